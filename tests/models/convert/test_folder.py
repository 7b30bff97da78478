"""A folder into a folder: whole or not there, never over anything, loadable, with what belongs to
it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import regard
from regard.errors import ArgumentError, FileError
from regard.files.atomic_write import folder_locked
from regard.models import save as saving
from regard.models.convert import ConversionOptions, compare_models, convert
from regard.models.convert import folder as subject
from regard.models.convert.report import evaluation_windows
from regard.models.model import Model
from regard.train.finetune import finetune
from tests.models import small

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TEXT = " ".join(small.TEXT) * 6


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    small.write(folder, small.model(num_key_value_heads=4))
    config = json.loads((folder / "config.json").read_text())
    more = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "initializer_range": 0.02,
    }
    (folder / "config.json").write_text(json.dumps(config | more))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 3], "do_sample": True})
    )
    (folder / "notes.txt").write_text("nobody's business")
    return folder


def state(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


EVERY: dict[str, tuple[ConversionOptions, str]] = {
    "gqa": (ConversionOptions(kv_heads=2), "llama"),
    "mqa, svd": (ConversionOptions(to="mqa", pooling="svd"), "llama"),
    "mla": (ConversionOptions(to="mla", rank=20), "deepseek_v2"),
    "mla, narrow, long": (
        ConversionOptions(to="mla", context=8192, dtype="float16"),
        "deepseek_v2",
    ),
    "layout and heads": (ConversionOptions(rotary_layout="interleaved", kv_heads=2), "regard"),
    "stored layout into latents": (
        ConversionOptions(to="mla", rotary_layout="half", stored_layout="interleaved"),
        "deepseek_v2",
    ),
    "context": (ConversionOptions(context=4096, scaling="linear"), "llama"),
    "dtype": (ConversionOptions(dtype="bfloat16"), "llama"),
}


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", EVERY)
def test_what_comes_out_loads_and_is_what_was_measured(
    name: str, source: Path, tmp_path: Path
) -> None:
    wanted, model_type = EVERY[name]
    before, out = state(source), tmp_path / "deep" / "out"
    report = convert(source, out, wanted, text=TEXT, length=32)
    assert state(source) == before
    assert report.after.model_type == model_type
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "generation_config.json",
    }
    raw = json.loads((out / "config.json").read_text())
    assert (raw["eos_token_id"], raw["bos_token_id"]) == ([2, 3], 1)
    first, again = regard.load(source, kind=Model), regard.load(out, kind=Model)
    assert again.eos_ids == {2, 3}
    ids, _ = evaluation_windows(first, TEXT, 32, 4096)
    assert report.measured == compare_models(
        first.decoder, again.decoder, ids, text="the given text"
    )
    assert report.measured.tokens == ids.numel() - len(ids)
    assert math.isfinite(report.measured.perplexity_after)
    json.dumps(report.figures(), allow_nan=False)


def test_transformers_loads_what_it_knows(source: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="parity needs the transformers extra")
    for name, architecture in (("gqa", "LlamaForCausalLM"), ("mla", "DeepseekV2ForCausalLM")):
        convert(source, tmp_path / name, EVERY[name][0], text=TEXT)
        assert json.loads((tmp_path / name / "config.json").read_text())["architectures"] == [
            architecture
        ]
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        assert type(theirs).__name__ == architecture
        ids = torch.arange(3, 30)[None]
        with torch.no_grad():
            exact = theirs(ids).logits
        mine = regard.load(tmp_path / name, kind=Model)(ids)
        assert float((mine - exact).abs().max()) < 1e-5 * float(exact.abs().max())


def test_an_exact_conversion_is_told_as_exact(tmp_path: Path) -> None:
    report = convert("tiny", tmp_path / "out", ConversionOptions(to="mha"), tokens=256)
    assert report.measured.largest == 0
    assert report.measured.perplexity_before == report.measured.perplexity_after
    assert (report.before.cached_values, report.after.cached_values) == (1024, 2048)


@pytest.mark.full
def test_latents_of_a_trained_model_lose_less_than_half_the_heads(tmp_path: Path) -> None:
    """`tiny`, 128 numbers per token and layer in place of 256: the latent is nearer than pooled
    heads, by svd or by mean.
    """
    tries = {
        "mla": ConversionOptions(to="mla", rank=96),
        "svd": ConversionOptions(kv_heads=2, pooling="svd"),
        "mean": ConversionOptions(kv_heads=2, pooling="mean"),
    }
    found = {
        name: convert("tiny", tmp_path / name, wanted, tokens=300) for name, wanted in tries.items()
    }
    assert {report.after.cached_values for report in found.values()} == {4 * 128}
    loss = {name: report.measured.loss_after for name, report in found.items()}
    assert loss["mla"] < loss["svd"] < loss["mean"]


@pytest.mark.full
def test_healing_trains_a_copy(source: Path, tmp_path: Path) -> None:
    before = state(source)
    how = partial(finetune, steps=30, lr=3e-3, batch=4)
    report = convert(
        source,
        tmp_path / "out",
        ConversionOptions(to="mla", rank=12),
        text=TEXT,
        length=16,
        finetune=how,
    )
    plain = convert(
        source, tmp_path / "plain", ConversionOptions(to="mla", rank=12), text=TEXT, length=16
    )
    assert report.finetuning is not None
    assert report.finetuning.loss_after < report.finetuning.loss_before
    assert report.measured.loss_after < plain.measured.loss_after
    assert report.measured.loss_before == plain.measured.loss_before
    assert state(source) == before
    # the constant of the latent is not trained away: the norm is still undone
    weight = (
        regard.load(tmp_path / "out", kind=Model).decoder.layers[0].attention.project.kv_norm.weight
    )
    assert float(weight[-1]) == 0
    assert float(weight[:-1].std() / weight[0]) < 1e-3
    again = convert(
        source,
        tmp_path / "again",
        ConversionOptions(to="mla", rank=12),
        text=TEXT,
        length=16,
        finetune=how,
    )
    assert again.finetuning == report.finetuning


def test_healing_holds_a_part_back(source: Path, tmp_path: Path) -> None:
    ids, _ = evaluation_windows(regard.load(source, kind=Model), TEXT, 16, 4096)
    how, told = partial(finetune, steps=2), list[str]()
    wanted = ConversionOptions(kv_heads=2)
    done = convert(
        source,
        tmp_path / "a",
        wanted,
        text=TEXT,
        length=16,
        finetune=how,
        report_progress=told.append,
    ).finetuning
    assert [line.split()[0] for line in told] == [
        "reading",
        "converting",
        "finetuning",
        "writing",
        "measuring",
    ]
    assert done is not None
    assert done.held_tokens == len(ids) // 10 * (ids.shape[1] - 1)
    assert done.tokens == (len(ids) - len(ids) // 10) * ids.shape[1]
    few = convert(
        source,
        tmp_path / "b",
        ConversionOptions(kv_heads=2),
        text=TEXT,
        tokens=64,
        length=16,
        finetune=how,
    )
    assert few.finetuning is not None
    assert few.finetuning.held_tokens == 0
    assert math.isnan(few.finetuning.held_before)


def test_narrow_weights_are_not_trained(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"the weights are torch\.bfloat16, which rounds small"):
        convert(
            source,
            tmp_path / "out",
            ConversionOptions(dtype="bfloat16"),
            text=TEXT,
            finetune=partial(finetune, steps=1),
        )
    assert not (tmp_path / "out").exists()


def test_without_a_tokenizer(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").unlink()
    report = convert(source, tmp_path / "out", ConversionOptions(kv_heads=2), tokens=64)
    assert math.isnan(report.measured.loss_after)
    assert report.measured.relative > 0
    with pytest.raises(ArgumentError, match="finetuning needs a text, and the model has no"):
        convert(
            source,
            tmp_path / "other",
            ConversionOptions(kv_heads=2),
            finetune=partial(finetune, steps=1),
        )


def test_nothing_is_written_over(source: Path, tmp_path: Path) -> None:
    before = state(source)
    for out in (source, source / "inside", tmp_path / "source" / ".." / "source"):
        with pytest.raises(ArgumentError, match="which is the source or is inside it"):
            convert(source, out, ConversionOptions(kv_heads=2))
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises(ArgumentError, match="which is the source"):
        convert(source, link, ConversionOptions(kv_heads=2))
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("precious")
    with pytest.raises(FileError, match="is not empty; a conversion never overwrites"):
        convert(source, full, ConversionOptions(kv_heads=2))
    with pytest.raises(FileError, match="exists and is not a folder"):
        convert(source, full / "mine", ConversionOptions(kv_heads=2))
    assert state(source) == before
    assert (full / "mine").read_text() == "precious"


def test_an_empty_folder_will_do(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", ConversionOptions(kv_heads=2), text=TEXT)
    assert regard.load(tmp_path / "out", kind=Model).config.num_key_value_heads == 2


@pytest.mark.parametrize("where", ["load", "save", "disk", "rename"])
def test_a_failure_leaves_nothing(where: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    breaks: dict[str, Any] = {
        "load": patch.object(subject, "compare_models", side_effect=ZeroDivisionError),
        "save": patch.object(subject, "save", side_effect=KeyboardInterrupt),
        "disk": patch.object(
            saving, "sync_to_disk", side_effect=OSError(28, "No space left on device")
        ),
        "rename": patch.object(Path, "rename", side_effect=OSError(5, "Input/output error")),
    }
    with breaks[where], pytest.raises((ZeroDivisionError, KeyboardInterrupt, FileError)) as caught:
        convert(source, out, ConversionOptions(kv_heads=2), text=TEXT)
    if where in ("disk", "rename"):
        assert str(caught.value).startswith(f"{out}: cannot write the folder: ")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_somebody_elses_files_survive(source: Path, tmp_path: Path) -> None:
    """The folder was empty when it was looked at, and is not when it is to be replaced."""
    out = tmp_path / "out"
    out.mkdir()

    def late(*arguments: Any, **named: Any) -> Any:
        (out / "theirs").write_text("precious")
        return compare_models(*arguments, **named)

    with (
        patch.object(subject, "compare_models", late),
        pytest.raises(FileError, match="cannot write the folder"),
    ):
        convert(source, out, ConversionOptions(kv_heads=2), text=TEXT)
    assert state(out) == {"theirs": b"precious"}
    assert {p.name for p in tmp_path.iterdir()} == {"source", "out"}


@pytest.mark.parametrize(
    "change, message",
    [
        ({}, "there is nothing to change; give to, kv_heads, rotary_layout, context, dtype or"),
        ({"scaling": "linear"}, "there is nothing to change"),
        ({"to": "mlaa"}, "to is 'mlaa'; it must be one of mha, gqa, mqa, mla"),
        ({"to": "gqa", "kv_heads": 2, "rank": 3}, "rank is given, but only mla has one: give to="),
        ({"to": "mla", "kv_heads": 2}, "kv_heads is given, but mla has no key/value heads: leave"),
        ({"to": "mha", "kv_heads": 2}, "kv_heads is given, but mha has as many as query heads"),
        ({"to": "mqa", "kv_heads": 2}, "kv_heads is 2, but mqa has 1: leave it out"),
        ({"to": "gqa"}, "to is gqa, and kv_heads is missing"),
        ({"to": "mla", "pooling": "svd"}, "pooling svd is only for fewer key/value heads: give"),
        ({"to": "mqa", "scaling": "ntk"}, "scaling ntk is given without context"),
        ({"to": "mqa", "stored_layout": "half"}, "stored_layout is given without rotary_layout"),
        ({"to": "mla", "rotary_layout": "half"}, "the rotary key of mla is always interleaved"),
    ],
)
def test_wishes_that_contradict(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        ConversionOptions(**change)
    assert dataclasses.is_dataclass(ConversionOptions)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    from regard.models.families import family

    bert = family("bert")

    config = bert.config(300, 24, 2, 4, 40, 64)
    network = bert.build(config)
    from regard.models.save import save

    (tmp_path / "bert").mkdir()
    save(network, config, tmp_path / "bert")
    with pytest.raises(FileError, match="a Model is needed here"):
        convert(tmp_path / "bert", tmp_path / "out", ConversionOptions(kv_heads=2))


def test_two_conversions_into_one_folder(source: Path, tmp_path: Path) -> None:
    left = tmp_path / ".writing-out"
    left.mkdir()
    (left / "half").write_text("of a killed run")
    with (
        folder_locked(left),
        pytest.raises(FileError, match="out is being written by another run; wait"),
    ):
        convert(source, tmp_path / "out", ConversionOptions(kv_heads=2), text=TEXT)
    assert (left / "half").exists()
    convert(source, tmp_path / "out", ConversionOptions(kv_heads=2), text=TEXT)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
