"""Attention tile by tile: memory linear in T and S, forward and backward, and what is masked is
never visited.

The keys of a block of queries are read in pieces; with m the largest score so far, each piece
updates

    m' = max(m, max_j s_j)    l' = l e^(m - m') + sum_j e^(s_j - m')
    o' = o e^(m - m') + sum_j e^(s_j - m') v_j

and at the end out = o / l, lse = m + ln l. The backward pass computes the scores again; m and l are
saved, not the lse, which cannot hold the small digits of l beside a large m:

    p = e^(s - m) / l    dv = p^T dout    dp = dout v^T    ds = p (dp - rowsum(p dp) + dlse)
    dq = ds k    dk = ds^T q

rowsum(p dp) = rowsum(dout out), which takes no pass over the keys: that is used where the keys are
several pieces and scores are small.

Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), algorithm 3; Dao et al. 2022 (arXiv
2205.14135), algorithms 1 and 4; Dao 2023 (arXiv 2307.08691), section 3.1; the term dlse:
differentiate lse = ln sum_j e^(s_j).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.ops.softmax.bias_gradient import BiasGradient
from regard.ops.softmax.call import SMALL_SCORE_BOUND, Call, KernelResult, WorkEstimate
from regard.ops.softmax.mask_lowering import visible_key_ranges
from regard.ops.softmax.merge import apply_sink


class TileSizes(NamedTuple):
    """How finely a call is cut.

    rows: queries in a block, of each head. keys: keys in a tile, which is what a mask is asked
    about. tile: scores in a piece, over all heads and rows, as long as that leaves it `keys` wide:
    they should stay in the cache. long: full tiles in a row that are worth a piece of their own;
    fewer join their masked neighbours.
    """

    rows: int = 128
    keys: int = 128
    tile: int = 2**19
    long: int = 5


DEFAULT_TILE_SIZES = TileSizes()

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TiledKernel:
    """Flash attention in plain torch, for every mask and bias, with gradients, softcap, sink and
    dropout.
    """

    name = "tiled"
    selects = False

    def __init__(self, grain: TileSizes = DEFAULT_TILE_SIZES) -> None:
        self.grain = grain

    def why_not(self, call: Call) -> list[str]:
        """Taps, non-finite inputs, empty shapes, compiled graphs."""
        reasons = [*([f"does not expose {sorted(call.needs)}"] if call.needs else [])]
        if call.q.dtype not in DTYPES:
            reasons.append(f"no {str(call.q.dtype).removeprefix('torch.')}")
        if 0 in (call.B, call.T, call.S, call.E):
            reasons.append(f"nothing to do (B {call.B}, T {call.T}, S {call.S}, E {call.E})")
        if call.compiling:
            reasons.append("reads the tiles of the mask, which a compiled graph cannot")
        elif not reasons and not call.finite:
            reasons.append("a NaN or infinity behind a mask would leak through 0 x NaN")
        return reasons

    def priority(self, call: Call) -> float | None:
        """Next to torch's kernel on a CPU; elsewhere generated kernels come before plain torch."""
        return 60 if call.q.is_cpu else 20

    def run(self, call: Call) -> KernelResult:
        """All query blocks, one after the other."""
        seed = int(torch.randint(2**31, ())) if call.dropout else 0
        work = query_blocks(call, self.grain)
        if call.has_gradient:
            learned = () if call.bias is None else call.bias.tensors()
            out, lse = TiledFunction.apply(  # type: ignore[no-untyped-call]
                call, seed, list(work), call.q, call.k, call.v, *learned
            )
        else:
            out, top, total = tiled_forward(call, seed, call.q, call.k, call.v, work)
            lse = top + total.log()
        return KernelResult(out if call.sink is None else apply_sink(out, lse, call.sink), lse)

    def work(self, call: Call) -> WorkEstimate:
        """Pairs of the pieces; bytes of the lse, of a piece's scores, and of the gradients while
        they are summed.
        """
        size, heads = call.score_dtype.itemsize, call.B * call.H
        areas = [
            (rows.stop - rows.start) * (columns.stop - columns.start)
            for rows, pieces in query_blocks(call, self.grain)
            for columns, _ in pieces
        ]
        held = heads * call.T + heads * max(areas, default=0) * (4 if call.has_gradient else 2)
        if call.has_gradient:
            held += call.q.numel() + call.k.numel() + call.v.numel()
        return WorkEstimate(heads * sum(areas), held * size)


class TiledKeyRange(NamedTuple):
    """A range of keys, and whether every query of the block sees all of them in every row and
    head.
    """

    columns: slice
    full: bool


class TiledQueryBlock(NamedTuple):
    """A block of queries, and the pieces of the keys that some of them see."""

    rows: slice
    pieces: list[TiledKeyRange]


