"""The block formats of GGUF files as numbers, by the library `gguf`, and as stored weights with
codes of 8 or 4 bits, where these hold the same numbers.

Every function takes the bytes of rows, uint8 [N, bytes of a row]. In these formats, 32 neighbouring
numbers or more share a factor d, or a factor and a minimum (s and m: those of a group in a block):

    Q8_0, Q5_0, IQ4_NL, MXFP4, TQ1_0, TQ2_0            w = d q
    IQ4_XS, IQ3_S, IQ3_XXS, IQ2_XXS, IQ1_S             w = d s q
    Q4_0   w = d (q - 8)
    Q4_1   w = d q + b
    Q4_K   w = d s q - dmin m

With d = 1 in its place, the library gives s q, which are small multiples of a power of two. In the
other formats 16 numbers share a factor, or the codes have 5 bits and a minimum. Everything is
numpy: thousands of small parallel operations of torch would wait for busy processors.

Source: the reference quantization of ggml, `dequantize_row_*`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8

from regard.ops.stored_weights import INT4_BLOCK, Int4Weight, Int8Weight, StoredWeight

Raw = UInt8[np.ndarray, "N bytes"]
_GROUP = 32
_PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
}


class _Factor(NamedTuple):
    """Where the factor d of a block is, the bytes of 1, and the unit of the numbers with d = 1."""

    place: int
    one: bytes = np.float16(1).tobytes()
    unit: float = 1.0


_FACTORS = {
    "Q5_0": _Factor(0),
    "IQ4_NL": _Factor(0),
    "IQ4_XS": _Factor(0),
    "IQ3_S": _Factor(0),
    "IQ3_XXS": _Factor(0, unit=1 / 4),
    "IQ2_XXS": _Factor(0, unit=1 / 8),
    "IQ1_S": _Factor(0, unit=1 / 8),
    "TQ1_0": _Factor(52),
    "TQ2_0": _Factor(64),
    "MXFP4": _Factor(0, one=b"\x80"),
}
"""Format -> its factor, where 8-bit codes hold the same numbers."""

RECORD_FORMS = dict.fromkeys(("Q8_0", *_FACTORS), "int8") | {
    "Q4_0": "int4",
    "Q4_1": "int4",
    "Q4_K": "int4",
}
"""Block format -> form of the stored weight with the same values."""


def plain_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of a format without blocks, or None."""
    return _PLAIN.get(name)


