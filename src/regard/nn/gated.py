"""Gated and differential attention: projections that change the output of attention before the
output map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.arguments import check_groups
from regard.caches import Parts
from regard.cost.softmax import VisibleKeys
from regard.cost.spec import ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.nn.explain import CallWeights, Explainable, HeadMix, LayerRun, MixTerm
from regard.nn.norms import RMSNorm
from regard.nn.projections import (
    Heads,
    Projection,
    ProjectionShape,
    Separate,
    adjust_query,
    attention_spec,
    cache_unsafe_reason,
    select_form,
)
from regard.span import Positions


class Gated(Explainable, nn.Module):
    """Any projection, with a gate on each number of the heads, made of the token that asks.

    z' = z * sigmoid(gate(x))

    Args:
        project: the projection.
        gate: `Heads` that make H heads of E.

    Raises:
        ArgumentError: the gate does not fit the heads that attention gives.

    >>> project = Separate(Heads(8, 4, 2), Heads(8, 2, 2), Heads(8, 2, 2))
    >>> gated = Gated(project, Heads(8, 4, 2))
    >>> gated.postprocess(torch.ones(1, 4, 3, 2), torch.zeros(1, 3, 8))[0, 0, 0]
    tensor([0.5000, 0.5000], grad_fn=<SelectBackward0>)

    Source: Qiu et al. 2025 (arXiv 2505.06708), section 3 (G1: after the weighted sum, per number
    and head).
    """

    def __init__(self, project: Projection, gate: Heads) -> None:
        super().__init__()
        H, _, _, E, _ = project.shape
        if (gate.heads, gate.head_dim) != (H, E):
            raise ArgumentError(
                f"gate is {gate.extra_repr()}; it must be {H} heads of {E}, as attention gives"
            )
        self.project, self.gate = project, gate

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """As the projection."""
        return self.project.query(x, positions)

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """As the projection."""
        return self.project.remember(x, positions)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """As the projection."""
        return self.project.recall(memory, positions)

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """The heads, gated."""
        result: Tensor = self.project.postprocess(z, x) * self.gate(x, None).sigmoid()
        return result

    def select_form(self, queries: int, keys: int) -> Projection:
        """The projection's form for so many queries against so many keys, gated."""
        form = select_form(self.project, queries, keys)
        return self if form is self.project else _GatedForm(form, self.gate)

    def adjust_query(self, q: Tensor, positions: Positions, seen: Positions) -> Tensor:
        """As the projection."""
        return adjust_query(self.project, q, positions, seen)

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """The cost of attention through the projection; `weights` hold those of the gate, too."""
        return attention_spec(self.project, weights, visible)

    @property
    def shape(self) -> ProjectionShape:
        """As the projection's."""
        return self.project.shape

    @property
    def cache_unsafe_reason(self) -> str | None:
        """As the projection's."""
        return self.project.cache_unsafe_reason


class _GatedForm:
    """A form of a gated projection: what it asks, keeps and recalls is the form's."""

    def __init__(self, form: Projection, gate: Heads) -> None:
        self.form, self.gate = form, gate
        self.query, self.remember, self.recall = form.query, form.remember, form.recall
        self.shape, self.cache_unsafe_reason = form.shape, form.cache_unsafe_reason

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """The form's heads, gated."""
        result: Tensor = self.form.postprocess(z, x) * self.gate(x, None).sigmoid()
        return result


class Differential(Separate):
    """Two patterns per head over the same values; the second is taken off the first.

    z_h = (1 - l0) norm((softmax(q1 k1^T / sqrt(D)) - l softmax(q2 k2^T / sqrt(D))) v),
    l = exp(a1 . b1) - exp(a2 . b2) + l0

    Attention sees 2 H query heads and 2 G key heads, first all of the first pattern, then all of
    the second.

    Args:
        q: `Heads` of 2 H heads.
        k: `Heads` of 2 G heads of the same dim D.
        v: `Heads` of G heads of E.
        depth: which layer this is, from 0: l0 = 0.8 - 0.6 exp(-0.3 depth).

    Raises:
        ArgumentError: the heads do not fit one another, or depth is negative.

    >>> pair = Differential(Heads(8, 4, 2), Heads(8, 2, 2), Heads(8, 1, 4))
    >>> pair.shape
    ProjectionShape(H=4, G=2, D=2, E=4, memory=(4, 4))

    Source: Ye et al. 2024 (arXiv 2410.05258), equations 1 to 3.
    """

    def __init__(self, q: Heads, k: Heads, v: Heads, *, depth: int = 0) -> None:
        nn.Module.__init__(self)
        if q.heads % 2 or k.heads != 2 * v.heads or q.head_dim != k.head_dim or depth < 0:
            raise ArgumentError(
                f"q is {q.extra_repr()}, k is {k.extra_repr()}, v is {v.extra_repr()}, depth "
                f"{depth}: q needs 2 H heads, "
                "k twice the heads of v and the head dim of q, depth at least 0"
            )
        check_groups(q.heads // 2, v.heads)
        self.q, self.k, self.v, self.key_transform, self.cache_unsafe_reason = (
            q,
            k,
            v,
            None,
            cache_unsafe_reason(k),
        )
        self.start = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.a1, self.b1, self.a2, self.b2 = (
            nn.Parameter(0.1 * torch.randn(q.head_dim)) for _ in range(4)
        )
        self.norm = RMSNorm(v.head_dim, eps=1e-5)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Keys of both patterns, and the values twice."""
        k, v = super().recall(memory, positions)
        return k, v.repeat(1, 2, 1, 1)

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """The first pattern's heads less those of the second, normed: [B,2H,T,E] -> [B,H,T,E]."""
        first, second = z.chunk(2, dim=1)
        out: Tensor = self.norm(first - self.share.to(z.dtype) * second) * (1 - self.start)
        return out

    @property
    def share(self) -> Tensor:
        """The factor l of the second pattern."""
        return (self.a1 @ self.b1).exp() - (self.a2 @ self.b2).exp() + self.start

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], here: int, head: int, row: int
    ) -> HeadMix:
        """Two softmaxes over the same values, the second taken off the first."""
        H, share = run.q.shape[1] // 2, float(self.share)
        first, second = head % H, head % H + H
        rows = calls[here].by_position(run.k.shape[2])
        return HeadMix(
            f"the pattern of output head {first} is a difference of two softmaxes, λ = "
            f"{share:.4f}: a weight may be negative, and the row sums to 1 - λ; then a norm, times "
            "1 - λ₀",
            (
                MixTerm(f"head {first}", 1.0, float(rows[first].sum()), head == first),
                MixTerm(f"head {second}", -share, float(rows[second].sum()), head == second),
            ),
            rows[first] - share * rows[second],
        )

    @property
    def shape(self) -> ProjectionShape:
        """2 H and 2 G heads of D, values of E; a token takes 2 G D + G E numbers."""
        D, G, E = self.k.head_dim, self.v.heads, self.v.head_dim
        return ProjectionShape(self.q.heads, 2 * G, D, E, (2 * G * D, G * E))
