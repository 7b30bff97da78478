"""The size of quantized weights, from a config.json alone, is that of the tensors in such files."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.configs.published import PUBLISHED_MODELS
from regard.configs.reader import parse, read_sizes_file
from regard.cost.report import CostReport, Setting
from regard.errors import ArgumentError
from regard.models.checkpoint.family import bind_names
from regard.models.checkpoint.stored_sizes import stored_size
from regard.models.families import family

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "torch_dtype": "bfloat16",
}
LLAMA = {"model_type": "llama", **SIZES, "head_dim": 16}
MIXTRAL = {"model_type": "mixtral", **SIZES, "num_local_experts": 3, "num_experts_per_tok": 2}
GPT_OSS = MIXTRAL | {"model_type": "gpt_oss", "head_dim": 16}
Tensors = dict[str, Tensor]
Writer = Callable[[str, int, int], Tensors]
"""(name, N, K) -> the tensors of a matrix [N, K]."""


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gptq(bits: int, group: int | None) -> Writer:
    def write(name: str, n: int, k: int) -> Tensors:
        groups = k // (group or k)
        return {
            f"{name}.qweight": empty(torch.int32, k * bits // 32, n),
            f"{name}.qzeros": empty(torch.int32, groups, n * bits // 32),
            f"{name}.scales": empty(torch.float16, groups, n),
            f"{name}.g_idx": empty(torch.int32, k),
        }

    return write


def awq(name: str, n: int, k: int) -> Tensors:
    return {
        f"{name}.qweight": empty(torch.int32, k, n // 8),
        f"{name}.qzeros": empty(torch.int32, k // 32, n // 8),
        f"{name}.scales": empty(torch.float16, k // 32, n),
    }


def fp8(name: str, n: int, k: int) -> Tensors:
    return {
        f"{name}.weight": empty(torch.float8_e4m3fn, n, k),
        f"{name}.weight_scale_inv": empty(torch.float32, -(-n // 48), -(-k // 48)),
    }


def whole(*, rows: bool) -> Writer:
    return lambda name, n, k: {
        f"{name}.weight": empty(torch.float8_e4m3fn, n, k),
        f"{name}.weight_scale": empty(torch.float32, *([n, 1] if rows else [])),
    }


def packed(*, zeros: bool) -> Writer:
    def write(name: str, n: int, k: int) -> Tensors:
        tensors = {
            f"{name}.weight_packed": empty(torch.int32, n, k // 8),
            f"{name}.weight_scale": empty(torch.bfloat16, n, k // 32),
            f"{name}.weight_shape": empty(torch.int64, 2),
        }
        if zeros:
            tensors[f"{name}.weight_zero_point"] = empty(torch.int32, n // 8, k // 32)
        return tensors

    return write


def eight_bits(dtype: torch.dtype) -> Writer:
    return lambda name, n, k: {
        f"{name}.weight": empty(dtype, n, k),
        f"{name}.weight_scale": empty(torch.bfloat16, n, 1),
    }


def int8_of_bitsandbytes(name: str, n: int, k: int) -> Tensors:
    return {
        f"{name}.weight": empty(torch.int8, n, k),
        f"{name}.SCB": empty(torch.float32, n),
        f"{name}.weight_format": empty(torch.uint8),
    }


def nf4(*, double: bool) -> Writer:
    def write(name: str, n: int, k: int) -> Tensors:
        blocks = -(-n * k // 64)
        tensors = {
            f"{name}.weight": empty(torch.uint8, n * k // 2, 1),
            f"{name}.weight.absmax": empty(torch.uint8 if double else torch.float32, blocks),
            f"{name}.weight.quant_map": empty(torch.float32, 16),
        }
        if double:
            tensors[f"{name}.weight.nested_absmax"] = empty(torch.float32, -(-blocks // 256))
            tensors[f"{name}.weight.nested_quant_map"] = empty(torch.float32, 256)
        return tensors

    return write


def scheme(layout: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*gate$"],
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FORMS: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq(4, 32)),
    "gptq-8": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, gptq(8, None)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [48, 48]}, fp8),
    "fp8-whole": ({"quant_method": "fp8"}, whole(rows=False)),
    "fp8-rows": ({"quant_method": "fbgemm_fp8"}, whole(rows=True)),
    "packed": (scheme("pack-quantized", **INT4, symmetric=True), packed(zeros=False)),
    "packed-zeros": (scheme("pack-quantized", **INT4, symmetric=False), packed(zeros=True)),
    "int": (scheme("int-quantized", **INT8), eight_bits(torch.int8)),
    "float": (scheme("float-quantized", **INT8), eight_bits(torch.float8_e4m3fn)),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_of_bitsandbytes),
    "bnb-nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        nf4(double=False),
    ),
    "bnb-double": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        nf4(double=True),
    ),
}


def checkpoint(raw: dict[str, Any]) -> Tensors:
    """The tensors of a checkpoint that is not quantized, in bf16."""
    its_family = family(raw["model_type"])
    plain = {k: v for k, v in raw.items() if k != "quantization_config"}
    network = its_family.build_empty(parse(its_family.config, plain))
    parameters = dict(network.named_parameters(remove_duplicate=False))
    return {
        name: binding.rule.pack([parameters[p].detach().bfloat16() for p in binding.parameters])
        for name, binding in bind_names(network, its_family.names).items()
    }


def size(tensors: Tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors.values())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("raw", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_the_bytes_of_a_checkpoint(raw: dict[str, Any], form: str) -> None:
    settings, write = FORMS[form]
    stored: Tensors = {}
    for name, x in checkpoint(raw).items():
        is_map = "proj.weight" in name or ".experts." in name
        stored |= write(name.removesuffix(".weight"), *x.shape) if is_map else {name: x}
    found = stored_size(raw | {"quantization_config": settings}, "config.json")
    assert found.bytes == size(stored) < size(checkpoint(raw))
    assert found.bits_of("embedding") == 16


def test_mxfp4_is_for_experts_only() -> None:
    stored: Tensors = {}
    for name, x in checkpoint(GPT_OSS).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = x.shape
            stored[f"{name}_blocks"] = empty(torch.uint8, experts, outputs, inputs // 32, 16)
            stored[f"{name}_scales"] = empty(torch.uint8, experts, outputs, inputs // 32)
        else:
            stored[name] = x
    raw = GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}
    assert stored_size(raw, "config.json").bytes == size(stored)


RELEASED = {
    # total_size of model.safetensors.index.json of openai/gpt-oss-20b and -120b
    "gpt-oss-20b": ({"quant_method": "mxfp4"}, 13_761_264_768, 0),
    "gpt-oss-120b": ({"quant_method": "mxfp4"}, 65_248_815_744, 0),
    # model.safetensors of TheBloke/Llama-2-7B-AWQ, Qwen/Qwen2.5-7B-Instruct-AWQ, as their pages say
    "llama-2-7b": ({"quant_method": "awq", "bits": 4, "group_size": 128}, 3.89e9, 5e6),
    "qwen2.5-7b": ({"quant_method": "awq", "bits": 4, "group_size": 128}, 5.57e9, 5e6),
}


@pytest.mark.full(keep=["llama"])
@pytest.mark.parametrize("name", RELEASED)
def test_the_bytes_of_released_files(name: str) -> None:
    settings, wanted, digits = RELEASED[name]
    raw = {**PUBLISHED_MODELS[name].config, "torch_dtype": "bfloat16"}
    found = stored_size(raw | {"quantization_config": settings}, name).bytes
    assert abs(found - wanted) <= digits


def test_a_token_reads_the_stored_bytes(tmp_path: Path) -> None:
    raw = MIXTRAL | {"quantization_config": FORMS["awq"][0]}
    stored = stored_size(raw, "config.json")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = read_sizes_file(tmp_path, stored_size)
    report = CostReport(model, Setting(8))
    assert report.weight_bytes == stored.bytes
    # all but the embedding, of which one row is read, and one expert of three
    unread = 16 * (40 - 1) * 64 + stored.bits_of("experts") * (2 * 3 * 64 * 192)
    assert report.active_bytes(1) == stored.bytes - Fraction(unread, 8)
    wide = CostReport(model, Setting(8, dtype="fp32"))
    assert wide.weight_bytes == 4 * model.parameters
    plain = read_sizes_file(tmp_path)  # without a count
    assert any("quantization_config" in note for note in plain.notes)
    assert CostReport(plain, Setting(8)).weight_bytes == 2 * model.parameters


REFUSED = [
    ({"quant_method": "hqq"}, "'hqq'"),
    ("awq", "quant_method is None"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
    ({"quant_method": "awq", "bits": 4, "group_size": "all"}, "group_size"),
    ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": "all"}, "no list"),
    ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["*"]}, "no regular expression"),
    ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": 4}, "lists of names"),
    ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["([a-z.]+)+!"]}, "repeat no"),
    ({"quant_method": "gptq", "bits": True}, "bits"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "dynamic"),
    ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size"),
    ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
    (scheme("nvfp4-pack-quantized"), "nvfp4"),
    (scheme("pack-quantized", **INT4, symmetric=True) | {"ignore": ["re:("]}, "no regular expr"),
    (scheme("pack-quantized", **INT4, symmetric=True) | {"ignore": 5}, "no list of names"),
    (scheme("int-quantized", **INT8) | {"config_groups": {}}, "config_groups"),
    (scheme("pack-quantized", **INT4 | {"strategy": "block"}), "strategy"),
    (scheme("pack-quantized", **INT4 | {"group_size": None}), "group_size"),
    (
        scheme("int-quantized") | {"config_groups": {"group_0": {"targets": ["re:.*"]}}},
        "the group is",
    ),
    ({"quant_method": "regard", "weights": "mixed"}, "mixed"),
]


@pytest.mark.parametrize(("settings", "word"), REFUSED)
def test_what_is_not_known_is_refused(settings: Any, word: str) -> None:
    with pytest.raises(ArgumentError, match=word) as refusal:
        stored_size(LLAMA | {"quantization_config": settings}, "the file")
    assert "the file: " in str(refusal.value)
    assert "--dtype" in str(refusal.value)


def test_families_and_tensors_that_are_not_known() -> None:
    for raw, settings, word in (
        (GPT_OSS, FORMS["awq"][0], "all experts in one tensor"),
        (LLAMA | {"model_type": "lama"}, FORMS["awq"][0], "'lama' is not supported"),
        (LLAMA | {"torch_dtype": "int8"}, FORMS["awq"][0], "dtype"),
    ):
        with pytest.raises(ArgumentError, match=word):
            stored_size(raw | {"quantization_config": settings}, "config.json")


@pytest.mark.parametrize("raw", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_modules_that_stay_wide(raw: dict[str, Any]) -> None:
    settings = FORMS["awq"][0]
    whole = stored_size(raw | {"quantization_config": settings}, "").bytes
    with_head = stored_size(raw | {"quantization_config": settings | {"lm_head": True}}, "").bytes
    assert with_head - whole == size(awq("lm_head", 40, 64)) - 2 * 40 * 64
    one = {"modules_to_not_convert": ["model.layers.1.self_attn"]}
    partly = stored_size(raw | {"quantization_config": settings | one}, "").bytes
    maps = [(64, 64), (32, 64), (32, 64), (64, 64)]
    assert partly - whole == sum(2 * n * k - size(awq("", n, k)) for n, k in maps)
