"""What the tests of commands share: a command that runs in this process."""

from __future__ import annotations

import pytest

from regard.cli.app import run
from tests.cli.command import Said


@pytest.fixture(autouse=True)
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed, `regard explain` without --model takes `tiny`."""
    monkeypatch.setattr("regard.files.named_packages.is_installed", lambda _name: False)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """What a command prints: standard output, or standard error if it fails without output."""

    def call(*arguments: object, code: int = 0) -> str:
        ended = run([str(x) for x in arguments])
        out, err = capsys.readouterr()
        assert ended == code, err
        return out if code == 0 else out or err

    return call


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """What a command that fails says on standard error, as one line; it prints nothing else."""

    def call(*arguments: object, code: int = 2) -> str:
        monkeypatch.setenv("COLUMNS", "400")
        ended = run([str(x) for x in arguments])
        out, err = capsys.readouterr()
        assert (ended, out) == (code, ""), err
        assert "Traceback" not in err
        return " ".join(err.split())

    return call
