"""Checkpoints that other programs quantized against the formulas of their formats, number by number
in Python integers and fp64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import regard
from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.models.checkpoint.group_quantized import (
    IntegerCodes,
    unpack_awq,
    unpack_gptq,
    unpack_words,
)
from regard.models.checkpoint.quantization_settings import (
    GROUP,
    READ,
    UNREAD,
    WEIGHTS,
    check_keys,
    check_method,
    compressed_weights,
)
from regard.models.checkpoint.quantized import READERS
from tests.models import small
from tests.oracles import moe as oracle

Tensors = dict[str, Tensor]
STORED = "model.layers.0.self_attn.q_proj"
QUERIES = "layers.0.attention.project.q.linear"
N = M = 256


def words(numbers: list[int], bits: int, order: list[int] | None = None) -> list[int]:
    """Pack unsigned numbers into signed 32-bit words; place i holds number order[i]."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    packed = []
    for first in range(0, len(numbers), per_word):
        word = sum(numbers[first + n] << (bits * i) for i, n in enumerate(order))
        packed.append(word - (1 << 32) if word >= 1 << 31 else word)
    return packed


def drawn(high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def int32(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def by_number(number: Callable[[int, int], float]) -> Tensor:
    """The matrix in fp64 whose numbers a function of the row and the column gives."""
    return torch.tensor([[number(n, m) for m in range(M)] for n in range(N)], dtype=torch.float64)


def by_group(scales: Tensor, codes: Tensor, zeros: Tensor, g_idx: Tensor) -> Tensor:
    """The matrix of integers with a scale and a zero point for the group of each column."""

    def number(n: int, m: int) -> float:
        g = int(g_idx[m])
        return float(scales[n, g]) * (int(codes[n, m]) - int(zeros[n, g]))

    return by_number(number)


def gptq(
    bits: int, group: int, *, offset: int = 1, act_order: bool = False, zero: int | None = None
) -> tuple[Tensors, Tensor]:
    """The tensors of one matrix, and the matrix in fp64."""
    top = 2**bits
    codes, zeros = drawn(top, N, M, seed=1), drawn(top, N, M // group, seed=2)
    zeros = zeros if zero is None else torch.full_like(zeros, zero)
    scales = (drawn(1000, N, M // group, seed=3) + 1).half() / 4096
    g_idx = torch.arange(M) // group
    if act_order:
        g_idx = g_idx[torch.randperm(M, generator=torch.Generator().manual_seed(4))]
    tensors = {
        "qweight": int32([words(row, bits) for row in codes.tolist()]).T.contiguous(),
        "qzeros": int32([words([(z - offset) % top for z in c], bits) for c in zeros.T.tolist()]),
        "scales": scales.T.contiguous(),
        "g_idx": g_idx.int(),
    }
    return tensors, by_group(scales, codes, zeros, g_idx)


def awq(group: int) -> tuple[Tensors, Tensor]:
    codes, zeros = drawn(16, N, M, seed=1), drawn(16, N, M // group, seed=2)
    scales = (drawn(1000, N, M // group, seed=3) + 1).half() / 4096
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "qweight": int32([words(column, 4, order) for column in codes.T.tolist()]),
        "qzeros": int32([words(column, 4, order) for column in zeros.T.tolist()]),
        "scales": scales.T.contiguous(),
    }
    return tensors, by_group(scales, codes, zeros, torch.arange(M) // group)


def compressed(bits: int, group: int, *, packed: bool, zeros: bool) -> tuple[Tensors, Tensor]:
    half = 2 ** (bits - 1)
    codes = drawn(2 * half, N, M, seed=1) - half
    points = drawn(2 * half, N, M // group, seed=2) - half if zeros else torch.zeros(N, M // group)
    scales = (drawn(1000, N, M // group, seed=3) + 1).bfloat16() / 4096
    tensors = {"weight_scale": scales}
    if packed:
        tensors["weight_packed"] = int32([words(row, bits) for row in (codes + half).tolist()])
        tensors["weight_shape"] = torch.tensor([N, M])
        if zeros:
            columns = [words(c, bits) for c in (points + half).long().T.tolist()]
            tensors["weight_zero_point"] = int32(columns).T.contiguous()
    else:
        tensors["weight"] = codes.to(torch.int8)
        if zeros:
            tensors["weight_zero_point"] = points.to(torch.int8)
    return tensors, by_group(scales, codes, points, torch.arange(M) // group)


def scheme(bits: int, layout: str, kind: str = "int", **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "group", **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def eighths(*blocks: int, scale: str, rank: int = 2) -> tuple[Tensors, Tensor]:
    """8-bit floats with a factor for each block of rows and columns."""
    raw = drawn(127, N, M, seed=1) + 128 * drawn(2, N, M, seed=2)  # without the two NaN
    rows, columns = blocks
    factors = (drawn(1000, N // rows, M // columns, seed=3) + 1).bfloat16() / 4096
    exact = by_number(
        lambda n, m: oracle.e4m3(int(raw[n, m])) * float(factors[n // rows, m // columns])
    )
    stored = factors.flatten()[0] if rank == 0 else factors
    weight = raw.to(torch.uint8).view(torch.float8_e4m3fn)
    return {"weight": weight, scale: stored, "input_scale": torch.ones(())}, exact


def quarters(group: int) -> tuple[Tensors, Tensor]:
    """4-bit floats: NVFP4 in groups of 16, and MXFP4 in groups of 32."""
    codes = drawn(16, N, M, seed=1)
    scales = drawn(60, N, M // group, seed=2) + 60  # bytes
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

    def number(n: int, m: int) -> float:
        code, byte = int(codes[n, m]), int(scales[n, m // group])
        factor = 2.0 ** (byte - 127) if group == 32 else oracle.e4m3(byte) / 8
        return float(values[code & 7] * (-1) ** (code >> 3) * factor)

    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    tensors = {"weight_packed": packed, "weight_scale": scales.to(torch.uint8)}
    if group == 16:
        tensors["weight_scale"] = tensors["weight_scale"].view(torch.float8_e4m3fn)
        tensors["weight_global_scale"] = torch.tensor([8.0])
    return tensors, by_number(number)


def normal_floats(*, nested: bool) -> tuple[Tensors, Tensor]:
    """NF4 of bitsandbytes: the quantiles of QLoRA's appendix E, the high nibble first."""
    normal = NormalDist()
    # 8 values from each side, equally spaced in probability, without their common zero
    up = [normal.inv_cdf(0.9677083 + i * (0.5 - 0.9677083) / 8) for i in range(8)]
    down = [-normal.inv_cdf(0.9677083 + i * (0.5 - 0.9677083) / 7) for i in range(7)]
    table = [x / max(up) for x in sorted([*down, 0.0, *up])]
    codes = drawn(16, N * M, seed=1)
    absmax = (drawn(1000, N * M // 64, seed=2) + 1).float() / 4096
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [N, M]}
    tensors = {}
    if nested:
        bytes_ = drawn(256, N * M // 64, seed=3)
        outer, values = drawn(9, N * M // 64 // 256, seed=4) + 1.0, torch.linspace(-1, 1, 256)
        absmax = torch.tensor(
            [float(values[b]) * float(outer[i // 256]) + 0.5 for i, b in enumerate(bytes_.tolist())]
        ).double()
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
        tensors = {"weight.nested_absmax": outer, "weight.nested_quant_map": values}
    exact = [table[c] * float(absmax[i // 64]) for i, c in enumerate(codes.tolist())]
    tensors |= {
        "weight": (16 * codes[::2] + codes[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": bytes_.to(torch.uint8) if nested else absmax,
        "weight.quant_map": torch.tensor(table),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    return tensors, torch.tensor(exact, dtype=torch.float64).view(N, M)


def bytes_of_rows() -> tuple[Tensors, Tensor]:
    """LLM.int8 of bitsandbytes: w = code / 127 times the largest of a row."""
    codes, largest = drawn(255, N, M, seed=1) - 127, (drawn(1000, N, seed=2) + 1).float() / 256
    exact = codes.double() * largest.double()[:, None] / 127
    tensors = {"weight": codes.to(torch.int8), "SCB": largest}
    return tensors | {"weight_format": torch.tensor(0, dtype=torch.uint8)}, exact


class Case(NamedTuple):
    """How a matrix is made, what config.json says, and the form in which it is computed with."""

    make: Callable[[], tuple[Tensors, Tensor]]
    settings: dict[str, Any]
    form: str | None
    rounded: bool = False  # more than once


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
NF4: dict[str, Any] = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}
CASES = {
    "gptq-4": Case(lambda: gptq(4, 128), {**GPTQ, "group_size": 128, "desc_act": False}, "int4"),
    "gptq-4-one-group": Case(lambda: gptq(4, 256), {**GPTQ, "group_size": -1}, "int4"),
    "gptq-8": Case(lambda: gptq(8, 256, zero=128), {**GPTQ, "bits": 8, "sym": True}, "int8"),
    "gptq-8-far-zeros": Case(lambda: gptq(8, 256), {**GPTQ, "bits": 8}, None),
    "gptq-act-order": Case(lambda: gptq(4, 64, act_order=True), {**GPTQ, "desc_act": True}, None),
    "gptq-v2": Case(
        lambda: gptq(4, 64, offset=0), {**GPTQ, "checkpoint_format": "gptq_v2"}, "int4"
    ),
    "gptq-16": Case(lambda: gptq(4, 16), GPTQ, None),
    "awq": Case(lambda: awq(64), {"quant_method": "awq", "bits": 4, "version": "gemm"}, "int4"),
    "packed-4": Case(
        lambda: compressed(4, 32, packed=True, zeros=True), scheme(4, "pack-quantized"), "int4"
    ),
    "packed-8": Case(
        lambda: compressed(8, 128, packed=True, zeros=False), scheme(8, "pack-quantized"), "int8"
    ),
    "int-8": Case(
        lambda: compressed(8, 256, packed=False, zeros=False), scheme(8, "int-quantized"), "int8"
    ),
    "fp8-blocks": Case(
        lambda: eighths(128, 64, scale="weight_scale_inv"),
        {**FP8, "weight_block_size": [128, 64]},
        None,
    ),
    "fp8-whole": Case(lambda: eighths(N, M, scale="weight_scale", rank=0), FP8, None),
    "fp8-rows": Case(
        lambda: eighths(1, M, scale="weight_scale"), {"quant_method": "fbgemm_fp8"}, None
    ),
    "float-blocks": Case(
        lambda: eighths(128, 128, scale="weight_scale"),
        scheme(8, "float-quantized", "float", strategy="block", block_structure=[128, 128]),
        None,
    ),
    "nvfp4": Case(lambda: quarters(16), scheme(4, "nvfp4-pack-quantized", "float"), None),
    "mxfp4": Case(lambda: quarters(32), scheme(4, "mxfp4-pack-quantized", "float"), "int8"),
    "nf4": Case(lambda: normal_floats(nested=False), NF4, None, rounded=True),
    "nf4-nested": Case(lambda: normal_floats(nested=True), NF4, None, rounded=True),
    "bitsandbytes-8": Case(
        bytes_of_rows, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", rounded=True
    ),
}


def folder_with(tmp_path: Path, tensors: Tensors, settings: dict[str, Any]) -> Path:
    """A copy of "tiny" in which the queries of the first layer are quantized."""
    folder = regard.load("tiny").save(tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    del stored[f"{STORED}.weight"]
    stored |= {f"{STORED}.{name}": x for name, x in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    write_settings(folder, settings)
    return folder


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    small.change_config(folder, quantization_config=settings)


KEPT = [
    "gptq-4",
    "awq",
    "packed-4",
    "packed-8",
    "gptq-act-order",
    "fp8-blocks",
    "nf4-nested",
    "bitsandbytes-8",
]


@pytest.mark.full(keep=KEPT)
@pytest.mark.parametrize("name", CASES)
def test_a_folder_loads_by_its_formula(name: str, tmp_path: Path) -> None:
    make, settings, form, rounded = CASES[name]
    tensors, exact = make()
    model = regard.load(folder_with(tmp_path, tensors, settings))
    module = model.decoder.get_submodule(QUERIES)
    if rounded:
        assert (module.weight - exact).abs().max() <= 2**-22 * exact.abs().max()
    else:
        assert torch.equal(module.weight, exact.float())
    record = getattr(module, "stored_weight", None)
    assert (record and record.form) == form
    if form is None:  # the conversion is said, with bytes
        assert model.converted is not None
        assert model.converted[:3] == (settings["quant_method"], 1, 1)
        assert model.converted.bytes_before < model.converted.bytes_after == 4 * N * M
    else:
        assert model.converted is None
    if record is not None:  # loops compute the same
        x = torch.randn(3, M, generator=torch.Generator().manual_seed(5))
        y = x.double() @ exact.T
        assert (module(x) - y).abs().max() <= 1e-5 * y.abs().max()


@pytest.mark.full
def test_a_form_that_is_asked_for_rounds_what_was_stored(tmp_path: Path) -> None:
    tensors, exact = awq(64)
    folder = folder_with(tmp_path, tensors, CASES["awq"].settings)
    module = regard.load(folder, weights="int8").decoder.get_submodule(QUERIES)
    assert module.stored_weight.form == "int8"
    assert (module.weight - exact).abs().max() <= exact.abs().max() / 127
    wide = regard.load(folder, dtype=torch.float64)  # no loops compute in it
    assert torch.equal(wide.decoder.get_submodule(QUERIES).weight, exact.float().double())
    assert wide.converted is not None


@pytest.mark.parametrize("stored, named", [(1, "gptq"), (0, "gptq_v2"), (1, "GPTQ")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_points_that_contradict_the_settings(
    tmp_path: Path, stored: int, named: str, symmetric: bool
) -> None:
    """A symmetric file has the zero point 8 in every group, 7 where the format stores it less 1."""
    tensors, exact = gptq(4, 64, offset=stored, zero=8 if symmetric else None)
    settings = {"quant_method": "gptq", "bits": 4, "sym": True, "checkpoint_format": named}
    folder = folder_with(tmp_path, tensors, settings)
    if symmetric:
        weight = regard.load(folder).decoder.get_submodule(QUERIES).weight
        assert torch.equal(weight, exact.float())
        settings["checkpoint_format"] = "gptq_v2" if stored else "gptq"
        write_settings(folder, settings)
    with pytest.raises(FileError, match=r"q_proj.*sym is true.*zero point is 8.*are \d+ to \d+"):
        regard.load(folder)
    write_settings(folder, {**settings, "sym": False, "group_size": 32})
    with pytest.raises(FileError, match="of 8 groups of 32 inputs"):
        regard.load(folder)


@pytest.mark.parametrize("method", ["int-quantized", "pack-quantized", "float-quantized", "nvfp4"])
def test_the_library_of_compressed_tensors_reads_the_same(method: str) -> None:
    pytest.importorskip(
        "compressed_tensors", reason="pip install --no-deps compressed-tensors loguru"
    )
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    name = {
        "int-quantized": "int-8",
        "pack-quantized": "packed-4",
        "float-quantized": "float-blocks",
        "nvfp4": "nvfp4",
    }[method]
    make, settings, *_ = CASES[name]
    tensors, exact = make()
    weights = dict(settings["config_groups"]["group_0"]["weights"])
    size = {"int-8": 256, "packed-4": 32, "nvfp4": 16}.get(name)
    if size is not None:
        weights |= {"group_size": size, "symmetric": name != "packed-4"}
    if name == "nvfp4":
        weights["strategy"] = "tensor_group"
    scheme_ = QuantizationScheme(targets=["Linear"], weights=weights)
    library = BaseCompressor.get_value_from_registry(settings["format"])
    theirs = library.decompress(tensors, scheme_)["weight"].double()
    # the library rounds to the dtype of the scales
    assert (theirs - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.full
def test_wrong_readings_differ() -> None:
    """Negative controls: another offset of zero points, another order in a word."""
    tensors, exact = gptq(4, 64)
    assert torch.equal(unpack_gptq(**tensors, bits=4).dequantize(), exact.float())
    assert not torch.equal(
        unpack_gptq(**tensors, bits=4, zero_offset=0).dequantize(), exact.float()
    )
    tensors, exact = awq(64)
    assert torch.equal(unpack_awq(**tensors).dequantize(), exact.float())
    in_order = unpack_words(tensors["qweight"], 4).T
    assert not torch.equal(in_order.float(), (exact / tensors["scales"].T.double()[:, :1]).float())


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    tensors, _ = gptq(4, 128)
    folder = folder_with(tmp_path, tensors, {})
    for settings, match in (
        ({"quant_method": "gptq", "bits": 3}, "bits 3; supported: 4, 8"),
        ({"quant_method": "awq", "bits": 8}, "bits 8; supported: 4"),
        ({**GPTQ, "group_size": 64}, "of 4 groups of 64 inputs"),
        ({**GPTQ, "dynamic": {"-:.*": {}}}, "the dynamic"),
        ({**GPTQ, "adapter": {"name": "lora"}}, "the adapter"),
        ({**GPTQ, "pack_dtype": "int64"}, "the pack_dtype 'int64'"),
        ({**GPTQ, "format": "gptq", "checkpoint_format": "gptq_v2"}, "two values of one setting"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "the zero_point False"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "the layout 'llm-awq'"),
        ({**FP8, "fmt": "e5m2"}, "the fmt 'e5m2'"),
        ({**FP8, "expert_dtype": "fp6"}, "the expert_dtype 'fp6'"),
        (scheme(4, "pack-quantized") | {"moe_sparsity_config": {"a": 1}}, "moe_sparsity_config"),
        (scheme(4, "pack-quantized") | {"sparsity_config": {"format": "2:4"}}, "sparsity_config"),
        (scheme(4, "pack-quantized", strategy="token"), "the strategy 'token'"),
        (scheme(4, "pack-quantized") | {"transform_config": {"u": 1}}, "transform_config"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "the layout 'gemv'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "layout 'marlin'"),
        (scheme(4, "marlin-24"), "the format 'marlin-24'"),
        (scheme(2, "pack-quantized"), "integers of 4 or of 8 bits"),
        ({"quant_method": "hqq"}, "the quant_method 'hqq'"),
    ):
        write_settings(folder, settings)
        with pytest.raises(FileError, match=match):
            regard.load(folder)
    stored = load_file(folder / "model.safetensors")
    write_settings(folder, GPTQ)
    save_file({k: x for k, x in stored.items() if "g_idx" not in k}, folder / "model.safetensors")
    with pytest.raises(FileError, match="g_idx' are missing"):
        regard.load(folder)
    stored[f"{STORED}.qzeros"] = stored[f"{STORED}.qzeros"][:, :-1].contiguous()
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(FileError, match="scales of its outputs"):
        regard.load(folder)


def test_contradictions_of_settings_and_tensors_are_refused(tmp_path: Path) -> None:
    shuffled, _ = gptq(4, 64, act_order=True)
    with pytest.raises(FileError, match="desc_act is false"):
        regard.load(folder_with(tmp_path / "a", shuffled, {**GPTQ, "desc_act": False}))
    nf4, _ = normal_floats(nested=False)
    with pytest.raises(FileError, match="quantization_config says 'fp4'"):
        regard.load(folder_with(tmp_path / "b", nf4, {**NF4, "bnb_4bit_quant_type": "fp4"}))
    nf4["weight.quant_map"] = nf4["weight.quant_map"].flip(0)
    with pytest.raises(FileError, match="quant_map differs"):
        regard.load(folder_with(tmp_path / "c", nf4, NF4))
    packed, _ = compressed(4, 32, packed=True, zeros=False)
    packed["weight_shape"] = torch.tensor([N, M - 1])
    with pytest.raises(FileError, match="weight_shape is"):
        regard.load(folder_with(tmp_path / "d", packed, scheme(4, "pack-quantized")))
    with pytest.raises(FileError, match="no tensor beside it is quantized so"):
        regard.load(folder_with(tmp_path / "f", {"weight": torch.ones(N, M)}, GPTQ))
    rows, _ = bytes_of_rows()
    rows["weight_format"] = torch.tensor(2, dtype=torch.uint8)
    with pytest.raises(FileError, match="weight_format is 2"):
        regard.load(folder_with(tmp_path / "e", rows, CASES["bitsandbytes-8"].settings))


OF_METHOD = {
    "gptq": "gptq-4",
    "awq": "awq",
    "compressed-tensors": "packed-4",
    "fp8": "fp8-blocks",
    "fbgemm_fp8": "fp8-rows",
    "bitsandbytes": "nf4",
    "mxfp4": None,
}
"""`quant_method` -> a case of it; test_quantized_folders.py has mxfp4."""


def test_every_method_is_in_both_tables() -> None:
    assert READERS.keys() == OF_METHOD.keys() == READ.keys() - {GROUP, WEIGHTS}


UNREAD_KEYS = dict.fromkeys((key for keys in UNREAD.values() for key in keys), "x")


@pytest.mark.parametrize("method", READ)
def test_a_key_that_nobody_knows_is_refused(method: str, tmp_path: Path) -> None:
    check_keys(tmp_path, method, UNREAD_KEYS)
    for key in ("zzz", f"{next(iter(READ[method] or UNREAD_KEYS))}_"):
        with pytest.raises(FileError, match=f"unknown key '{key}'"):
            check_keys(tmp_path, method, {**UNREAD_KEYS, key: None})


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("method", [x for x, name in OF_METHOD.items() if name])
def test_keys_that_are_not_read_change_nothing(method: str, tmp_path: Path) -> None:
    make, settings, *_ = CASES[str(OF_METHOD[method])]
    tensors, exact = make()
    folder = folder_with(tmp_path, tensors, {**UNREAD_KEYS, **settings})
    found = regard.load(folder).decoder.get_submodule(QUERIES).weight
    assert (found - exact).abs().max() <= 2**-22 * exact.abs().max()
    write_settings(folder, {**settings, "a_key_that_nobody_knows": 1})
    with pytest.raises(FileError, match="unknown key 'a_key_that_nobody_knows'"):
        regard.load(folder)


@pytest.mark.parametrize("place", [GROUP, WEIGHTS])
def test_keys_inside_groups_are_checked(place: str, tmp_path: Path) -> None:
    settings = scheme(4, "pack-quantized")
    assert compressed_weights(tmp_path, settings)[0]["num_bits"] == 4
    group = settings["config_groups"]["group_0"]
    (group if place == GROUP else group["weights"])["zzz"] = 1
    with pytest.raises(FileError, match="unknown key 'zzz'"):
        compressed_weights(tmp_path, settings)


@pytest.mark.parametrize(
    "method", ["quanto", "torchao", "hqq", "eetq", "aqlm", "auto-round", "modelopt", GROUP, 3]
)
def test_other_methods_are_refused_by_name(method: object, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=f"quant_method '?{method}.*in a GGUF file"):
        check_method(tmp_path, method)


def test_a_key_that_is_nearly_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"unknown key 'desc_akt'.*'desc_act'"):
        check_keys(tmp_path, "gptq", {"desc_akt": True})


@pytest.mark.full(keep=3)
@pytest.mark.parametrize(
    "name, change, match",
    [
        ("gptq-8", {"bits": 4}, "a packed matrix and the scales"),
        ("gptq-4", {"bits": 8}, "a packed matrix and the scales"),
        ("packed-8", scheme(4, "pack-quantized", group_size=128), "2 groups for 512 inputs"),
        ("packed-4", scheme(4, "pack-quantized", group_size=64), "8 groups for 256 inputs"),
        ("packed-4", scheme(4, "pack-quantized", symmetric=True), "symmetric is true"),
        ("packed-8", scheme(8, "pack-quantized", symmetric=False), "contradicts config_groups"),
        ("packed-8", scheme(8, "pack-quantized", actorder="group"), "contradicts config_groups"),
        ("int-8", scheme(8, "int-quantized", "float"), "int8, int of 8 bits.*float of 8 bits"),
        ("float-blocks", scheme(8, "float-quantized"), "float of 8 bits.*int of 8 bits"),
        ("nvfp4", scheme(8, "naive-quantized", "float"), "float of 4 bits.*float of 8 bits"),
        ("nf4", {"load_in_8bit": True}, "load_in_8bit True, .* 1 matrices of 4 bits"),
        ("bitsandbytes-8", {"load_in_8bit": False, "load_in_4bit": True}, "and 1 of 8"),
        ("nf4", {"bnb_4bit_use_double_quant": True}, "bnb_4bit_use_double_quant True"),
    ],
)
def test_settings_that_contradict_the_tensors(
    name: str, change: dict[str, Any], match: str, tmp_path: Path
) -> None:
    make, settings, *_ = CASES[name]
    tensors, _ = make()
    tensors.pop("weight_shape", None)
    with pytest.raises(FileError, match=match):
        regard.load(folder_with(tmp_path, tensors, {**settings, **change}))


def test_scales_of_activations_keys_and_values_are_left(tmp_path: Path) -> None:
    """What a file stores for rounding that is not done belongs to a module with a matrix."""
    make, settings, *_ = CASES["packed-4"]
    tensors, exact = make()
    folder = folder_with(tmp_path, tensors, {**settings, "kv_cache_scheme": {"num_bits": 8}})
    stored = load_file(folder / "model.safetensors")
    about = {f"{STORED}.output_scale": torch.ones(1)}
    about[f"{STORED.rpartition('.')[0]}.k_scale"] = torch.ones(1)
    save_file(stored | about, folder / "model.safetensors", metadata={"format": "pt"})
    weight = regard.load(folder).decoder.get_submodule(QUERIES).weight
    assert torch.equal(weight, exact.float())
    far = {"model.layers.1.self_attn.k_scale": torch.ones(1)}
    save_file(stored | far, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FileError, match=r"layers\.1\.self_attn\.k_scale"):
        regard.load(folder)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match="bits is 3"):
        unpack_words(torch.zeros(1, 1, dtype=torch.int32), 3)
    with pytest.raises(ArgumentTypeError, match="words are"):
        unpack_words(torch.zeros(1, 1), 4)
    with pytest.raises(ArgumentError, match="groups of equal size"):
        IntegerCodes(8, torch.zeros(2, 9).int(), torch.ones(2, 2))
    tensors, _ = gptq(4, 128)
    with pytest.raises(ArgumentError, match="groups 0 to 7"):
        unpack_gptq(
            **{
                **tensors,
                "g_idx": torch.full((M,), 7).clone().index_fill_(0, torch.tensor([0]), 0),
            },
            bits=4,
        )
