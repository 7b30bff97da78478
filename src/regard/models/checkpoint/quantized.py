"""Quantized checkpoints (MXFP4, block FP8, GPTQ, AWQ and compressed-tensors), whose matrices are
dequantized when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Float8e4m3fn, Float32, UInt8
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.files.safetensors_files import DEFAULT_BUFFERING, ReadBuffering, StoredTensor
from regard.models.checkpoint.group_quantized import (
    dequantize_awq,
    dequantize_compressed,
    dequantize_gptq,
    unpack_words,
)
from regard.models.checkpoint.tensors import CheckpointTensors
from regard.untrusted_text import error_text, short_repr

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the three low bits of an MXFP4 number; the fourth bit is the sign."""

CHUNK_BYTES = 2**16
"""The number of bytes that are unpacked at a time, which bounds the temporary memory."""
_LARGEST_BLOCK = 1 << 14  # published files have 128


def unpack_mxfp4(
    blocks: UInt8[Tensor, "*b G 16"],
    scales: UInt8[Tensor, "*b G"],
    dtype: torch.dtype = torch.float32,
    *,
    piece: int = CHUNK_BYTES,
) -> Float[Tensor, "*b n"]:
    """Dequantize blocks of 32 four-bit numbers with a shared power of two, as in `openai/gpt-oss`.

    w[g 32 + 2 i + h] = 2^(scales[g] - 127) * e2m1(nibble h of blocks[g, i]),  the low nibble first

    Every value is exact in bfloat16; a scale of 255 is NaN. Source: OCP Microscaling Formats (MX)
    Specification 1.0, 2023, sections 5.3.3, 5.4.1 and 6.3.
    """
    _check_bytes("blocks", blocks)
    _check_bytes("scales", scales)
    if blocks.ndim < 2 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise ArgumentError(
            f"blocks are {tuple(blocks.shape)} and scales {tuple(scales.shape)}; they must be "
            "[..., G, 16] and [..., G]"
        )
    if dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise ArgumentTypeError(
            f"dtype is {dtype}; it must be float32, float64 or bfloat16: others cannot hold "
            "scales from 2^-127 to 2^127"
        )
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=blocks.device)
    # the two float32 values of each byte as one int64, which is much faster to look up
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1).view(torch.int64)
    exponents = torch.arange(256, device=blocks.device)
    powers = (exponents.double() - 127).exp2().masked_fill(exponents == 255, torch.nan).float()
    out = torch.empty(scales.numel(), 32, dtype=dtype, device=blocks.device)
    flat, factors, step = blocks.flatten(), powers[scales.flatten().int(), None], piece // 16
    for i in range(0, scales.numel(), step):
        numbers = pairs[:, 0].index_select(0, flat[16 * i : 16 * (i + step)].int())
        out[i : i + step] = numbers.view(torch.float32).view(-1, 32) * factors[i : i + step]
    return out.reshape(*blocks.shape[:-2], 32 * blocks.shape[-2])


