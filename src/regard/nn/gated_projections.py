"""Projections that change the result of attention before the output map: an output gate, and the
difference of differential attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.argument_checks import check_groups
from regard.biases import Bias
from regard.caches import Parts
from regard.cost.softmax import VisibleKeys
from regard.cost.spec import ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.nn.data_bias import data_bias
from regard.nn.explainable import CallWeights, HeadMix, LayerRun, MixTerm
from regard.nn.norms import RMSNorm
from regard.nn.projections import (
    HeadProjection,
    Projection,
    ProjectionModule,
    ProjectionShape,
    SeparateQKV,
    adjust_query,
    attention_spec,
    cache_unsafe_reason,
    select_form,
)
from regard.span import Positions
from regard.units import plural


class GatedProjection(ProjectionModule):
    """A projection with an output gate: every element of the heads is multiplied by a gate that is
    computed from the hidden state of the query.

    z' = z * sigmoid(gate(x))

    Args:
        project: the projection to wrap; any `Projection`.
        gate: a `HeadProjection` of x to H heads of E, which is one gate per head and channel.

    Raises:
        ArgumentError: the gate does not have the heads that attention returns.

    >>> q, k, v = (HeadProjection(8, heads, 2) for heads in (4, 2, 2))
    >>> gated = GatedProjection(SeparateQKV(q, k, v), HeadProjection(8, 4, 2))
    >>> gated.postprocess(torch.ones(1, 4, 3, 2), torch.zeros(1, 3, 8))[0, 0, 0]
    tensor([0.5000, 0.5000], grad_fn=<SelectBackward0>)

    Source: Qiu et al. 2025 (arXiv 2505.06708), section 3 (G1: after the weighted sum, per channel
    and head).
    """

    def __init__(self, project: Projection, gate: HeadProjection) -> None:
        super().__init__()
        H, _, _, E, _ = project.shape
        if (gate.heads, gate.head_dim) != (H, E):
            raise ArgumentError(
                f"gate is {gate.extra_repr()}; it must be {plural(H, 'head')} of {E}, as attention "
                "returns"
            )
        self.project, self.gate = project, gate

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """Return the queries [B,H,T,D] of the wrapped projection."""
        return self.project.query(x, positions)

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the memory parts of the wrapped projection."""
        return self.project.remember(x, positions)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the wrapped projection."""
        return self.project.recall(memory, positions)

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Postprocess the heads by the wrapped projection, then multiply them by the gate."""
        result: Tensor = self.project.postprocess(z, x) * self.gate(x, None).sigmoid()
        return result

    def select_form(self, queries: int, keys: int) -> Projection:
        """Return the wrapped projection's form for this number of queries and keys, with the gate.

        Args:
            queries: the number of queries T.
            keys: the number of keys S in memory.

        Returns:
            The gated form.
        """
        form = select_form(self.project, queries, keys)
        return self if form is self.project else _GatedForm(form, self.gate)

    def adjust_query(self, q: Tensor, positions: Positions, k_positions: Positions) -> Tensor:
        """Adjust queries to the positions of the keys, if the wrapped projection does so.

        Args:
            q: queries [B,H,T,D].
            positions: positions of the queries.
            k_positions: positions of the keys.

        Returns:
            The adjusted queries.
        """
        return adjust_query(self.project, q, positions, k_positions)

    def data_bias(
        self, x: Tensor, q: Tensor, memory: Parts, positions: Positions, k_positions: Positions
    ) -> Bias | None:
        """Return the bias that the wrapped projection computes from the tokens, or None.

        Args:
            x, q, memory, positions, k_positions: as for `regard.nn.data_bias.HasDataBias`.

        Returns:
            The bias, or None.
        """
        return data_bias(self.project, x, q, memory, positions, k_positions)

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """Return the cost of attention through this projection.

        Args:
            weights: the number of parameters of the layer, those of the gate included.
            visible: the number of keys that a query sees.

        Returns:
            The cost specification.
        """
        return attention_spec(self.project, weights, visible)

    @property
    def shape(self) -> ProjectionShape:
        """The sizes of the wrapped projection."""
        return self.project.shape

    @property
    def cache_unsafe_reason(self) -> str | None:
        """The reason why a cache must not store the memory of the wrapped projection, or None."""
        return self.project.cache_unsafe_reason


