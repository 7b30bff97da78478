"""The second door of the compiled CPU kernels: prefill, many queries, and its gradient.

`PrefillArgs` holds what a call asks. `prefill` packs keys and values into the panels that products
of small matrices read (`product`), then has blocks of queries computed (`prefill_loops`);
`prefill_with_gradient` is the same for autograd, whose backward pass goes through the same blocks
again (`gradient_loops`). A call takes milliseconds, so arguments go through Numba's own
dispatchers, and threads are those of `openmp.POOL`. Compiled code checks nothing: the caller has
checked sizes, dtypes and devices. Numba is imported when the first call comes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.ops.jit import openmp

_NO_POSITION = 1 << 62


@dataclass(frozen=True, eq=False)
class PrefillArgs:
    """Queries, keys and values, which pairs are visible, and what is added to their scores.

    Attributes:
        q, k, v: [B,H,T,D], [B,G,S,D] and [B,G,S,E], of any strides.
        scale: of the scores.
        softcap: 0 is none.
        symmetric: whether ALiBi is.
        slopes: fp32 [H] of ALiBi, or [0].
        q_positions, k_positions: int64 [b,T] and [b,S], below 0 where a slot holds nothing.
        starts, stops: int64 [b,h,t,n], the ranges of positions that a query sees.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float
    symmetric: bool
    slopes: Tensor
    q_positions: Tensor
    k_positions: Tensor
    starts: Tensor
    stops: Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        """B, H, G, T, S, D, E."""
        (B, H, T, D), (_, G, S, E) = self.q.shape, self.v.shape
        return B, H, G, T, S, D, E


