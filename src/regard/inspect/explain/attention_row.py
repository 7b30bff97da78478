"""One row of one head: its scores step by step, its softmax, its combination with other rows, and
why keys are masked.

A `KernelRow` comes from a recorded call of a softmax kernel. Where no such kernel ran, the row
comes from the mechanism (`regard.nn.explainable.EffectiveRow`). A score rule gives the same result
for a query whatever the other queries of the call are, so such a row is computed again in float64
from the recorded q and k, for all heads, because a rule may mix them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard import masks
from regard.caches import Parts
from regard.inspect.explain.captured_run import CapturedRun, QueryCall
from regard.inspect.explain.explanation import (
    EQUATIONS,
    Array,
    ComputationStep,
    Mixture,
    MixtureTerm,
    RecurrentState,
    SoftmaxBlock,
    SoftmaxRow,
)
from regard.language import Phrase, counted
from regard.nn.explainable import CallWeights, EffectiveRow, Explainable, LayerRun
from regard.scores import ScoreBlock, ScoreRule
from regard.scores.base import change_scores
from regard.span import Positions, as_tensor, find_empty_slots, slice_positions

Checks: TypeAlias = dict[str, float]
"""The largest absolute difference of each compared quantity, by its name."""

MIN_BLOCK, MAX_BLOCKS = 4, 8
"""The smallest number of keys in a block of the online softmax, and the largest number of
blocks.
"""


class ScoreFunction(NamedTuple):
    """The scores of a row as a function of q and k.

    Args:
        q: the query, `[D]`.
        k: the keys, `[n, D]`.
        bias: bias, `[n]`, or None.
        visible: which keys the mask allows, `[n]`.
    """

    q: Array
    k: Array
    scale: float
    softcap: float | None
    bias: Array | None
    visible: NDArray[np.bool_]

    def steps(self) -> tuple[ComputationStep, ...]:
        """Return the scores, `[n]`, after each step of their computation."""
        s: Array = self.k @ self.q
        steps = [ComputationStep("dot", EQUATIONS["dot"], s)]

        def then(name: str, s: Array) -> Array:
            steps.append(ComputationStep(name, EQUATIONS[name], s))
            return s

        s = then("scaled", self.scale * s)
        if self.softcap is not None:
            s = self.softcap * np.tanh(s / self.softcap)
            equation = EQUATIONS["capped"].replace("c", f"{self.softcap:.9g}")
            steps.append(ComputationStep("capped", equation, s))
        if self.bias is not None:
            s = then("biased", s + self.bias)
        then("masked", np.where(self.visible, s, -np.inf))
        return tuple(steps)


@dataclass(frozen=True, eq=False)
class KernelRow:
    """One head of a recorded call, for one query.

    Args:
        chain: the scores of the row as a function of q and k.
        v: values, `[n, E]`.
        out: output of the kernel, `[E]`.
    """

    call: QueryCall
    head: int
    chain: ScoreFunction
    v: Array
    sink: float | None
    lse: float
    out: Array

    @property
    def group(self) -> int:
        """Return the key/value head that the query head reads: h // (H/G)."""
        return self.head // (self.call.place.H // self.call.groups)


def kernel_row(call: QueryCall, head: int) -> KernelRow:
    """Return the row of a head in a call, in float64."""
    step, place, i = call.step, call.place, call.row
    group = head // (place.H // call.groups)
    bias, where = None, (step.q_positions, step.k_positions, slice(i, i + 1))
    if step.bias is not None:
        bias = to_array(_row_of_head(step.bias.block(*where, dtype=torch.float64), head))
    visible = _row_of_head(step.mask.block(*where), head).numpy()
    chain = ScoreFunction(
        to_array(step.q[0, head, i]),
        to_array(place.keys(step)[0, group]),
        step.scale,
        step.softcap,
        bias,
        visible,
    )
    values = place.values(step)
    assert values is not None, "SiteRecorder keeps values"
    assert step.out is not None, "SiteRecorder keeps outputs"
    sink = None if step.sink is None else float(step.sink[head])
    return KernelRow(
        call,
        head,
        chain,
        to_array(values[0, group]),
        sink,
        float(step.lse[0, head, i]),
        to_array(step.out[0, head, i]),
    )


