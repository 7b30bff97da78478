"""Prefill on a CPU: attention of many queries, and its gradient.

`PrefillArgs` holds the arguments. `prefill` packs keys and values into the panels that the matrix
products read (`matmul`), then computes blocks of queries (`prefill_loops`). `prefill_with_gradient`
does the same for autograd; its backward pass computes the weights of the same blocks again
(`prefill_gradient_loops`). A call takes milliseconds; it therefore uses Numba's dispatchers and the
Python threads of `openmp.THREAD_POOL`, which are simpler and slower to start than the argument
structs and entry points of `decode`. Compiled code checks no argument: the caller has checked
sizes, dtypes and devices. Numba is imported at the first call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from regard.ops.jit import launch, openmp
from regard.ops.jit.launch import FlatArray

if TYPE_CHECKING:
    from regard.ops.jit.matmul import Factors

_NO_POSITION = 1 << 62
"""Larger than any position."""


@dataclass(frozen=True, eq=False)
class PrefillArgs:
    """The arguments of prefill: queries, keys and values, which keys each query sees, and the terms
    that are added to the scores.

    In the shapes b, h and t are B, H and T, or 1.

    Args:
        q: queries `[B, H, T, D]` of any strides.
        k: keys `[B, G, S, D]` of any strides.
        v: values `[B, G, S, E]` of any strides.
        scale: the factor on q . k.
        softcap: the bound on the scores; 0: none.
        symmetric: whether ALiBi is symmetric.
        slopes: the slopes of ALiBi, fp32 `[H]`, or `[0]`.
        q_positions: the positions of the queries, int64 `[b, T]`, below 0 for empty slots.
        k_positions: the positions of the keys, int64 `[b, S]`, below 0 for empty slots.
        starts: the starts of the n ranges of positions that each query sees, int64 `[b, h, t, n]`.
        stops: one past the ends of these ranges, in the same shape.
        out_dtype: the dtype of the output: that of q, or fp32.
        factors: how the factors of the products are stored; None: in the form that this process
            multiplies fastest.
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
    out_dtype: torch.dtype
    factors: Factors | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes B, H, G, T, S, D and E."""
        (B, H, T, D), (_, G, S, E) = self.q.shape, self.v.shape
        return B, H, G, T, S, D, E


def prefill(args: PrefillArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention without a gradient.

    Keys and values are packed first; then each task is a block of queries.

    Args:
        args: the queries, keys and values, the mask and the terms that are added to the scores.

    Returns:
        The output `[B, H, T, E]` in `args.out_dtype`, and for each query in fp32 `[B, H, T]` the
        largest score m (0 if it sees no key) and the sum of e^(s - m) over its scores s.
    """
    from regard.ops.jit import prefill_loops as loops

    B, H, G, T, _, D, E = args.sizes
    workers, group_rows = openmp.thread_count(), _factors(args).rows
    out = launch.empty(B, H, T, E, dtype=args.out_dtype)
    max_score, scaled_sum = (launch.empty(B, H, T, dtype=torch.float32) for _ in range(2))
    panels, packed_dims = _pack_keys_and_values(args, workers)
    rows_per_worker = math.ceil(B * G * T * (H // G) / workers)
    most_rows = loops.MAX_BLOCK_ROWS // group_rows * group_rows
    block_rows = min(most_rows, round_up(rows_per_worker, group_rows))
    sizes = (B, H, G, T, E, block_rows, packed_dims)
    mask, extra, queries = _mask_arguments(args), _score_arguments(args), (*_flat_memory(args.q), D)
    results = _flat_array(out), _flat_array(max_score), _flat_array(scaled_sum)

    def work(worker: int, worker_count: int) -> None:
        scratch = _forward_scratch(args, block_rows, packed_dims)
        loops.run_tasks(queries, panels, sizes, mask, extra, scratch, results, worker, worker_count)

    openmp.THREAD_POOL.run(work, workers)
    return out, max_score, scaled_sum


Gradients: TypeAlias = Callable[
    [tuple[Tensor, ...], Tensor | None, Tensor | None], tuple[Tensor | None, ...]
]
"""(q, k, v), the gradient of the output and that of the lse -> the gradients of q, k and v."""


def prefill_with_gradient(
    args: PrefillArgs, differentiable_gradients: Gradients
) -> tuple[Tensor, Tensor]:
    """Compute the output `[B, H, T, E]` and the lse `[B, H, T]`, which autograd can differentiate
    by q, k and v. No scores are saved.

    Args:
        args: the arguments of `prefill`.
        differentiable_gradients: computes the gradients where they must be differentiable
            themselves (`create_graph=True`), which those of the compiled loops are not.
    """
    results: tuple[Tensor, Tensor] = _PrefillFunction.apply(
        args, differentiable_gradients, args.q, args.k, args.v
    )
    return results


class _PrefillFunction(torch.autograd.Function):
    """Autograd function of `prefill`, for the gradients of q, k and v."""

    @staticmethod
    def forward(
        ctx: Any,
        args: PrefillArgs,
        differentiable_gradients: Gradients,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Tensor]:
        out, top, total = prefill(args)
        ctx.differentiable_gradients = differentiable_gradients
        ctx.save_for_backward(q, k, v, out, top, total)
        # ctx.save_for_backward holds q, k and v already; these arguments hold their shapes only
        ctx.args = replace(args, **{x: getattr(args, x).detach().to("meta") for x in "qkv"})
        ctx.set_materialize_grads(False)
        return out, top + total.log()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, top, total = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, *ctx.differentiable_gradients((q, k, v), d_out, d_lse)
        args = replace(ctx.args, q=q.detach(), k=k.detach(), v=v.detach())
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_lse = torch.zeros_like(top) if d_lse is None else d_lse
        with torch.autocast("cpu", enabled=False):
            return None, None, *prefill_gradient(args, out, (top, total), d_out, d_lse)


def prefill_gradient(
    args: PrefillArgs,
    out: Tensor,
    saved: tuple[Tensor, Tensor],
    d_out: Tensor,
    d_lse: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v.

    Args:
        args: the arguments of `prefill`.
        out: the output of `prefill`.
        saved: for each query `[B, H, T]` the largest score, and the sum of e^(score - largest), as
            `prefill` returned them.
        d_out: the gradient of the output, `[B, H, T, E]`.
        d_lse: the gradient of the lse, `[B, H, T]`.
        dtype: the dtype of the gradients: that of q (None), or fp32.
    """
    from regard.ops.jit import prefill_gradient_loops as loops
    from regard.ops.jit.matmul import PANEL_COLUMNS
    from regard.ops.jit.prefill_loops import MAX_BLOCK_ROWS

    B, H, G, T, S, D, E = args.sizes
    workers, group_size, group_rows = openmp.thread_count(), H // G, _factors(args).rows
    step = min(MAX_BLOCK_ROWS // group_rows * group_rows, round_up(T * group_size, group_rows))
    splits = min(
        workers // math.gcd(B * G, workers), max(4, group_size), -(-T * group_size // step)
    )
    packed = _pack_for_backward(args, workers)
    d_q = launch.empty(*args.q.shape, dtype=dtype or args.q.dtype)
    panels = (splits, B * G, round_up(S, PANEL_COLUMNS) // PANEL_COLUMNS)
    d_k, d_v = (
        launch.full((*panels, round_up(size, group_rows), PANEL_COLUMNS), 0, dtype=torch.float32)
        for size in (D, E)
    )
    row_inputs = ((*_flat_memory(args.q), D), (*_flat_memory(d_out), E), (*_flat_memory(out), E))
    sizes = (B, H, G, T, step, splits)
    rows = tuple(_flat_array(x.contiguous()) for x in (*saved, d_lse))
    call_data = _mask_arguments(args), _score_arguments(args), rows
    results = tuple(_flat_array(x) for x in (d_q, d_k, d_v))

    def work(worker: int, worker_count: int) -> None:
        scratch = _backward_scratch(args, step)
        loops.run_tasks(
            row_inputs, packed, sizes, *call_data, scratch, results, worker, worker_count
        )

    openmp.THREAD_POOL.run(work, workers)
    dtype = d_q.dtype
    return (
        d_q,
        _unpack_gradient(d_k, args.k, args.scale, dtype),
        _unpack_gradient(d_v, args.v, 1.0, dtype),
    )


def round_up(n: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `n`.

    >>> round_up(70, 64)
    128
    """
    return -(-n // step) * step


def _factors(args: PrefillArgs) -> Factors:
    """Return how the factors of the products of a call are stored."""
    from regard.ops.jit.matmul import FP32_FACTORS, bfloat16_factors

    if args.factors is not None:
        return args.factors
    return bfloat16_factors()[0] if args.q.dtype == torch.bfloat16 else FP32_FACTORS


def _factor_array(length: int, factors: Factors, *, zeros: bool = False) -> FlatArray:
    """Allocate an array of `length` factors, all 0 or uninitialized."""
    dtype = torch.bfloat16 if factors.each == 2 else torch.float32
    memory = launch.full((length,), 0, dtype=dtype) if zeros else launch.empty(length, dtype=dtype)
    return _flat_array(memory).view(factors.dtype)


def _scratch(*shape: int) -> FlatArray:
    """Allocate an uninitialized array of fp32 numbers."""
    return launch.array(launch.empty(*shape, dtype=torch.float32), torch.float32)


def _flat_array(x: Tensor) -> FlatArray:
    """Return the memory of a contiguous tensor as a flat numpy array; 16-bit numbers are viewed as
    uint16.
    """
    return launch.array(x, x.dtype).reshape(-1)


def _flat_memory(x: Tensor) -> tuple[object, ...]:
    """Return the flat memory of a tensor of four dimensions, its first three strides, and the tag
    of its encoding; it is copied if its last dimension is not contiguous.
    """
    from regard.ops.jit.half_precision import BF16, FP16

    x = x.detach()
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    strides = x.stride()
    length = x.shape[-1] + sum(
        (n - 1) * step for n, step in zip(x.shape[:-1], strides[:-1], strict=True)
    )
    tag = FP16 if x.dtype == torch.float16 else BF16
    return _flat_array(x.as_strided((length,), (1,))), *strides[:3], tag


def _mask_arguments(args: PrefillArgs) -> tuple[object, ...]:
    """Return the argument `mask` of the loops: the positions of the keys; for each panel of keys
    the smallest and the largest position and whether no slot is empty; and the starts and stops of
    the ranges of positions that each query sees.
    """
    from regard.ops.jit.matmul import PANEL_COLUMNS

    keys, S = args.k_positions, args.k.shape[2]
    padded = launch.full((keys.shape[0], round_up(S, PANEL_COLUMNS)), -1, dtype=torch.int64)
    padded[:, :S] = keys
    panels = padded.unflatten(1, (-1, PANEL_COLUMNS))
    is_token = panels >= 0
    smallest = panels.masked_fill(~is_token, _NO_POSITION).amin(-1)
    bounds = torch.stack([smallest, panels.amax(-1), is_token.all(-1).long()], -1)
    starts, stops = (
        launch.array(x.expand(*(max(n, 1) for n in x.shape)).contiguous(), torch.int64)
        for x in (args.starts, args.stops)
    )
    return *(launch.array(x, torch.int64) for x in (padded, bounds)), starts, stops


def _score_arguments(args: PrefillArgs) -> tuple[object, ...]:
    """Return the argument `extra` of the loops: the scale, the softcap, whether ALiBi is symmetric,
    its slopes, and the positions of the queries.
    """
    slopes = launch.array(args.slopes.contiguous(), torch.float32)
    q_positions = launch.array(args.q_positions.contiguous(), torch.int64)
    return np.float32(args.scale), np.float32(args.softcap), args.symmetric, slopes, q_positions


def _pack_keys_and_values(args: PrefillArgs, workers: int) -> tuple[tuple[object, ...], int]:
    """Pack keys and values for `prefill`.

    Returns:
        (packed keys, packed values, stride of a head in both, stride of a panel of values), and the
        packed size of D.
    """
    from regard.ops.jit import matmul

    (B, _, G, _, S, D, E), factors, PANEL = args.sizes, _factors(args), matmul.PANEL_COLUMNS
    length, depth, width = round_up(S, PANEL), round_up(D, factors.depth), round_up(E, PANEL)
    padded = (length, depth, width) != (S, D, E)  # then the padding must be zeros
    packed = tuple(
        _factor_array(B * G * length * size, factors, zeros=padded) for size in (depth, width)
    )
    sizes, keys, values = (B, G, S, D, E, factors.each), _flat_memory(args.k), _flat_memory(args.v)
    openmp.THREAD_POOL.run(
        lambda worker, worker_count: matmul.pack_panels(
            keys, values, sizes, packed, worker, worker_count
        ),
        workers,
    )
    return (*packed, length * depth, length * width, length * PANEL), depth


def _forward_scratch(args: PrefillArgs, rows: int, depth: int) -> tuple[object, ...]:
    """Allocate the memory of one thread of `prefill`: the queries, scores, weights and output sums
    of a block, the largest score and the sum of weights of each row, and `_loop_scratch`.
    """
    from regard.ops.jit.matmul import PANEL_COLUMNS
    from regard.ops.jit.prefill_loops import TILE_KEYS

    factors = _factors(args)
    q = _factor_array(rows * depth, factors, zeros=True)
    scores = _scratch(rows * TILE_KEYS)
    weights = _factor_array(rows * TILE_KEYS, factors) if factors.each == 2 else scores
    sums = _scratch(rows * round_up(args.v.shape[3], PANEL_COLUMNS))
    maxima_and_totals = _scratch(2, rows)
    return q, scores, weights, sums, (*maxima_and_totals,), *_loop_scratch(args, rows)


def _loop_scratch(args: PrefillArgs, rows: int) -> tuple[object, ...]:
    """Allocate what one thread notes of a mask and of its tile registers.

    Returns:
        For each group of rows the first and one past the last panel of a tile that it sees, and
        what the mask hides of each panel; for each range of positions its bounds over all rows of
        a block; and two configurations of tile registers.
    """
    from regard.ops.jit.amx import CONFIGURATION_BYTES
    from regard.ops.jit.prefill_loops import TILE_PANELS

    groups, ranges = rows // _factors(args).rows, max(args.starts.shape[3], 1)
    spans, hidden = np.empty((groups, 2), np.int64), np.empty((groups, TILE_PANELS), np.int8)
    hull = np.empty((ranges, 2), np.int64)
    return (spans, hidden), hull, np.empty(2 * CONFIGURATION_BYTES, np.uint8)


def _pack_for_backward(args: PrefillArgs, workers: int) -> tuple[object, ...]:
    """Return the keys and the values in panels `[dims, PANEL_COLUMNS]` for the products over
    dimensions, and the keys in panels `[S, PANEL_COLUMNS]` for the products over tokens.
    """
    from regard.ops.jit import prefill_gradient_loops
    from regard.ops.jit.matmul import PANEL_COLUMNS

    (B, _, G, _, S, D, E), factors = args.sizes, _factors(args)
    length, depth = round_up(S, PANEL_COLUMNS), factors.depth
    widths = round_up(D, depth), round_up(E, depth), round_up(D, PANEL_COLUMNS)
    padded = (length, *widths) != (S, D, E, D)  # then the padding must be zeros
    packed = tuple(_factor_array(B * G * length * width, factors, zeros=padded) for width in widths)
    sizes, keys, values = (B, G, S, D, E, factors.each), _flat_memory(args.k), _flat_memory(args.v)
    openmp.THREAD_POOL.run(
        lambda worker, worker_count: prefill_gradient_loops.pack_for_gradient(
            keys, values, sizes, packed, worker, worker_count
        ),
        workers,
    )
    return packed


def _backward_scratch(args: PrefillArgs, step: int) -> tuple[object, ...]:
    """Allocate the memory of one thread of the backward pass.

    Returns:
        The queries and output gradients of a block with their transposes; the scores, their
        gradients, and the derivatives of the softcap for one row; the weights and score gradients
        as factors of the products, which are separate bfloat16 arrays where products are in
        bfloat16; the sums of the query gradient; m, 1/l, shift and dlse of each row; and
        `_loop_scratch`.
    """
    from regard.ops.jit.matmul import PANEL_COLUMNS

    D, E, factors = args.q.shape[3], args.v.shape[3], _factors(args)
    row_factors = tuple(
        _factor_array(step * width, factors, zeros=True)
        for size in (D, E)
        for width in (round_up(size, factors.depth), round_up(size, factors.rows))
    )
    scores = tuple(
        _scratch(length) for length in (step * PANEL_COLUMNS, step * PANEL_COLUMNS, PANEL_COLUMNS)
    )
    if factors.each == 2:
        weights, slopes, rows = (_factor_array(step * PANEL_COLUMNS, factors) for _ in range(3))
    else:
        weights, slopes, rows = scores[0], scores[1], scores[1]
    right = weights, weights.view("uint32"), slopes, slopes.view("uint32"), rows
    d_q = _scratch(step * round_up(D, PANEL_COLUMNS))
    of_rows = _scratch(4, step)
    return row_factors, scores, right, d_q, (*of_rows,), *_loop_scratch(args, step)


def _unpack_gradient(sums: Tensor, like: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Sum a gradient `[splits, B G, panels, D, PANEL_COLUMNS]` over the splits, multiply it by the
    scale, and convert it to `[B, G, S, D]`, the shape of `like`, in a dtype.
    """
    B, G, S, D = like.shape
    sums = sums.sum(0) if sums.shape[0] > 1 else sums[0]
    rows = sums[:, :, :D].mT.reshape(B, G, -1, D)[:, :, :S]
    return (rows if scale == 1 else rows * scale).to(dtype).contiguous()
