"""The rows of `python -m tests.machines` name tests that exist, and say what failed in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.machines import BRIEF, TESTS, Row
from tests.machines import __main__ as command


def test_rows_name_tests_that_exist(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key, tests in TESTS.items():
        assert all((root / x).exists() for x in (*tests, *BRIEF[key]))
        assert all(x.startswith(tests) for x in BRIEF[key]), key
    assert command.main(["--ci", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    with pytest.raises(SystemExit):
        command.main(["Python 4"])


@pytest.mark.full
@pytest.mark.parametrize(
    "row, passed, not_here, failed",
    [
        (Row((), {"LC_ALL": "C"}, "a 中文 b", cores=1, umask=0o077, read_only=True), 1, "", []),
        (Row((), {"REGARD_TEST_THREADS": "many"}), 0, "", ["regard shew", "pytest ended with"]),
        (Row((), version="2.7"), None, "Python 3.", []),
        (Row((), {"REGARD_CPU_ISA": "z80"}), None, "REGARD_CPU_ISA is 'z80'", []),
    ],
)
def test_what_becomes_of_a_row(
    row: Row,
    passed: int | None,
    not_here: str,
    failed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second row is the negative control: an unknown command, and tests that cannot start."""
    command_names = ["show", *(x.removeprefix("regard ") for x in failed[:1])]
    monkeypatch.setattr(command, "COMMANDS", [(x, "causal") for x in command_names])
    test = "tests/files/test_strict_json.py"
    result = command.run_row(row, [test], [sys.executable], 600)
    assert result["not_here"].startswith(not_here)
    assert (result["not_here"] == "") is (not_here == "")
    assert len(result["failures"]) == len(failed)
    assert all(x.startswith(y) for x, y in zip(result["failures"], failed, strict=True))
    if passed is not None:
        assert (result["passed"] > 0) is (passed > 0)
        assert result["commands"] == f"1 of {len(command_names)}"