def dequantize_gguf(name: str, raw: Raw) -> Float32[np.ndarray, "N M"]:
    """Return the numbers of rows in the format `name`."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # a hostile file may have any factors
        values: Float32[np.ndarray, "N M"] = dequantize(raw, GGMLQuantizationType[name])
    return values


def gguf_record(name: str, raw: Raw, dtype: torch.dtype) -> StoredWeight:
    """Return rows in a format of `RECORD_FORMS` as a stored weight, exactly but for Q4_1 and Q4_K,
    whose zero points -b / d and dmin m / (d s) are rounded to fp32; where the scale is 0, codes are
    0, the zero point 1 and the scale the offset.
    """
    if name == "Q8_0":
        x = _blocks(raw, 34)
        codes = x[..., 2:].reshape(len(raw), -1).view(np.int8)
        return _int8(codes, _half(x[..., :2]), dtype)
    if name in _FACTORS:
        return _factored(name, raw, dtype)
    if name == "Q4_0":
        x = _blocks(raw, 18)
        scales = _half(x[..., :2])
        return _int4(x[..., 2:], scales, np.full_like(scales, 8), dtype)
    if name == "Q4_1":
        x = _blocks(raw, 20)
        factors, offsets = _half(x[..., :2]).astype("f4"), -_half(x[..., 2:4]).astype("f4")
        pairs = x[..., 4:]
    else:
        x = _blocks(raw, 144)
        factors, offsets = _group_factors(x)
        pairs = _neighbours(x[..., 16:])
    constant = factors == 0
    with np.errstate(all="ignore"):
        zeros = np.where(constant, np.float32(1), offsets / np.where(constant, 1, factors))
    pairs = np.where(constant[..., None], np.uint8(0), pairs.reshape(len(raw), -1, 16))
    return _int4(pairs, np.where(constant, offsets, factors), zeros, dtype)


def _blocks(raw: Raw, bytes_: int) -> UInt8[np.ndarray, "N blocks bytes"]:
    """Return the bytes of rows as [N, blocks, bytes of a block]."""
    return raw.reshape(len(raw), -1, bytes_)


def _half(raw: UInt8[np.ndarray, "N blocks 2"]) -> Float[np.ndarray, "N blocks"]:
    """Return pairs of bytes as fp16."""
    return np.ascontiguousarray(raw).view(np.float16)[..., 0]


def _int8(codes: np.ndarray, scales: np.ndarray, dtype: torch.dtype) -> Int8Weight:
    return Int8Weight(torch.from_numpy(codes), torch.from_numpy(scales), codes.shape[1], dtype)


def _int4(
    pairs: UInt8[np.ndarray, "N blocks 16"],
    scales: Float[np.ndarray, "N blocks"],
    zeros: Float[np.ndarray, "N blocks"],
    dtype: torch.dtype,
) -> Int4Weight:
    """Return blocks of 32 numbers, of which byte i has numbers i and 16 + i, in the order of
    `Int4Weight`: byte b of word w is byte w of block b, of four blocks.
    """
    padding = ((0, 0), (0, -pairs.shape[1] % (INT4_BLOCK // _GROUP)))
    blocks = np.pad(pairs, (*padding, (0, 0))).reshape(len(pairs), -1, 4, 16)
    factors = np.stack([np.pad(x, padding) for x in (scales, zeros)], 1)
    packed = np.ascontiguousarray(blocks.swapaxes(2, 3)).reshape(len(pairs), -1)
    return Int4Weight(
        torch.from_numpy(packed), torch.from_numpy(factors), _GROUP * pairs.shape[1], dtype
    )


def _factored(name: str, raw: Raw, dtype: torch.dtype) -> Int8Weight:
    """Return rows of blocks with one factor d as codes s q / g and scales d g, where g is the
    greatest common divisor of s q in a group where codes were too large otherwise.
    """
    from regard.files.gguf_files import block_formats

    factor = _FACTORS[name]
    block = next(x for x in block_formats().values() if x.name == name)
    place = slice(factor.place, factor.place + len(factor.one))
    unscaled = _blocks(raw, block.bytes).copy()
    d = unscaled[..., place].copy()
    unscaled[..., place] = np.frombuffer(factor.one, np.uint8)
    numbers = dequantize_gguf(name, unscaled.reshape(raw.shape)) / np.float32(factor.unit)
    groups = numbers.astype(np.int16).reshape(len(raw), -1, _GROUP)
    if name == "MXFP4":  # 2^(e - 128)
        with np.errstate(all="ignore"):
            scales = np.exp2(d[..., 0].astype(np.float64) - 128).astype(np.float32)
    else:
        scales = _half(d)
    scales = np.repeat(scales, block.elements // _GROUP, 1)
    if np.abs(groups).max(initial=0) > 127 or factor.unit != 1:
        divisors = np.maximum(np.gcd.reduce(groups, axis=-1), 1)
        groups = groups // divisors[..., None]
        scales = scales.astype(np.float32) * (divisors * np.float32(factor.unit))
    return _int8(groups.astype(np.int8).reshape(len(raw), -1), scales, dtype)


def _group_factors(
    x: UInt8[np.ndarray, "N blocks 144"],
) -> tuple[Float32[np.ndarray, "N groups"], Float32[np.ndarray, "N groups"]]:
    """Return the products d s and dmin m of Q4_K for the 8 groups of each block.

    In 12 bytes, 0 to 3 have the low 6 bits of s and 4 to 7 of m for groups 0 to 3; bytes 8 to 11
    have 4 bits of s and of m for groups 4 to 7, whose upper 2 bits are those of bytes 0 to 7.
    """
    a, b, c = x[..., 4:8], x[..., 8:12], x[..., 12:16]
    s = np.concatenate((a & 63, c & 15 | a >> 6 << 4), -1)
    m = np.concatenate((b & 63, c >> 4 | b >> 6 << 4), -1)
    with np.errstate(all="ignore"):
        return tuple(  # type: ignore[return-value]
            (_half(x[..., i : i + 2]).astype("f4")[..., None] * part).reshape(len(x), -1)
            for i, part in ((0, s), (2, m))
        )


def _neighbours(codes: UInt8[np.ndarray, "N blocks 128"]) -> UInt8[np.ndarray, "N pairs 16"]:
    """Return codes of Q4_K, of which byte i of 32 has numbers i and 32 + i, as bytes with numbers i
    and 16 + i of 32.
    """
    chunks = codes.reshape(len(codes), -1, 2, 16)  # [N, 64 numbers, half, 16]
    first, second = chunks[:, :, 0], chunks[:, :, 1]
    low = first & 15 | second << 4
    high = first >> 4 | second & 240
    return np.stack((low, high), 2).reshape(len(codes), -1, 16)
