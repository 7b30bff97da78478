"""`regard convert`: what it prints, writes, and refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import regard
from regard.models.model import Model
from tests.cli.command import Said
from tests.models import small


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return small.write(tmp_path / "source", small.model(num_key_value_heads=4))


def test_a_table(source: Path, tmp_path: Path, said: Said) -> None:
    out = said(
        "convert", source, tmp_path / "out", "--to", "mla", "--rank", 16, "--dtype", "bfloat16"
    )
    rows = {row[:24].strip(): row[24:].split() for row in out.splitlines()}
    assert rows["family"] == ["llama", "deepseek_v2"]
    assert rows["dtype"] == ["float32", "bfloat16"]
    assert rows["values cached per token"] == ["160", "52"]
    assert rows["perplexity"][1] == rows["loss, nats per token"][1] == "->"
    assert rows["KL(before | after)"][1:5] == ["±", rows["KL(before | after)"][2], "nats", "per"]
    assert float(rows["KL(before | after)"][0]) > 0
    order = [
        out.index(x)
        for x in ("KL(before", "same likeliest token", "loss, nats", "perplexity", "family")
    ]
    assert order == sorted(order), "KL and agreement lead"
    assert "4 key/value heads of 10 + 10 to a latent of 16 and a rotary key of 10" in out
    assert ", the topics of pydoc, Python 3." in out
    assert "short text" not in out
    assert "layer 1    scores 0." in out
    assert "error of the latent by rank" in out


@pytest.mark.full
def test_json_and_healing(source: Path, tmp_path: Path, said: Said) -> None:
    text = tmp_path / "text"
    text.write_text(" ".join(small.TEXT) * 4)
    how = shlex.split("--kv-heads 2 --groups svd --context 4096 --scaling ntk --length 16 --text")
    how.append(str(text))
    healing = shlex.split("--heal 3 --lr 0.001 --batch 2 --seed 5")
    told = json.loads(said("convert", source, tmp_path / "out", *how, *healing, "--json"))
    assert [len(step["weight_error"]) for step in told["steps"]] == [2, 0]
    assert told["measured"]["length"] <= 16
    assert told["measured"]["text"] == "the given text"
    assert told["measured"]["loss_change_error"] > 0
    change = told["measured"]["loss_after"] - told["measured"]["loss_before"]
    assert told["measured"]["loss_change"] == pytest.approx(change)
    assert told["finetuning"].items() >= {"steps": 3, "lr": 0.001, "seed": 5}.items()
    config = regard.load(tmp_path / "out", kind=Model).config
    assert (config.num_key_value_heads, config.max_position_embeddings) == (2, 4096)
    out = said("convert", source, tmp_path / "again", *how, *healing)
    assert "finetuning: 3 steps of 2 x " in out
    assert "peak learning rate 0.001, seed 5" in out
    assert "held-out text, " in out
    short = shlex.split("--to mqa --tokens 32 --heal 1 --text")
    few = said("convert", source, tmp_path / "few", *short, text)
    assert "no text was held out" in few
    assert "that is a short text, on which such figures can mislead" in few


FEW = ("--tokens", 96)


@pytest.mark.full
def test_every_target(source: Path, tmp_path: Path, said: Said) -> None:
    said("convert", source, tmp_path / "gqa", *FEW, "--to", "gqa", "--kv-heads", 2)
    exact = said("convert", tmp_path / "gqa", tmp_path / "mha", *FEW, "--to", "mha")
    assert "logits differ by        0 at most" in exact
    assert "same likeliest token    100.0%" in exact
    assert "weight error" not in exact
    said("convert", source, tmp_path / "there", *FEW, "--rotary-layout", "interleaved")
    back = said("convert", tmp_path / "there", tmp_path / "back", *FEW, "--rotary-layout", "half")
    assert "rotary pairs from interleaved to half" in back
    layouts = shlex.split("--rotary-layout half --stored-layout interleaved")
    fixed = said("convert", source, tmp_path / "fixed", *FEW, *layouts)
    assert "rotary pairs from interleaved, as the weights were stored, to half" in fixed


def test_without_a_tokenizer(source: Path, tmp_path: Path, said: Said) -> None:
    (source / "tokenizer.json").unlink()
    out = said("convert", source, tmp_path / "out", "--to", "mqa", "--tokens", 64)
    assert ", ids drawn at random (seed 0): there is no tokenizer, and a loss means nothing:" in out
    assert "perplexity" not in out


@pytest.mark.full(keep=2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is nothing to change"),
        (("--to", "gqa"), "to is gqa, and kv_heads is missing"),
        (("--to", "mha"), "the model has 4 key/value heads for 4 query heads already"),
        (("--to", "moe"), "to is 'moe'; it must be one of mha, gqa, mqa, mla"),
        (("--kv-heads", "2", "--groups", "median"), "pooling is 'median'; it must be one of mean"),
        (("--context", "9000", "--scaling", "longrope"), "scaling is 'longrope'; it must be one"),
        (("--rotary-layout", "gptj"), "rotary_layout is 'gptj'; it must be one of half"),
        (("--dtype", "fp8"), "dtype is 'fp8'; it must be one of float32"),
        (("--to", "mqa", "--text", "nowhere"), "nowhere is missing"),
        (("--to", "mqa", "--heal", "0"), "--heal"),
        (("--to", "mqa", "--heal", "1", "--lr", "-1"), "lr is -1.0; it must be positive"),
    ],
)
def test_wrong_usage(
    arguments: tuple[str, ...], message: str, source: Path, tmp_path: Path, refused: Said
) -> None:
    assert message in refused("convert", source, tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_folders_that_are_not_fit(source: Path, tmp_path: Path, said: Said) -> None:
    assert "no model" in said("convert", tmp_path / "none", tmp_path / "out", "--to", "mqa", code=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    err = said("convert", source, tmp_path / "full", "--to", "mqa", code=1)
    assert "is not empty; a conversion never overwrites" in err
