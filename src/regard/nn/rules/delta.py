"""The delta rule as a part of a module: strengths and decays made of the token, and the op that
uses them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.arguments import check_number
from regard.caches import Parts
from regard.cost.recurrent import DeltaSpec
from regard.cost.spec import HeadShape, Weights
from regard.errors import ArgumentError
from regard.ops.linear.delta_rule import delta_rule, gated_delta_rule
from regard.span import Positions


class Decay(nn.Module):
    """How much of the state a token leaves, as a logarithm per head, made of the token.

    g = -exp(rate) softplus(W x + shift), in fp32 or better

    The start is that of Mamba-2: exp(rate) is drawn from 1 to 16, softplus(shift) from 0.001 to 0.1
    on a log scale, so that heads begin with memories of different length.

    Args:
        dim: the model dim M.
        groups: the key/value heads G.

    Raises:
        ArgumentError: a size is less than 1.

    >>> bool((Decay(8, 2)(torch.randn(1, 5, 8)) <= 0).all())
    True

    Source: Yang et al. 2024 (arXiv 2412.06464), section 3.4; Dao and Gu 2024 (arXiv 2405.21060),
    listing 2.
    """

    def __init__(self, dim: int, groups: int) -> None:
        super().__init__()
        _check_sizes("Decay", dim, groups)
        self.linear = nn.Linear(dim, groups, bias=False)
        self.rate = nn.Parameter(torch.empty(groups).uniform_(1, 16).log())
        step = torch.empty(groups).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.shift = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus(shift) = step

    def forward(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B G T"]:
        """The log decays of tokens x, at most 0."""
        step = F.softplus(_wide(self.linear(x)) + _wide(self.shift))
        return (-_wide(self.rate).exp() * step).transpose(1, 2)


class Delta(nn.Module):
    """The delta rule with strengths beta = most sigmoid(W x), and with decays if there is a part
    that makes them.

    Args:
        dim: the model dim M.
        groups: the key/value heads G.
        decay: None, or a module [B,T,M] -> log decays [B,G,T], such as `Decay`.
        most: the greatest strength, from 0 to 2: above 1 a step can turn what stands under a key to
            its negative.

    Raises:
        ArgumentError: a size is less than 1, or most is not above 0 and at most 2.

    >>> x, k = torch.zeros(1, 3, 8), torch.eye(3)[None, None]
    >>> z, (S,) = Delta(8, 1)(x, k, k, k, None, None, "auto")
    >>> S[0, 0].diagonal().tolist()  # half of each value is written
    [0.5, 0.5, 0.5]

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.3; most = 2: Grazzi et al. 2024 (arXiv
    2411.12537), section 4.
    """

    def __init__(
        self, dim: int, groups: int, *, decay: nn.Module | None = None, most: float = 1.0
    ) -> None:
        super().__init__()
        _check_sizes("Delta", dim, groups)
        check_number("most", most, 0, math.nextafter(2, 3), "greater than 0 and at most 2")
        self.strength = nn.Linear(dim, groups, bias=False)
        self.decay, self.most = decay, most

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B G T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B H T E"], Parts]:
        """What the queries of tokens x read, and the state (S,) behind the last one."""
        beta = self.most * _wide(self.strength(x)).sigmoid().transpose(1, 2)
        if self.decay is None:
            return delta_rule(q, k, v, beta, state=state, k_positions=positions, form=form)
        g = self.decay(x)
        return gated_delta_rule(q, k, v, beta, g, state=state, k_positions=positions, form=form)

    def spec(self, weights: Weights, shape: HeadShape) -> DeltaSpec:
        """The cost of a layer with this rule."""
        return DeltaSpec(weights, (), shape, gated=self.decay is not None)

    def extra_repr(self) -> str:
        """The greatest strength."""
        return f"most={self.most}"


def _wide(x: Tensor) -> Tensor:
    """In fp32 or better."""
    return x if x.dtype == torch.float64 else x.float()


def _check_sizes(name: str, dim: int, groups: int) -> None:
    if min(dim, groups) < 1:
        raise ArgumentError(f"{name}(dim={dim}, groups={groups}): each must be at least 1")
