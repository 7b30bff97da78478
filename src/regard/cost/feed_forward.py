"""Feed-forward layers: dense, gated or not, and mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from regard.cost.spec import Weights


class FeedForward(Protocol):
    """What a feed-forward layer answers when a model is added up."""

    @property
    def weights(self) -> dict[str, Weights]:
        """Its parameters, by part."""
        ...

    def active_weights(self, tokens: int) -> dict[str, Weights]:
        """Its active parameters for so many tokens together; for experts the mean over even choices, rounded up."""
        ...


@dataclass(frozen=True)
class Dense:
    """Up and down, and a gate beside up: M F or 2 M F, and F M.

    >>> Dense(4096, 14336).weights["feed-forward"].matrices
    176160768
    """

    dim: int
    hidden: int
    gated: bool = True
    bias: bool = False

    @property
    def all(self) -> Weights:
        """All of its numbers."""
        ups = 2 if self.gated else 1
        biases = ups * self.hidden + self.dim if self.bias else 0
        return Weights((ups + 1) * self.dim * self.hidden, biases)

    @property
    def weights(self) -> dict[str, Weights]:
        """One part."""
        return {"feed-forward": self.all}

    def active_weights(self, tokens: int) -> dict[str, Weights]:
        """All of it."""
        return self.weights


@dataclass(frozen=True)
class Experts:
    """Experts of which each token uses `active`, chosen by a router; and one that all tokens use, or none.

    Attributes:
        expert: each of them.
        count, active: how many there are, and how many a token uses.
        shared: the one that all use.
        router_bias: numbers beside the router's matrix, for each expert one or none.

    >>> experts = Experts(Dense(7168, 2048), 256, 8, Dense(7168, 2048), router_bias=256)  # DeepSeek-V3
    >>> experts.weights["experts"].matrices // experts.active_weights(1)["experts"].matrices
    32
    >>> round(experts.active_weights(32)["experts"].matrices / experts.active_weights(1)["experts"].matrices, 2)  # of 32 tokens, not 32 times
    20.41

    Source: Shazeer et al. 2017 (arXiv 1701.06538), equation 1.
    """

    expert: Dense
    count: int
    active: int
    shared: Dense | None = None
    router_bias: int = 0

    @property
    def weights(self) -> dict[str, Weights]:
        """Experts, router, and the shared one."""
        return self._parts(self.count)

    def active_weights(self, tokens: int) -> dict[str, Weights]:
        """E (1 - (1 - k / E)^n) experts, where n tokens choose independently and evenly."""
        # exact for the few of a batch, a float for the many of a prompt, where nothing is left
        missed = 1 - Fraction(self.active, self.count)
        left = missed**tokens if tokens <= 64 else Fraction(float(missed) ** tokens)
        return self._parts(self.count * (1 - left))

    def _parts(self, experts: Fraction | int) -> dict[str, Weights]:
        one = self.expert.all
        used = Weights(_up(experts * one.matrices), _up(experts * one.biases))
        parts = {
            "experts": used,
            "router": Weights(self.expert.dim * self.count, self.router_bias),
        }
        return parts if self.shared is None else {**parts, "shared expert": self.shared.all}


def _up(x: Fraction | int) -> int:
    return -(-Fraction(x).numerator // Fraction(x).denominator)
