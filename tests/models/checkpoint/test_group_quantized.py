"""Checkpoints of GPTQ, AWQ and compressed-tensors against the formulas of those formats, number by
number in Python integers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import regard
from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.models.checkpoint.group_quantized import (
    dequantize_awq,
    dequantize_compressed,
    dequantize_gptq,
    unpack_words,
)

Tensors = dict[str, Tensor]
STORED = "model.layers.0.self_attn.q_proj"
QUERIES = "layers.0.attention.project.q.linear.weight"
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
    exact = torch.empty(N, M, dtype=torch.float64)
    for n in range(N):
        for m in range(M):
            g = int(g_idx[m])
            exact[n, m] = float(scales[n, g]) * (int(codes[n, m]) - int(zeros[n, g]))
    tensors = {
        "qweight": int32([words(row, bits) for row in codes.tolist()]).T.contiguous(),
        "qzeros": int32([words([(z - offset) % top for z in c], bits) for c in zeros.T.tolist()]),
        "scales": scales.T.contiguous(),
        "g_idx": g_idx.int(),
    }
    return tensors, exact


def awq(group: int) -> tuple[Tensors, Tensor]:
    codes, zeros = drawn(16, N, M, seed=1), drawn(16, N, M // group, seed=2)
    scales = (drawn(1000, N, M // group, seed=3) + 1).half() / 4096
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    exact = torch.empty(N, M, dtype=torch.float64)
    for n in range(N):
        for m in range(M):
            g = m // group
            exact[n, m] = float(scales[n, g]) * (int(codes[n, m]) - int(zeros[n, g]))
    tensors = {
        "qweight": int32([words(column, 4, order) for column in codes.T.tolist()]),
        "qzeros": int32([words(column, 4, order) for column in zeros.T.tolist()]),
        "scales": scales.T.contiguous(),
    }
    return tensors, exact


def compressed(bits: int, group: int, *, packed: bool, zeros: bool) -> tuple[Tensors, Tensor]:
    half = 2 ** (bits - 1)
    codes = drawn(2 * half, N, M, seed=1) - half
    points = drawn(2 * half, N, M // group, seed=2) - half if zeros else torch.zeros(N, M // group)
    scales = (drawn(1000, N, M // group, seed=3) + 1).bfloat16() / 4096
    exact = torch.empty(N, M, dtype=torch.float64)
    for n in range(N):
        for m in range(M):
            g = m // group
            exact[n, m] = float(scales[n, g]) * (int(codes[n, m]) - int(points[n, g]))
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
    return tensors, exact


def scheme(bits: int, layout: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group"}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


CASES: dict[str, tuple[Callable[[], tuple[Tensors, Tensor]], dict[str, Any]]] = {
    "gptq-4": (lambda: gptq(4, 128), {"quant_method": "gptq", "bits": 4, "group_size": 128}),
    "gptq-8": (lambda: gptq(8, 256), {"quant_method": "gptq", "bits": 8}),
    "gptq-act-order": (lambda: gptq(4, 64, act_order=True), {"quant_method": "gptq", "bits": 4}),
    "gptq-v2": (
        lambda: gptq(4, 64, offset=0),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (lambda: awq(64), {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "packed-4": (
        lambda: compressed(4, 32, packed=True, zeros=True),
        scheme(4, "pack-quantized"),
    ),
    "packed-8": (
        lambda: compressed(8, 128, packed=True, zeros=False),
        scheme(8, "pack-quantized"),
    ),
    "int-8": (lambda: compressed(8, 256, packed=False, zeros=True), scheme(8, "int-quantized")),
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
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.full(keep=["awq", "packed", "act"])
@pytest.mark.parametrize("name", CASES)
def test_a_folder_loads_by_its_formula(name: str, tmp_path: Path) -> None:
    make, settings = CASES[name]
    tensors, exact = make()
    model = regard.load(folder_with(tmp_path, tensors, settings))
    found = model.decoder.get_parameter(QUERIES)
    assert torch.equal(found, exact.float())
    stored = regard.load(tmp_path / "model", weights="int8")
    record = stored.decoder.layers[0].attention.project.q.linear.stored_weight
    assert (record.dequantize() - found).abs().max() <= exact.abs().max() / 127


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
        weight = regard.load(folder).decoder.get_parameter(QUERIES)
        assert torch.equal(weight, exact.float())
        settings["checkpoint_format"] = "gptq_v2" if stored else "gptq"
        write_settings(folder, settings)
    with pytest.raises(FileError, match=r"q_proj.*sym is true.*zero point is 8.*are \d+ to \d+"):
        regard.load(folder)
    write_settings(folder, {**settings, "sym": False, "group_size": 32})
    with pytest.raises(FileError, match="of 8 groups of 32 inputs"):
        regard.load(folder)


@pytest.mark.full
def test_wrong_readings_differ() -> None:
    """Negative controls: another offset of zero points, another order in a word."""
    tensors, exact = gptq(4, 64)
    assert torch.equal(dequantize_gptq(**tensors, bits=4), exact.float())
    assert not torch.equal(dequantize_gptq(**tensors, bits=4, zero_offset=0), exact.float())
    tensors, exact = awq(64)
    assert torch.equal(dequantize_awq(**tensors), exact.float())
    in_order = unpack_words(tensors["qweight"], 4).T
    assert not torch.equal(in_order.float(), (exact / tensors["scales"].T.double()[:, :1]).float())


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    tensors, _ = gptq(4, 128)
    folder = folder_with(tmp_path, tensors, {})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for settings, match in (
        ({"quant_method": "gptq", "bits": 3}, r"bits 3; of gptq supported are \(4, 8\)"),
        ({"quant_method": "awq", "bits": 8}, r"of awq supported are \(4,\)"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "the layout 'gemv'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "layout 'marlin'"),
        (scheme(4, "marlin-24"), "the format 'marlin-24'"),
        (scheme(2, "pack-quantized"), "int of 4 or 8 bits"),
        ({"quant_method": "hqq"}, "the quant_method 'hqq'"),
    ):
        path.write_text(json.dumps({**config, "quantization_config": settings}))
        with pytest.raises(FileError, match=match):
            regard.load(folder)
    dynamic = scheme(8, "int-quantized")
    dynamic["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    path.write_text(json.dumps({**config, "quantization_config": dynamic}))
    with pytest.raises(FileError, match="quantized activations"):
        regard.load(folder)
    stored = load_file(folder / "model.safetensors")
    path.write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    save_file({k: x for k, x in stored.items() if "g_idx" not in k}, folder / "model.safetensors")
    with pytest.raises(FileError, match="g_idx' are missing"):
        regard.load(folder)
    stored[f"{STORED}.qzeros"] = stored[f"{STORED}.qzeros"][:, :-1].contiguous()
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(FileError, match="scales of its outputs"):
        regard.load(folder)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match="bits is 3"):
        unpack_words(torch.zeros(1, 1, dtype=torch.int32), 3)
    with pytest.raises(ArgumentTypeError, match="words are"):
        unpack_words(torch.zeros(1, 1), 4)
    with pytest.raises(ArgumentError, match="groups of equal size"):
        dequantize_compressed(torch.zeros(2, 9).int(), torch.ones(2, 2))
    tensors, _ = gptq(4, 128)
    with pytest.raises(ArgumentError, match="groups 0 to 7"):
        dequantize_gptq(
            **{
                **tensors,
                "g_idx": torch.full((M,), 7).clone().index_fill_(0, torch.tensor([0]), 0),
            },
            bits=4,
        )