def score_and_compare(row: KernelRow) -> tuple[tuple[ComputationStep, ...], SoftmaxRow, Checks]:
    """Compute the scores and the softmax of a row, and how far they are from the kernel's."""
    steps, values = row.chain.steps(), visible_values(row)
    s = steps[-1].values
    row_softmax = softmax(s, row.sink)
    denominator = row.lse if row.sink is None else float(np.logaddexp(row.lse, row.sink))
    with np.errstate(invalid="ignore"):
        kernel_weights = np.where(np.isneginf(s), 0, np.exp(s - denominator))
    total = float(kernel_weights.sum())
    total += 0.0 if row.sink is None else float(np.exp(row.sink - denominator))
    blocks = online_softmax(s, values)
    lse, z = finish_online(blocks, row.sink)
    mixed, own_lse = row_softmax.weights @ values, np.array(row_softmax.lse)
    same_lse, same_z = max_difference(np.array(lse), own_lse), max_difference(z, mixed)
    weights = max_difference(row_softmax.weights, kernel_weights)
    checks = {
        "weights against exp(s - lse) of the kernel": weights,
        "row sum of exp(s - lse) of the kernel against 1": abs(total - 1)
        if row.chain.visible.any()
        else 0.0,
        "lse of the kernel": max_difference(own_lse, np.array(row.lse)),
        "output of the kernel": max_difference(mixed, row.out),
        "online softmax": max(same_lse, same_z),
    }
    return steps, replace(row_softmax, sink=row.sink, online=blocks), checks


def visible_values(row: KernelRow) -> Array:
    """Return the values, `[n, E]`, with 0 where the mask forbids: masked values may be garbage."""
    return np.where(row.chain.visible[:, None], row.v, 0.0)


def softmax(s: Array, sink: float | None = None) -> SoftmaxRow:
    """Return the maximum m, exp(s - m), their sum, ln sum exp(s), and the weights of a row.

    The sink is a term of the weights' denominator only.
    """
    top = float(s.max(initial=-np.inf))
    if top == -np.inf:  # the query sees no key
        none = np.zeros_like(s)
        return SoftmaxRow(top, none, 0.0, top, none)
    exps = np.exp(s - top)
    total = float(exps.sum())
    lse = top + float(np.log(total))
    weights = exps / total if sink is None else np.exp(s - np.logaddexp(lse, sink))
    return SoftmaxRow(top, exps, total, lse, weights)


