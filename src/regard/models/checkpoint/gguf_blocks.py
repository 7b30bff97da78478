"""The block formats of GGUF files: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K.

Every function takes the bytes of rows, uint8 [N, bytes of a row], in which a row is a sequence of
blocks of 32 numbers, or of 256 for the formats with a K. Letters: d and dmin are the fp16 factors
of a block, b its fp16 minimum, q the unsigned codes, s and m the factors of the groups in a
block of 256.

    Q8_0   w = d q                   q in -128 ... 127
    Q5_0   w = d (q - 16)            q in 0 ... 31
    Q5_1   w = d q + b               q in 0 ... 31
    Q4_0   w = d (q - 8)             q in 0 ... 15
    Q4_1   w = d q + b               q in 0 ... 15
    Q4_K   w = d s q - dmin m        q in 0 ... 15, s and m in 0 ... 63 for each 32 numbers
    Q5_K   w = d s q - dmin m        q in 0 ... 31
    Q6_K   w = d s (q - 32)          q in 0 ... 63, s in -128 ... 127 for each 16 numbers

Source: the reference quantization of ggml, `dequantize_row_*`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regard.ops.stored_weights import Int4Weight, Int8Weight, StoredWeight


class GroupedCodes(NamedTuple):
    """Codes with a factor and an offset for each group of neighbouring numbers.

    w[n, m] = scales[n, g] codes[n, m] - offsets[n, g],  g = m // (M / groups)

        offsets: fp32 [N, groups]; None is 0.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None


def _blocks(raw: Tensor, bytes_: int) -> Tensor:
    """Return the bytes of rows as [N, blocks, bytes of a block]."""
    return torch.unflatten(raw, 1, (-1, bytes_))


def _half(raw: Tensor) -> Tensor:
    """Return pairs of bytes [N, blocks, 2] as fp16 [N, blocks]."""
    return torch.from_numpy(raw.numpy().copy()).view(torch.float16).squeeze(-1)


def _nibbles(raw: Tensor) -> Tensor:
    """Return the low nibbles of bytes [..., n], and after them the high ones, [..., 2 n]."""
    x = raw.numpy()  # in one thread: starting others for each matrix takes longer
    return torch.from_numpy(np.concatenate((x & 15, x >> 4), -1))


def _q8_0(raw: Tensor) -> GroupedCodes:
    x = _blocks(raw, 34)
    return GroupedCodes(x[..., 2:].contiguous().view(torch.int8).flatten(1), _half(x[..., :2]))


def _q4_0(raw: Tensor) -> GroupedCodes:
    x = _blocks(raw, 18)
    scales = _half(x[..., :2])
    return GroupedCodes(_nibbles(x[..., 2:]).flatten(1), scales, 8 * scales.float())


def _q4_1(raw: Tensor) -> GroupedCodes:
    x = _blocks(raw, 20)
    return GroupedCodes(_nibbles(x[..., 4:]).flatten(1), _half(x[..., :2]), -_half(x[..., 2:4]))


def _five_bits(x: Tensor) -> Tensor:
    """Return the codes of blocks [N, blocks, 20]: bit j of the first 4 bytes is the highest of
    number j.
    """
    high = _bits(x[..., :4], torch.arange(8, device="cpu")).flatten(-2)
    return _nibbles(x[..., 4:]) | high << 4


def _q5_0(raw: Tensor) -> GroupedCodes:
    x = _blocks(raw, 22)
    return GroupedCodes((_five_bits(x[..., 2:]).to(torch.int8) - 16).flatten(1), _half(x[..., :2]))


def _q5_1(raw: Tensor) -> GroupedCodes:
    x = _blocks(raw, 24)
    return GroupedCodes(_five_bits(x[..., 4:]).flatten(1), _half(x[..., :2]), -_half(x[..., 2:4]))


def _bits(raw: Tensor, places: Tensor) -> Tensor:
    """Return the bits of bytes [..., n] at the given places, [..., n, places]."""
    return raw[..., None] >> places.to(torch.uint8) & 1


