"""The kernel "flex": torch's FlexAttention; on a CPU it supports inference only.

A mask becomes the key ranges of each query, so that one generated kernel serves every mask, and the
list of 128 x 128 blocks that are not empty. Softcap, bias and score rule become a `score_mod`; a
sink is applied by the lse. On a CPU it holds every score in memory.

Source: Dong et al. 2024 (arXiv 2412.05496).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard import biases, masks, units
from regard.biases import Bias
from regard.masks import EMPTY
from regard.ops.softmax.call import Call
from regard.ops.softmax.kernel import Kernel, KernelResult, WorkEstimate
from regard.ops.softmax.lowering import bias_terms, why_not_pairs
from regard.ops.softmax.merge import apply_sink
from regard.scores import PairRule, to_score_mod
from regard.span import Span, as_tensor, slice_positions

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK_SIZE = 128
"""The side of a block of the mask, and the shortest length on CUDA."""

CUDA_HEAD_DIMS = (16, 256)
"""The smallest and the largest head dimension of the generated CUDA kernel."""

MAX_TABLE_BYTES = 2**26
"""The largest table of bools of a mask on CUDA, in bytes."""

MAX_CPU_BYTES = 2**32
"""The largest size in bytes of the scores on a CPU, where all of them are in memory at once."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexKernel(Kernel):
    """The kernel "flex": a call of torch.nn.attention.flex_attention."""

    name = "flex"

    def why_not(self, call: Call) -> list[str]:
        """Refuse dropout, taps, non-finite masked inputs, and what torch's function lacks."""
        reasons = [f"does not expose {sorted(call.needs)}"] if call.needs else []
        if call.dropout:
            reasons.append("no dropout")
        if call.compiling:  # a question about sizes would specialize the graph
            return [*reasons, "not inside a compiled graph"]
        if not call.readable and not call.q.is_meta:
            reasons.append("not inside a transform of torch.func, nor without values")
        if 0 in (call.B, call.T, call.S, call.E):
            reasons.append(f"nothing to compute (B {call.B}, T {call.T}, S {call.S}, E {call.E})")
        device = call.q.device.type
        if device == "cpu":
            reasons += _cpu_reasons(call)
        elif device == "cuda":
            reasons += _cuda_reasons(call)
        else:
            reasons.append(f"runs on cuda and cpu, not on {device}")
        if not reasons and not call.finite:
            reasons.append("a NaN or infinity behind a mask would leak through 0 x NaN")
        return reasons

    def why_not_score(self, call: Call) -> list[str]:
        """Refuse rules that are no function of one score, and gradients of their tensors."""
        rule = call.score
        if rule is None:
            return []
        reasons = why_not_pairs(call)
        wrong = [str(x) for x in rule.steps() if not isinstance(x, PairRule)]
        if not reasons and wrong:
            reasons.append(f"no score_mod for {' and '.join(wrong)}")
        if call.has_gradient and any(x.requires_grad for x in rule.tensors()):
            reasons.append("no gradient for a score rule")
        return reasons

    def priority(self, call: Call) -> float | None:
        """Return 70 on an accelerator, behind torch's fused kernel; 40 on a CPU."""
        return 40 if call.q.is_cpu else 70

    def run(self, call: Call) -> KernelResult:
        """Convert mask and bias, run FlexAttention, and apply the sink."""
        from torch.nn.attention.flex_attention import AuxRequest

        q, k, v = call.q, call.k, call.v
        if q.device.type == "cpu":  # uncompiled, it would round the scores to half precision
            q, k, v = (x.detach().to(call.score_dtype) for x in (q, k, v))
        out, aux = _flex_attention_for(q.device.type)(
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
        out = out if call.sink is None else apply_sink(out, lse, call.sink)
        return KernelResult(out.to(call.q.dtype), lse)

    def work(self, call: Call) -> WorkEstimate:
        """Return the pairs of non-empty blocks and the bytes of the lse; on a CPU, all scores."""
        pairs = call.B * call.H * call.T * call.S
        if call.q.device.type == "cpu":
            return WorkEstimate(pairs, 2 * pairs * call.score_dtype.itemsize)
        tiles = (
            call.mask.tiles(call.q_positions, call.k_positions, (BLOCK_SIZE, BLOCK_SIZE)) != EMPTY
        )
        heads = call.B * call.H // (tiles.shape[0] * tiles.shape[1])
        visible_pairs = min(pairs, heads * int(tiles.sum()) * BLOCK_SIZE**2)
        return WorkEstimate(visible_pairs, call.B * call.H * call.T * 4)


def _cpu_reasons(call: Call) -> list[str]:
    """Return the reasons against a call on a CPU."""
    reasons = ["no gradients on CPU"] if call.has_gradient else []
    size = 2 * call.B * call.H * call.T * call.S * call.score_dtype.itemsize
    if size > MAX_CPU_BYTES:
        need, limit = units.size(size), units.size(MAX_CPU_BYTES)
        reasons.append(f"would hold {need} of scores on CPU; limit {limit}")
    return reasons


def _cuda_reasons(call: Call) -> list[str]:
    """Return the reasons against a call on CUDA."""
    reasons = []
    if call.q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        reasons.append(f"no {str(call.q.dtype).removeprefix('torch.')} on CUDA")
    if min(call.T, call.S) < BLOCK_SIZE:
        reasons.append(f"T {call.T} or S {call.S} is below {BLOCK_SIZE}")
    low, high = CUDA_HEAD_DIMS
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
        and table > MAX_TABLE_BYTES
        and call.mask.intervals(first) is None
    ):
        reasons.append(f"no key ranges in the mask {call.mask}")
    return reasons


