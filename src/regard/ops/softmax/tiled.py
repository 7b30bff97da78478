"""The kernel "tiled": flash attention in plain torch, with memory linear in T and S.

With m the largest score so far, each range of keys updates

    m' = max(m, max_j s_j)    l' = l e^(m - m') + sum_j e^(s_j - m')
    o' = o e^(m - m') + sum_j e^(s_j - m') v_j

and at the end out = o / l, lse = m + ln l. The backward pass uses the saved m and l, since an lse
cannot represent the small digits of ln l beside a large m:

    p = e^(s - m) / l    dv = p^T dout    dp = dout v^T    ds = p (dp - rowsum(p dp) + dlse)
    dq = ds k    dk = ds^T q

rowsum(p dp) = rowsum(dout out), without a pass over the keys, serves small scores.

Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), algorithm 3; Dao et al. 2022 (arXiv
2205.14135), algorithms 1 and 4; Dao 2023 (arXiv 2307.08691), section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.softmax.call import SMALL_SCORE_BOUND, Call, Partial
from regard.ops.softmax.definition import differentiable_gradients
from regard.ops.softmax.kernel import Kernel, KernelResult, WorkEstimate, maximum_and_sum
from regard.ops.softmax.lowering import (
    BiasGradient,
    RuleOfTile,
    TileGradient,
    visible_key_ranges,
    why_not_pairs,
)
from regard.ops.softmax.merge import apply_sink


class TileSizes(NamedTuple):
    """The sizes of the blocks and tiles into which a call is split.

    Args:
        rows, keys: the most queries in a block per head, and the keys in a tile.
        tile: the most scores in a key range of at least `keys` keys, to stay in the CPU cache.
        long: the fewest adjacent fully visible tiles that form a range without a mask.
    """

    rows: int = 128
    keys: int = 128
    tile: int = 2**19
    long: int = 5


DEFAULT_TILE_SIZES = TileSizes()
"""The tile sizes that the kernel "tiled" uses."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernel supports."""


