"""Weights that other programs stored as floats of 4 and 8 bits (MXFP4, NVFP4, FP8, and NF4 and FP4
of bitsandbytes), dequantized.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.models.checkpoint.group_quantized import IntegerCodes

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the three low bits of an MXFP4 number; the fourth bit is the sign."""

_NF4_NEGATIVE = (0.69619280, 0.52507305, 0.39491749, 0.28444138, 0.18477343, 0.09105004)
_NF4_POSITIVE = (0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684)
_FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
BITSANDBYTES_VALUES: dict[str, tuple[float, ...]] = {
    "nf4": (-1.0, *(-x for x in _NF4_NEGATIVE), 0.0, *_NF4_POSITIVE, 1.0),
    "fp4": (*_FP4, *(-x for x in _FP4)),
}
"""quant_type -> the value of each code, to eight digits: a file has all of them."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)

CHUNK_BYTES = 2**16
"""The number of bytes that are unpacked at a time, which bounds the temporary memory."""


def unpack_mxfp4(
    blocks: UInt8[Tensor, "*b G 16"], scales: UInt8[Tensor, "*b G"], *, turned: bool = False
) -> IntegerCodes:
    """Unpack blocks of 32 four-bit numbers with a shared power of two, as in `openai/gpt-oss`:
    integers, because twice each number is one.

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
    codes = look_up(blocks, (2 * e2m1(blocks.device)).to(torch.int8)).flatten(-2)
    halves = (powers_of_two(scales) / 2).bfloat16()
    return IntegerCodes(8, codes, halves, turned=turned)


def unpack_fp8(
    weight: Shaped[Tensor, "N K"],
    scales: Shaped[Tensor, "n k"],
    dtype: torch.dtype = torch.float32,
    *,
    block: tuple[int, int] = (128, 128),
) -> Float[Tensor, "N K"]:
    """Dequantize a matrix of 8-bit floats with a factor for each block of rows and columns, as in
    DeepSeek-V3; uint8 factors are powers of two.

    w[i, j] = float(weight[i, j]) * scales[i // block[0], j // block[1]] in float32, rounded once.
    Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.3.2.
    """
    if min(block) < 1:
        raise ArgumentError(f"block is {block}; both sizes must be at least 1")
    if weight.dtype not in FLOAT8 or scales.dtype not in SCALES:
        raise ArgumentTypeError(
            f"weight is {weight.dtype} and scales {scales.dtype}; they must be of "
            f"{_listed(FLOAT8)}, and of {_listed(SCALES)}"
        )
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ArgumentTypeError(
            f"dtype is {dtype}; it must be float16, bfloat16, float32 or float64"
        )
    wanted = tuple(-(-size // side) for size, side in zip(weight.shape, block, strict=True))
    if tuple(scales.shape) != wanted:
        raise ArgumentError(
            f"scales are {tuple(scales.shape)}; a weight of {tuple(weight.shape)} in blocks of "
            f"{block[0]} x {block[1]} has {wanted}"
        )
    factors = powers_of_two(scales) if scales.dtype == torch.uint8 else scales.float()
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for i, row in enumerate(factors):
        rows = slice(i * block[0], (i + 1) * block[0])
        out[rows] = weight[rows].float() * row.repeat_interleave(block[1])[: weight.shape[1]]
    return out


def unpack_nvfp4(
    packed: UInt8[Tensor, "N half"],
    scales: Shaped[Tensor, "N G"],
    divisor: Float[Tensor, "1"],
) -> Float[Tensor, "N K"]:
    """Dequantize groups of 16 four-bit numbers with an 8-bit scale each, and one divisor for all.

    w[n, m] = e2m1(n, m) scales[n, m // 16] / divisor,  the low nibble first
    """
    _check_bytes("packed", packed)
    values = look_up(packed, e2m1(packed.device))
    if scales.shape != (len(values), values.shape[1] // 16) or values.shape[1] % 16:
        raise ArgumentError(
            f"packed is {tuple(packed.shape)} and scales {tuple(scales.shape)}; they must be "
            "[N, K / 2] and [N, K / 16]"
        )
    factors = scales.float() / divisor.float()
    return (torch.unflatten(values, 1, (-1, 16)) * factors[..., None]).flatten(1)


def unpack_bitsandbytes(
    packed: UInt8[Tensor, " half"],
    factors: Float[Tensor, " blocks"],
    values: Float[Tensor, "16"],
    shape: tuple[int, ...],
    *,
    block: int,
) -> Float[Tensor, "..."]:
    """Dequantize 4-bit codes of bitsandbytes, the high nibble first, in blocks of all numbers.

    w_i = values[code_i] factors[i // block].  Source: Dettmers et al. 2023 (arXiv 2305.14314).
    """
    _check_bytes("packed", packed)
    count = math.prod(shape)
    if packed.numel() != -(-count // 2) or factors.numel() != -(-count // block):
        raise ArgumentError(
            f"packed has {packed.numel()} bytes and {factors.numel()} factors; a weight of {shape} "
            f"in blocks of {block} has {-(-count // 2)} and {-(-count // block)}"
        )
    flat = packed.flatten()
    numbers = look_up(flat >> 4 | flat << 4, values.float())[:count]
    return (numbers * factors.float().repeat_interleave(block)[:count]).view(shape)


def e2m1(device: torch.device | None = None) -> Float[Tensor, "16"]:
    """Return the value of each code of 4 bits."""
    return torch.tensor([*E2M1, *(-x for x in E2M1)], device=device)


def powers_of_two(bytes_: UInt8[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return 2^(x - 127) for each byte; 255 is NaN."""
    exponents = torch.arange(256, device=bytes_.device)
    powers = (exponents.double() - 127).exp2().masked_fill(exponents == 255, torch.nan).float()
    return powers[bytes_.int()]


def look_up(
    bytes_: UInt8[Tensor, "*r n"], values: Shaped[Tensor, "16"], *, piece: int = CHUNK_BYTES
) -> Shaped[Tensor, "*r m"]:
    """Return the values of both halves of each byte, that of the low one first."""
    # the two values of each byte as one integer, which is much faster to look up
    pair = {torch.float32: torch.int64, torch.int8: torch.int16}[values.dtype]
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1).view(pair)[:, 0]
    flat = bytes_.flatten()
    out = torch.empty(flat.shape, dtype=pair, device=flat.device)
    for i in range(0, len(flat), piece):
        out[i : i + piece] = pairs.index_select(0, flat[i : i + piece].int())
    return out.view(values.dtype).view(*bytes_.shape[:-1], 2 * bytes_.shape[-1])


def _check_bytes(name: str, x: Tensor) -> None:
    if x.dtype != torch.uint8:
        raise ArgumentTypeError(f"{name} are {x.dtype}; they must be uint8")


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(x).removeprefix("torch.") for x in dtypes)
