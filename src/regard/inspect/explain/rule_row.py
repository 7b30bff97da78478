"""One row of a recorded call with a score rule: its scores after each step of the rule, and the
weights that the rule gives.

A rule gives the same result for a query whatever the other queries of the call are. So the row is
computed again in float64 from the recorded q and k, for all heads, because a rule may mix them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.inspect.explain.attention_row import (
    Checks,
    KernelRow,
    max_difference,
    online_softmax,
    softmax,
    to_array,
    visible_values,
)
from regard.inspect.explain.explanation import Array, ComputationStep, SoftmaxRow
from regard.language import Phrase
from regard.scores import ScoreBlock, ScoreRule
from regard.scores.base import change_scores
from regard.span import as_tensor


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
    """Compute the row of a recorded call with a score rule, and compare it with the recorded
    weights and output.
    """
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
    weights = _weights(rule, s, block, row.call.step.sink)
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
    names = [str(one) for one in rule.steps() if {"normaliser", "pattern"} & set(one.stages)]
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


def _weights(rule: ScoreRule, s: Tensor, block: ScoreBlock, sink: Tensor | None) -> Tensor:
    """Return the weights [1,H,1,n] of masked scores, after the rules on weights."""
    if rule.normaliser is not None:
        p = rule.normaliser.normalise(s, block)
    else:
        extra = s.new_full((*s.shape[:3], 1), -torch.inf)
        if sink is not None:
            extra = sink.double()[None, :, None, None].expand_as(extra)
        sees_nothing = ~block.visible.any(-1, keepdim=True)
        p = torch.cat([s.masked_fill(sees_nothing, 0), extra], dim=-1).softmax(-1)[..., :-1]
    for one in rule.steps():
        p = one.change_pattern(p.masked_fill(~block.visible, 0), block)
    return p.masked_fill(~block.visible, 0)