def unpack_fp8(
    weight: Float8e4m3fn[Tensor, "N K"],
    scale_inv: Float32[Tensor, "n k"],
    dtype: torch.dtype = torch.float32,
    *,
    block: int = 128,
) -> Float[Tensor, "N K"]:
    """Dequantize a matrix of 8-bit floats with a factor for each square block, as in DeepSeek-V3.

    w[i, j] = float(weight[i, j]) * scale_inv[i // block, j // block] in float32, rounded once.
    Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.3.2.
    """
    if block < 1:
        raise ArgumentError(f"block is {block}; it must be at least 1")
    if weight.dtype != torch.float8_e4m3fn or scale_inv.dtype != torch.float32:
        raise ArgumentTypeError(
            f"weight is {weight.dtype} and scale_inv {scale_inv.dtype}; they must be "
            "float8_e4m3fn and float32"
        )
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ArgumentTypeError(
            f"dtype is {dtype}; it must be float16, bfloat16, float32 or float64"
        )
    wanted = tuple(-(-size // block) for size in weight.shape)
    if tuple(scale_inv.shape) != wanted:
        raise ArgumentError(
            f"scale_inv is {tuple(scale_inv.shape)}; a weight of {tuple(weight.shape)} in blocks "
            f"of {block} x {block} has {wanted}"
        )
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for i, row in enumerate(scale_inv):
        rows = slice(i * block, (i + 1) * block)
        out[rows] = weight[rows].float() * row.repeat_interleave(block)[: weight.shape[1]]
    return out


def _check_bytes(name: str, x: Tensor) -> None:
    if x.dtype != torch.uint8:
        raise ArgumentTypeError(f"{name} are {x.dtype}; they must be uint8")


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix stored as small numbers and other tensors (scales, zero points, groups), its plain
    header entry, and `unpack`: (values, *others) -> matrix.
    """

    values: str
    others: tuple[str, ...]
    plain: StoredTensor
    unpack: Callable[..., Tensor]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class DequantizedTensors(CheckpointTensors):
    """Checkpoint tensors in which each pair of values and scales appears as the dequantized matrix;
    scales, at most a sixteenth of the size, are read first.
    """

    packed: CheckpointTensors
    pairs: Mapping[str, QuantizedMatrix]

    def read(
        self, names: Iterable[str] | None = None, buffering: ReadBuffering = DEFAULT_BUFFERING
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values; memory also holds the scales and one matrix."""
        chosen = list(self.tensors if names is None else names)
        pairs = {self.pairs[n].values: self.pairs[n] for n in chosen if n in self.pairs}
        small = {name for pair in pairs.values() for name in pair.others}
        others = dict(self.packed.read(small, buffering))
        whole = [n for n in chosen if n not in self.pairs]
        for name, tensor in self.packed.read([*whole, *pairs], buffering):
            if name in pairs:
                pair = pairs[name]
                try:
                    plain = pair.unpack(tensor, *(others.pop(n) for n in pair.others))
                except ArgumentError as error:
                    place = f"{pair.plain.file}: {short_repr(name)}"
                    raise FileError(f"{place}: {error_text(error)}") from error
                yield pair.plain.name, plain
            else:
                yield name, tensor


def dequantized(store: CheckpointTensors, quantization_config: Any) -> CheckpointTensors:
    """Return a folder's tensors with quantized pairs dequantized: "mxfp4" (`X_blocks` and
    `X_scales`, [..., in, out]), "fp8" (`X.weight` and `X.weight_scale_inv`), and the forms of
    `group_quantized`.
    """
    if quantization_config is None:
        return store
    method = (
        quantization_config.get("quant_method")
        if isinstance(quantization_config, Mapping)
        else None
    )
    if method == "mxfp4":
        pairs = _mxfp4(store)
    elif method == "fp8":
        pairs = _fp8(store, _block(store.folder, quantization_config))
    elif method in ("gptq", "awq", "compressed-tensors"):
        pairs = group_quantized_matrices(store, quantization_config)
    else:
        raise _config_error(
            store.folder,
            f"the quant_method {short_repr(method)}; supported are 'mxfp4', 'fp8', 'gptq', 'awq' "
            "and 'compressed-tensors': use a checkpoint that is not quantized",
        )
    hidden = {name for pair in pairs for name in (pair.values, *pair.others, *pair.unread)}
    entries = {name: x for name, x in store.tensors.items() if name not in hidden}
    for pair in pairs:
        if pair.plain.name in entries:
            raise FileError(
                f"{pair.plain.file}: {short_repr(pair.plain.name)} is stored both "
                "quantized and not quantized; keep one"
            )
        entries[pair.plain.name] = pair.plain
    total = sum(x.bytes for x in entries.values())
    by_name = {pair.plain.name: pair for pair in pairs}
    return DequantizedTensors(
        store.folder, MappingProxyType(entries), total, store.marks, store, by_name
    )


def _mxfp4(store: CheckpointTensors) -> list[QuantizedMatrix]:
    pairs = []
    for name, x in store.tensors.items():
        plain = name.removesuffix("_blocks")
        if plain == name:
            continue
        scales = _scales(store, x, plain + "_scales")
        fits = len(x.shape) > 2 and x.shape[-1] == 16 and scales.shape == x.shape[:-1]
        if not fits or {x.dtype, scales.dtype} != {torch.uint8}:
            raise _mismatch_error(x, scales, "uint8 [..., G, 16] and uint8 [..., G]")
        shape = (*x.shape[:-3], 32 * x.shape[-2], x.shape[-3])
        pairs.append(
            QuantizedMatrix(
                name,
                (scales.name,),
                _dequantized_entry(x, plain, shape, torch.bfloat16),
                _transposed,
            )
        )
    return pairs


def _transposed(blocks: Tensor, scales: Tensor) -> Tensor:
    # bfloat16 holds every value exactly
    return unpack_mxfp4(blocks, scales, torch.bfloat16).mT


def _fp8(store: CheckpointTensors, block: int) -> list[QuantizedMatrix]:
    pairs = []
    for name, x in store.tensors.items():
        if x.dtype != torch.float8_e4m3fn:
            continue
        scales = _scales(store, x, name + "_scale_inv")
        wanted = tuple(-(-size // block) for size in x.shape)
        if len(x.shape) != 2 or scales.shape != wanted or scales.dtype != torch.float32:
            raise _mismatch_error(x, scales, f"a matrix and float32 {wanted}")
        plain = _dequantized_entry(x, name, x.shape, torch.float32)
        pairs.append(QuantizedMatrix(name, (scales.name,), plain, partial(unpack_fp8, block=block)))
    return pairs


def group_quantized_matrices(
    store: CheckpointTensors, quantization_config: Mapping[str, Any]
) -> list[QuantizedMatrix]:
    """Return the matrices of a checkpoint of GPTQ, AWQ or compressed-tensors."""
    method = quantization_config["quant_method"]
    if method == "compressed-tensors":
        return _compressed(store, *_compressed_settings(store.folder, quantization_config))
    bits = quantization_config.get("bits", quantization_config.get("w_bit"))
    allowed = (4, 8) if method == "gptq" else (4,)
    if bits not in allowed or type(bits) is not int:
        raise _config_error(
            store.folder, f"bits {short_repr(bits)}; of {method} supported are {allowed}"
        )
    layout = quantization_config.get(
        "checkpoint_format" if method == "gptq" else "version",
        "gptq" if method == "gptq" else "gemm",
    )
    layouts = ("gptq", "gptq_v2") if method == "gptq" else ("gemm",)
    layout, symmetric = str(layout).lower(), quantization_config.get("sym")
    if layout not in layouts:
        raise _config_error(
            store.folder,
            f"the layout {short_repr(layout)}; of {method} supported are {', '.join(layouts)}",
        )
    if symmetric not in (True, False, None):
        raise _config_error(store.folder, f"sym {short_repr(symmetric)}; it must be true or false")
    group_size = quantization_config.get("group_size", quantization_config.get("q_group_size"))
    matrices = []
    for name, x in store.tensors.items():
        base = name.removesuffix(".qweight")
        if base == name:
            continue
        zeros, scales = (_scales(store, x, f"{base}.{part}") for part in ("qzeros", "scales"))
        names: tuple[str, ...] = (zeros.name, scales.name)
        unpack: Callable[..., Tensor]
        per_word, outputs = 32 // bits, scales.shape[-1] if scales.shape else 0
        if x.dtype != torch.int32 or zeros.dtype != torch.int32 or len(x.shape) != 2:
            raise _mismatch_error(x, zeros, "matrices of int32")
        if method == "awq":
            inputs, unpack = x.shape[0], dequantize_awq
            fits = x.shape[1] * per_word == outputs
        else:
            groups = _scales(store, x, f"{base}.g_idx")
            inputs, names = x.shape[0] * per_word, (*names, groups.name)
            unpack = partial(
                dequantize_gptq,
                bits=bits,
                zero_offset=int(layout == "gptq"),
                symmetric=bool(symmetric),
            )
            fits = x.shape[1] == outputs and groups.shape == (inputs,)
        if not fits or zeros.shape != (scales.shape[0], outputs // per_word):
            raise _mismatch_error(x, scales, "a packed matrix and the scales of its outputs")
        groups_told = -(-inputs // group_size) if _is_count(group_size) else scales.shape[0]
        if groups_told != scales.shape[0]:
            raise _mismatch_error(x, scales, f"of {groups_told} groups of {group_size} inputs")
        plain = _dequantized_entry(x, f"{base}.weight", (outputs, inputs), torch.float32)
        matrices.append(QuantizedMatrix(name, names, plain, unpack))
    return matrices


def _is_count(value: object) -> bool:
    """Return whether a setting is a whole number above 0; -1 is one group for all inputs."""
    return type(value) is int and value > 0


def _compressed_settings(folder: Path, settings: Mapping[str, Any]) -> tuple[str, int]:
    """Return the format and the bits of compressed-tensors."""
    layout, groups = settings.get("format"), settings.get("config_groups")
    if layout not in ("pack-quantized", "int-quantized"):
        raise _config_error(
            folder,
            f"the format {short_repr(layout)}; of compressed-tensors supported are "
            "'pack-quantized' and 'int-quantized'",
        )
    values = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [x.get("weights") if isinstance(x, Mapping) else None for x in values]
    bits = {x.get("num_bits") if isinstance(x, Mapping) else None for x in weights}
    kinds = {x.get("type") if isinstance(x, Mapping) else None for x in weights}
    if len(bits) != 1 or not bits <= {4, 8} or kinds != {"int"}:
        raise _config_error(folder, f"config_groups {short_repr(groups)}; int of 4 or 8 bits are")
    if any(x.get("input_activations") or x.get("output_activations") for x in values):
        raise _config_error(folder, "quantized activations; supported are quantized weights only")
    return layout, 4 if bits == {4} else 8


def _compressed(store: CheckpointTensors, layout: str, bits: int) -> list[QuantizedMatrix]:
    """Return the matrices of a checkpoint of compressed-tensors."""
    packed = layout == "pack-quantized"
    end, matrices = (".weight_packed" if packed else ".weight"), []
    for name, x in store.tensors.items():
        base = name.removesuffix(end)
        if base == name or x.dtype != (torch.int32 if packed else torch.int8):
            continue
        scales = _scales(store, x, f"{base}.weight_scale")
        if len(x.shape) != 2 or len(scales.shape) != 2 or scales.shape[0] != x.shape[0]:
            raise _mismatch_error(x, scales, "a matrix and scales [outputs, groups]")
        if f"{base}.weight_g_idx" in store.tensors:
            raise FileError(
                f"{x.file}: {short_repr(base)} has groups of inputs that are not neighbours "
                "(weight_g_idx), which is not supported: use a checkpoint without it"
            )
        inputs = x.shape[1] * (32 // bits if packed else 1)
        zeros = f"{base}.weight_zero_point"
        others = (scales.name, *([zeros] if zeros in store.tensors else []))
        unread = tuple(n for n in (f"{base}.weight_shape",) if n in store.tensors)
        unpack = partial(_unpack_compressed, bits=bits if packed else None)
        plain = _dequantized_entry(x, f"{base}.weight", (x.shape[0], inputs), torch.float32)
        matrices.append(QuantizedMatrix(name, others, plain, unpack, unread))
    return matrices


def _unpack_compressed(
    values: Tensor, scales: Tensor, zeros: Tensor | None = None, *, bits: int | None
) -> Tensor:
    """Dequantize a matrix of compressed-tensors; bits is None where no numbers are packed."""
    if bits is None:
        return dequantize_compressed(values.int(), scales, zeros if zeros is None else zeros.int())
    middle = 2 ** (bits - 1)
    codes = unpack_words(values, bits) - middle
    if zeros is not None:  # packed along the outputs
        zeros = unpack_words(zeros.T.contiguous(), bits).T[: len(codes)] - middle
    return dequantize_compressed(codes, scales, zeros)


def _block(folder: Path, quantization_config: Mapping[str, object]) -> int:
    """Return the number of rows and columns of a block."""
    fmt = quantization_config.get("fmt", "e4m3")
    sides = quantization_config.get("weight_block_size")
    if fmt != "e4m3":
        raise _config_error(folder, f"the fmt {short_repr(fmt)}; supported is 'e4m3'")
    side = sides[0] if isinstance(sides, list) and len(sides) == 2 else None
    if type(side) is not int or not 1 <= side <= _LARGEST_BLOCK or sides != [side, side]:
        raise _config_error(
            folder, f"the weight_block_size {short_repr(sides)}; supported are square blocks"
        )
    return side


def _scales(store: CheckpointTensors, values: StoredTensor, name: str) -> StoredTensor:
    if name not in store.tensors:
        raise FileError(
            f"{values.file}: {short_repr(values.name)} is quantized, and its scales "
            f"{short_repr(name)} are missing; is a shard missing?"
        )
    return store.tensors[name]


def _dequantized_entry(
    values: StoredTensor, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> StoredTensor:
    return replace(
        values, name=name, shape=shape, dtype=dtype, bytes=math.prod(shape) * dtype.itemsize
    )


def _mismatch_error(values: StoredTensor, scales: StoredTensor, wanted: str) -> FileError:
    pair = [f"{short_repr(x.name)} is {x.dtype} {x.shape}" for x in (values, scales)]
    return FileError(f"{values.file}: {' and '.join(pair)}; they must be {wanted}")


def _config_error(folder: Path, problem: str) -> FileError:
    return FileError(f"{folder / 'config.json'}: quantization_config has {problem}")
