"""What a mask lets a call see, written out, and how far off a kernel on torch's fused ops may
be.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.errors import KernelRefusal
from regard.ops.softmax.call import Call, make_call
from regard.ops.softmax.kernel import Kernel


def qkv(
    B: int = 1,
    H: int = 4,
    G: int = 2,
    T: int = 70,
    S: int = 70,
    D: int = 16,
    E: int = 16,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    size: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, E))
    q, k, v = (torch.randn(shape, generator=draw) for shape in shapes)
    return (q * size).to(dtype), (k * size).to(dtype), v.to(dtype)


def grid(T: int, S: int) -> tuple[Tensor, Tensor]:
    """Positions of queries, bottom right, and of keys."""
    return torch.arange(S - T, S)[:, None], torch.arange(S)[None]


def refusal_of(backend: str, *tensors: Tensor, **options: Any) -> str:
    """What a kernel says that is asked for by name, and cannot run the call."""
    with pytest.raises(KernelRefusal) as caught:
        regard.attend(*tensors, backend=backend, **options)
    return str(caught.value)


def reasons_in_a_graph(kernel: Kernel) -> list[str]:
    """What keeps a kernel from a call, asked for while torch compiles."""
    reasons: list[str] = []

    @torch.compile(backend="eager", fullgraph=True)
    def ask(q: Tensor) -> Tensor:
        reasons.extend(kernel.why_not(make_call(q, q, q)))
        return q + 1

    ask(torch.randn(1, 1, 20, 4))
    return reasons


def meaning(call: Call) -> dict[str, Any]:
    """The options of plain math for a call, its mask and its bias written out."""
    where = (call.q_positions, call.k_positions)
    return {
        "visible": call.mask.block(*where),
        "bias": None if call.bias is None else call.bias.block(*where, dtype=torch.float64),
        "scale": call.scale,
        "softcap": call.softcap,
        "sink": call.sink,
    }


def allowed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """What the mask of a call lets each query see, bool [B or 1, H or 1, T, S]: masks have tests of
    their own.
    """
    keep = ("mask", "q_positions", "k_positions")
    call = make_call(q, k, v, **{name: x for name, x in options.items() if name in keep})
    return call.mask.block(call.q_positions, call.k_positions)


def torch_dense(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, scale: float | None, bias: Tensor | None
) -> Tensor:
    """torch's own fused call under one dense mask: no kernel made of it can be expected to be
    closer.
    """
    most = max(q.shape[-1], v.shape[-1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    padded = (F.pad(x, (0, most - x.shape[-1])) for x in (q, k, v))
    mask = torch.where(
        seen, torch.zeros((), dtype=q.dtype) if bias is None else bias.to(q.dtype), -math.inf
    )
    return F.scaled_dot_product_attention(*padded, attn_mask=mask, scale=scale, enable_gqa=True)[
        ..., : v.shape[-1]
    ]


def assert_near(x: Tensor, exact: Tensor, others: list[Tensor], factor: float = 2) -> None:
    """max|x - exact| <= factor * max|other - exact| + two roundings, others in the dtype of x;
    infinities agree.

    For fp64 there is no more exact result. There the others are fp32, and their error is scaled by
    the ratio of the machine epsilons, 2^-29; twice, because `exact` is off as well.
    """
    assert x.shape == exact.shape
    assert not x.isnan().any(), "NaN in the result"
    assert torch.equal(x.isneginf(), exact.isneginf())
    seen = exact.isfinite()
    if not seen.any():
        return
    wide = x.dtype == torch.float64
    rounded = exact[seen].to(torch.float32 if wide else x.dtype)
    usual = max(float((other.double() - exact)[seen].abs().max()) for other in others)
    most = factor * usual + 2 * float((rounded + 0.3 - 0.3 - rounded).abs().max())
    worst = float((x.double() - exact)[seen].abs().max())
    most *= 2**-28 if wide else 1
    assert worst <= most, f"off by {worst:.3g}, allowed {most:.3g}"
