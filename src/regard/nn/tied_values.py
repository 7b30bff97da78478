"""Projections whose values are computed from the keys: keys before norm and rotation as values
(Gemma 4), and one vector that is key and value (DeepSeek-V4).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.argument_checks import check_groups
from regard.caches import Parts
from regard.errors import ArgumentError
from regard.nn.explainable import (
    InputSteps,
    ProjectionQuery,
    first_rotary,
    projection_step,
    run_steps,
)
from regard.nn.projections import (
    HeadProjection,
    Projection,
    ProjectionShape,
    cache_unsafe_reason,
)
from regard.span import Positions


class KeysAsValues(Projection, nn.Module):
    """A projection whose values are the projected keys before the steps on keys, with steps of
    their own: the matrix of the values is left out.

    y = W_k x;  k = key steps(y);  v = value steps(y)

    A cache stores both, because the steps on keys, such as a rotation, change them.

    Args:
        q: a `HeadProjection` to H query heads of D.
        k: a `HeadProjection` to G key heads of D, with the steps on keys.
        value_steps: modules called as step(y [B,G,S,D], positions).

    Raises:
        ArgumentError: G does not divide H, or q and k differ in head dim.

    >>> import torch
    >>> project = KeysAsValues(HeadProjection(8, 4, 2), HeadProjection(8, 2, 2))
    >>> k, v = project.remember(torch.randn(1, 3, 8), None)
    >>> torch.equal(k, v), project.shape.memory
    (True, (4, 4))

    Source: the code of Gemma 4 in transformers (`attention_k_eq_v`).
    """

    def __init__(
        self, q: HeadProjection, k: HeadProjection, *, value_steps: Sequence[nn.Module] = ()
    ) -> None:
        super().__init__()
        _check_heads(q, k)
        self.q, self.k, self.value_steps = q, k, nn.ModuleList(value_steps)
        self.cache_unsafe_reason = cache_unsafe_reason(k)

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Return the queries [B,H,T,D] of hidden states x."""
        q: Tensor = self.q(x, positions)
        return q

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the keys and the values [B,G,S,D], from one linear map."""
        y = self._heads(x)
        return _run(self.k.steps, y, positions), _run(self.value_steps, y, positions)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values."""
        k, v = memory
        return k, v

    def _heads(self, x: Tensor) -> Tensor:
        """Return the projected keys [B,G,S,D] before any step."""
        y: Tensor = self.k.flat(self.k.linear(x))
        return torch.unflatten(y, -1, (self.k.heads, self.k.head_dim)).transpose(1, 2)

    @property
    def shape(self) -> ProjectionShape:
        """H, G and D, with E = D; a cache stores 2 G D values per token."""
        G, D = self.k.heads, self.k.head_dim
        return ProjectionShape(self.q.heads, G, D, D, (G * D, G * D))

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of queries, keys and values; the values start from the projected
        keys.
        """
        first = projection_step("k", self._heads(query.memory)[0], self.k.linear)
        first = first._replace(equation=f"v_{first.equation.partition('_')[2]}, the projected key")
        return InputSteps(
            self.q.explain_steps(query.x, query.positions, "q"),
            self.k.explain_steps(query.memory, query.k_positions, "k"),
            run_steps(self.value_steps, (first,), query.k_positions, "v"),
            first_rotary(self.q.steps),
        )


class SharedKeyValue(Projection, nn.Module):
    """A projection with one vector per group that is key and value, which a cache stores once.

    k = v = steps(W_kv x)

    If the steps rotate it, the result of attention is rotated by all positions of the keys; the
    step `InverseRotary` on the result makes it depend on distances only.

    Args:
        q: a `HeadProjection` to H query heads of D.
        kv: a `HeadProjection` to G heads of D.

    Raises:
        ArgumentError: G does not divide H, or q and kv differ in head dim.

    >>> SharedKeyValue(HeadProjection(8, 4, 2), HeadProjection(8, 1, 2)).shape.memory
    (2,)

    Source: the code of DeepSeek-V4 in transformers.
    """

    def __init__(self, q: HeadProjection, kv: HeadProjection) -> None:
        super().__init__()
        _check_heads(q, kv)
        self.q, self.kv = q, kv
        self.cache_unsafe_reason = cache_unsafe_reason(kv)

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Return the queries [B,H,T,D] of hidden states x."""
        q: Tensor = self.q(x, positions)
        return q

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the vectors [B,G,S,D] that are keys and values."""
        return (self.kv(x, positions),)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the stored vectors as keys and as values."""
        return memory[0], memory[0]

    @property
    def shape(self) -> ProjectionShape:
        """H, G and D, with E = D; a cache stores G D values per token."""
        G, D = self.kv.heads, self.kv.head_dim
        return ProjectionShape(self.q.heads, G, D, D, (G * D,))

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of queries, and the same steps for keys and for values."""
        kv, memory, k_positions = self.kv, query.memory, query.k_positions
        return InputSteps(
            self.q.explain_steps(query.x, query.positions, "q"),
            kv.explain_steps(memory, k_positions, "k"),
            kv.explain_steps(memory, k_positions, "v"),
            first_rotary(self.q.steps),
        )


def _check_heads(q: HeadProjection, k: HeadProjection) -> None:
    """Check that the heads of queries and keys fit one another."""
    check_groups(q.heads, k.heads)
    if q.head_dim != k.head_dim:
        raise ArgumentError(
            f"q is {q.extra_repr()} and k is {k.extra_repr()}; they must have the same head dim"
        )


def _run(steps: nn.ModuleList, y: Tensor, positions: Positions | None) -> Tensor:
    """Apply the steps to heads y [B,n,L,d]."""
    for step in steps:
        y = step(y, positions)
    return y
