"""Mechanisms that keep a state in place of tokens, as a module: one small class, assembled from
parts.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor, nn

from regard.caches import Cache, Parts, State
from regard.cost import Spec
from regard.cost.spec import HeadShape, Weights
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.mixer import Mixer, count_weights
from regard.nn.project import Heads, Projection
from regard.span import Positions
from regard.tap import tap


@runtime_checkable
class Rule(Protocol):
    """How a recurrence writes a token into its state and reads it. Its gates are made of x, by
    parts of its own.
    """

    def __call__(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Tensor, Parts]:
        """x [B,T,M], q [B,H,T,D], k [B,G,T,D], v [B,G,T,E] -> what the queries read [B,H,T,E], and
        the new state.
        """

    def spec(self, weights: Weights, shape: HeadShape) -> Spec:
        """The cost of a layer with this rule, from its parameters and the sizes of its heads."""


class Recurrent(Mixer):
    """project -> rule -> norm -> gate -> output.

    q, k, v = project(x);  z, state = rule(x, q, k, v, state);  z' = norm(z) * silu(gate(x));
    out = output(z', heads joined)

    Args:
        project: a `Projection`: query heads H, key/value heads G and every step on a head are its
            matter.
        rule: a module that is a `Rule`.
        output: a module [B,T,H*E] -> [B,T,M].
        norm: None, or a module on the last dim of each head.
        gate: None, or `Heads` that make H heads of E: the output gate, made of the token that asks.

    Raises:
        ArgumentError: the gate does not fit the heads.

    >>> import torch
    >>> from regard.nn.project import Separate
    >>> from regard.nn.rules import Delta
    >>> project = Separate(Heads(8, 4, 2), Heads(8, 2, 2), Heads(8, 2, 2))
    >>> mixer = Recurrent(project, Delta(8, 2), nn.Linear(8, 8))
    >>> cache = mixer.new_cache()
    >>> mixer(torch.zeros(1, 5, 8), cache=cache).shape, cache.bytes
    (torch.Size([1, 5, 8]), 32)

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4; norm and gate: Sun et al.
    2023 (arXiv 2307.08621), equation 8.
    """

    def __init__(
        self,
        project: Projection,
        rule: Rule,
        output: nn.Module,
        *,
        norm: nn.Module | None = None,
        gate: Heads | None = None,
    ) -> None:
        super().__init__()
        H, _, _, E, _ = project.shape
        if gate is not None and (gate.heads, gate.head_dim) != (H, E):
            raise ArgumentError(
                f"gate is {gate.extra_repr()}; it must be {H} heads of {E}, as the rule gives"
            )
        self.project, self.rule, self.output = project, rule, output
        self.norm, self.gate = norm, gate

    def check_cache(self, cache: Cache) -> None:
        """Refuse a cache of tokens.

        Raises:
            ArgumentTypeError: the cache is not a `regard.caches.State`.
        """
        if not isinstance(cache, State):
            raise ArgumentTypeError(
                f"the cache is {type(cache).__name__}; a recurrence needs a State: use new_cache()"
            )

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Mix x [B,T,M] with the state that the cache holds; backend is the form of the op
        ("reference" is "recurrent").
        """
        assert cache is None or isinstance(cache, State)
        q = tap("q", self.project.query(x, positions))
        k, v = self.project.recall(self.project.remember(x, positions), positions)
        k, v = tap("k", k), tap("v", v)
        form = "recurrent" if backend == "reference" else backend
        before = None if cache is None else cache.state
        z, after = self.rule(x, q, k, v, before, positions, form)
        if cache is not None:
            cache.store(after, positions)
        z = self.project.finish(z, x)
        z = z if self.norm is None else self.norm(z)
        z = tap("z", z if self.gate is None else z * F.silu(self.gate(x, positions)))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def new_cache(self) -> State:
        """An empty cache: a new text begins with a new one, or with `reset()`."""
        return State()

    @property
    def spec(self) -> Spec:
        """The cost of this layer: that of its rule."""
        return self.rule.spec(count_weights(self), self.project.shape.heads)
