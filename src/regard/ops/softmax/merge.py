"""`merge`: join attention over disjoint parts of the keys, exactly, by their lse."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.argument_checks import check_device, check_sink, check_tensor
from regard.errors import ArgumentError, ArgumentTypeError
from regard.ops.softmax.call import Partial


def merge(partials: Sequence[Partial], *, sink: Tensor | None = None) -> Partial:
    """Join attention over disjoint parts of the keys into attention over their union.

    lse = ln sum_p exp(lse_p)        out = sum_p exp(lse_p - lse) out_p

    No key may be in two parts. The operation is associative, commutative and differentiable. A
    query that sees no key in any part gets the output 0, the lse -inf and the gradient 0.

    Args:
        partials: one or more `Partial`s, out `[B, H, T, E]` and lse `[B, H, T]`.
        sink: one logit per query head, `[H]`, or None. It is counted here, once for all parts, and
            not included in the lse.

    Returns:
        A `Partial` over all the keys, in the shapes and dtypes of the parts.

    Raises:
        ArgumentError: there is no part, shapes differ, or the sink is not `[H]`.
        ArgumentTypeError: the parts differ in dtype.

    >>> import torch, regard
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind(0)
    >>> halves = slice(0, 3), slice(3, 8)
    >>> parts = [regard.attend_partial(q, k[:, :, s], v[:, :, s]) for s in halves]
    >>> torch.allclose(regard.merge(parts).out, regard.attend(q, k, v), atol=1e-6)
    True

    Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), section 3.1; Dao 2022 (arXiv
    2205.14135), section 3.1.
    """
    partials = [Partial(*p) for p in partials]
    if not partials:
        raise ArgumentError(
            "merge got no partials; pass at least one result of regard.attend_partial"
        )
    for i, (out, lse) in enumerate(partials):
        if out.shape != partials[0].out.shape or lse.shape != out.shape[:3]:
            raise ArgumentError(
                f"partial {i} has out {tuple(out.shape)} and lse {tuple(lse.shape)}; all must have "
                f"out {tuple(partials[0].out.shape)} and lse {tuple(partials[0].out.shape[:3])}"
            )
    _check_dtypes_and_devices(partials)
    check_sink(sink, partials[0].out.shape[1], partials[0].out)
    lses = torch.stack([p.lse for p in partials])
    max_lse = lses.amax(0).detach()
    max_lse = max_lse.masked_fill(max_lse == -math.inf, 0)
    weights = torch.exp(lses - max_lse)  # [P,B,H,T]
    total = weights.sum(0)
    empty = total == 0
    share = (weights / total.masked_fill(empty, 1)).unsqueeze(-1)
    out = weighted_sum(share, [p.out for p in partials])
    lse = (max_lse + total.masked_fill(empty, 1).log()).masked_fill(empty, -math.inf)
    if sink is not None:
        out = apply_sink(out, lse, sink)
    return Partial(out, lse)


def merge_into(total: Partial, part: Partial) -> None:
    """Join a part to the attention over disjoint keys, in place and without a gradient.

    lse' = ln(exp(lse) + exp(lse_p))        out' = exp(lse - lse') out + exp(lse_p - lse') out_p
    """
    lse = part.lse.to(total.lse.dtype)
    largest = torch.maximum(total.lse, lse)
    sees_nothing = largest == -math.inf
    largest.masked_fill_(sees_nothing, 0)
    share, part_share = torch.exp(total.lse - largest), torch.exp(lse - largest)
    weights = share + part_share
    # shares of the sum of both, rather than exp(lse - lse'): the rounding of lse' would scale both
    divisor = weights.masked_fill(sees_nothing, 1)
    share, part_share = share / divisor, part_share / divisor
    out = part.out
    if bool((part_share == 0).any()):  # as in `merge`: a NaN with the share 0 has no effect
        out = torch.where(part_share.unsqueeze(-1) == 0, 0, out)
    if bool((share == 0).any()):
        total.out.masked_fill_(share.unsqueeze(-1) == 0, 0)
    total.out.mul_(share.unsqueeze(-1)).addcmul_(out.to(total.out.dtype), part_share.unsqueeze(-1))
    total.lse.copy_(largest + weights.log())


def _check_dtypes_and_devices(partials: Sequence[Partial]) -> None:
    """Check that all parts are floating-point tensors of one dtype on one device."""
    first = partials[0]
    for i, part in enumerate(partials):
        for name, x, like in zip(Partial._fields, part, first, strict=True):
            check_tensor(f"{name} of partial {i}", x)
            check_device(f"{name} of partial {i}", x, first.out, "out of partial 0")
            if x.dtype != like.dtype:
                raise ArgumentTypeError(
                    f"{name} of partial {i} is {x.dtype} and that of partial 0 {like.dtype}; all "
                    "parts must have one dtype: convert one with .to()"
                )


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return out * sigmoid(lse - sink), which has exp(sink) in the softmax denominator."""
    # A row with the lse -inf has the output 0 whatever its share is, so its lse may be set to 0; a
    # sink of -inf would otherwise give -inf - (-inf) = NaN.
    finite_lse = lse.masked_fill(lse == -math.inf, 0)
    share = torch.sigmoid(finite_lse - sink.to(lse.dtype)[:, None])
    return (out * share.unsqueeze(-1)).to(out.dtype)


def weighted_sum(share: Tensor, outs: list[Tensor]) -> Tensor:
    """Return sum_p share_p out_p for shares `[P, B, H, T, 1]` and P outputs `[B, H, T, E]`.

    A part with a share of 0 counts as 0, so that a NaN there has no effect.
    """
    terms = [s * torch.where(s == 0, 0, out) for s, out in zip(share, outs, strict=True)]
    return torch.stack(terms).sum(0).to(outs[0].dtype)