def prefill(args: PrefillArgs) -> tuple[Tensor, Tensor, Tensor]:
    """out [B,H,T,E] in the dtype of q; of each row the largest score m, or 0 if it sees nothing,
    and sum e^(s - m), fp32 [B,H,T].

    Keys and values are packed, then blocks of queries are tasks.
    """
    from regard.ops.jit import matmul
    from regard.ops.jit import prefill_loops as loops

    B, H, G, T, _, D, E = args.sizes
    workers = openmp.thread_count()
    out = torch.empty(B, H, T, E, dtype=args.q.dtype)
    top, total = torch.empty(B, H, T), torch.empty(B, H, T)
    packed, depth = _pack_keys_and_values(args, workers)
    share = math.ceil(B * G * T * (H // G) / workers)
    step = min(loops.ROWS, round_up(share, matmul.REGISTER_ROWS))
    sizes = (B, H, G, T, E, step, depth)
    mask, extra, queries = _mask_arguments(args), _score_arguments(args), (*_flat_memory(args.q), D)
    results = _flat_array(out), _flat_array(top), _flat_array(total)

    def work(part: int, of: int) -> None:
        scratch = _forward_scratch(args, step, depth)
        loops.run_tasks(queries, packed, sizes, mask, extra, scratch, results, part, of)

    openmp.THREAD_POOL.run(work, workers)
    return out, top, total


def prefill_with_gradient(args: PrefillArgs) -> tuple[Tensor, Tensor]:
    """out [B,H,T,E] and lse [B,H,T], with gradients for q, k and v. It saves no scores."""
    found: tuple[Tensor, Tensor] = _PrefillFunction.apply(args, args.q, args.k, args.v)
    return found


class _PrefillFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, args: PrefillArgs, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, top, total = prefill(args)
        ctx.save_for_backward(q, k, v, out, top, total)
        # what autograd keeps for us is not kept a second time
        ctx.args = replace(args, **{x: getattr(args, x).detach().to("meta") for x in "qkv"})
        ctx.set_materialize_grads(False)
        return out, top + total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, top, total = ctx.saved_tensors
        args = replace(ctx.args, q=q.detach(), k=k.detach(), v=v.detach())
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_lse = torch.zeros_like(top) if d_lse is None else d_lse
        with torch.autocast("cpu", enabled=False):
            return None, *prefill_gradient(args, out, (top, total), d_out, d_lse)


def prefill_gradient(
    args: PrefillArgs, out: Tensor, saved: tuple[Tensor, Tensor], d_out: Tensor, d_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v.

    Args:
        args: as `prefill` was given them.
        out: what it gave.
        saved: of each row [B,H,T] the largest score, and the sum of e^(score - largest).
        d_out, d_lse: the gradients of out and lse.
    """
    from regard.ops.jit import prefill_gradient_loops as loops
    from regard.ops.jit.matmul import PANEL_COLUMNS, REGISTER_ROWS
    from regard.ops.jit.prefill_loops import MAX_BLOCK_ROWS

    B, H, G, T, S, D, E = args.sizes
    workers, n = openmp.thread_count(), H // G
    step = min(MAX_BLOCK_ROWS, round_up(T * n, REGISTER_ROWS))
    splits = min(workers // math.gcd(B * G, workers), max(4, n), -(-T * n // step))
    packed = _pack_for_backward(args, workers)
    d_q = torch.empty(args.q.shape, dtype=args.q.dtype)
    panels = (splits, B * G, round_up(S, PANEL_COLUMNS) // PANEL_COLUMNS)
    d_k, d_v = (
        torch.zeros(*panels, round_up(size, REGISTER_ROWS), PANEL_COLUMNS) for size in (D, E)
    )
    given = ((*_flat_memory(args.q), D), (*_flat_memory(d_out), E), (*_flat_memory(out), E))
    sizes = (B, H, G, T, step, splits)
    rows = tuple(_flat_array(x.contiguous()) for x in (*saved, d_lse))
    rest = _mask_arguments(args), _score_arguments(args), rows
    results = tuple(_flat_array(x) for x in (d_q, d_k, d_v))

    def work(part: int, of: int) -> None:
        scratch = _backward_scratch(args, step)
        loops.run_tasks(given, packed, sizes, *rest, scratch, results, part, of)

    openmp.THREAD_POOL.run(work, workers)
    return d_q, _unpack_gradient(d_k, args.k, args.scale), _unpack_gradient(d_v, args.v, 1.0)


def round_up(n: int, step: int) -> int:
    """The least multiple of a step that is not below n.

    >>> up(70, 64)
    128
    """
    return -(-n // step) * step


def _factors_per_word(args: PrefillArgs) -> int:
    """How many factors stand together: two bfloat16s, where the processor multiplies those."""
    from regard.ops.jit.matmul import HAS_BF16_DOT

    return 2 if args.q.dtype == torch.bfloat16 and HAS_BF16_DOT else 1


def _flat_array(x: Tensor) -> Any:
    """The memory of a contiguous tensor as a flat array, of the bits if they are 16."""
    flat = x.detach().view(-1)
    return flat.numpy() if x.dtype == torch.float32 else flat.view(torch.uint16).numpy()


def _flat_memory(x: Tensor) -> tuple[Any, ...]:
    """A tensor [B,a,b,d] as its flat memory, its first three steps, and how its bits are meant; d
    is contiguous.
    """
    from regard.ops.jit.half_precision import BF16, FP16

    x = x.detach()
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    steps = x.stride()
    length = x.shape[-1] + sum(
        (n - 1) * step for n, step in zip(x.shape[:-1], steps[:-1], strict=True)
    )
    tag = FP16 if x.dtype == torch.float16 else BF16
    return _flat_array(x.as_strided((length,), (1,))), *steps[:3], tag


def _mask_arguments(args: PrefillArgs) -> tuple[Any, ...]:
    """Positions of the keys; least, largest and whether all are there, of each panel; ranges of the
    queries.
    """
    from regard.ops.jit.matmul import PANEL_COLUMNS

    keys, S = args.k_positions, args.k.shape[2]
    padded = torch.full((keys.shape[0], round_up(S, PANEL_COLUMNS)), -1)
    padded[:, :S] = keys
    panels = padded.unflatten(1, (-1, PANEL_COLUMNS))
    there = panels >= 0
    least = panels.masked_fill(~there, _NO_POSITION).amin(-1)
    bounds = torch.stack([least, panels.amax(-1), there.all(-1).long()], -1)
    starts, stops = (
        x.expand(*(max(n, 1) for n in x.shape)).contiguous().numpy()
        for x in (args.starts, args.stops)
    )
    return padded.numpy(), bounds.numpy(), starts, stops


def _score_arguments(args: PrefillArgs) -> tuple[Any, ...]:
    """Scale, softcap, ALiBi's slopes, and where the queries stand."""
    slopes, at = args.slopes.contiguous().numpy(), args.q_positions.contiguous().numpy()
    return np.float32(args.scale), np.float32(args.softcap), args.symmetric, slopes, at


def _pack_keys_and_values(args: PrefillArgs, workers: int) -> tuple[tuple[Any, ...], int]:
    """(packed keys and values, steps of a head in both and of a panel of values), and D as it is
    packed.
    """
    from regard.ops.jit import matmul

    (B, _, G, _, S, D, E), each, PANEL = args.sizes, _factors_per_word(args), matmul.PANEL_COLUMNS
    length, depth, width = round_up(S, PANEL), round_up(D, each), round_up(E, PANEL)
    dtype = torch.bfloat16 if each == 2 else torch.float32
    fits = (length, depth, width) == (S, D, E)  # else what is missing must be zeros
    make = torch.empty if fits else torch.zeros
    packed = tuple(_flat_array(make(B * G * length * size, dtype=dtype)) for size in (depth, width))
    sizes, keys, values = (B, G, S, D, E, each), _flat_memory(args.k), _flat_memory(args.v)
    openmp.THREAD_POOL.run(
        lambda part, of: matmul.pack_panels(keys, values, sizes, packed, part, of), workers
    )
    return (*packed, length * depth, length * width, length * PANEL), depth


def _forward_scratch(args: PrefillArgs, rows: int, depth: int) -> tuple[Any, ...]:
    """Queries, scores, weights, sums and the lanes of a maximum, for one worker."""
    from regard.ops.jit.matmul import PANEL_COLUMNS
    from regard.ops.jit.prefill_loops import TILE_KEYS

    pairs = _factors_per_word(args) == 2
    q = _flat_array(torch.zeros(rows * depth, dtype=torch.bfloat16 if pairs else torch.float32))
    scores = torch.empty(rows * TILE_KEYS).numpy()
    weights = _flat_array(torch.empty(rows * TILE_KEYS, dtype=torch.bfloat16)) if pairs else scores
    sums = torch.empty(rows * round_up(args.v.shape[3], PANEL_COLUMNS)).numpy()
    return q, scores, weights, sums, torch.empty(PANEL_COLUMNS).numpy()


def _pack_for_backward(args: PrefillArgs, workers: int) -> tuple[Any, ...]:
    """Keys and values by dims, and keys by tokens, in panels."""
    from regard.ops.jit import prefill_gradient_loops
    from regard.ops.jit.matmul import PANEL_COLUMNS

    (B, _, G, _, S, D, E), each = args.sizes, _factors_per_word(args)
    length = round_up(S, PANEL_COLUMNS)
    dtype = torch.bfloat16 if each == 2 else torch.float32
    widths = round_up(D, each), round_up(E, each), round_up(D, PANEL_COLUMNS)
    fits = (length, *widths) == (S, D, E, D)  # else what is missing must be zeros
    make = torch.empty if fits else torch.zeros
    packed = tuple(_flat_array(make(B * G * length * width, dtype=dtype)) for width in widths)
    sizes, keys, values = (B, G, S, D, E, each), _flat_memory(args.k), _flat_memory(args.v)
    openmp.THREAD_POOL.run(
        lambda part, of: prefill_gradient_loops.pack_for_gradient(
            keys, values, sizes, packed, part, of
        ),
        workers,
    )
    return packed


def _backward_scratch(args: PrefillArgs, step: int) -> tuple[Any, ...]:
    """Rows as they are and turned; scores, their gradients and the lanes of a slope; the same as
    factors; sums.
    """
    from regard.ops.jit.half_precision import BF16
    from regard.ops.jit.matmul import PANEL_COLUMNS, REGISTER_ROWS

    D, E, each = args.q.shape[3], args.v.shape[3], _factors_per_word(args)
    kind = torch.bfloat16 if each == 2 else torch.float32
    left = tuple(
        _flat_array(torch.zeros(step * width, dtype=kind))
        for size in (D, E)
        for width in (round_up(size, each), round_up(size, REGISTER_ROWS))
    )
    scores = tuple(
        torch.empty(length).numpy()
        for length in (step * PANEL_COLUMNS, step * PANEL_COLUMNS, PANEL_COLUMNS)
    )
    if each == 2:
        weights, slopes, rows = (
            _flat_array(torch.empty(step * PANEL_COLUMNS, dtype=kind)) for _ in range(3)
        )
    else:
        weights, slopes, rows = scores[0], scores[1], scores[1]
    factors = weights, weights.view("uint32"), slopes, slopes.view("uint32"), rows, BF16
    return left, scores, factors, torch.empty(step * round_up(D, PANEL_COLUMNS)).numpy()


def _unpack_gradient(sums: Tensor, like: Tensor, scale: float) -> Tensor:
    """[splits,B G,panels,D,PANEL] -> [B,G,S,D], in the dtype of `like`."""
    B, G, S, D = like.shape
    sums = sums.sum(0) if sums.shape[0] > 1 else sums[0]
    rows = sums[:, :, :D].mT.reshape(B, G, -1, D)[:, :, :S]
    return (rows if scale == 1 else rows * scale).to(like.dtype).contiguous()