class TiledKernel(Kernel):
    """The kernel "tiled": every mask, bias and rule on pairs, with gradients."""

    name = "tiled"
    wide_output = True

    def __init__(self, sizes: TileSizes = DEFAULT_TILE_SIZES) -> None:
        self.sizes = sizes

    def why_not(self, call: Call) -> list[str]:
        """Refuse taps, unsupported dtypes, non-finite masked inputs, and compiled graphs."""
        reasons = [*([f"does not expose {sorted(call.needs)}"] if call.needs else [])]
        if call.q.dtype not in DTYPES:
            reasons.append(f"no {str(call.q.dtype).removeprefix('torch.')}")
        if call.compiling:  # a question about sizes would specialize the graph
            reason = "reads the tiles of the mask, which is not possible in a compiled graph"
            return [*reasons, reason]
        if 0 in (call.B, call.T, call.S, call.E):
            reasons.append(f"nothing to compute (B {call.B}, T {call.T}, S {call.S}, E {call.E})")
        if not call.readable:
            reasons.append(
                "reads values, which a transform of torch.func hides, and which meta and fake "
                "tensors do not have"
            )
        elif not reasons and not call.finite:
            reasons.append("a NaN or infinity behind a mask would leak through 0 x NaN")
        return reasons

    def why_not_score(self, call: Call) -> list[str]:
        """Refuse rules that read more than one score at a time, or change weights."""
        return why_not_pairs(call)

    def priority(self, call: Call) -> float | None:
        """Return 60 on a CPU, behind torch's fused kernel; 20 on other devices."""
        return 60 if call.q.is_cpu else 20

    def run(self, call: Call) -> KernelResult:
        """Compute all query blocks, one after another."""
        seed = int(torch.randint(2**31, (), device="cpu")) if call.dropout else 0
        blocks = query_blocks(call, self.sizes)
        if call.has_gradient:
            bias_tensors = call.bias_tensors
            rule_tensors = () if call.score is None else call.score.tensors()
            out, lse = TiledFunction.apply(  # type: ignore[no-untyped-call]
                call, seed, list(blocks), call.q, call.k, call.v, *bias_tensors, *rule_tensors
            )
        else:
            out, max_score, scaled_sum = tiled_forward(call, seed, call.q, call.k, call.v, blocks)
            lse = max_score + scaled_sum.log()
        if call.score is not None and call.score.normalizer is not None:
            return KernelResult(out, None)
        return KernelResult(out if call.sink is None else apply_sink(out, lse, call.sink), lse)

    def part_gradients(
        self, call: Call, whole: Partial, d_out: Tensor, d_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of some of the keys; see `attend.part_gradients`."""
        bias_tensors = call.bias_tensors
        d_bias = BiasGradient(
            call.bias, tuple(x.requires_grad for x in bias_tensors), call.score_dtype
        )
        grads = tiled_backward(
            call,
            0,
            list(query_blocks(call, self.sizes)),
            (call.q, call.k, call.v, whole.out, *maximum_and_sum(whole.lse)),
            d_out,
            d_lse,
            d_bias,
            exact_row_sums=False,
            of_part=True,
        )
        return *grads, *d_bias.total()

    def work(self, call: Call) -> WorkEstimate:
        """Return the pairs of the key ranges, and the bytes of lse, scores and gradients."""
        size, heads = call.score_dtype.itemsize, call.B * call.H
        areas = [
            (rows.stop - rows.start) * (columns.stop - columns.start)
            for rows, ranges in query_blocks(call, self.sizes)
            for columns, _ in ranges
        ]
        elements = heads * call.T + heads * max(areas, default=0) * (4 if call.has_gradient else 2)
        if call.has_gradient:
            elements += call.q.numel() + call.k.numel() + call.v.numel()
        return WorkEstimate(heads * sum(areas), elements * size)


class TiledKeyRange(NamedTuple):
    """A range of keys, and whether every query of the block sees all of it."""

    columns: slice
    full: bool


class TiledQueryBlock(NamedTuple):
    """A block of queries, and the ranges of keys that some of them see."""

    rows: slice
    ranges: list[TiledKeyRange]


def query_blocks(call: Call, sizes: TileSizes = DEFAULT_TILE_SIZES) -> Iterator[TiledQueryBlock]:
    """Yield the blocks of queries of a call with their key ranges."""
    heads, tile_keys = call.B * call.H, sizes.keys
    step = min(call.T, max(16, min(sizes.rows, sizes.tile // (tile_keys * heads))))
    widest = tile_keys * max(1, sizes.tile // (heads * step * tile_keys))
    for start in range(0, call.T, step):
        rows = slice(start, min(start + step, call.T))
        ranges = [
            TiledKeyRange(slice(i, min(i + widest, keys.stop)), full)
            for keys, full in visible_key_ranges(call, rows, tile_keys, sizes.long)
            for i in range(keys.start, keys.stop, widest)
        ]
        yield TiledQueryBlock(rows, ranges)


class TiledFunction(torch.autograd.Function):
    """Autograd function for output and lse, which saves no scores."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        seed: int,
        blocks: list[TiledQueryBlock],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *learned: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute the output; `learned` are the tensors of the bias, then of the score rule."""
        out, max_score, scaled_sum = tiled_forward(call, seed, q, k, v, blocks)
        ctx.save_for_backward(q, k, v, out, max_score, scaled_sum, *learned)
        # autograd saves q, k and v already; the saved call holds their shapes only
        shapes = {name: getattr(call, name).detach().to("meta") for name in "qkv"}
        ctx.call, ctx.seed, ctx.blocks = replace(call, sink=None, **shapes), seed, blocks
        # a rule may make scores of any size
        ctx.exact_row_sums = call.score is not None or call.score_bound > SMALL_SCORE_BOUND
        ctx.set_materialize_grads(False)
        return out, max_score + scaled_sum.log()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients from scores computed again, by the definition if differentiable."""
        q, k, v, out, max_score, scaled_sum, *learned = ctx.saved_tensors
        call, rule = ctx.call, None
        if torch.is_grad_enabled():  # create_graph=True
            inputs = (q, k, v, *learned)
            return None, None, None, *differentiable_gradients(call, inputs, d_out, d_lse)
        n = 0 if call.bias is None else len(call.bias.tensors())
        if call.bias is not None:
            call = replace(call, bias=call.bias.with_tensors(learned[:n]))
        if call.score is not None:
            call = replace(call, score=call.score.with_tensors(learned[n:]))
            rule = RuleOfTile(call, q.device, learned[n:], ctx.needs_input_grad[6 + n :])
        d_bias = BiasGradient(call.bias, ctx.needs_input_grad[6 : 6 + n], max_score.dtype)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        with torch.autocast(q.device.type, enabled=False):
            saved = (q, k, v, out, max_score, scaled_sum)
            grads = tiled_backward(
                call,
                ctx.seed,
                ctx.blocks,
                saved,
                d_out,
                d_lse,
                d_bias,
                rule,
                exact_row_sums=ctx.exact_row_sums,
            )
        d_qkv = (x.to(q.dtype) for x in grads)
        return None, None, None, *d_qkv, *d_bias.total(), *(rule.total() if rule else ())


def tiled_forward(
    call: Call, seed: int, q: Tensor, k: Tensor, v: Tensor, blocks: Iterable[TiledQueryBlock]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output `[B, H, T, E]`, and m and l of each row, `[B, H, T]`."""
    dtype = call.score_dtype
    out = torch.zeros(call.B, call.H, call.T, call.E, dtype=call.result_dtype, device=q.device)
    max_scores, scaled_sums = (
        torch.zeros(call.B, call.H, call.T, dtype=dtype, device=q.device) for _ in "ml"
    )
    rule = None if call.score is None else RuleOfTile(call, q.device)
    adds_weights = rule is not None and rule.replaces_softmax
    for rows, ranges in blocks:
        if not ranges:
            continue
        query = fold_heads(call, q[:, :, rows]) * call.scale
        # a finite number instead of -inf, because -inf - (-inf) is NaN
        max_score = torch.full_like(query[..., :1], torch.finfo(dtype).min)
        scaled_sum, weighted_sum = (
            torch.zeros_like(max_score),
            max_score.new_zeros(*query.shape[:2], call.E),
        )
        for key_range in ranges:
            s = tile_scores(call, query, k, rows, key_range, rule).values
            if adds_weights:  # of a normalizer whose rows have no sum
                if call.dropout:
                    s.mul_(dropout_factors(call, seed, s, rows, key_range))
                weighted_sum.baddbmm_(s, keys_of_range(v, key_range, dtype))
                continue
            new_max = torch.maximum(max_score, s.amax(-1, keepdim=True))
            p, correction = s.sub_(new_max).exp_(), max_score.sub_(new_max).exp_()
            scaled_sum.mul_(correction).add_(p.sum(-1, keepdim=True))
            if call.dropout:
                p.mul_(dropout_factors(call, seed, p, rows, key_range))
            weighted_sum.mul_(correction).baddbmm_(p, keys_of_range(v, key_range, dtype))
            max_score = new_max
        max_scores[:, :, rows], scaled_sums[:, :, rows] = (
            x.view(call.B, call.H, -1) for x in (max_score, scaled_sum)
        )
        out[:, :, rows] = weighted_sum.div_(scaled_sum.masked_fill_(scaled_sum == 0, 1)).view(
            out[:, :, rows].shape
        )
    return out, max_scores, scaled_sums


def tiled_backward(
    call: Call,
    seed: int,
    blocks: list[TiledQueryBlock],
    saved: tuple[Tensor, ...],
    d_out: Tensor,
    d_lse: Tensor | None,
    d_bias: BiasGradient,
    rule: RuleOfTile | None = None,
    *,
    exact_row_sums: bool,
    of_part: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, and add that of the bias to `d_bias`."""
    (q, k, v, out, max_score, scaled_sum), dtype = saved, call.score_dtype
    d_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
    d_k, d_v = (torch.zeros(x.flatten(0, 1).shape, dtype=dtype, device=q.device) for x in (k, v))
    for rows, ranges in blocks:
        query = fold_heads(call, q[:, :, rows]) * call.scale
        d_row, row_max, row_sum = (
            fold_heads(call, x[:, :, rows])
            for x in (d_out, max_score[..., None], scaled_sum[..., None])
        )
        sees_nothing = row_sum == 0
        row_sum = row_sum.masked_fill(sees_nothing, 1)
        recompute = partial(
            _recompute_weights, call, seed, (query, row_max, d_row / row_sum), (k, v), rows, rule
        )
        only_range = [recompute(key_range) for key_range in ranges[: len(ranges) == 1]]
        adds_weights = rule is not None and rule.replaces_softmax
        if adds_weights:
            row_shift = 0 * row_max
        elif not of_part and (only_range or exact_row_sums):
            recomputed = only_range or map(recompute, ranges)
            sums = ((p * d_p).sum(-1, keepdim=True) for p, d_p, *_ in recomputed)
            row_shift = sum(sums, 0 * row_max)
        else:
            row_shift = (d_row * fold_heads(call, out[:, :, rows])).sum(-1, keepdim=True)
        if d_lse is not None:
            # the lse of a row that sees no key is constant: its gradient must have no effect
            row_shift = row_shift - fold_heads(call, d_lse[:, :, rows, None]).masked_fill(
                sees_nothing, 0
            )
        row_shift, d_row = row_shift / row_sum, d_row / row_sum
        d_query = torch.zeros_like(query)
        for key_range in ranges:
            p, d_p, dropped_p, tile = only_range.pop() if only_range else recompute(key_range)
            d_v[:, key_range.columns] += torch.bmm(dropped_p.mT, d_row)
            d_s = d_p if adds_weights else d_p.sub_(row_shift).mul_(p)
            if tile.rule is not None:
                d_s = tile.rule.pull_back(d_s)
            d_bias.add(call, d_s, rows, key_range.columns)
            if tile.slope is not None:
                d_s.mul_(tile.slope)
            d_query.baddbmm_(d_s, keys_of_range(k, key_range, dtype))
            d_k[:, key_range.columns] += torch.bmm(d_s.mT, query)
        d_q[:, :, rows] = d_query.mul_(call.scale).view(d_q[:, :, rows].shape)
    return d_q, d_k.view(k.shape), d_v.view(v.shape)


def _recompute_weights(
    call: Call,
    seed: int,
    row: tuple[Tensor, ...],
    keys_values: tuple[Tensor, Tensor],
    rows: slice,
    rule: RuleOfTile | None,
    key_range: TiledKeyRange,
) -> tuple[Tensor, Tensor, Tensor, TileScores]:
    """Recompute the weights of a block of queries for a range of keys."""
    (query, row_max, d_row), (k, v) = row, keys_values
    tile = tile_scores(call, query, k, rows, key_range, rule, with_slope=True)
    p = tile.values
    if rule is None or not rule.replaces_softmax:
        p = p.sub_(row_max).exp_()
    d_p = torch.bmm(d_row, keys_of_range(v, key_range, query.dtype).mT)
    if not call.dropout:
        return p, d_p, p, tile
    factors = dropout_factors(call, seed, p, rows, key_range)
    return p, d_p.mul_(factors), p * factors, tile


class TileScores(NamedTuple):
    """The scores of a key range, or a rule's weights, and the derivatives of softcap and rule."""

    values: Tensor
    slope: Tensor | None = None
    rule: TileGradient | None = None


def tile_scores(
    call: Call,
    query: Tensor,
    k: Tensor,
    rows: slice,
    key_range: TiledKeyRange,
    rule: RuleOfTile | None = None,
    *,
    with_slope: bool = False,
) -> TileScores:
    """Compute the scores of a key range, and their derivatives if `with_slope` is set."""
    slope = None
    s = torch.bmm(query, keys_of_range(k, key_range, query.dtype).mT)
    if call.softcap is not None:
        s.div_(call.softcap).tanh_()
        slope = 1 - s * s if with_slope else None
        s.mul_(call.softcap)
    by_head = s.view(call.B, call.H, -1, s.shape[-1])
    block_of = (call.q_positions, call.k_positions, rows, key_range.columns)
    if call.bias is not None:
        by_head += call.bias.block(*block_of, dtype=s.dtype, device=s.device)
    if rule is not None:
        tile = _apply_rule(call, by_head, rows, key_range, rule, with_slope=with_slope)
        return tile._replace(slope=slope)
    if not key_range.full:
        by_head.masked_fill_(~call.mask.block(*block_of, device=s.device), -math.inf)
    return TileScores(s, slope)


def _apply_rule(
    call: Call,
    by_head: Tensor,
    rows: slice,
    key_range: TiledKeyRange,
    rule: RuleOfTile,
    *,
    with_slope: bool,
) -> TileScores:
    """Apply the score rule of a call to scores `[B, H, t, s]`, with its derivative if asked."""
    hides, columns = not key_range.full, key_range.columns
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=by_head.device)
    if hides:
        visible = call.mask.block(
            call.q_positions, call.k_positions, rows, columns, device=by_head.device
        )
    block = rule.block(rows, columns, visible)
    folded = (call.B * call.G, -1, by_head.shape[-1])
    if not with_slope:
        return TileScores(rule.apply(by_head, block, hides=hides).reshape(folded))
    gradient = rule.apply_with_gradient(by_head, block, hides=hides)
    return TileScores(gradient.values.view(folded), rule=gradient)


def fold_heads(call: Call, x: Tensor) -> Tensor:
    """Reshape `[B, H, t, a]` to `[B G, (H/G) t, a]`, in the dtype of the scores."""
    return x.reshape(call.B * call.G, -1, x.shape[-1]).to(call.score_dtype)


def keys_of_range(x: Tensor, key_range: TiledKeyRange, dtype: torch.dtype) -> Tensor:
    """Return the keys or values of a range, `[B G, s, a]`."""
    return x[:, :, key_range.columns].flatten(0, 1).to(dtype)


def dropout_factors(
    call: Call, seed: int, p: Tensor, rows: slice, key_range: TiledKeyRange
) -> Tensor:
    """Return 1/(1 - dropout) for kept weights, else 0, the same in forward and backward."""
    generator = torch.Generator(p.device)
    generator.manual_seed(seed + rows.start * call.S + key_range.columns.start)
    draw = torch.rand(p.shape, generator=generator, dtype=torch.float32, device=p.device)
    return (draw >= call.dropout).to(p.dtype).div_(1 - call.dropout)
