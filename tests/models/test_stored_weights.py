"""Models whose weights are stored in fewer bits: loading, saving, generating, explaining, and what
is refused.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import regard
from regard.cli.app import run
from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.models.checkpoint.stored_forms import weight_form
from regard.models.convert import ConversionOptions, convert
from regard.nn import RMSNorm
from regard.nn.mixer import count_weights
from regard.nn.projections.fused import FusedQKV
from regard.nn.weights import (
    Linear,
    StoredEmbedding,
    count_parameters,
    device_of,
    store_weight,
    stored_modules,
)
from regard.ops.stored_weights import Int8Weight
from tests.models import small
from tests.rules import assert_close_rule, in_orders

IDS = torch.arange(3, 40)[None]


@pytest.mark.full
@pytest.mark.parametrize("form", ["int8", "int4", "float16", "bfloat16"])
def test_load_save_and_load_again(form: str, tmp_path: Path) -> None:
    model = regard.load("tiny", weights=form)
    plain = regard.load("tiny")
    records = dict(stored_modules(model.decoder))
    assert {"embed.embedding.weight", "head.weight", "layers.0.feed_forward.up.weight"} <= {
        *records
    }
    assert model.dtype == torch.float32
    # the model that has the dequantized matrices computes the same
    for name, record in records.items():
        plain.decoder.get_parameter(name).data = record.dequantize()
    torch.testing.assert_close(model(IDS), plain(IDS), atol=1e-4, rtol=1e-4)
    caches = model.new_caches()
    steps = [model(IDS[:, i : i + 1], caches=caches) for i in range(IDS.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), model(IDS), atol=1e-4, rtol=1e-4)
    folder = model.save(tmp_path / "saved")
    again = regard.load(folder, weights=None if "int" in form else form)
    assert torch.equal(model(IDS), again(IDS))
    assert (folder / "model.safetensors").stat().st_size < 14e6 * {"int8": 0.3, "int4": 0.16}.get(
        form, 0.6
    )


def test_generate_explain_and_record() -> None:
    model = regard.load("tiny", weights="int8")
    text = "".join(model.generate("Return the", max_tokens=8))
    assert len(text) > 3
    recording = regard.inspect.record(model, "to be or not to be")
    assert len(recording.places) == 4
    explanation = regard.inspect.explain(model, "to be or not to be", layer=1, head=0)
    assert explanation.layer == 1


def test_state_dict_names_what_is_stored() -> None:
    model = regard.load("tiny", weights="int8").decoder
    state = model.state_dict()
    assert state["head.weight.codes"].dtype == torch.int8
    assert "head.weight" not in state
    other = copy.deepcopy(model)
    changed = {**state, "head.weight.scales": state["head.weight.scales"] * 2}
    other.load_state_dict(changed)
    assert torch.equal(other.head.weight, 2 * model.head.weight)
    with pytest.raises(RuntimeError, match=r"head\.weight\.codes is torch\.int8"):
        other.load_state_dict({**state, "head.weight.codes": state["head.weight.codes"][:3]})
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({k: x for k, x in state.items() if k != "head.weight.codes"})
    half = regard.load("tiny", weights="bfloat16").decoder
    assert half.state_dict()["head.weight.values"].dtype == torch.bfloat16
    moved = copy.deepcopy(model).to("meta")
    assert moved.head.weight.is_meta
    assert model.half().head.stored_weight.scales.dtype == torch.float16


def test_fused_projection_uses_its_rows() -> None:
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    for order in ("parts", "groups"):
        fused = FusedQKV(64, 4, 2, 16, order=order).requires_grad_(False)
        plain = copy.deepcopy(fused)
        store_weight(fused.linear, Int8Weight.quantize(fused.linear.weight))
        plain.linear.weight.copy_(fused.linear.weight)
        torch.testing.assert_close(fused.query(x, None), plain.query(x, None))
        for a, b in zip(fused.remember(x, None), plain.remember(x, None), strict=True):
            torch.testing.assert_close(a, b)


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="must be one of int8, int4"):
        regard.load("tiny", weights="int3")
    with pytest.raises(ArgumentError, match="computes in float32"):
        regard.load("tiny", weights="float16", dtype=torch.bfloat16)
    with pytest.raises(ArgumentTypeError, match="module is RMSNorm"):
        store_weight(RMSNorm(32), Int8Weight.quantize(torch.ones(2, 32)))
    with pytest.raises(ArgumentError, match=r"record is \(2, 32\)"):
        store_weight(Linear(32, 3), Int8Weight.quantize(torch.ones(2, 32)))
    embedding = torch.nn.Embedding(4, 32)
    store_weight(embedding, Int8Weight.quantize(embedding.weight))
    assert isinstance(embedding, StoredEmbedding)
    assert torch.equal(embedding(torch.tensor([2])), embedding.weight[2:3])
    folder = regard.load("tiny", weights="int8").save(tmp_path / "int8")
    with pytest.raises(ArgumentError, match="are int8 already"):
        regard.load(folder, weights="int4")
    with pytest.raises(ArgumentError, match="round them a second time") as caught:
        convert(folder, tmp_path / "out", ConversionOptions(weights="int4"))
    assert caught.value.argument == "weights"


@pytest.mark.full
def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    folder = regard.load("tiny", weights="int4").save(tmp_path / "int4")
    tensors = load_file(folder / "model.safetensors")
    key = "regard.layers.0.attention.output.weight."

    def load_with(changed: dict[str, torch.Tensor | None], words: str) -> None:
        some = {k: x for k, x in {**tensors, **changed}.items() if x is not None}
        save_file(some, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(FileError, match=words):
            regard.load(folder)

    load_with({key + "codes": None}, "must have codes and scales")
    load_with({key + "codes": None, key + "scales": None}, "1 missing")
    load_with({key + "codes": tensors[key + "codes"][:-1].clone()}, "must have 256 rows")
    load_with({key + "scales": tensors[key + "scales"].double()}, "scales torch.float64")
    load_with({key + "scales": tensors[key + "scales"][:, :1].clone()}, "for 256 inputs")
    load_with({"regard.norm.weight.codes": torch.ones(1)}, "belongs to no linear map")
    load_with({"extra": torch.ones(1)}, "1 unexpected")
    change = {"quant_method": "regard", "weights": "int4", "bits": 4}
    small.change_config(folder, quantization_config=change)
    load_with({}, "weights, 'int8', 'int4' or 'mixed', and nothing else")


@pytest.mark.full
def test_convert_reports_what_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["convert", "tiny", str(tmp_path / "int8"), "--weights", "int8", "--tokens", "256"]
    assert run(words) == 0
    text = capsys.readouterr().out
    for part in ("weights to int8", "KL(before | after)", "same likeliest", "hidden states"):
        assert part in text
    report = convert("tiny", tmp_path / "int4", ConversionOptions(weights="int4"), tokens=256)
    assert 0 < report.measured.divergence < 1
    assert len(report.hidden_errors) == 4
    assert all(0 < error < 0.5 for error in report.hidden_errors)
    assert report.after.parameters == report.before.parameters
    assert report.figures()["hidden_errors"] == list(report.hidden_errors)
    assert regard.load(tmp_path / "int4").dtype == torch.float32


@pytest.mark.parametrize("form", ["int8", "int4", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_dtype_of_a_model_is_that_of_its_products(form: str, dtype: torch.dtype) -> None:
    layer = Linear(128, 96).requires_grad_(False)
    tied = nn.Embedding(96, 128).requires_grad_(False)
    wide = weight_form(form).store(layer.weight, torch.float32)
    both = nn.ModuleList([layer, tied])
    for module in both:
        store_weight(module, wide)
    both.to(dtype)
    record = layer.stored_weight
    assert record is not None
    assert tied.stored_weight is record  # still shared
    for old, new in zip(wide.tensors().values(), record.tensors().values(), strict=True):
        assert torch.equal(old, new)
    weight = wide.dequantize(torch.float64)
    for vectors in (1, 20):
        x = torch.randn(vectors, 128).to(dtype)
        exact = F.linear(x.double(), weight, layer.bias.double())
        plains = in_orders(lambda x=x: F.linear(x, weight.to(dtype), layer.bias))
        assert_close_rule(layer(x), plains, exact)
    assert count_weights(both).biases == 96
    assert count_parameters(both) == 96 * 128 + 96
    bare = nn.ModuleList([tied])  # without a parameter
    assert not [*bare.parameters()]
    assert device_of(bare.to("meta")).type == "meta"
    assert device_of(bare.float()).type == "meta"
