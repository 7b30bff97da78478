"""The options with which commands load a model, and models that are no decoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard import argument_checks
from regard.cli.app import run
from regard.cli.options import LoadOptions, load
from regard.models.families import family
from regard.models.save import save
from tests.cli.command import Said
from tests.models import small

bert = family("bert")
t5 = family("t5")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small.write(tmp_path, small.model())


def change(folder: Path, **tensors: Any) -> None:
    path = folder / "model.safetensors"
    held = load_file(path)
    for name, value in tensors.items():
        name = name.replace("__", ".")
        held = {n: t for n, t in held.items() if n != name}
        if value is not None:
            held[name] = value
    path.unlink()
    save_file(held, path)


def generate(folder: Path, *options: str) -> tuple[str, ...]:
    return ("generate", "the key", "--model", str(folder), "--max-tokens", "3", *options)


def test_a_device_that_can_be_used(folder: Path, said: Said) -> None:
    assert said(*generate(folder, "--device", "cpu")) == said(*generate(folder))


def test_a_model_goes_to_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is given to the model that was loaded; "meta" stands for one that is there."""
    monkeypatch.setattr(argument_checks, "check_usable_device", lambda device: None)
    assert load(str(folder), LoadOptions(device="meta")).device.type == "meta"
    assert load(str(folder), LoadOptions()).device.type == "cpu"


def test_weights_that_are_missing(
    folder: Path, refused: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, model__norm__weight=None)
    error = refused(*generate(folder), code=1)
    assert "1 missing ['model.norm.weight']" in error
    assert "--allow-missing PATTERN" in error
    assert run(generate(folder, "--allow-missing", "*norm*")) == 0
    out, err = capsys.readouterr()
    assert out.startswith("the key")
    assert "not trained, initialized at random: 1 weight (model.norm.weight)" in err


def test_weights_that_are_not_finite(folder: Path, refused: Said) -> None:
    change(folder, model__norm__weight=torch.full((24,), float("inf")))
    error = refused(*generate(folder, "--finite"), code=1)
    assert "'model.norm.weight' has values that are not finite: 0 of 24 NaN, 24 infinite" in error


def test_the_dtype(folder: Path, said: Said, refused: Said) -> None:
    wide, narrow = (
        json.loads(said(*generate(folder, "--dtype", dtype, "--json")))["cache_bytes"]
        for dtype in ("float32", "float16")
    )
    assert wide == 2 * narrow
    error = refused(*generate(folder, "--dtype", "int8"))
    assert "'int8' is not one of float32, float16" in error
    out = said("explain", "the key", "--model", folder, "--dtype", "float64", "--json")
    assert json.loads(out)["sizes"]["T"] == small.model().encode("the key").shape[1]


def test_an_encoder_decoder_answers(
    tmp_path: Path, said: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    config = t5.config(300, 8, 4, 16, 2, 2)
    network = t5.build(config)
    small.randomize(network)
    save(network, config, tmp_path)
    small.model().tokenizer.save(tmp_path)
    given = ("--model", str(tmp_path), "--max-tokens", "4")
    assert run(["generate", "the key", "a value", *given, "--beams", "2"]) == 0
    out, err = capsys.readouterr()
    assert "\n---\n" in out
    assert "2 texts in " in err
    told = json.loads(said("generate", "the key", *given, "--json"))
    assert told["rows"][0]["prompt"] == "the key"


def test_an_encoder_continues_nothing(tmp_path: Path, refused: Said) -> None:
    config = bert.config(300, 8, 1, 2, 16, 32)
    save(bert.build(config), config, tmp_path)
    small.model().tokenizer.save(tmp_path)
    error = refused("generate", "the key", "--model", tmp_path)
    assert "is an encoder, which generates no text" in error
    assert "--chat" in refused("explain", "the key", "--model", tmp_path, "--chat")
