"""The command `regard view`, and `--file` of the commands that read a text."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import regard
from regard.cli.app import run
from regard.cli.options import given_text, working
from regard.cli.view import _check_memory
from regard.errors import FileError
from tests.cli.command import Said

TEXT = "to be or not to be"


def test_the_text_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], said: Said) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, "utf-8")
    assert given_text(None, str(file)) == TEXT
    assert given_text(str(file), None) == str(file)
    assert "to read the file, write --file" in capsys.readouterr().err
    from_file = said("explain", "--file", file, "--no-color").splitlines()
    assert said("explain", TEXT, "--no-color").splitlines()[:3] == from_file[:3]


def test_the_text_of_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(TEXT.encode())))
    assert given_text(None, "-") == TEXT


def test_a_text_that_is_none(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text(" \n")
    binary.write_bytes(b"ab\xff")
    for text, file, message in (
        (None, None, "neither was given"),
        (TEXT, str(empty), "both were given"),
        (None, str(empty), "contains no text"),
        (None, str(binary), r"is not UTF-8 text \(byte 2\)"),
    ):
        with pytest.raises(typer.BadParameter, match=message):
            given_text(text, file)
    with pytest.raises(FileError, match="missing"):
        given_text(None, str(tmp_path / "missing"))
    with pytest.raises(FileError, match="regular file"):
        given_text(None, str(tmp_path))


def test_long_work_says_that_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    with working("running the model", 112_500) as say:
        say("more")
    assert "running the model: 112,500" in capsys.readouterr().err.replace("112500", "112,500")
    with working("running the model", 10):
        pass
    assert capsys.readouterr().err == ""


def test_a_model_and_its_recording_are_served(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    served: list[Any] = []

    def wait(self: Any) -> None:
        served.append([(p.name, p.heads) for p in self.session.places])
        assert self._thread is not None
        assert isinstance(self._thread, threading.Thread)
        assert self._thread.is_alive()
        self.close()

    monkeypatch.setattr("regard.inspect.tile_server.serve.Server.wait", wait)
    file = tmp_path / "run.safetensors"
    assert said(
        "view", "tiny", TEXT, "--layer", "1", "--head", "2", "--save", str(file)
    ).startswith("http://127.0.0.1:")
    assert served == [[("layers.1", (2,))]]
    assert run(["view", str(file), "--lang", "zh"]) == 0
    assert served == [[("layers.1", (2,))]] * 2
    assert run(["view", str(file), "--beside", str(file)]) == 0
    assert served[2:] == [[("layers.1", (2,))] * 2]
    assert len(regard.inspect.load(file).places) == 1


def test_what_cannot_be_served(tmp_path: Path, said: Said) -> None:
    file = tmp_path / "run.safetensors"
    regard.inspect.save(regard.inspect.record(regard.load("tiny"), TEXT), file)
    assert "a recording was given" in said("view", file, TEXT, code=2).replace("\n", " ")
    assert "there is no recording" in said("view", tmp_path / "other.safetensors", code=2)
    model = SimpleNamespace(
        config=SimpleNamespace(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32),
        encode=lambda text: SimpleNamespace(ids=SimpleNamespace(shape=(1, len(text)))),
    )
    with pytest.raises(typer.BadParameter, match="choose heads with --layer and --head"):
        _check_memory(model, "x" * 131_072, None, None, 4.0)
    _check_memory(model, "x" * 131_072, [0], [3], 4.0)


def test_a_missing_server_is_told_before_the_model_runs(
    monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """A thread that still runs the model when the process ends aborts the process."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setattr("regard.cli.view.load", lambda *_: pytest.fail("the model was loaded"))
    assert "regard[view]" in said("view", "tiny", TEXT, code=2)
