"""Rules of recurrences that fit a linear map from keys to values: the Mesa layer, which solves the
regression, and the linear memory of Titans, which descends its gradient.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_number
from regard.caches import Parts
from regard.cost.delta_rules import mesa_spec, titans_spec
from regard.cost.fixed_state import CountedSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError
from regard.nn.delta_rules import at_least_float32
from regard.ops.linear.regression import mesa, titans_memory
from regard.span import Positions


class MesaRule(nn.Module):
    """The Mesa layer: each token solves the regularised regression from all past keys to values.

    o = C^T (A + diag(ridge))^{-1} q;  g = -softplus(-(W_a x + b_a)), beta = sigmoid(W_b x + b_b),
    ridge = softplus(r) + least_ridge

    Args:
        dim: the model dim M.
        heads: the heads H.
        head_dim: the head dim D.
        least_ridge: the lower bound of the regularisation, above 0.

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, or the bound is not above 0.

    >>> rule, k = MesaRule(8, 2, 3), torch.zeros(1, 2, 5, 3)
    >>> rule(torch.zeros(1, 5, 8), k, k, k, None, None, "auto")[0].shape
    torch.Size([1, 2, 5, 3])

    Source: von Oswald et al. 2025 (arXiv 2506.05233), section 3; the parameters:
    flash-linear-attention.
    """

    def __init__(self, dim: int, heads: int, head_dim: int, *, least_ridge: float = 0.25) -> None:
        super().__init__()
        if min(dim, heads, head_dim) < 1:
            raise ArgumentError(
                f"MesaRule(dim={dim}, heads={heads}, head_dim={head_dim}): each must be at least 1"
            )
        check_number("least_ridge", least_ridge, 0, float("inf"), "above 0")
        self.decay_proj, self.beta_proj = nn.Linear(dim, heads), nn.Linear(dim, heads)
        first = math.log(math.expm1(max(1.0 - least_ridge, 0.1)))  # a ridge of 1 at the start
        self.ridge = nn.Parameter(torch.full((heads, head_dim), first))
        self.least_ridge = least_ridge

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B H T D"],
        v: Float[Tensor, "B H T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B H T E"], Parts]:
        """Return the results [B,H,T,E] and the state (C, A) after the last token."""
        beta = at_least_float32(self.beta_proj(x)).sigmoid().transpose(1, 2)
        g = F.logsigmoid(at_least_float32(self.decay_proj(x))).transpose(1, 2)
        ridge = F.softplus(at_least_float32(self.ridge)) + self.least_ridge
        return mesa(q, k, v, beta, g, ridge, state=state, k_positions=positions, form=form)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
        """Return the cost of a layer with this rule."""
        return mesa_spec(weights, shape)


class TitansRule(nn.Module):
    """The linear memory of Titans: a step of gradient descent per token, with momentum, on a memory
    that forgets; the step, the momentum and what is kept are computed from the token.

    step = max_step sigmoid(W_s x);  g = log sigmoid(W_g x + b_g);  e = log sigmoid(W_e x + b_e)

    Args:
        dim: the model dim M.
        heads: the heads H.
        max_step: the upper bound of a step, above 0.

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, or max_step is not above 0.

    >>> rule, k = TitansRule(8, 2), torch.zeros(1, 2, 5, 3)
    >>> [tuple(part.shape) for part in rule(torch.zeros(1, 5, 8), k, k, k, None, None, "auto")[1]]
    [(1, 2, 3, 3), (1, 2, 3, 3)]

    Source: Behrouz et al. 2024 (arXiv 2501.00663), section 3.1 with a memory that is a matrix.
    """

    def __init__(self, dim: int, heads: int, *, max_step: float = 1.0) -> None:
        super().__init__()
        if min(dim, heads) < 1:
            raise ArgumentError(f"TitansRule(dim={dim}, heads={heads}): each must be at least 1")
        check_number("max_step", max_step, 0, float("inf"), "above 0")
        self.step_proj = nn.Linear(dim, heads, bias=False)
        self.keep_proj, self.momentum_proj = nn.Linear(dim, heads), nn.Linear(dim, heads)
        nn.init.constant_(self.keep_proj.bias, 4.0)  # keeps 98 % at the start
        self.max_step = max_step

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B H T D"],
        v: Float[Tensor, "B H T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B H T E"], Parts]:
        """Return the results [B,H,T,E] and the state (M, N) after the last token."""
        step = self.max_step * at_least_float32(self.step_proj(x)).sigmoid().transpose(1, 2)
        g = F.logsigmoid(at_least_float32(self.keep_proj(x))).transpose(1, 2)
        e = F.logsigmoid(at_least_float32(self.momentum_proj(x))).transpose(1, 2)
        return titans_memory(q, k, v, step, g, e, state=state, k_positions=positions, form=form)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
        """Return the cost of a layer with this rule."""
        return titans_spec(weights, shape)
