"""Weights that other programs stored as integers with a scale for each group of inputs (GPTQ, AWQ,
compressed-tensors, and int8 of bitsandbytes). They differ in how integers are packed, and in the
encoding of zero points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int, Int32, Shaped, UInt8
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.ops.cpu.library import DTYPES
from regard.ops.stored_weights import GROUPS, Int4Weight, Int8Weight, StoredWeight
from regard.units import plural

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of AWQ, counted in units of 4 bits from the lowest, of each of 8 numbers."""


@dataclass(frozen=True, eq=False)
class IntegerCodes:
    """Integers [..., N, M] with a scale and a zero point for each group of inputs.

    w[n, m] = scales[n, g] (codes[n, m] - zeros[n, g]),  g = groups[m], or m // (M / G) without them

    Args:
        codes: uint8, or int8 of 8 bits.
        zeros: integers [..., N, G]; None is 0.
        groups: the group of each input, where the inputs of one are not neighbours.
        turned: whether the weight is stored as [..., M, N], as those of several experts are.

    Raises:
        ArgumentError: sizes do not fit.
    """

    bits: int
    codes: Shaped[Tensor, "*e N M"]
    scales: Float[Tensor, "*e N G"]
    zeros: Int[Tensor, "*e N G"] | None = None
    groups: Int[Tensor, " M"] | None = None
    turned: bool = False

    def __post_init__(self) -> None:
        (*rows, M), G = self.codes.shape, self.scales.shape[-1]
        fits = self.scales.shape[:-1] == torch.Size(rows) and G
        fits = fits and (self.groups is not None or M % G == 0)
        if not fits or (self.zeros is not None and self.zeros.shape != self.scales.shape):
            zeros = None if self.zeros is None else tuple(self.zeros.shape)
            raise ArgumentError(
                f"codes are {tuple(self.codes.shape)}, scales {tuple(self.scales.shape)} and zero "
                f"points {zeros}; scales and zero points must be {(*rows, 'groups')}, with groups "
                f"of equal size of {plural(M, 'input')}"
            )

    def dequantize(self) -> Float[Tensor, "*e N M"]:
        """Return the weight as it is stored, in which each number is rounded once, in fp32; in bf16
        if that has all of them, because scales are powers of two (MXFP4).
        """
        exact = self.scales.dtype if self.turned else torch.float32
        codes, scales = self.codes.to(exact), self.scales.to(exact)
        zeros = torch.zeros_like(scales) if self.zeros is None else self.zeros.to(exact)
        if self.groups is not None:
            index = self.groups.long()
            return codes.sub_(zeros[:, index]).mul_(scales[:, index])
        grouped = torch.unflatten(codes, -1, (scales.shape[-1], -1))
        weight = grouped.sub_(zeros[..., None]).mul_(scales[..., None]).flatten(-2)
        return weight.mT if self.turned else weight

    def divide(self, unpack: Callable[[Tensor], Sequence[Tensor]]) -> list[IntegerCodes]:
        """Return the parameters of a stored tensor, which `unpack` divides without a change of the
        order of inputs.
        """
        names = ("codes", "scales") if self.zeros is None else ("codes", "scales", "zeros")
        whole = [getattr(self, name) for name in names]
        whole = [x.mT for x in whole] if self.turned else whole
        parts = zip(*(unpack(x) for x in whole), strict=True)
        parameters = []
        for part in parts:
            changed: dict[str, Any] = dict(zip(names, map(Tensor.contiguous, part), strict=True))
            parameters.append(replace(self, turned=False, **changed))
        return parameters

    def record(self, dtype: torch.dtype) -> StoredWeight | None:
        """Return the same numbers as a stored weight, for computations in `dtype`; None if none has
        such groups, or codes of such a range.
        """
        (N, M), G = self.codes.shape, self.scales.shape[1]
        # one group for all inputs may be padded
        whole = GROUPS[0] if G == 1 else None
        group = next((g for g in reversed(GROUPS) if M // G % g == 0), whole)
        if group is None or self.groups is not None or self.scales.dtype not in DTYPES:
            return None
        zeros = (
            torch.zeros(N, G, dtype=torch.int16, device=self.codes.device)
            if self.zeros is None
            else self.zeros.short()
        )
        scales, zeros = (x.repeat_interleave(-(-M // G // group), 1) for x in (self.scales, zeros))
        codes = self.codes
        if M % group:
            codes = torch.cat((codes, zeros[:, -1:].expand(-1, -M % group).to(codes.dtype)), 1)
        if self.bits == 4:
            return Int4Weight.pack(codes, scales, zeros.to(scales.dtype), M, dtype)
        grouped = torch.unflatten(codes.short(), 1, (-1, group)) - zeros[..., None]
        least, greatest = grouped.aminmax()
        if int(least) < -128 or int(greatest) > 127:
            return None
        return Int8Weight(grouped.flatten(1).to(torch.int8), scales.contiguous(), M, dtype)


def unpack_words(words: Int32[Tensor, "a b"], bits: int) -> UInt8[Tensor, "a c"]:
    """Return the unsigned numbers in 32-bit words along the last dim, lowest bits first."""
    if bits not in (4, 8):
        raise ArgumentError(f"bits is {bits}; supported are 4 and 8")
    if words.dtype != torch.int32 or words.ndim != 2:
        raise ArgumentTypeError(
            f"words are {words.dtype} {tuple(words.shape)}; must be int32 [a, b]"
        )
    numbers = words.contiguous().view(torch.uint8)
    return numbers if bits == 8 else torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)


def unpack_gptq(
    qweight: Int32[Tensor, "words N"],
    qzeros: Int32[Tensor, "groups n"],
    scales: Float[Tensor, "groups N"],
    g_idx: Int[Tensor, " M"] | None = None,
    *,
    bits: int,
    zero_offset: int = 1,
    symmetric: bool = False,
    ordered: bool = False,
) -> IntegerCodes:
    """Unpack a matrix of GPTQ, whose zero points are (qzeros + zero_offset) % 2^bits; `ordered`
    says that groups are neighbours. Source: Frantar et al. 2022 (arXiv 2210.17323); AutoGPTQ.
    """
    codes = unpack_words(qweight.T.contiguous(), bits)
    zeros = unpack_words(qzeros, bits).T
    M, G = codes.shape[1], len(scales)
    # zero point 0 is stored as -1, that is 2^bits - 1
    shifted = (zeros + zero_offset) & (2**bits - 1)
    if symmetric and bool((shifted != 2 ** (bits - 1)).any()):
        raise ArgumentError(
            f"sym is true, so that every zero point is {2 ** (bits - 1)}, and those of this format "
            f"are {int(shifted.min())} to {int(shifted.max())}; is checkpoint_format "
            f"{'gptq_v2' if zero_offset else 'gptq'}, or sym false?"
        )
    if g_idx is not None:
        if g_idx.shape != (M,) or int(g_idx.min()) < 0 or int(g_idx.max()) >= G:
            raise ArgumentError(
                f"g_idx is {tuple(g_idx.shape)} with groups {int(g_idx.min())} to "
                f"{int(g_idx.max())}; it must have {M} groups below {G}"
            )
        size = max(1, int((g_idx == 0).sum()))
        if torch.equal(g_idx.long(), torch.arange(M, device=g_idx.device) // size):
            g_idx = None if size * G == M else g_idx
        elif ordered:
            raise ArgumentError(
                "desc_act is false, so that the inputs of a group are neighbours, and g_idx puts "
                "others together; is desc_act true?"
            )
    return IntegerCodes(bits, codes, scales.T, shifted.short(), g_idx)


def unpack_awq(
    qweight: Int32[Tensor, "M n"],
    qzeros: Int32[Tensor, "groups n"],
    scales: Float[Tensor, "groups N"],
) -> IntegerCodes:
    """Unpack a matrix of AWQ in the layout "gemm" of AutoAWQ, of 4 bits. Source: Lin et al. 2023
    (arXiv 2306.00978).
    """
    codes, zeros = (
        torch.unflatten(unpack_words(x, 4), 1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1).T
        for x in (qweight, qzeros)
    )
    return IntegerCodes(4, codes, scales.T, zeros.short())


def unpack_compressed(
    values: Shaped[Tensor, "N m"],
    scales: Float[Tensor, "N groups"],
    zeros: Shaped[Tensor, "n groups"] | None = None,
    groups: Int[Tensor, " M"] | None = None,
    *,
    bits: int,
) -> IntegerCodes:
    """Unpack a matrix of compressed-tensors: int8 codes, or words of unsigned codes 2^(bits - 1)
    above the signed ones, with zero points packed along the outputs.
    """
    if values.dtype == torch.int8:
        return IntegerCodes(8, values, scales, zeros, groups)
    codes, middle = unpack_words(values, bits), 2 ** (bits - 1)
    if zeros is None:
        points = torch.full(scales.shape, middle, dtype=torch.int16, device=scales.device)
    else:
        points = unpack_words(zeros.T.contiguous(), bits).T[: len(codes)].short()
    return IntegerCodes(bits, codes, scales, points, groups)
