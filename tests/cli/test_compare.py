"""`regard compare`: a small comparison from the command to its files, resumed, interrupted, and
what is refused.
"""

from __future__ import annotations

import csv
import json
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regard.compare import experiment
from regard.compare.mechanisms import DEFAULT_NAMES
from tests.cli.command import Said

SMALL = shlex.split(
    "--dim 32 --layers 1 --window 8 --context 6 --context 12 --length 64 --batch 1 --rounds 1 "
    "--no-memory"
)
TAUGHT = ("--quality", "--task", "mqar", "--steps", "2", "--lr", "0.01")


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """Who runs the tests in the background may have them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.full
def test_a_comparison_and_its_files(tmp_path: Path, said: Said) -> None:
    names = {"--csv": "c.csv", "--html": "c.html", "--out": "kept"}
    files = [x for flag, name in names.items() for x in (flag, tmp_path / name)]
    text = said("compare", "mha", "linear", *SMALL, *TAUGHT, *files)
    assert "1 layer, dim 32, 4 heads, feed-forward width 96 in all" in text
    assert "mqar against cache bytes: " in text
    kept = sorted((tmp_path / "kept").iterdir())
    # prompts and tokens at two contexts, training, the pilot, the steps, and two runs
    assert len(kept) == 4 + 1 + 1 + 1 + 2
    rows = {
        row["name"]: row for row in csv.DictReader((tmp_path / "c.csv").read_text().splitlines())
    }
    assert [rows[name]["kv_bytes_12"] for name in ("mha", "linear")] == [
        str(4 * 64 * 12),
        str(4 * 4 * 8 * 9),
    ]
    assert (tmp_path / "c.html").read_text("utf-8").count("<svg") == 2 + 2 + 3
    before = {path.name: path.stat().st_mtime_ns for path in kept}
    told = json.loads(said("compare", "mha", "linear", *SMALL, *TAUGHT, *files, "--json"))
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "kept").iterdir()} == before
    assert [e["name"] for e in told["mechanisms"]] == ["mha", "linear"]
    assert told["command"].startswith("regard")
    assert told["mechanisms"][1]["quality"]["mqar"]["rate"] == 0.01
    assert (
        float(rows["linear"]["mqar_accuracy"]) == told["mechanisms"][1]["quality"]["mqar"]["mean"]
    )


def test_ctrl_c_prints_and_writes_what_is_done(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = experiment.ExperimentStore.write

    def write(self: Any, one: Any, numbers: Any, seconds: float) -> None:
        real(self, one, numbers, seconds)
        if one.name == "decode/6":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(experiment.ExperimentStore, "write", write)
    out = ("--out", str(tmp_path / "kept"), "--csv", str(tmp_path / "c.csv"), "--json")
    told = json.loads(said("compare", "mqa", *SMALL, *out, code=130))
    assert told["interrupted"] is True
    (entry,) = told["mechanisms"]
    assert list(entry["decode"]) == ["6"]
    assert entry["training"] is None
    (row,) = csv.DictReader((tmp_path / "c.csv").read_text().splitlines())
    assert (row["kv_bytes_6"], row["kv_bytes_12"]) == (str(4 * 16 * 6), "")
    monkeypatch.setattr(experiment.ExperimentStore, "write", real)
    told = json.loads(said("compare", "mqa", *SMALL, *out))
    assert told["interrupted"] is False
    assert list(told["mechanisms"][0]["decode"]) == ["6", "12"]
    assert len(list((tmp_path / "kept").iterdir())) == 5


def test_the_same_parameters(said: Said) -> None:
    told = json.loads(said("compare", "mha", "mqa", *SMALL, "--same", "parameters", "--json"))
    a, b = (e["parameters"] for e in told["mechanisms"])
    assert abs(b / a - 1) <= 0.01
    assert (
        told["mechanisms"][1]["hidden"] > told["mechanisms"][0]["hidden"] == told["shape"]["hidden"]
    )


def test_the_list(said: Said) -> None:
    out = said("compare", "--list")
    for name in (*DEFAULT_NAMES, "text", "mqar", "passkey"):
        assert any(row.startswith(f"  {name} ") for row in out.splitlines()), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mhaa",), "did you mean 'mha'"),
        (("--same", "flops"), "same is 'flops'"),
        (("--steps", "3"), "'--steps': applies only to training; give --quality too"),
        (("--seeds", "2"), "'--seeds': applies only to training"),
        (("--quality", "--task", "copy"), "there is no evaluation task 'copy'"),
        (("--quality", "--lr", "0.1", "--lr", "0.1"), "give at least one, and each only once"),
        (("--rounds", "0"), "--rounds"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str, refused: Said) -> None:
    assert message in refused("compare", *arguments)


@pytest.mark.parametrize("flag", ["--csv", "--html"])
def test_files_that_cannot_be_written_are_refused_first(
    flag: str, tmp_path: Path, refused: Said
) -> None:
    err = refused("compare", "mha", flag, tmp_path / "none" / "x")
    assert "there is no folder" in err
    assert " ... " not in err, "nothing is measured before"
    (tmp_path / "file").write_text("")
    assert "is a file; give a" in refused("compare", "mha", "--out", tmp_path / "file", code=1)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_on_a_terminal_replaces_itself(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.cli import compare

    monkeypatch.setattr(compare.sys.stderr, "isatty", lambda: terminal, raising=False)
    for line in ("text/mha (1/2)", "  step 1/2, loss 3", "text/mqa (2/2, about 0:05 left)"):
        compare._report(line)
    err = capsys.readouterr().err
    if terminal:
        assert err.split("\r\x1b[K") == [
            "",
            "... text/mha (1/2)\n",
            "... step 1/2, loss 3",
            "... text/mqa (2/2, about 0:05 left)\n",
        ]
    else:
        assert err == "... text/mha (1/2)\n... text/mqa (2/2, about 0:05 left)\n"
