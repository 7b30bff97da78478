"""Weights that other programs quantized in groups of inputs (GPTQ, AWQ, compressed-tensors),
dequantized: w[n, m] = scale[n, g(m)] (q[n, m] - zero[n, g(m)]). They differ in how integers are
packed, and in the encoding of zero points.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.units import plural

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of AWQ, counted in units of 4 bits from the lowest, of each of 8 numbers."""


def unpack_words(words: Int32[Tensor, "a b"], bits: int) -> Int32[Tensor, "a c"]:
    """Return the unsigned numbers in 32-bit words along the last dim, lowest bits first."""
    if bits not in (4, 8):
        raise ArgumentError(f"bits is {bits}; supported are 4 and 8")
    if words.dtype != torch.int32 or words.ndim != 2:
        raise ArgumentTypeError(
            f"words are {words.dtype} {tuple(words.shape)}; must be int32 [a, b]"
        )
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    numbers: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(1)


def dequantize_gptq(
    qweight: Int32[Tensor, "words N"],
    qzeros: Int32[Tensor, "groups n"],
    scales: Float[Tensor, "groups N"],
    g_idx: Int[Tensor, " M"],
    *,
    bits: int,
    zero_offset: int = 1,
    symmetric: bool = False,
) -> Float[Tensor, "N M"]:
    """Dequantize a matrix of GPTQ: w[n, m] = scales[g_idx[m], n] (q[m, n] - (qzeros[g_idx[m], n] +
    zero_offset) % 2^bits). Source: Frantar et al. 2022 (arXiv 2210.17323); AutoGPTQ's layout.
    """
    codes = unpack_words(qweight.T.contiguous(), bits)
    zeros = unpack_words(qzeros, bits).T
    M = codes.shape[1]
    _check_groups(codes.shape, scales.T, zeros)
    if g_idx.shape != (M,) or int(g_idx.min()) < 0 or int(g_idx.max()) >= scales.shape[0]:
        raise ArgumentError(
            f"g_idx is {tuple(g_idx.shape)} with groups {int(g_idx.min())} to {int(g_idx.max())}; "
            f"it must have {M} groups below {scales.shape[0]}"
        )
    # zero point 0 is stored as -1, that is 2^bits - 1
    shifted = (zeros + zero_offset) & (2**bits - 1)
    if symmetric and bool((shifted != 2 ** (bits - 1)).any()):
        raise ArgumentError(
            f"sym is true, so that every zero point is {2 ** (bits - 1)}, and those of this format "
            f"are {int(shifted.min())} to {int(shifted.max())}; is checkpoint_format "
            f"{'gptq_v2' if zero_offset else 'gptq'}, or sym false?"
        )
    index = g_idx.long()
    differences: Tensor = (codes - shifted[:, index]).float()
    return differences * scales.T.float()[:, index]


def dequantize_awq(
    qweight: Int32[Tensor, "M n"],
    qzeros: Int32[Tensor, "groups n"],
    scales: Float[Tensor, "groups N"],
) -> Float[Tensor, "N M"]:
    """Dequantize a matrix of AWQ in the layout "gemm" of AutoAWQ, of 4 bits: w[n, m] = scales[g, n]
    (q[m, n] - qzeros[g, n]), g = m // (M / groups). Source: Lin et al. 2023 (arXiv 2306.00978).
    """
    codes, zeros = (_in_order(unpack_words(words, 4)).T for words in (qweight, qzeros))
    _check_groups(codes.shape, scales.T, zeros)
    return _dequantize(codes, scales.T, zeros)


def dequantize_compressed(
    codes: Int[Tensor, "N M"],
    scales: Float[Tensor, "N groups"],
    zeros: Int[Tensor, "N groups"] | None = None,
) -> Float[Tensor, "N M"]:
    """Dequantize signed codes of compressed-tensors ("pack-quantized", "int-quantized"): w[n, m] =
    scales[n, g] (codes[n, m] - zeros[n, g]), g = m // (M / groups).
    """
    if zeros is None:
        zeros = torch.zeros_like(scales, dtype=codes.dtype)
    _check_groups(codes.shape, scales, zeros)
    return _dequantize(codes, scales, zeros)


def _in_order(numbers: Tensor) -> Tensor:
    """Return numbers that were packed in the order of AWQ in their own order."""
    return torch.unflatten(numbers, 1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)


def _dequantize(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return scales (codes - zeros), with equal groups of neighbouring inputs."""
    grouped = torch.unflatten(codes, 1, (scales.shape[1], -1)) - zeros[..., None]
    return (grouped.float() * scales.float()[..., None]).flatten(1)


def _check_groups(shape: torch.Size, scales: Tensor, zeros: Tensor) -> None:
    """Check that scales and zero points [N, groups] fit codes [N, M]."""
    (N, M), groups = shape, scales.shape[1]
    if scales.shape[0] != N or zeros.shape != scales.shape or not groups or M % groups:
        raise ArgumentError(
            f"codes are {tuple(shape)}, scales {tuple(scales.shape)} and zero points "
            f"{tuple(zeros.shape)}; scales and zero points must be ({N}, groups), with groups of "
            f"equal size of {plural(M, 'input')}"
        )
