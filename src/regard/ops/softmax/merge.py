"""Joining attention over parts of the keys: (out, lse) is all that is needed, and the join is
exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.argument_checks import check_device, check_sink, check_tensor
from regard.errors import ArgumentError, ArgumentTypeError
from regard.ops.softmax.call import Partial


def merge(partials: Sequence[Partial], *, sink: Tensor | None = None) -> Partial:
    """Attention over the union of disjoint parts of the keys, from attention over each part.

    lse = ln sum_p exp(lse_p)        out = sum_p exp(lse_p - lse) out_p

    The parts must not share a key. It is associative and commutative, its identity is (0, -inf),
    and it is differentiable in every out and lse. A row that sees nothing in any part stays (0,
    -inf), with gradient 0.

    Args:
        partials: at least one `Partial`: out [B,H,T,E], lse [B,H,T].
        sink: [H], one logit per head that takes part in the denominator only; counted once, here.
            The lse that comes back is without it.

    Raises:
        ArgumentError: there is no part, shapes differ, or the sink is not [H].

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
            "merge got no partials; give at least one: regard.attend_partial makes them"
        )
    for i, (out, lse) in enumerate(partials):
        if out.shape != partials[0].out.shape or lse.shape != out.shape[:3]:
            raise ArgumentError(
                f"partial {i} has out {tuple(out.shape)} and lse {tuple(lse.shape)}; all must "
                "have out "
                f"{tuple(partials[0].out.shape)} and lse {tuple(partials[0].out.shape[:3])}"
            )
    _check_kinds(partials)
    check_sink(sink, partials[0].out.shape[1], partials[0].out)
    lses = torch.stack([p.lse for p in partials])
    top = lses.amax(0).detach()
    top = top.masked_fill(top.isneginf(), 0)
    weights = torch.exp(lses - top)  # [P,B,H,T]
    total = weights.sum(0)
    empty = total == 0
    share = (weights / total.masked_fill(empty, 1)).unsqueeze(-1)
    out = sum_selected(share, [p.out for p in partials])
    lse = (top + total.masked_fill(empty, 1).log()).masked_fill(empty, -math.inf)
    if sink is not None:
        out = with_sink(out, lse, sink)
    return Partial(out, lse)


def _check_kinds(partials: Sequence[Partial]) -> None:
    """All parts are floating tensors of one dtype on one device, and so are their log-sums."""
    first = partials[0]
    for i, part in enumerate(partials):
        for name, x, like in zip(Partial._fields, part, first, strict=True):
            check_tensor(f"{name} of partial {i}", x)
            check_device(f"{name} of partial {i}", x, first.out, "out of partial 0")
            if x.dtype != like.dtype:
                raise ArgumentTypeError(
                    f"{name} of partial {i} is {x.dtype} and that of partial 0 {like.dtype}; all "
                    "parts must have one dtype: "
                    "convert one with .to()"
                )


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """The output when exp(sink) joins the denominator: out * sigmoid(lse - sink); a row that sees
    nothing stays 0.
    """
    sees = lse.masked_fill(lse.isneginf(), 0)  # its out is 0 anyway, and -inf - -inf would be NaN
    keep = torch.sigmoid(sees - sink.to(lse.dtype)[:, None])
    return (out * keep.unsqueeze(-1)).to(out.dtype)


def sum_selected(share: Tensor, outs: list[Tensor]) -> Tensor:
    """sum_p share_p out_p in the precision of the shares; a part with share 0 is left out, NaN
    included.
    """
    terms = [s * torch.where(s == 0, 0, out) for s, out in zip(share, outs, strict=True)]
    return torch.stack(terms).sum(0).to(outs[0].dtype)
