"""torch's FlexAttention: one generated kernel for any mask and score change. On CUDA it trains; on
CPU it only infers.

A mask becomes the key ranges of each query, as tensors (one generated kernel then serves every
mask), and the blocks of 128 x 128 that it leaves; softcap and bias become a `score_mod`; a sink is
applied by the lse. On CPU torch's uncompiled form holds every score, so `backend="auto"` does not
take it there.

Source: Dong et al. 2024 (arXiv 2412.05496).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from regard import biases, masks, units
from regard.biases import Bias
from regard.masks import EMPTY, FULL, Mask
from regard.ops.softmax.bias_gradient import bias_terms
from regard.ops.softmax.call import Call, Result, Work
from regard.ops.softmax.merge import with_sink
from regard.span import Positions, Span, as_tensor, slice_positions

BLOCK = 128
"""The side of a block of the mask, and the shortest length on CUDA; below it the other kernels are
as fast.
"""

DIMS = (16, 256)
"""Head dimensions on CUDA: what its generated kernel takes."""

RANGES = 8
"""The most key ranges per query; a mask with more, or none, is looked up in a table of bools."""

TABLE_BYTES = 2**26
"""The largest such table on CUDA."""

MAX_BYTES = 2**32
"""What it may hold on CPU, where it keeps every score."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Flex:
    """torch.nn.attention.flex_attention."""

    name = "flex"
    selects = False

    def why_not(self, call: Call) -> list[str]:
        """Dropout, taps, non-finite inputs; on CUDA other shapes and dtypes; on CPU gradients and
        long inputs.
        """
        reasons = [f"does not expose {sorted(call.needs)}"] if call.needs else []
        if call.dropout:
            reasons.append("no dropout")
        if call.compiling:
            reasons.append("not inside a graph that is being compiled")
        if 0 in (call.B, call.T, call.S, call.E):
            reasons.append(f"nothing to do (B {call.B}, T {call.T}, S {call.S}, E {call.E})")
        device = call.q.device.type
        if device == "cpu":
            reasons += _why_not_cpu(call)
        elif device == "cuda":
            reasons += _why_not_cuda(call)
        else:
            reasons.append(f"runs on cuda and cpu, not on {device}")
        if not reasons and not call.finite:
            reasons.append("a NaN or infinity behind a mask would leak through 0 x NaN")
        return reasons

    def priority(self, call: Call) -> float | None:
        """Behind torch's fused kernel; on a CPU, where it holds every score, behind the tiles."""
        return 40 if call.q.is_cpu else 70

    def run(self, call: Call) -> Result:
        """Lower mask and bias, run, apply the sink."""
        from torch.nn.attention.flex_attention import AuxRequest

        q, k, v = call.q, call.k, call.v
        if q.device.type == "cpu":  # uncompiled, it would round the scores to a half type
            q, k, v = (x.detach().to(call.score_dtype) for x in (q, k, v))
        out, aux = _function(q.device.type)(
            q,
            k,
            v,
            score_mod=score_mod(call),
            block_mask=block_mask(call),
            scale=call.scale,
            enable_gqa=call.G != call.H,
            return_aux=AuxRequest(lse=True),
        )
        lse = aux.lse.to(call.score_dtype)
        out = out if call.sink is None else with_sink(out, lse, call.sink)
        return Result(out.to(call.q.dtype), lse)

    def work(self, call: Call) -> Work:
        """On CUDA the blocks that are not empty, and the lse; on CPU every pair, as scores and as
        weights.
        """
        every = call.B * call.H * call.T * call.S
        if call.q.device.type == "cpu":
            return Work(every, 2 * every * call.score_dtype.itemsize)
        tiles = call.mask.tiles(call.q_positions, call.k_positions, (BLOCK, BLOCK)) != EMPTY
        heads = call.B * call.H // (tiles.shape[0] * tiles.shape[1])
        pairs = min(every, heads * int(tiles.sum()) * BLOCK**2)
        return Work(pairs, call.B * call.H * call.T * 4)


def _why_not_cpu(call: Call) -> list[str]:
    reasons = ["no gradients on CPU"] if call.has_gradient else []
    size = 2 * call.B * call.H * call.T * call.S * call.score_dtype.itemsize
    if size > MAX_BYTES:
        held, limit = units.size(size), units.size(MAX_BYTES)
        reasons.append(f"would hold {held} of scores on CPU; limit {limit}")
    return reasons