class _GatedForm:
    """One form of a wrapped projection (`HasForms`), with the output gate on its result."""

    def __init__(self, form: Projection, gate: HeadProjection) -> None:
        self.form, self.gate = form, gate
        self.query, self.remember, self.recall = form.query, form.remember, form.recall
        self.shape, self.cache_unsafe_reason = form.shape, form.cache_unsafe_reason

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Postprocess the heads by the form, then multiply them by the gate."""
        result: Tensor = self.form.postprocess(z, x) * self.gate(x, None).sigmoid()
        return result


class DifferentialProjection(SeparateQKV):
    """The projection of differential attention: each head has two attention patterns over the same
    values, and the second is subtracted from the first.

    z_h = (1 - l0) norm((softmax(q1 k1^T / sqrt(D)) - l softmax(q2 k2^T / sqrt(D))) v),
    l = exp(a1 . b1) - exp(a2 . b2) + l0,  l0 = 0.8 - 0.6 exp(-0.3 depth)

    l and l0 are lambda and lambda_init of the paper; a1, b1, a2 and b2 are its lambda_q1,
    lambda_k1, lambda_q2 and lambda_k2.

    Attention computes 2 H query heads and 2 G key heads: first those of the first pattern, then
    those of the second.

    Args:
        q: a `HeadProjection` to 2 H heads of D.
        k: a `HeadProjection` to 2 G heads of D.
        v: a `HeadProjection` to G heads of E.
        depth: the index of the layer, from 0, which determines l0.

    Raises:
        ArgumentError: the heads do not fit one another, or depth is negative.

    >>> q, k, v = HeadProjection(8, 4, 2), HeadProjection(8, 2, 2), HeadProjection(8, 1, 4)
    >>> DifferentialProjection(q, k, v).shape
    ProjectionShape(H=4, G=2, D=2, E=4, memory=(4, 4))

    Source: Ye et al. 2024 (arXiv 2410.05258), equations 1 to 3.
    """

    def __init__(
        self, q: HeadProjection, k: HeadProjection, v: HeadProjection, *, depth: int = 0
    ) -> None:
        nn.Module.__init__(self)
        if q.heads % 2 or k.heads != 2 * v.heads or q.head_dim != k.head_dim or depth < 0:
            raise ArgumentError(
                f"q is {q.extra_repr()}, k is {k.extra_repr()}, v is {v.extra_repr()}, "
                f"depth is {depth}; q must have an even number of heads, k must have twice the "
                "heads of v and the head dim of q, and depth must be at least 0"
            )
        check_groups(q.heads // 2, v.heads)
        self.q, self.k, self.v, self.key_transform = q, k, v, None
        self.cache_unsafe_reason = cache_unsafe_reason(k)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.a1, self.b1, self.a2, self.b2 = (
            nn.Parameter(0.1 * torch.randn(q.head_dim)) for _ in range(4)
        )
        self.norm = RMSNorm(v.head_dim, eps=1e-5)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the keys of both patterns [B,2G,S,D], and the values repeated for both
        [B,2G,S,E].
        """
        k, v = super().recall(memory, positions)
        return k, v.repeat(1, 2, 1, 1)

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Subtract the second pattern's heads from the first's and normalise: [B,2H,T,E] ->
        [B,H,T,E].
        """
        first, second = z.chunk(2, dim=1)
        out: Tensor = self.norm(first - self.lambda_full.to(z.dtype) * second)
        return out * (1 - self.lambda_init)

    @property
    def lambda_full(self) -> Tensor:
        """The factor l of the second pattern, a scalar tensor."""
        return (self.a1 @ self.b1).exp() - (self.a2 @ self.b2).exp() + self.lambda_init

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], call_index: int, head: int, row: int
    ) -> HeadMix:
        """Return the difference of the two attention patterns as a mix of two rows."""
        H, factor = run.q.shape[1] // 2, float(self.lambda_full)
        first, second = head % H, head % H + H
        rows = calls[call_index].by_position(run.k.shape[2])
        return HeadMix(
            f"the pattern of output head {first} is the first softmax minus λ times the second, "
            f"λ = {factor:.4f}: weights may be negative, and the row sums to 1 - λ; a norm and the "
            "factor 1 - λ₀ follow",
            (
                MixTerm(f"head {first}", 1.0, float(rows[first].sum()), head == first),
                MixTerm(f"head {second}", -factor, float(rows[second].sum()), head == second),
            ),
            rows[first] - factor * rows[second],
        )

    @property
    def shape(self) -> ProjectionShape:
        """2 H query heads and 2 G key heads of D, values of E; a cache stores 2 G D + G E values
        per token.
        """
        D, G, E = self.k.head_dim, self.v.heads, self.v.head_dim
        return ProjectionShape(self.q.heads, 2 * G, D, E, (2 * G * D, G * E))
