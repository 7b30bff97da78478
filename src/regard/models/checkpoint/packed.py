"""Weights that a file stores as small numbers with a scale per block, back to plain ones."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float8e4m3fn, Float32, UInt8
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the three low bits of an MXFP4 number stand for; the fourth is the sign."""

PIECE = 2**16
"""Bytes that are unpacked at a time, so that what is needed beside the result stays small."""


def unpack_mxfp4(
    blocks: UInt8[Tensor, "*b G 16"],
    scales: UInt8[Tensor, "*b G"],
    dtype: torch.dtype = torch.float32,
    *,
    piece: int = PIECE,
) -> Float[Tensor, "*b n"]:
    """Weights in blocks of 32 four-bit numbers that share a power of two, as `openai/gpt-oss` files
    hold their experts.

    w[g 32 + 2 i + h] = 2^(scales[g] - 127) * e2m1(nibble h of blocks[g, i]),  the low nibble first

    blocks [..., G, 16] and scales [..., G] give [..., G * 32]. Every value is exact in float32, and
    in bfloat16 too; a scale of 255 is the format's NaN.

    Args:
        blocks: two numbers a byte.
        scales: an exponent per block, biased by 127.
        dtype: of the result; float16 has too little range and is refused.
        piece: bytes that are unpacked at a time.

    Raises:
        ArgumentError: blocks are not [..., G, 16], or scales do not go with them.
        ArgumentTypeError: they are not uint8, or the dtype cannot hold the values.

    >>> unpack_mxfp4(torch.full((1, 16), 0x92, dtype=torch.uint8), torch.tensor([128], dtype=torch.uint8))[:4]
    tensor([ 2., -1.,  2., -1.])

    Source: Open Compute Project 2023, OCP Microscaling Formats (MX) Specification 1.0, sections
    5.3.3, 5.4.1 and 6.3.
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
    # what each byte holds, as one number of eight bytes: that many times faster to look up than two
    # of four
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1).view(torch.int64)
    exponents = torch.arange(256, device=blocks.device)
    powers = (exponents.double() - 127).exp2().masked_fill(exponents == 255, torch.nan).float()
    out = torch.empty(scales.numel(), 32, dtype=dtype, device=blocks.device)
    flat, factors, step = blocks.flatten(), powers[scales.flatten().int(), None], piece // 16
    for i in range(0, scales.numel(), step):
        some = pairs[:, 0].index_select(0, flat[16 * i : 16 * (i + step)].int())
        out[i : i + step] = some.view(torch.float32).view(-1, 32) * factors[i : i + step]
    return out.reshape(*blocks.shape[:-2], 32 * blocks.shape[-2])


def unpack_fp8(
    weight: Float8e4m3fn[Tensor, "N K"],
    scale_inv: Float32[Tensor, "n k"],
    dtype: torch.dtype = torch.float32,
    *,
    block: int = 128,
) -> Float[Tensor, "N K"]:
    """A matrix of eight-bit floats with a factor for each square block, as DeepSeek-V3 files hold
    theirs.

    w[i, j] = float(weight[i, j]) * scale_inv[i // block, j // block],  multiplied in float32 and rounded once

    weight [N,K] and scale_inv [ceil(N / block), ceil(K / block)] give [N,K]. (The name is the
    files': the inverse of what the weight was multiplied by, and so a factor here.)

    Args:
        weight: the matrix, float8_e4m3fn.
        scale_inv: the factors.
        dtype: of the result.
        block: rows and columns of a block.

    Raises:
        ArgumentError: there is not one factor for each block, or block is less than 1.
        ArgumentTypeError: weight is not float8_e4m3fn, scale_inv not float32, or the dtype no plain
            one.

    >>> unpack_fp8(torch.ones(2, 2).to(torch.float8_e4m3fn), torch.tensor([[2.0, 3.0]]), block=2)
    Traceback (most recent call last):
    regard.errors.ArgumentError: scale_inv is (1, 2); a weight of (2, 2) in blocks of 2 x 2 has (1, 1)
    >>> unpack_fp8(torch.ones(2, 4).to(torch.float8_e4m3fn), torch.tensor([[2.0, 3.0]]), block=2)[0]
    tensor([2., 2., 3., 3.])

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
            "of "
            f"{block} x {block} has {wanted}"
        )
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for i, row in enumerate(scale_inv):
        rows = slice(i * block, (i + 1) * block)
        out[rows] = weight[rows].float() * row.repeat_interleave(block)[: weight.shape[1]]
    return out


def _check_bytes(name: str, x: Tensor) -> None:
    if x.dtype != torch.uint8:
        raise ArgumentTypeError(f"{name} are {x.dtype}; they must be uint8")
