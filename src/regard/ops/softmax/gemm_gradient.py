"""Training on the compiled products: the weights are computed again, block by block, over the keys that a mask leaves.

    p = e^(s - m) / l    dv = p^T dout    dp = dout v^T    ds = p (dp - rowsum(dout out) + dlse)    dq = ds k    dk = ds^T q

m and l are saved, not the lse, which cannot hold the small digits of l beside a large m.

Source: Dao et al. 2022 (arXiv 2205.14135), algorithm 4; Dao 2023 (arXiv 2307.08691), section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.ops.softmax.call import Call
from regard.ops.softmax.packed import extra_of, mask_of, memory, numbers, together, up

Forward = Callable[[Call], tuple[Tensor, Tensor, Tensor]]


class WithGradient(torch.autograd.Function):
    """(out, lse), with gradients for q, k and v. It saves no scores."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, run: Forward, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `run`, which gives out, m and l."""
        out, top, total = run(call)
        ctx.save_for_backward(q, k, v, out, top, total)
        # what autograd keeps for us is not kept a second time
        shapes = {name: getattr(call, name).detach().to("meta") for name in "qkv"}
        ctx.call = replace(call, sink=None, **shapes)
        ctx.set_materialize_grads(False)
        return out, top + total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        """The same blocks again."""
        q, k, v, out, top, total = ctx.saved_tensors
        call = replace(ctx.call, q=q.detach(), k=k.detach(), v=v.detach())
        d_out = torch.zeros_like(out) if d_out is None else d_out
        with torch.autocast("cpu", enabled=False):
            d_lse = torch.zeros_like(top) if d_lse is None else d_lse
            return None, None, *backward(call, out, (top, total), d_out, d_lse)


def backward(
    call: Call, out: Tensor, saved: tuple[Tensor, Tensor], d_out: Tensor, d_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v.

    saved: of each row [B,H,T] the largest score, and the sum of e^(score - largest).
    """
    from regard.ops.jit import gradient
    from regard.ops.jit.pool import POOL, threads
    from regard.ops.jit.prefill import ROWS
    from regard.ops.jit.product import PANEL, STEP

    workers, n = threads(), call.H // call.G
    step = min(ROWS, up(call.T * n, STEP))
    splits = min(workers // math.gcd(call.B * call.G, workers), max(4, n), -(-call.T * n // step))
    packed = _pack(call, workers)
    d_q = torch.empty(call.q.shape, dtype=call.q.dtype)
    panels = (splits, call.B * call.G, up(call.S, PANEL) // PANEL)
    d_k, d_v = (torch.zeros(*panels, up(size, STEP), PANEL) for size in (call.D, call.E))
    given = ((*memory(call.q), call.D), (*memory(d_out), call.E), (*memory(out), call.E))
    sizes = (call.B, call.H, call.G, call.T, step, splits)
    rest = mask_of(call), extra_of(call), tuple(numbers(x.contiguous()) for x in (*saved, d_lse))
    results = tuple(numbers(x) for x in (d_q, d_k, d_v))

    def work(part: int, of: int) -> None:
        scratch = _scratch(call, step)
        gradient.run_tasks(given, packed, sizes, *rest, scratch, results, part, of)

    POOL.run(work, workers)
    return d_q, _whole(d_k, call.k, call.scale), _whole(d_v, call.v, 1.0)


def _whole(sums: Tensor, like: Tensor, scale: float) -> Tensor:
    """[splits,B G,panels,D,PANEL] -> [B,G,S,D], in the dtype of `like`."""
    B, G, S, D = like.shape
    sums = sums.sum(0) if sums.shape[0] > 1 else sums[0]
    rows = sums[:, :, :D].mT.reshape(B, G, -1, D)[:, :, :S]
    return (rows if scale == 1 else rows * scale).to(like.dtype).contiguous()


def _pack(call: Call, workers: int) -> tuple[Any, ...]:
    """Keys and values by dims, and keys by tokens, in panels."""
    from regard.ops.jit import gradient
    from regard.ops.jit.pool import POOL
    from regard.ops.jit.product import PANEL

    each, (B, G, S, D), E = together(call), call.k.shape, call.E
    length = up(S, PANEL)
    dtype = torch.bfloat16 if each == 2 else torch.float32
    widths = up(D, each), up(E, each), up(D, PANEL)
    fits = (length, *widths) == (S, D, E, D)  # else what is missing must be zeros
    make = torch.empty if fits else torch.zeros
    packed = tuple(numbers(make(B * G * length * width, dtype=dtype)) for width in widths)
    sizes, keys, values = (B, G, S, D, E, each), memory(call.k), memory(call.v)
    POOL.run(lambda part, of: gradient.pack(keys, values, sizes, packed, part, of), workers)
    return packed


def _scratch(call: Call, step: int) -> tuple[Any, ...]:
    """Rows as they are and turned; scores, their gradients and the lanes of a slope; the same as factors; sums."""
    from regard.ops.jit.bits import BF16
    from regard.ops.jit.product import PANEL, STEP

    each = together(call)
    kind = torch.bfloat16 if each == 2 else torch.float32
    left = tuple(
        numbers(torch.zeros(step * width, dtype=kind))
        for size in (call.D, call.E)
        for width in (up(size, each), up(size, STEP))
    )
    scores = tuple(torch.empty(length).numpy() for length in (step * PANEL, step * PANEL, PANEL))
    if each == 2:
        weights, slopes, rows = (numbers(torch.empty(step * PANEL, dtype=kind)) for _ in range(3))
    else:
        weights, slopes, rows = scores[0], scores[1], scores[1]
    factors = weights, weights.view("uint32"), slopes, slopes.view("uint32"), rows, BF16
    return left, scores, factors, torch.empty(step * up(call.D, PANEL)).numpy()