def _why_not_cuda(call: Call) -> list[str]:
    reasons = []
    if call.q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        reasons.append(f"no {str(call.q.dtype).removeprefix('torch.')} on CUDA")
    if min(call.T, call.S) < BLOCK:
        reasons.append(f"fewer than {BLOCK} queries or keys (T {call.T}, S {call.S})")
    low, high = DIMS
    if any(not low <= x <= high or x % 16 for x in (call.D, call.E)):
        reasons.append(
            f"head dimensions are not multiples of 16 from {low} to {high} (D {call.D}, E {call.E})"
        )
    for term in bias_terms(call.bias):
        if not isinstance(term, (biases.ALiBi, biases.DenseBias)):
            reasons.append(f"no generated kernel for the bias {term}")
        elif any(x.requires_grad for x in term.tensors()):
            reasons.append("no gradient for a bias")
    first = slice_positions(call.q_positions, slice(0, 1))
    table = call.B * call.H * call.T * call.S
    if (
        not isinstance(call.mask, masks.Dense)
        and table > TABLE_BYTES
        and call.mask.intervals(first) is None
    ):
        reasons.append(f"no key ranges in the mask {call.mask}")
    return reasons


@cache
def _function(device: str) -> Callable[..., Any]:
    from torch.nn.attention import flex_attention as module

    # torch warns once in a process of the uncompiled form. Its own list of what was said is told
    # so, because a filter around each call is one for all threads: two that come and go in turns
    # leave it behind.
    module._WARNINGS_SHOWN.add("flex_attention_performance")
    # uncompiled it holds every score: never on CUDA; on CPU compiling takes seconds, gives no lse
    # and no float64
    chosen: Callable[..., Any] = module.flex_attention
    return chosen if device == "cpu" else torch.compile(chosen, dynamic=False)


def block_mask(call: Call) -> Any:
    """The `BlockMask` of a call, or None if every query sees every key."""
    if call.sees_everything:
        return None
    q, k = call.q_positions, call.k_positions
    lasts = isinstance(q, Span) and isinstance(k, Span) and call.mask.is_static
    build = _block_mask_cached if lasts else _block_mask  # a tensor in a mask may change
    return build(call.mask, q, k, call.q.device, (call.T, call.S))


def _block_mask(
    mask: Mask, q: Positions, k: Positions, device: torch.device, lengths: tuple[int, int]
) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    tiles = mask.tiles(q, k, (BLOCK, BLOCK), device=device)
    some, full = tiles != EMPTY, tiles == FULL
    for dim, length in ((2, lengths[0]), (3, lengths[1])):
        if length % BLOCK:  # a block that sticks out is never full: its tail must be masked
            full = full.clone()
            full.select(dim, -1).fill_(False)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod(mask, q, k, device),
        seq_lengths=lengths,
    )


_block_mask_cached = lru_cache(32)(_block_mask)


def mask_mod(mask: Mask, q: Positions, k: Positions, device: torch.device) -> MaskMod:
    """The mask as a function of indices: by key ranges, else by a table."""
    found = mask.intervals(q, device=device)
    if found is None or not 0 < found.starts.shape[-1] <= RANGES:
        table = mask.block(q, k, device=device)
        b_step, h_step = (int(n > 1) for n in table.shape[:2])

        def by_table(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return table[b * b_step, h * h_step, i, j]

        return by_table
    most = torch.iinfo(torch.int32).max
    starts, stops = (
        [y.contiguous() for y in x.clamp(-most, most).to(torch.int32).unbind(-1)]
        for x in (found.starts, found.stops)
    )
    keys = as_tensor(k, device).to(torch.int32)
    row_step, (b_step, h_step) = int(keys.shape[0] > 1), (int(n > 1) for n in starts[0].shape[:2])

    def by_range(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = keys[b * row_step, j]
        seen = at < 0
        for start, stop in zip(starts, stops, strict=True):
            here = (b * b_step, h * h_step, i)
            seen = seen | ((at >= start[here]) & (at < stop[here]))
        return seen & (at >= 0)

    return by_range


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """bool [b,h,nQ,nK] -> how many are chosen [b,h,nQ], and which, first in the list
    [b,h,nQ,nK].
    """
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def score_mod(call: Call) -> ScoreMod | None:
    """Softcap, then bias, as one function of a score and its indices; None if there is neither."""
    mods = [_bias_mod(term, call) for term in bias_terms(call.bias)]
    cap = call.softcap
    if cap is None and not mods:
        return None

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        for add in mods:
            score = add(score, b, h, i, j)
        return score

    return mod


def _bias_mod(term: Bias, call: Call) -> ScoreMod:
    q, k = (as_tensor(p, call.q.device) for p in (call.q_positions, call.k_positions))
    q_step, k_step = int(q.shape[0] > 1), int(k.shape[0] > 1)
    if isinstance(term, biases.ALiBi):
        slopes = term.block(
            Span(1, 1), Span(0, 1), dtype=call.score_dtype, device=q.device
        ).flatten()

        def linear(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            distance = q[b * q_step, i] - k[b * k_step, j]
            return score + slopes[h] * (distance.abs() if term.symmetric else distance)

        return linear
    # the others are a table of slots: on CUDA only Dense comes here, which is one already
    table = term.block(call.q_positions, call.k_positions, dtype=call.score_dtype, device=q.device)
    b_step, h_step = (int(n > 1) for n in table.shape[:2])

    def dense(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[b * b_step, h * h_step, i, j]

    return dense
