"""Feed-forward layers: dense, gated or not, and mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from regard.cost.spec import ParameterCounts


class FeedForwardSpec(Protocol):
    """The parameters of a feed-forward layer, all and active ones."""

    @property
    def weights(self) -> dict[str, ParameterCounts]:
        """Its parameters, by part."""
        ...

    def active_weights(self, tokens: int) -> dict[str, ParameterCounts]:
        """The parameters that so many tokens use together, by part.

        For experts it is the mean over routers that choose evenly, rounded up.
        """
        ...


@dataclass(frozen=True)
class DenseSpec:
    """A dense layer: a matrix up (M F), a matrix down (F M), and a gate (M F) if it is gated.

    >>> DenseSpec(4096, 14336).weights["feed-forward"].matrices
    176160768
    """

    dim: int
    hidden: int
    gated: bool = True
    bias: bool = False

    @property
    def total(self) -> ParameterCounts:
        """All parameters."""
        ups = 2 if self.gated else 1
        biases = ups * self.hidden + self.dim if self.bias else 0
        return ParameterCounts((ups + 1) * self.dim * self.hidden, biases)

    @property
    def weights(self) -> dict[str, ParameterCounts]:
        """The parameters, as one part."""
        return {"feed-forward": self.total}

    def active_weights(self, tokens: int) -> dict[str, ParameterCounts]:
        """All parameters: a dense layer uses them for every token."""
        return self.weights


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts: a router chooses `active` of them for each token.

    Attributes:
        expert: the sizes of each expert.
        count, active: how many experts there are, and how many a token uses.
        shared: an expert that all tokens use; None if there is none.
        router_bias: how many parameters the router has beside its matrix.

    >>> one = DenseSpec(7168, 2048)  # DeepSeek-V3
    >>> experts = MoESpec(one, 256, 8, shared=one, router_bias=256)
    >>> few, many = (experts.active_weights(tokens)["experts"].matrices for tokens in (1, 32))
    >>> experts.weights["experts"].matrices // few
    32
    >>> round(many / few, 2)  # 32 tokens share experts, so that this is less than 32
    20.41

    Source: Shazeer et al. 2017 (arXiv 1701.06538), equation 1.
    """

    expert: DenseSpec
    count: int
    active: int
    shared: DenseSpec | None = None
    router_bias: int = 0

    @property
    def weights(self) -> dict[str, ParameterCounts]:
        """Experts, router, and the shared one."""
        return self._parts(self.count)

    def active_weights(self, tokens: int) -> dict[str, ParameterCounts]:
        """E (1 - (1 - k / E)^n) experts, where n tokens choose independently and evenly."""
        # exact for the few of a batch, a float for the many of a prompt, where nothing is left
        missed = 1 - Fraction(self.active, self.count)
        left = missed**tokens if tokens <= 64 else Fraction(float(missed) ** tokens)
        return self._parts(self.count * (1 - left))

    def _parts(self, experts: Fraction | int) -> dict[str, ParameterCounts]:
        one = self.expert.total
        used = ParameterCounts(_up(experts * one.matrices), _up(experts * one.biases))
        parts = {
            "experts": used,
            "router": ParameterCounts(self.expert.dim * self.count, self.router_bias),
        }
        return parts if self.shared is None else {**parts, "shared expert": self.shared.total}


def _up(x: Fraction | int) -> int:
    return -(-Fraction(x).numerator // Fraction(x).denominator)
