"""Folders with packed matrices: read as what they stand for, and refused where the pieces do not
fit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import regard
from regard.errors import ArgumentError, FileError
from regard.models.checkpoint.quantized import dequantized
from regard.models.checkpoint.tensors import CheckpointTensors
from tests.models import small
from tests.models.checkpoint.test_block_formats import bytes_
from tests.oracles import moe as oracle

os.environ.setdefault("HF_HUB_OFFLINE", "1")
MXFP4: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [4, 4],
}


def opened(folder: Path, tensors: dict[str, Tensor], said: Any) -> CheckpointTensors:
    save_file(tensors, folder / "model.safetensors")
    return dequantized(CheckpointTensors.open(folder), said)


def blocks_and_scales() -> dict[str, Tensor]:
    return {"w_blocks": bytes_(2, 6, 3, 16), "w_scales": bytes_(2, 6, 3, low=120, high=130)}


def eighths(N: int = 6, K: int = 9, seed: int = 0) -> dict[str, Tensor]:
    """Every byte but the two NaN."""
    raw = bytes_(N, K, seed=seed)
    raw = torch.where(raw % 128 == 127, 0, raw)
    make = torch.Generator().manual_seed(seed)
    scale = torch.rand(-(-N // 4), -(-K // 4), generator=make) + 0.1
    return {"a.weight": raw.view(torch.float8_e4m3fn), "a.weight_scale_inv": scale}


def test_a_plain_folder_is_itself(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    store = CheckpointTensors.open(tmp_path)
    assert dequantized(store, None) is store


def test_mxfp4_is_one_matrix_turned(tmp_path: Path) -> None:
    packed = blocks_and_scales()
    store = opened(tmp_path, packed | {"b": torch.ones(3)}, MXFP4)
    assert {name: (x.shape, x.dtype) for name, x in store.tensors.items()} == {
        "b": ((3,), torch.float32),
        "w": ((2, 96, 6), torch.bfloat16),
    }
    assert store.bytes == 12 + 2 * 96 * 6 * 2
    found = dict(store.read())
    rows = [
        [oracle.mxfp4_row(b, s) for b, s in zip(blocks, scales, strict=True)]
        for blocks, scales in zip(
            packed["w_blocks"].tolist(), packed["w_scales"].tolist(), strict=True
        )
    ]
    assert torch.equal(found["w"].mT.double(), torch.tensor(rows, dtype=torch.float64))
    assert torch.equal(found["b"], torch.ones(3))
    assert set(dict(store.read(["b"]))) == {"b"}
    assert set(dict(store.read(["w"]))) == {"w"}


def test_pairs_may_lie_in_different_shards(tmp_path: Path) -> None:
    packed = blocks_and_scales() | {"b": torch.ones(3)}
    save_file({"w_blocks": packed["w_blocks"]}, tmp_path / "model-00001-of-00002.safetensors")
    rest = {name: packed[name] for name in ("w_scales", "b")}
    save_file(rest, tmp_path / "model-00002-of-00002.safetensors")
    where = {"w_blocks": 1, "w_scales": 2, "b": 2}
    index = {
        "metadata": {},
        "weight_map": {n: f"model-0000{i}-of-00002.safetensors" for n, i in where.items()},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    store = dequantized(CheckpointTensors.open(tmp_path), MXFP4)
    (tmp_path / "whole").mkdir()
    whole = opened(tmp_path / "whole", packed, MXFP4)
    for (name, x), (other, y) in zip(store.read(), sorted(whole.read(), reverse=True), strict=True):
        assert name == other
        assert torch.equal(x, y)


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    store = opened(tmp_path, blocks_and_scales(), MXFP4)
    with pytest.raises(ArgumentError, match="has no tensor 'v'"):
        list(store.read(["v"]))


@pytest.mark.parametrize(
    "change, said, message",
    [
        ({}, {"quant_method": "hqq"}, "config.json: quantization_config has the quant_method"),
        ({}, ["mxfp4"], "the quant_method None"),
        ({"w_scales": None}, MXFP4, "'w_blocks' is quantized, and its scales 'w_scales'"),
        ({"w_scales": bytes_(2, 6, 2)}, MXFP4, r"'w_scales' is torch.uint8 \(2, 6, 2\); they"),
        ({"w_scales": torch.ones(2, 6, 3)}, MXFP4, "'w_scales' is torch.float32"),
        ({"w_blocks": bytes_(2, 6, 3, 8)}, MXFP4, r"'w_blocks' is torch.uint8 \(2, 6, 3, 8\)"),
        ({"w_blocks": bytes_(3, 16), "w_scales": bytes_(3)}, MXFP4, r"\(3, 16\)"),
        ({"w": torch.ones(2)}, MXFP4, "'w' is stored both quantized and not quantized"),
        (eighths(), FP8 | {"fmt": "e5m2"}, "the fmt 'e5m2'; supported: 'e4m3'"),
        (eighths(), FP8 | {"weight_block_size": [4, 8]}, r"a matrix and factors \(2, 2\)"),
        (eighths(), FP8 | {"weight_block_size": None}, "one factor, or one for each"),
        (eighths(), FP8 | {"weight_block_size": [0, 0]}, "the size of blocks"),
        (eighths(), FP8 | {"weight_block_size": [4.0, 4.0]}, "the size of blocks"),
        ({"a.weight": eighths()["a.weight"]}, FP8, "'a.weight_scale_inv' are missing"),
        (eighths() | {"a.weight_scale_inv": torch.ones(2, 2)}, FP8, "they must be a matrix"),
        (eighths() | {"a.weight_scale_inv": torch.ones(2, 3).double()}, FP8, "torch.float64"),
    ],
)
def test_it_refuses(change: dict[str, Any], said: Any, message: str, tmp_path: Path) -> None:
    tensors = {name: x for name, x in (blocks_and_scales() | change).items() if x is not None}
    with pytest.raises(FileError, match=message):
        opened(tmp_path, tensors, said)


# Whole models.


def drawn(name: str, config: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs the transformers extra")
    from tests.parity.families.harness import theirs

    del transformers
    return theirs(name, config)


def pack(folder: Path, change: dict[str, Tensor | None], said: Any) -> None:
    """The folder with some tensors replaced, and what config.json says of them."""
    tensors = load_file(folder / "model.safetensors") | change
    save_file({n: x for n, x in tensors.items() if x is not None}, folder / "model.safetensors")
    small.change_config(folder, quantization_config=said)


def test_a_packed_gpt_oss(tmp_path: Path) -> None:
    """Experts of random bits: what transformers takes apart and what is loaded here computes the
    same.
    """
    model = drawn(
        "GptOss",
        {
            "vocab_size": 40,
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    experts, change = model.model.layers[0].mlp.experts, {}
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        E, inside, outside = weight.shape
        blocks = bytes_(E, outside, inside // 32, 16, seed=inside)
        scales = bytes_(E, outside, inside // 32, seed=outside, low=120, high=126)
        weight.data = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        stored = f"model.layers.0.mlp.experts.{name}"
        change |= {stored: None, f"{stored}_blocks": blocks, f"{stored}_scales": scales}
    model.save_pretrained(tmp_path)
    plain = regard.load(tmp_path)
    pack(tmp_path, change, MXFP4)
    mine = regard.load(tmp_path)
    assert mine.converted is None
    for name, module in mine.decoder.named_modules():
        if name.endswith((".gate", ".up", ".down")):  # each expert computes with 8 bits
            assert module.stored_weight.form == "int8", name
            assert torch.equal(module.weight, plain.decoder.get_submodule(name).weight), name
    ids = torch.arange(3, 20)[None]
    exact = model(input_ids=ids, use_cache=False).logits
    assert float((mine(ids) - exact).abs().max()) <= 1e-5 * float(exact.abs().max())
    wide = regard.load(tmp_path, dtype=torch.float64)
    assert wide.converted[1:3] == (2, 2)
    for (name, one), two in zip(
        plain.decoder.named_parameters(), wide.decoder.parameters(), strict=True
    ):
        assert torch.equal(one, two.float()), name


def test_packed_tensors_that_config_json_does_not_speak_of(tmp_path: Path) -> None:
    """Eight-bit numbers without their factors are no weights."""
    model = drawn(
        "Llama",
        {
            "vocab_size": 40,
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    )
    model.save_pretrained(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    packed = eighths(20, 16)
    pack(
        tmp_path,
        {name: packed["a.weight"], name + "_scale_inv": packed["a.weight_scale_inv"]},
        None,
    )
    with pytest.raises(FileError, match=r"unexpected.*up_proj\.weight_scale_inv"):
        regard.load(tmp_path)
    small.change_config(tmp_path, quantization_config=FP8)
    regard.load(tmp_path)
