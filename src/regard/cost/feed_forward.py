"""Count the parameters of feed-forward layers: dense layers, gated or not, and mixtures of
experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from regard.cost.spec import ParameterCounts


class FeedForwardSpec(Protocol):
    """The protocol of a feed-forward layer: how many parameters it has, and how many of them are
    active.
    """

    @property
    def weights(self) -> dict[str, ParameterCounts]:
        """All parameters of the layer, by part."""
        ...

    def active_weights(self, tokens: int) -> dict[str, ParameterCounts]:
        """Return the parameters that `tokens` tokens use together, by part.

        For experts this is the expected number under routers that choose uniformly, rounded up.
        """
        ...


@dataclass(frozen=True)
class DenseSpec:
    """A dense layer: an up projection (M F), a down projection (F M), and a gate projection (M F)
    if it is gated.

    Attributes:
        dim: M, the width of the model.
        hidden: F, the width of the hidden layer.
        gated: whether there is a gate projection, as in SwiGLU.
        bias: whether every projection has a bias.

    >>> DenseSpec(4096, 14336).weights["feed-forward"].matrices
    176160768
    """

    dim: int
    hidden: int
    gated: bool = True
    bias: bool = False

    @property
    def total(self) -> ParameterCounts:
        """All parameters of the layer as one record."""
        up_projections = 2 if self.gated else 1
        biases = up_projections * self.hidden + self.dim if self.bias else 0
        return ParameterCounts((up_projections + 1) * self.dim * self.hidden, biases)

    @property
    def weights(self) -> dict[str, ParameterCounts]:
        """All parameters, under the one part "feed-forward"."""
        return {"feed-forward": self.total}

    def active_weights(self, tokens: int) -> dict[str, ParameterCounts]:
        """Return all parameters, because a dense layer uses them for every token."""
        return self.weights


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts (MoE): a router chooses `active` of the experts for each token.

    Attributes:
        expert: the sizes of each expert.
        count: how many experts there are.
        active: how many experts each token uses.
        shared: an expert that all tokens use; None if there is none.
        router_bias: how many parameters the router has besides its matrix.

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
        """The parameters of the experts, the router, and the shared expert."""
        return self._parts(self.count)

    def active_weights(self, tokens: int) -> dict[str, ParameterCounts]:
        """Return the parameters that `tokens` tokens are expected to use together.

        If n tokens choose k of E experts independently and uniformly, they use E (1 - (1 - k /
        E)^n) experts on average.
        """
        unused_by_one = 1 - Fraction(self.active, self.count)
        if tokens <= 64:  # the exact power has few digits
            unused_by_all = unused_by_one**tokens
        else:
            unused_by_all = Fraction(float(unused_by_one) ** tokens)
        return self._parts(self.count * (1 - unused_by_all))

    def _parts(self, experts: Fraction | int) -> dict[str, ParameterCounts]:
        """Return the parameters by part if `experts` of the experts are counted."""
        one = self.expert.total
        used = ParameterCounts(_round_up(experts * one.matrices), _round_up(experts * one.biases))
        parts = {
            "experts": used,
            "router": ParameterCounts(self.expert.dim * self.count, self.router_bias),
        }
        return parts if self.shared is None else {**parts, "shared expert": self.shared.total}


def _round_up(x: Fraction | int) -> int:
    """Return the smallest integer that is at least x."""
    return -(-Fraction(x).numerator // Fraction(x).denominator)
