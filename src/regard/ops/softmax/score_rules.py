"""Score rules in a call: their inputs, their gradients, and calls that mean the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regard.ops.softmax.call import Call
from regard.scores import ScoreBlock, ScoreRule, SoftClamp, Temperature
from regard.scores.base import change_scores
from regard.span import Positions, as_tensor, slice_positions


def score_block(
    call: Call, rows: slice, columns: slice, visible: Tensor, key_count: Tensor | None = None
) -> ScoreBlock:
    """Return what a score rule may read about a block of a call."""
    device = visible.device  # a call that a backward pass saved has no data

    def along(positions: Positions, part: slice, dim: int) -> Tensor:
        return as_tensor(slice_positions(positions, part), device)[:, None].unsqueeze(dim)

    if key_count is None and call.score is not None and call.score.needs_count:
        key_count = visible.expand(*visible.shape[:3], call.S).sum(-1, keepdim=True)
    return ScoreBlock(
        call.q[:, :, rows],
        visible,
        torch.arange(call.B, device=device)[:, None, None, None],
        torch.arange(call.H, device=device)[None, :, None, None],
        along(call.q_positions, rows, 3),
        along(call.k_positions, columns, 2),
        torch.arange(call.T, device=device)[rows][None, None, :, None],
        torch.arange(call.S, device=device)[columns][None, None, None, :],
        key_count,
    )


def change_pattern(rule: ScoreRule, p: Tensor, block: ScoreBlock) -> Tensor:
    """Return the weights after all steps of a rule that change weights; 0 where a key is hidden."""
    for step in rule.steps():
        p = step.change_pattern(p.masked_fill(~block.visible, 0), block)
    return p.masked_fill(~block.visible, 0)


def without_rule(call: Call) -> Call | None:
    """Return a call without a score rule that means the same, such as by a softcap, or None."""
    if call.score is None or call.bias is not None or call.softcap is not None:
        return None
    q, scale, softcap = call.q, call.scale, call.softcap
    for step in call.score.steps():
        if softcap is not None or not isinstance(step, (Temperature, SoftClamp)):
            return None
        if isinstance(step, SoftClamp):
            softcap = float(step.cap)
        elif isinstance(step.tau, Tensor):
            h = torch.arange(call.H, device=q.device)[None, :, None]
            positions = as_tensor(call.q_positions, q.device)[:, None]
            divisor = step.divisor(h, positions, call.score_dtype)
            assert isinstance(divisor, Tensor), "the temperature is a tensor"
            q = (q.to(call.score_dtype) / divisor[..., None]).to(call.q.dtype)
        else:
            scale = scale / step.tau
    if not 0 < abs(scale) < math.inf:  # a graph cannot ask isfinite
        return None
    return replace(call, q=q, scale=scale, softcap=softcap, score=None, original=call)


class RuleOfTile:
    """A score rule on one tile, with the way back of its gradient."""

    def __init__(
        self,
        call: Call,
        device: torch.device,
        tensors: Sequence[Tensor] = (),
        needs_gradient: Sequence[bool] = (),
    ) -> None:
        assert call.score is not None, "only made for a call with a rule"
        self.rule, self.needs_gradient = call.score, tuple(needs_gradient)
        self.replaces_softmax = call.score.normalizer is not None
        self.sums = [
            torch.zeros(x.shape, dtype=call.score_dtype, device=x.device) if needed else None
            for x, needed in zip(tensors, self.needs_gradient, strict=True)
        ]
        self.dtypes = [x.dtype for x in tensors]
        self._key_count = (
            call.mask.visible(call.q_positions, call.k_positions, device=device)[..., None]
            if call.score.needs_count
            else None
        )
        self._call = call

    def block(self, rows: slice, columns: slice, visible: Tensor) -> ScoreBlock:
        """Return what the rule may read about a tile; see `score_block`."""
        count = None if self._key_count is None else self._key_count[:, :, rows]
        return score_block(self._call, rows, columns, visible, count)

    def apply(self, s: Tensor, block: ScoreBlock, *, hides: bool) -> Tensor:
        """Return the scores of a tile after the rule, -inf where masked, or the rule's weights."""
        return self._apply(self.rule, s, block, hides=hides)

    def _apply(self, rule: ScoreRule, s: Tensor, block: ScoreBlock, *, hides: bool) -> Tensor:
        s = change_scores(rule, s, block, hides=hides)
        s = s.masked_fill(~block.visible, -math.inf) if hides else s
        if not self.replaces_softmax:
            return s
        weights = rule.normalizer.normalize(s, block)  # type: ignore[union-attr]
        return weights.masked_fill(~block.visible, 0) if hides else weights

    def apply_with_gradient(self, s: Tensor, block: ScoreBlock, *, hides: bool) -> TileGradient:
        """Return the result of `apply`, with what its gradient needs."""
        with torch.enable_grad():
            before = s.detach().requires_grad_()
            tensors = [
                x.detach().to(s.dtype).requires_grad_(needed)
                for x, needed in zip(self.rule.tensors(), self.needs_gradient, strict=True)
            ]
            after = self._apply(self.rule.with_tensors(tensors), before, block, hides=hides)
        return TileGradient(self, before, tensors, after)

    def add(self, i: int, gradient: Tensor) -> None:
        """Add the gradient of the i-th tensor on one tile."""
        total = self.sums[i]
        assert total is not None, "only tensors that require a gradient get one"
        total += gradient

    def total(self) -> list[Tensor | None]:
        """Return the summed gradients in the dtypes of the tensors; None where not required."""
        return [
            None if x is None else x.to(dtype)
            for x, dtype in zip(self.sums, self.dtypes, strict=True)
        ]


class TileGradient:
    """One tile to which a rule was applied, and the derivative of the rule there."""

    def __init__(
        self, owner: RuleOfTile, before: Tensor, tensors: list[Tensor], after: Tensor
    ) -> None:
        self._owner, self._before, self._tensors, self._after = owner, before, tensors, after

    @property
    def values(self) -> Tensor:
        """A copy of the scores, or the weights, after the rule."""
        return self._after.detach().clone()

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the scores before the rule, and add those of its tensors."""
        if not self._after.requires_grad:  # the rule returned constants
            return torch.zeros_like(gradient)
        wanted = [i for i, x in enumerate(self._tensors) if x.requires_grad]
        d_scores, *others = torch.autograd.grad(
            self._after,
            [self._before, *(self._tensors[i] for i in wanted)],
            gradient.view(self._after.shape),
            materialize_grads=True,
        )
        for i, d in zip(wanted, others, strict=True):
            self._owner.add(i, d)
        result: Tensor = d_scores.reshape(gradient.shape)
        return result


def why_not_pairs(call: Call) -> list[str]:
    """Return why a kernel that computes scores tile by tile cannot serve the rule of a call."""
    rule = call.score
    if rule is None:
        return []
    if rule.scope == "pair":
        changes = [str(x) for x in rule.steps() if "pattern" in x.stages]
        return [f"{' and '.join(changes)} changes weights after the normalizer"] if changes else []
    needs = "all keys of a row" if rule.scope == "row" else "the scores of all heads"
    steps = " and ".join(str(x) for x in rule.steps() if x.scope == rule.scope)
    return [f"the score rule {steps} needs {needs} at once"]