def query_blocks(call: Call, grain: TileSizes = DEFAULT_TILE_SIZES) -> Iterator[TiledQueryBlock]:
    """The work of a call, one block of queries after the other."""
    heads, size = call.B * call.H, grain.keys
    step = min(call.T, max(16, min(grain.rows, grain.tile // (size * heads))))
    widest = size * max(1, grain.tile // (heads * step * size))
    for start in range(0, call.T, step):
        rows = slice(start, min(start + step, call.T))
        parts = [
            TiledKeyRange(slice(i, min(i + widest, keys.stop)), full)
            for keys, full in visible_key_ranges(call, rows, size, grain.long)
            for i in range(keys.start, keys.stop, widest)
        ]
        yield TiledQueryBlock(rows, parts)


class TiledFunction(torch.autograd.Function):
    """(out, lse), with gradients for q, k, v and the tensors of the bias. It saves no scores."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        seed: int,
        work: list[TiledQueryBlock],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *learned: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The tiles, and what the backward pass needs of them."""
        out, top, total = tiled_forward(call, seed, q, k, v, work)
        ctx.save_for_backward(q, k, v, out, top, total, *learned)
        # what autograd keeps for us is not kept a second time
        shapes = {name: getattr(call, name).detach().to("meta") for name in "qkv"}
        ctx.call, ctx.seed, ctx.work = replace(call, sink=None, **shapes), seed, work
        ctx.careful = call.score_bound > SMALL_SCORE_BOUND
        ctx.set_materialize_grads(False)
        return out, top + total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        """The same tiles again."""
        q, k, v, out, top, total, *learned = ctx.saved_tensors
        call = ctx.call
        if call.bias is not None:
            call = replace(call, bias=call.bias.with_tensors(learned))
        d_bias = BiasGradient(call.bias, ctx.needs_input_grad[6:], top.dtype)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        with torch.autocast(q.device.type, enabled=False):
            saved = (q, k, v, out, top, total)
            grads = tiled_backward(
                call, ctx.seed, ctx.work, saved, d_out, d_lse, d_bias, careful=ctx.careful
            )
        return None, None, None, *grads, *d_bias.total()


def tiled_forward(
    call: Call, seed: int, q: Tensor, k: Tensor, v: Tensor, work: Iterable[TiledQueryBlock]
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B,H,T,E] in the dtype of q; of each row the largest score m and l = sum e^(s - m),
    [B,H,T].
    """
    kind = call.score_dtype
    out = torch.zeros(call.B, call.H, call.T, call.E, dtype=q.dtype, device=q.device)
    tops, totals = (torch.zeros(call.B, call.H, call.T, dtype=kind, device=q.device) for _ in "ml")
    for rows, pieces in work:
        if not pieces:
            continue
        query = fold_heads(call, q[:, :, rows]) * call.scale
        top = torch.full_like(query[..., :1], torch.finfo(kind).min)  # not -inf: -inf - -inf is NaN
        total, mixed = torch.zeros_like(top), top.new_zeros(*query.shape[:2], call.E)
        for piece in pieces:
            s, _ = tile_scores(call, query, k, rows, piece)
            higher = torch.maximum(top, s.amax(-1, keepdim=True))
            p, shrink = s.sub_(higher).exp_(), top.sub_(higher).exp_()
            total.mul_(shrink).add_(p.sum(-1, keepdim=True))
            if call.dropout:
                p.mul_(dropout_factors(call, seed, p, rows, piece))
            mixed.mul_(shrink).baddbmm_(p, keys_of_range(v, piece, kind))
            top = higher
        tops[:, :, rows], totals[:, :, rows] = (x.view(call.B, call.H, -1) for x in (top, total))
        out[:, :, rows] = mixed.div_(total.masked_fill_(total == 0, 1)).view(out[:, :, rows].shape)
    return out, tops, totals


def tiled_backward(
    call: Call,
    seed: int,
    work: list[TiledQueryBlock],
    saved: tuple[Tensor, ...],
    d_out: Tensor,
    d_lse: Tensor | None,
    d_bias: BiasGradient,
    *,
    careful: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; that of the bias is added to d_bias.

    careful: sum p dp over the keys even where it takes a pass of its own, in place of the equal
        rowsum(dout out). Where one weight of a row is nearly 1, p (dp - sum p dp) is nearly 0, and
        only the same numbers cancel.
    """
    (q, k, v, out, top, total), kind = saved, call.score_dtype
    d_q = torch.zeros(q.shape, dtype=kind, device=q.device)
    d_k, d_v = (torch.zeros(x.flatten(0, 1).shape, dtype=kind, device=q.device) for x in (k, v))
    for rows, pieces in work:
        query = fold_heads(call, q[:, :, rows]) * call.scale
        d_row, row_top, row_total = (
            fold_heads(call, x[:, :, rows]) for x in (d_out, top[..., None], total[..., None])
        )
        blind = row_total == 0
        row_total = row_total.masked_fill(blind, 1)
        weigh = partial(
            _recompute_weights, call, seed, (query, row_top, d_row / row_total), (k, v), rows
        )
        held = [weigh(piece) for piece in pieces[: len(pieces) == 1]]
        if held or careful:
            shift = sum(
                (_weighted_gradient_sum(held[0] if held else weigh(piece)) for piece in pieces),
                0 * row_top,
            )
        else:
            shift = (d_row * fold_heads(call, out[:, :, rows])).sum(-1, keepdim=True)
        if d_lse is not None:  # of a blind row it may be anything: nothing depends on it
            shift = shift - fold_heads(call, d_lse[:, :, rows, None]).masked_fill(blind, 0)
        shift, d_row = shift / row_total, d_row / row_total
        d_query = torch.zeros_like(query)
        for piece in pieces:
            p, d_p, kept_p, slope = held.pop() if held else weigh(piece)
            d_v[:, piece.columns] += torch.bmm(kept_p.mT, d_row)
            d_s = d_p.sub_(shift).mul_(p)
            d_bias.add(call, d_s, rows, piece.columns)
            if slope is not None:
                d_s.mul_(slope)
            d_query.baddbmm_(d_s, keys_of_range(k, piece, kind))
            d_k[:, piece.columns] += torch.bmm(d_s.mT, query)
        d_q[:, :, rows] = d_query.mul_(call.scale).view(d_q[:, :, rows].shape)
    return d_q.to(q.dtype), d_k.view(k.shape).to(k.dtype), d_v.view(v.shape).to(v.dtype)


def _recompute_weights(
    call: Call,
    seed: int,
    row: tuple[Tensor, ...],
    memory: tuple[Tensor, Tensor],
    rows: slice,
    piece: TiledKeyRange,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute one piece without the 1/l of the weights: p, dp, p after dropout, and the slope of
    the softcap if there is one.
    """
    (query, row_top, d_row), (k, v) = row, memory
    s, slope = tile_scores(call, query, k, rows, piece, with_slope=True)
    p = s.sub_(row_top).exp_()
    d_p = torch.bmm(d_row, keys_of_range(v, piece, query.dtype).mT)
    if not call.dropout:
        return p, d_p, p, slope
    keep = dropout_factors(call, seed, p, rows, piece)
    return p, d_p.mul_(keep), p * keep, slope


def _weighted_gradient_sum(weighed: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> Tensor:
    """sum_j p_j dp_j over the keys of a piece."""
    return (weighed[0] * weighed[1]).sum(-1, keepdim=True)


def tile_scores(
    call: Call,
    query: Tensor,
    k: Tensor,
    rows: slice,
    piece: TiledKeyRange,
    *,
    with_slope: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The scores [B G, (H/G) t, s] of a piece, and the slope of the softcap there, 1 - tanh^2, if
    it is asked for.
    """
    slope = None
    s = torch.bmm(query, keys_of_range(k, piece, query.dtype).mT)
    if call.softcap is not None:
        s.div_(call.softcap).tanh_()
        slope = 1 - s * s if with_slope else None
        s.mul_(call.softcap)
    by_head = s.view(call.B, call.H, -1, s.shape[-1])
    where = (call.q_positions, call.k_positions, rows, piece.columns)
    if call.bias is not None:
        by_head += call.bias.block(*where, dtype=s.dtype, device=s.device)
    if not piece.full:
        by_head.masked_fill_(~call.mask.block(*where, device=s.device), -math.inf)
    return s, slope


def fold_heads(call: Call, x: Tensor) -> Tensor:
    """[B,H,t,a] -> [B G, (H/G) t, a], in the dtype of the scores: the heads of a group are rows of
    one product.
    """
    return x.reshape(call.B * call.G, -1, x.shape[-1]).to(call.score_dtype)


def keys_of_range(x: Tensor, piece: TiledKeyRange, dtype: torch.dtype) -> Tensor:
    """The keys or values of a piece, [B G, s, a]."""
    return x[:, :, piece.columns].flatten(0, 1).to(dtype)


def dropout_factors(call: Call, seed: int, p: Tensor, rows: slice, piece: TiledKeyRange) -> Tensor:
    """1/(1 - dropout) where a weight is kept, else 0; the same for a piece in both passes, another
    for each piece.
    """
    generator = torch.Generator(p.device)
    generator.manual_seed(seed + rows.start * call.S + piece.columns.start)
    draw = torch.rand(p.shape, generator=generator, dtype=torch.float32, device=p.device)
    return (draw >= call.dropout).to(p.dtype).div_(1 - call.dropout)
