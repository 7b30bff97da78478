"""`Model`, `TextEncoder` and `Seq2Seq` have the same methods, and their old names still work."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

import regard
from regard.errors import ArgumentError, FileError
from regard.models import Model, Seq2Seq, TextEncoder
from regard.models.families import family
from regard.models.text_model import TextModel
from regard.models.tokenizer import Tokenizer

bert = family("bert")
t5 = family("t5")

KINDS = ("decoder", "encoder", "encoder-decoder")
COMMON = ("__call__", "forward", "encode", "decode", "device", "dtype", "save", "tokenizer")


def tokenizer() -> Tokenizer:
    return regard.load("tiny").tokenizer


def make(kind: str) -> Model | TextEncoder | Seq2Seq:
    torch.manual_seed(0)
    if kind == "decoder":
        return regard.load("tiny")
    if kind == "encoder":
        config = bert.config(1024, 8, 1, 2, 16, 32)
        pooling = regard.models.Pooling("max", normalize=False)
        return TextEncoder(
            bert.build(config).eval(), tokenizer(), config, pooling=pooling, max_seq_length=32
        )
    settings = t5.config(1024, 8, 4, 16, 1, 2)
    network = t5.build(settings).eval()
    return Seq2Seq(network, tokenizer(), settings, start=0, eos_ids=[1, 7])


def outputs(model: Model | TextEncoder | Seq2Seq) -> torch.Tensor:
    if isinstance(model, Model):
        return model(model.encode("to be"))
    if isinstance(model, TextEncoder):
        return model(*model.encode(["to be", "or not to be"]))
    ids, positions = model.encode("to be")
    return model(ids, torch.tensor([[0, 5]]), positions)


@pytest.mark.parametrize("kind", [Model, TextEncoder, Seq2Seq])
def test_the_three_classes_have_the_same_members(kind: type[TextModel]) -> None:
    for name in COMMON:
        member = inspect.getattr_static(kind, name)
        assert isinstance(member, property) or callable(member), name
    assert issubclass(kind, TextModel)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_forward(kind: str) -> None:
    model = make(kind)
    assert inspect.unwrap(type(model).__call__) is inspect.unwrap(type(model).forward)
    with torch.no_grad():
        assert outputs(model).dtype == model.dtype == torch.float32
    assert model.device == torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_decode_inverts_encode(kind: str) -> None:
    model = make(kind)
    texts = ["to be, né 你好", "or"]
    if isinstance(model, Model):
        assert model.decode(model.encode(texts[0])) == texts[:1]
        assert model.decode(model.encode(texts[0])[0]) == texts[0]
    else:
        ids, positions, *_ = model.encode(texts)
        assert model.decode(ids, positions=positions) == texts
        assert str(model.decode(ids[1], skip_special_tokens=True)).startswith("or")
    end_ids = model.tokenizer.encode("<|endoftext|>x", special=True)
    assert model.decode(end_ids) == "<|endoftext|>x"
    assert model.decode(end_ids, skip_special_tokens=True) == "x"
    assert model.decode(torch.tensor(end_ids), skip_special_tokens=True) == "x"
    with pytest.raises(ArgumentError, match=r"ids are \(1, 1, 1\); they must be \[T\] or"):
        model.decode(torch.zeros(1, 1, 1, dtype=torch.int64))


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_computes_the_same(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    folder = model.save(tmp_path / "new" / "model")
    assert sorted(p.name for p in folder.parent.iterdir()) == ["model"], "nothing else remains"
    again = regard.load(folder)
    assert type(again) is type(model)
    with torch.no_grad():
        assert torch.equal(outputs(again), outputs(model))
    if isinstance(model, TextEncoder) and isinstance(again, TextEncoder):
        assert (again.pooling, again.max_seq_length) == (model.pooling, model.max_seq_length)
        assert torch.equal(again.embed("to be"), model.embed("to be"))
    elif not isinstance(model, TextEncoder) and not isinstance(again, TextEncoder):
        assert again.eos_ids == model.eos_ids
    with pytest.raises(FileError, match="is not empty; saving never overwrites: give a new"):
        model.save(folder)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="file exists and is not a folder; give another name"):
        model.save(tmp_path / "file")
    with pytest.raises(FileError, match="cannot write the folder"):
        model.save(tmp_path / "file" / "inner")


def test_a_saved_model_keeps_its_dtype(tmp_path: Path) -> None:
    model = regard.load("tiny", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert regard.load(model.save(tmp_path / "half")).dtype == torch.bfloat16
