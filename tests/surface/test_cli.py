"""The command as a program: exit codes, one clean message, help with an example."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import regard
from regard.cli import app as application
from regard.cli import main
from regard.cli.app import COMMANDS
from regard.ops.cpu.instruction_sets import describe_kernels
from regard.units import plural

FOLDER = Path(application.__file__).parent
NAMES = sorted(COMMANDS)


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and stderr of `python -m regard ...` in a new process; stdout must be empty on
    failure.
    """
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parents[1]), "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "regard", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stderr


def code_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code


def test_each_command_has_its_module_and_each_module_its_entry() -> None:
    # options is what several commands share
    modules = {p.stem for p in FOLDER.glob("*.py")} - {"__init__", "app", "options"}
    helpers = {name for name in modules if name.startswith("_")}
    assert set(COMMANDS) == modules - helpers


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ()])
def test_help_lists_the_commands_each_on_one_line(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    assert code_of(*arguments) == 0
    said = capsys.readouterr()
    assert said.err == ""
    for name, line in COMMANDS.items():
        assert any(name in row and line in row for row in said.out.splitlines()), name


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("--version") == 0
    lines = capsys.readouterr().out.splitlines()
    threads = plural(torch.get_num_threads(), "thread")
    assert lines == [
        f"regard {regard.__version__}",
        describe_kernels(),
        f"torch {torch.__version__}, {threads}",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_a_command_has_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(name, "--help") == 0
    assert f"regard {name}" in capsys.readouterr().out.partition("Usage:")[2].partition("\n")[2]


@pytest.mark.parametrize("arguments", [("nope",), ("--nope",), ("show", "--nope", "causal")])
def test_wrong_usage_is_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "nope" in said.err


def test_a_mistyped_command_meets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("trian") == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (regard.FileError("no file x"), 1),
        (regard.ArgumentError("no file x"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(32, "no file x"), 0),
    ],
)
def test_what_a_command_raises_becomes_an_exit_code(
    problem: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with patch.object(application.Commands, "invoke", side_effect=problem):
        assert code_of("show", "causal") == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == ("error: no file x\n" if code == 1 else "")


def test_an_unexpected_error_keeps_its_traceback() -> None:
    with (
        patch.object(application.Commands, "invoke", side_effect=ZeroDivisionError),
        pytest.raises(ZeroDivisionError),
    ):
        main(["show", "causal"])


def test_as_a_module() -> None:
    code, err = run("nope")
    assert code == 2
    assert "Traceback" not in err
    assert run("--version") == (0, "")