def _group_factors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products d s and dmin m of Q4_K and Q5_K, fp32 [N, 8 groups of each block].

    In 12 bytes, 0 to 3 have the low 6 bits of s and 4 to 7 of m for groups 0 to 3; bytes 8 to 11
    have 4 bits of s and of m for groups 4 to 7, whose upper 2 bits are those of bytes 0 to 7.
    """
    a, b, c = x[..., 4:8], x[..., 8:12], x[..., 12:16]
    s = torch.cat((a & 63, c & 15 | a >> 6 << 4), -1)
    m = torch.cat((b & 63, c >> 4 | b >> 6 << 4), -1)
    d, dmin = (_half(x[..., i : i + 2]).float()[..., None] for i in (0, 2))
    return (d * s).flatten(1), (dmin * m).flatten(1)


def _q4_k(raw: Tensor) -> GroupedCodes:
    x = _blocks(raw, 144)
    codes = _nibbles(torch.unflatten(x[..., 16:], -1, (4, 32)))
    return GroupedCodes(codes.flatten(1), *_group_factors(x))


def _q5_k(raw: Tensor) -> GroupedCodes:
    x = _blocks(raw, 176)
    low = torch.unflatten(_nibbles(torch.unflatten(x[..., 48:], -1, (4, 32))), -1, (2, 32))
    high = _bits(
        x[..., 16:48], torch.arange(8, device="cpu")
    ).mT  # bit g of byte i belongs to group g, number i
    return GroupedCodes((low.flatten(-3, -2) | high << 4).flatten(1), *_group_factors(x))


def _q6_k(raw: Tensor) -> GroupedCodes:
    x = _blocks(raw, 210)
    low = _nibbles(torch.unflatten(x[..., :128], -1, (2, 64)))  # of 128 numbers each
    pairs = torch.unflatten(x[..., 128:192], -1, (2, 1, 32))
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device="cpu")[:, None]
    high = (pairs >> places & 3).flatten(-2)
    codes = (low | high << 4).to(torch.int8) - 32
    d, s = _half(x[..., 208:]).float(), x[..., 192:208].contiguous().view(torch.int8)
    return GroupedCodes(codes.flatten(1), (d[..., None] * s).flatten(1))


_READERS: dict[str, Callable[[Tensor], GroupedCodes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

RECORD_FORMS = {"Q8_0": "int8", "Q5_0": "int8", "Q4_0": "int4", "Q4_1": "int4", "Q4_K": "int4"}
"""Block format -> form of the stored weight with the same values."""


def float_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of a format without blocks, or None."""
    return _FLOATS.get(name)


def dequantize_gguf(name: str, raw: UInt8[Tensor, "N bytes"]) -> Float[Tensor, "N M"]:
    """Return the numbers of rows in the format `name`, through fp32 if they are quantized."""
    if (dtype := _FLOATS.get(name)) is not None:
        return raw.contiguous().view(dtype)
    codes, scales, offsets = _READERS[name](raw)
    values = torch.unflatten(codes.float(), 1, (scales.shape[1], -1))
    values = values.mul_(scales.float()[..., None])
    return (values if offsets is None else values.sub_(offsets[..., None])).flatten(1)


def gguf_record(name: str, raw: UInt8[Tensor, "N bytes"], dtype: torch.dtype) -> StoredWeight:
    """Return rows in a format of `RECORD_FORMS` as a stored weight, exactly but for Q4_1 and Q4_K,
    whose zero points -b / d and dmin m / (d s) are rounded to fp32; where the scale is 0, codes are
    0, the zero point 1 and the scale the offset.
    """
    codes, scales, offsets = _READERS[name](raw)
    if RECORD_FORMS[name] == "int8":
        return Int8Weight(codes, scales, codes.shape[1], dtype)
    if name == "Q4_0":
        return Int4Weight.pack(codes, scales, torch.full_like(scales, 8), codes.shape[1], dtype)
    assert offsets is not None
    scales, offsets = scales.float(), offsets.float()
    constant = scales == 0
    zeros = torch.where(constant, 1.0, offsets / scales.masked_fill(constant, 1.0))
    scales = torch.where(constant, offsets, scales)
    if bool(constant.any()):
        grouped = torch.unflatten(codes, 1, (scales.shape[1], -1))
        codes = grouped.masked_fill(constant[..., None], 0).flatten(1)
    return Int4Weight.pack(codes, scales, zeros, codes.shape[1], dtype)