@cache
def _flex_attention_for(device: str) -> Callable[..., Any]:
    """Return FlexAttention for a device type: uncompiled for a CPU, compiled for other devices."""
    from torch.nn.attention import flex_attention as module

    # torch warns once per process about the uncompiled form. The warning is marked as shown in
    # torch's own list; a warning filter around each call would be shared by all threads, and two
    # threads that enter and leave it in turns would leave it set.
    module._WARNINGS_SHOWN.add("flex_attention_performance")
    # The uncompiled form holds every score, so it is never used on CUDA. On a CPU the compiled form
    # takes seconds to compile, returns no lse, and does not support float64.
    # `regard.accelerate` may have replaced the function
    chosen: Callable[..., object] = inspect.unwrap(module.flex_attention)
    return chosen if device == "cpu" else torch.compile(chosen, dynamic=False)


def block_mask(call: Call) -> BlockMask | None:
    """Return the `BlockMask` of a call, or None if every query sees every key."""
    if call.sees_everything:
        return None
    q, k = call.q_positions, call.k_positions
    is_constant = isinstance(q, Span) and isinstance(k, Span) and call.mask.is_static
    # a mask with tensors may change and is not cached
    build = _block_mask_cached if is_constant else masks.to_block_mask
    return build(call.mask, q, k, block_size=BLOCK_SIZE, device=call.q.device)


_block_mask_cached = lru_cache(32)(masks.to_block_mask)


def score_mod(call: Call) -> ScoreMod | None:
    """Return softcap, bias and score rule as one function of a score, or None."""
    mods = [_bias_score_mod(term, call) for term in bias_terms(call.bias)]
    if call.score is not None:
        q, k = (as_tensor(p, call.q.device) for p in (call.q_positions, call.k_positions))
        mods.append(to_score_mod(call.score, q, k))
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


def _bias_score_mod(term: Bias, call: Call) -> ScoreMod:
    """Return one bias as a function that adds it to a score."""
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
    # other biases become a table; on CUDA only Dense reaches this line, which is a table already
    table = term.block(call.q_positions, call.k_positions, dtype=call.score_dtype, device=q.device)
    b_step, h_step = (int(n > 1) for n in table.shape[:2])

    def dense(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[b * b_step, h * h_step, i, j]

    return dense
