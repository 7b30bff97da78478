"""DeltaProduct as parts of a recurrence: a projection with several keys and values per token, and
the rule that writes them one after the other.
"""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_number, check_value_heads
from regard.caches import Parts
from regard.cost.delta_rules import delta_product_spec
from regard.cost.fixed_state import CountedSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError
from regard.nn.causal_convolution import CausalConvolution
from regard.nn.delta_rules import at_least_float32
from regard.nn.linear_recurrence import L2Norm, LogDecay
from regard.nn.projections import HeadProjection, ProjectionShape
from regard.nn.recurrent_projections import ConvolvedQKV
from regard.ops.linear.delta_rules import delta_product
from regard.span import Positions


class SeveralKeysQKV(ConvolvedQKV):
    """A projection with n keys and n values per token and head, side by side in one head of width n
    D and n E.

    Args:
        q: a `HeadProjection` to H query heads of D.
        k: a `HeadProjection` to G key heads of n D; G divides H.
        v: a `HeadProjection` to N value heads of n E; G divides N.
        convolution: a `CausalConvolution` over the channels of all heads.
        writes: n, the keys and values of a token.

    Raises:
        ArgumentError: the heads do not fit together, or a width is not n times as large.

    >>> q, k, v = (HeadProjection(8, 2, d) for d in (3, 6, 8))
    >>> SeveralKeysQKV(q, k, v, CausalConvolution(34, 4), writes=2).shape[:4]
    (2, 2, 3, 4)

    Source: Siems et al. 2025 (arXiv 2502.10297), section 3.
    """

    def __init__(
        self,
        q: HeadProjection,
        k: HeadProjection,
        v: HeadProjection,
        convolution: CausalConvolution,
        *,
        writes: int,
    ) -> None:
        if writes < 1 or k.head_dim != writes * q.head_dim or v.head_dim % writes:
            raise ArgumentError(
                f"q is {q.extra_repr()}, k is {k.extra_repr()}, v is {v.extra_repr()}; with "
                f"{writes} writes per token, keys and values must be {writes} times as wide"
            )
        super().__init__(q, k, v, convolution)
        self.writes = writes

    def _check_heads(self, q: HeadProjection, k: HeadProjection, v: HeadProjection) -> None:
        """Raise unless the numbers of heads fit together."""
        check_value_heads(q.heads, k.heads, v.heads)

    @property
    def shape(self) -> ProjectionShape:
        """H, G, and the widths D and E of one key and one value."""
        return super().shape._replace(D=self.q.head_dim, E=self.v.head_dim // self.writes)


class DeltaProductRule(nn.Module):
    """The rule of DeltaProduct: the state decays once per token, then each of the n keys of the
    token corrects the value that is stored for it.

    beta = max_beta sigmoid(W x), one for each key; keys are scaled to length 1

    Args:
        dim: the model dim M.
        groups: the value heads N.
        writes: n, the keys and values of a token.
        max_beta: the upper bound of beta, above 0 and at most 2.

    Raises:
        ArgumentError: a size is less than 1, or max_beta is out of range.

    >>> import torch
    >>> rule, q = DeltaProductRule(8, 2, writes=2), torch.zeros(1, 2, 5, 3)
    >>> k, v = torch.zeros(1, 2, 5, 6), torch.zeros(1, 2, 5, 8)
    >>> rule(torch.zeros(1, 5, 8), q, k, v, None, None, "auto")[0].shape
    torch.Size([1, 2, 5, 4])

    Source: Siems et al. 2025 (arXiv 2502.10297), section 3; max_beta = 2: Grazzi et al. 2024 (arXiv
    2411.12537).
    """

    explain_refusal = (
        "has no single weight for a token, because each token writes several values; read the "
        "state in its cache, or explain a layer of attention"
    )
    """Why `Recurrent.explain_row` cannot give a row."""

    def __init__(self, dim: int, groups: int, *, writes: int, max_beta: float = 2.0) -> None:
        super().__init__()
        if min(dim, groups, writes) < 1:
            raise ArgumentError(
                f"DeltaProductRule(dim={dim}, groups={groups}, writes={writes}): each must be at "
                "least 1"
            )
        check_number("max_beta", max_beta, 0, math.nextafter(2, 3), "greater than 0 and at most 2")
        self.beta_proj = nn.Linear(dim, groups * writes, bias=False)
        self.decay, self.normalise = LogDecay(dim, groups), L2Norm()
        self.writes, self.max_beta = writes, max_beta

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T nD"],
        v: Float[Tensor, "B N T nE"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B O T E"], Parts]:
        """Return the results [B,max(H,N),T,E] and the state (S,) after the last token."""
        n = self.writes
        beta = self.max_beta * at_least_float32(self.beta_proj(x)).sigmoid()
        beta = beta.unflatten(-1, (-1, n)).transpose(1, 2)  # [B,N,T,n]
        keys, values = (y.unflatten(-1, (n, -1)) for y in (k, v))
        keys = self.normalise(keys)
        return delta_product(
            q, keys, values, beta, self.decay(x), state=state, k_positions=positions, form=form
        )

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
        """Return the cost of a layer with this rule."""
        return delta_product_spec(weights, shape, self.writes)

    def extra_repr(self) -> str:
        """Return the number of writes per token and the upper bound of beta."""
        return f"writes={self.writes}, max_beta={self.max_beta}"
