"""What commands read of weights of few bits, in an int8 folder, an int4 folder and a GGUF file, is
what their dequantized weights give; test_every_form.py runs every command on these forms.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import regard
from regard.cli.app import run
from regard.files.gguf_writer import TensorToWrite, write_gguf
from regard.models.families import family
from regard.models.model import Model
from regard.models.tokenizer import Tokenizer
from regard.nn.weights import count_parameters, stored_modules
from tests.models import small
from tests.models.checkpoint import gguf_writer
from tests.models.checkpoint.test_gguf import checkpoint
from tests.rules import assert_close_rule, in_orders

llama = family("llama")

TEXT = "abcdefgh"
FORMS = ("int8", "int4", "gguf")
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32,
}


class Source(NamedTuple):
    """A model of few bits, its files, and a folder with its dequantized weights in fp32."""

    path: Path
    plain: Path
    stored_bytes: int


def small_model() -> Model:
    tokenizer = Tokenizer.train(["abcdefgh"], vocab_size=258)
    config = llama.config(vocab_size=tokenizer.vocab_size, **SIZES)  # type: ignore[arg-type]
    torch.manual_seed(0)
    network = llama.build(config)
    small.randomize(network)
    for p in network.parameters():
        p.data *= 0.5 if p.ndim == 2 else 1
    return Model(network.eval().requires_grad_(False), tokenizer, config)


def write_as_gguf(model: Model, folder: Path) -> Path:
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    tensors = []
    for name, x in checkpoint(model.decoder, "llama").items():
        part = next((p for p in heads if p in name), None)
        rows = gguf_writer.interleave(x, heads[part]) if part else x
        kind = "Q8_0" if x.ndim == 2 else "F32"
        tensors.append(TensorToWrite(gguf_writer.name_in_file(name), rows, kind))
    folder.mkdir()
    write_gguf(folder / "m.gguf", gguf_writer.metadata_of(model.config, "llama"), tensors)
    model.tokenizer.save(folder)
    return folder / "m.gguf"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    folder = tmp_path_factory.mktemp("few")
    model, found = small_model(), {}
    model.save(folder / "wide")
    for form in FORMS:
        if form == "gguf":
            path = write_as_gguf(model, folder / "gguf")
        else:
            path = regard.load(folder / "wide", weights=form).save(folder / form)
        few = regard.load(path, kind=Model)
        assert sum(1 for _ in stored_modules(few.decoder)) == 16
        plain = small_model()
        for name, x in plain.decoder.named_parameters():
            values = dict(stored_modules(few.decoder)) | dict(few.decoder.named_parameters())
            value = values[name]
            x.data.copy_(value if isinstance(value, Tensor) else value.dequantize())
        plain.save(folder / f"{form}-plain")
        wide = sum(p.nbytes for p in few.decoder.parameters())
        size = wide + sum(record.bytes for _, record in stored_modules(few.decoder))
        if form == "gguf":  # the file has a scale for 32 numbers in 16 bits, as the record does
            assert size == sum(t.bytes for t in gguf_tensors(path))
        else:
            assert size == sum(x.nbytes for x in load_file(path / "model.safetensors").values())
        found[form] = Source(path, folder / f"{form}-plain", size)
    return found


def gguf_tensors(path: Path) -> Iterator[Any]:
    from regard.files.gguf_files import read_gguf_header

    return iter(read_gguf_header(path).tensors.values())


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("more", [(), ("--what", "k", "--distance", "1")], ids=str)
def test_products_of_weights(
    more: tuple[str, ...],
    form: str,
    sources: dict[str, Source],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def printed(path: Path, dtype: str = "float32") -> Tensor:
        given = ["inspect", "weights", *more, "--model", str(path), "--dtype", dtype, "--json"]
        assert run(given) == 0
        values = json.loads(capsys.readouterr().out)["values"]
        numbers = [[math.nan if x is None else x for x in row] for row in values]
        return torch.tensor(numbers, dtype=torch.float64)

    source = sources[form]
    found, exact = printed(source.path), printed(source.plain, "float64")
    plains = in_orders(lambda: printed(source.plain).nan_to_num().float())
    assert torch.equal(found.isnan(), exact.isnan())
    assert_close_rule(found.nan_to_num().float(), plains, exact.nan_to_num())


@pytest.mark.parametrize("form", FORMS)
def test_words_and_sizes(
    form: str,
    sources: dict[str, Source],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, text = sources[form], tmp_path / "text.txt"
    text.write_text(" ".join([TEXT] * 40), "utf-8")

    def printed(*arguments: str, code: int = 0) -> str:
        assert run(list(arguments)) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    for words in (["generate", TEXT, "--max-tokens", "4"], ["inspect", "taps"]):
        few, plain = (printed(*words, "--model", str(x)) for x in (source.path, source.plain))
        assert few == plain
    wide = "fp32" if form != "gguf" else "fp16"
    cost = ["cost", str(source.path), "--context", "16", "--json"]
    told = json.loads(printed(*cost))
    assert told["weight_bytes"] == source.stored_bytes
    assert (told["dtype"], told["parameters"]) == (wide, count_parameters(small_model().decoder))
    told = json.loads(printed(*cost, "--dtype", "int4"))
    assert told["weight_bytes"] == -(-told["parameters"] // 2)
    assert "--dtype" in printed("cost", str(source.path), "--mechanisms", "mqa", code=2)
    out = str(tmp_path / "out")
    assert "a second time" in printed("convert", str(source.path), out, "--weights", "int8", code=2)
    fewer = ["--to", "mqa", "--text", str(text), "--json"]
    few = json.loads(printed("convert", str(source.path), out, *fewer))
    plain = json.loads(printed("convert", str(source.plain), f"{out}-plain", *fewer))
    made = [regard.load(folder, kind=Model).decoder for folder in (out, f"{out}-plain")]
    assert few["after"] == plain["after"]
    assert len(few["steps"]) == len(plain["steps"]) + 1
    for name, x in made[1].named_parameters():
        assert torch.allclose(made[0].get_parameter(name), x, atol=1e-5)


@pytest.mark.nightly(keep=1)
@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_training_begins_with_the_dequantized_weights(
    form: str, sources: dict[str, Source], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(TEXT[i % 8 :] + TEXT[: i % 5] for i in range(60)), "utf-8")
    trained = []
    for path in (sources[form].path, sources[form].plain):
        out = tmp_path / path.name
        options = ["--steps", "1", "--batch", "2", "--context", "16", "--out", str(out)]
        assert run(["train", str(text), "--start-from", str(path), *options]) == 0
        trained.append(load_file(out / "model.safetensors"))
    assert all(torch.equal(x, trained[1][name]) for name, x in trained[0].items())
