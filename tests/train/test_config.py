"""The TOML file of `regard train`: what it may say, and what is told of it otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from regard.cli.train import SECTIONS, read_config
from regard.errors import FileError

FULL = """
[model]
attention = "sliding_window"
kv-heads = 2
dim = 64
tie = true
options = {window = 8, base = 5e4, head_dim = 16}
[train]
lr = 3e-4
weight-decay = 0
[data]
source = "a text.txt"
repeat = 0.25
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text, "utf-8")
    return file


def test_a_file_becomes_texts_of_options(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, FULL)) == {
        "attention": "sliding_window",
        "kv_heads": "2",
        "dim": "64",
        "tie": "True",
        "option": ["window=8", "base=50000.0", "head_dim=16"],
        "lr": "0.0003",
        "weight_decay": "0",
        "source": "a text.txt",
        "repeat": "0.25",
    }
    lists = "[model.options]\nbounds = [0, 5, 9]\nempty = 'skip'"
    assert read_config(written(tmp_path, lists)) == {"option": ["bounds=[0, 5, 9]", "empty='skip'"]}
    assert read_config(written(tmp_path, "")) == {}


def test_every_option_that_shapes_a_run_has_a_place() -> None:
    import inspect

    from regard.cli.train import TASK_OPTIONS, train

    elsewhere = {"ctx", "out", "resume", "json", "config", "set", "task", "parallel", *TASK_OPTIONS}
    places = [name for names in SECTIONS.values() for name in names]
    assert sorted(places) == sorted(set(inspect.signature(train).parameters) - elsewhere)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[modle]\ndim = 3", "there is no section [modle]; did you mean 'model'? The sections are"),
        ("dim = 3", "dim is outside a section; put it under [model]"),
        ("model = 3", "there is no section [model]"),
        ("[train]\ndim = 3", "dim is in [train]; put it in [model]"),
        ("[train]\nstpes = 3", "[train] has no stpes; did you mean 'steps'? It has steps, batch"),
        ("[model]\noption = 3", "[model] has no option; did you mean 'options'?"),
        ("[model]\noptions = 3", "[model] has no options"),
        ("[model]\nkv-heads = 3\nkv_heads = 3", "[model] has kv_heads twice; give it once"),
        ("[train]\nsteps = [3]", "[train] steps is [3]; it must be a string, a number, true or"),
        ("[train]\nsteps = 2020-01-01", "[train] steps is datetime.date(2020, 1, 1); it must be a"),
        ("[model.options]\nscaling = {factor = 2}", "[model.options] scaling is {'factor': 2}; it"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=re.escape(message)):
        read_config(written(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none\.toml is missing"):
        read_config(tmp_path / "none.toml")
    with pytest.raises(FileError, match=r"run\.toml: is not TOML: "):
        read_config(written(tmp_path, "[model\n"))
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(FileError, match="is not text: not UTF-8 at byte 0"):
        read_config(tmp_path / "run.toml")