def online_softmax(s: Array, v: Array, size: int | None = None) -> tuple[SoftmaxBlock, ...]:
    """Compute the softmax of a row block by block, as a fused kernel does."""
    n = len(s)
    size = size or max(MIN_BLOCK, 1 << (max(n - 1, 1) // MAX_BLOCKS).bit_length())
    running_max, running_sum, running_output, blocks = -np.inf, 0.0, np.zeros(v.shape[1]), []
    for start in range(0, n, size):
        stop = min(start + size, n)
        block_scores = s[start:stop]
        new_max = max(running_max, float(block_scores.max()))
        if new_max > -np.inf:
            rescale = float(np.exp(running_max - new_max))
            e = np.exp(block_scores - new_max)
            running_sum, running_output = (
                running_sum * rescale + float(e.sum()),
                running_output * rescale + e @ v[start:stop],
            )
        else:
            rescale = 1.0
        running_max = new_max
        blocks.append(
            SoftmaxBlock(start, stop, running_max, rescale, running_sum, running_output.copy())
        )
    return tuple(blocks)


def finish_online(
    blocks: tuple[SoftmaxBlock, ...], sink: float | None = None
) -> tuple[float, Array]:
    """Return the lse and the output z after the last block."""
    last = blocks[-1]
    if last.running_sum == 0:
        return -np.inf, np.zeros_like(last.running_output)
    lse = last.running_max + float(np.log(last.running_sum))
    share = 1.0 if sink is None else float(np.exp(lse - np.logaddexp(lse, sink)))
    return lse, last.running_output / last.running_sum * share


def to_array(x: Tensor) -> Array:
    """Return a tensor as a float64 array."""
    result: Array = x.detach().double().cpu().numpy()
    return result


def max_difference(x: Array, y: Tensor | Array) -> float:
    """Return the largest absolute difference; 0 where both are the same infinity."""
    other = to_array(y) if isinstance(y, Tensor) else y
    same = x == other
    return float(np.abs(np.where(same, 0, x) - np.where(same, 0, other)).max(initial=0.0))


def _row_of_head(block: Tensor, head: int) -> Tensor:
    """Select the row `[n]` of a head from `[B or 1, H or 1, 1, n]`."""
    return block[0, head if block.shape[1] > 1 else 0, 0]


def effective_row_scores(effective: EffectiveRow) -> tuple[tuple[ComputationStep, ...], SoftmaxRow]:
    """Return the scores and the weights of a row that a mechanism describes itself."""
    steps = tuple(
        ComputationStep(
            link.name, link.equation or EQUATIONS.get(link.name, ""), to_array(link.values)
        )
        for link in effective.scores
    )
    if effective.weights is None:
        return steps, softmax(steps[-1].values)
    visible, weights = ~np.isneginf(steps[-1].values), to_array(effective.weights)
    top, no_exps = float(weights[visible].max(initial=-np.inf)), np.full(len(weights), np.nan)
    return steps, SoftmaxRow(top, no_exps, float(weights[visible].sum()), float("nan"), weights)


def recurrent_state(parts: Parts, before: Parts) -> RecurrentState:
    """Summarize the recurrent state of a head; its first part is the matrix S `[D, E]`."""
    S, old = to_array(parts[0]), to_array(before[0])
    sizes = np.linalg.svd(S, compute_uv=False) if S.ndim == 2 else np.abs(S)
    share = sizes / max(float(sizes.sum()), np.finfo(float).tiny)
    rank = float(np.exp(-(share * np.log(np.maximum(share, 1e-300))).sum()))
    numbers = sum(int(part.numel()) for part in parts)
    return RecurrentState(
        tuple(S.shape),
        numbers,
        numbers * parts[0].element_size(),
        float(np.linalg.norm(S)),
        float(np.linalg.norm(old)),
        rank,
        S,
    )


def mix_of_rows(
    mechanism: Explainable,
    run: CapturedRun,
    calls: Sequence[QueryCall],
    call: QueryCall,
    head: int,
    i: int,
    tokens: int,
) -> Mixture | None:
    """Return how the row of a call enters the output of the head; None if it is the only row."""
    weights = [CallWeights(one.branch, torch.from_numpy(one.weights), one.keys) for one in calls]
    layer = layer_run(run)
    mix = mechanism.explain_mix(layer, weights, list(calls).index(call), head, i)
    if mix is not None:
        terms = tuple(MixtureTerm(*term) for term in mix.terms)
        return Mixture(mix.text, terms, None if mix.row is None else to_array(mix.row))
    return _mix_of_calls(run, calls, call, head, i, tokens) if len(calls) > 1 else None


def layer_run(captured: CapturedRun) -> LayerRun:
    """Convert a captured run to the `LayerRun` that the methods of `Explainable` receive."""
    taps = {name: values[None] for name, values in captured.taps.items()}
    return LayerRun(captured.hidden["x"][None], taps)


def _mix_of_calls(
    run: CapturedRun, calls: Sequence[QueryCall], call: QueryCall, head: int, i: int, tokens: int
) -> Mixture:
    """Find out, from the recorded z, whether one call replaced the others or all were merged."""
    outs = [kernel_row(one, head).out for one in calls]
    z = to_array(run.taps["z"][head, i]) if "z" in run.taps else None
    lses = np.array([kernel_row(one, head).lse for one in calls])
    sink = kernel_row(call, head).sink
    total = np.logaddexp.reduce(lses if sink is None else np.append(lses, sink))
    with np.errstate(invalid="ignore"):
        shares = np.where(np.isneginf(lses), 0.0, np.exp(lses - total))
    merged = sum(share * out for share, out in zip(shares, outs, strict=True))
    scale = max(float(np.abs(x).max(initial=0.0)) for x in outs) or 1.0

    def equals_z(x: Array) -> bool:
        return z is not None and float(np.abs(x - z).max()) <= 1e-5 * scale

    call_is_output = [equals_z(out) for out in outs]
    if any(call_is_output) and not (equals_z(merged) and not call_is_output[-1]):
        last = len(call_is_output) - 1 - call_is_output[::-1].index(True)
        shares = np.array([float(n == last) for n in range(len(call_is_output))])
        text = Phrase(
            "{calls} for this query; the head uses the output of only one of them, which replaces "
            "the others",
            calls=counted(len(calls), "call"),
        )
    else:
        text = Phrase(
            "{calls} for this query, merged exactly by their lse: one softmax over all their keys",
            calls=counted(len(calls), "call"),
        )
    rows = [one.by_key(tokens).numpy()[head] for one in calls]
    terms = tuple(
        MixtureTerm(f"call {n}", float(share), float(row.sum()), one is call)
        for n, (share, row, one) in enumerate(zip(shares, rows, calls, strict=True))
    )
    return Mixture(text, terms, sum(share * row for share, row in zip(shares, rows, strict=True)))


class RuleRow(NamedTuple):
    """The row of one head under a score rule.

    Args:
        kind: "softmax" if the weights are a softmax of the last scores; otherwise "linear".
        steps: the scores after each step, `[n]`, the last one -inf where masked.
        softmax: the weights; with the kind "linear", there are no parts of a softmax.
        checks: the differences from the recorded run.
    """

    kind: str
    steps: tuple[ComputationStep, ...]
    softmax: SoftmaxRow
    checks: Checks


def rule_row(row: KernelRow) -> RuleRow:
    """Compute the row of a recorded call with a score rule, and compare it with what it gave."""
    rule = row.call.step.score
    assert rule is not None, "callers ask for a rule first"
    head, (s, block) = row.head, _scores_of_all_heads(row)
    *before, masked = row.chain.steps()
    steps = list(before)
    for one in rule.steps():
        if "scores" in one.stages or "selection" in one.stages:
            s = change_scores(one, s, block)
            steps.append(ComputationStep(one.kind, f"s_ij ← {one}", to_array(s[0, head, 0])))
    s = s.masked_fill(~block.visible, -torch.inf)
    steps.append(masked._replace(values=to_array(s[0, head, 0])))
    weights = _rule_weights(rule, s, block, row.call.step.sink)
    own, values = to_array(weights[0, head, 0]), visible_values(row)
    checks = {
        "weights of the recorded run": max_difference(own, row.call.weights[head]),
        "output of the kernel": max_difference(own @ values, row.out),
    }
    if set(rule.stages) <= {"scores", "selection"}:
        parts = softmax(steps[-1].values, row.sink)
        checks["softmax of the last scores"] = max_difference(parts.weights, own)
        blocks = online_softmax(steps[-1].values, values)
        return RuleRow(
            "softmax", tuple(steps), replace(parts, sink=row.sink, online=blocks), checks
        )
    steps.append(_final_step(rule, own, steps[-1].values))
    visible = ~np.isneginf(steps[-1].values)
    top = float(own[visible].max(initial=-np.inf))
    no_exps = np.full(len(own), np.nan)
    total = float(own[visible].sum())
    return RuleRow("linear", tuple(steps), SoftmaxRow(top, no_exps, total, np.nan, own), checks)


def _final_step(rule: ScoreRule, weights: Array, masked: Array) -> ComputationStep:
    """Return the weights as the last step of a row without a softmax at its end."""
    names = [str(one) for one in rule.steps() if {"normalizer", "pattern"} & set(one.stages)]
    values = np.where(np.isneginf(masked), -np.inf, weights)
    return ComputationStep("effective", Phrase("a_ij by {names}", names=", ".join(names)), values)


def _scores_of_all_heads(row: KernelRow) -> tuple[Tensor, ScoreBlock]:
    """Return the scores [1,H,1,n] before the rule in float64, and what the rule may read."""
    call, step, i = row.call, row.call.step, row.call.row
    q = step.q[:1, :, i : i + 1].double()
    k = call.place.keys(step)[:1].double()
    H, n = q.shape[1], k.shape[2]
    s = row.chain.scale * (q @ k.repeat_interleave(H // k.shape[1], dim=1).mT)
    if step.softcap is not None:
        s = step.softcap * torch.tanh(s / step.softcap)
    where = (step.q_positions, step.k_positions, slice(i, i + 1))
    if step.bias is not None:
        s = s + step.bias.block(*where, dtype=torch.float64)[:1]
    visible = step.mask.block(*where)[:1].expand(1, H, 1, n)
    block = ScoreBlock(
        q,
        visible,
        torch.zeros(1, 1, 1, 1, dtype=torch.int64),
        torch.arange(H)[None, :, None, None],
        as_tensor(step.q_positions)[:1, None, i : i + 1, None],
        as_tensor(step.k_positions)[:1, None, None],
        torch.tensor(i).view(1, 1, 1, 1),
        torch.arange(n)[None, None, None],
        visible.sum(-1, keepdim=True),
    )
    return s, block


def _rule_weights(rule: ScoreRule, s: Tensor, block: ScoreBlock, sink: Tensor | None) -> Tensor:
    """Return the weights [1,H,1,n] of masked scores, after the rules on weights."""
    if rule.normalizer is not None:
        p = rule.normalizer.normalize(s, block)
    else:
        extra = s.new_full((*s.shape[:3], 1), -torch.inf)
        if sink is not None:
            extra = sink.double()[None, :, None, None].expand_as(extra)
        sees_nothing = ~block.visible.any(-1, keepdim=True)
        p = torch.cat([s.masked_fill(sees_nothing, 0), extra], dim=-1).softmax(-1)[..., :-1]
    for one in rule.steps():
        p = one.change_pattern(p.masked_fill(~block.visible, 0), block)
    return p.masked_fill(~block.visible, 0)


Bools = NDArray[np.bool_]

EMPTY = "padding"
"""The reason for a key or query whose position is -1: the slot holds no token."""


def why_masked(
    mask: masks.Mask | None,
    positions: Positions,
    i: int,
    visible: Bools,
    head: int = 0,
    k_positions: Positions | None = None,
) -> tuple[str, ...]:
    """Return, for each key, the terms of the mask that hide it from query i, or ""."""
    keys = positions if k_positions is None else k_positions
    words = [EMPTY] * len(visible)
    empty = find_empty_slots(slice_positions(positions, slice(i, i + 1)))
    if empty is None or not bool(empty[0]):
        reasons = [set[str]()] * len(visible)
        if mask is not None:
            reasons = _reasons(mask, positions, keys, i, head)
        has_token = (as_tensor(keys)[0] >= 0).tolist()
        words = [
            (" and ".join(sorted(terms)) or "the kernel") if real else EMPTY
            for terms, real in zip(reasons, has_token, strict=True)
        ]
    return tuple("" if shown else word for shown, word in zip(visible, words, strict=True))


def _reasons(mask: masks.Mask, q: Positions, k: Positions, i: int, head: int) -> list[set[str]]:
    """Return, for each key, the terms that exclude it; empty where the whole mask allows it."""
    rows = mask.block(q, k, slice(i, i + 1))[0]
    allowed = rows[head if rows.shape[0] > 1 else 0, 0].tolist()
    if operands := mask.operands():
        terms = [_reasons(term, q, k, i, head) for term in operands]
        reasons = [set[str]().union(*each) for each in zip(*terms, strict=True)]
    else:
        reasons = [{mask.refusal().words} for _ in allowed]
    return [set() if yes else words for yes, words in zip(allowed, reasons, strict=True)]
