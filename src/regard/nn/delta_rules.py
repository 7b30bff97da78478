"""Rules that choose the vectors of the generalised delta rule, Gated DeltaNet-2, Comba and
preconditioned Kimi Delta Attention, and a decay for each channel of the state.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_number
from regard.caches import Parts
from regard.cost.delta_rules import preconditioned_spec
from regard.cost.fixed_state import CountedSpec, DeltaSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError
from regard.nn.linear import Linear
from regard.nn.linear_recurrence import LogDecay
from regard.nn.projections import HeadProjection
from regard.ops.linear.call import empty_slot_mask, zero_empty_slots
from regard.ops.linear.delta_rules import generalised_delta_rule
from regard.ops.linear.linear_recurrence import linear_recurrence
from regard.span import Positions


def at_least_float32(x: Tensor) -> Tensor:
    """Convert a tensor to float32, unless it is float64.

    >>> at_least_float32(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x if x.dtype == torch.float64 else x.float()


class BottleneckProjection(HeadProjection):
    """A `HeadProjection` through a bottleneck: x -> W_2 f(W_1 x) + b -> split into heads.

    Args:
        dim: the model dim M.
        rank: the size of the bottleneck.
        heads: the number of heads n.
        head_dim: the size of one head d.
        bias: whether the second map has a bias.
        inner: a module f on [B,L,rank], such as `nn.Tanh()`; None applies none.

    Raises:
        ArgumentError: a size is less than 1.

    >>> BottleneckProjection(8, 2, 4, 3)(torch.zeros(1, 5, 8), None).shape
    torch.Size([1, 4, 5, 3])
    """

    def __init__(
        self,
        dim: int,
        rank: int,
        heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        inner: nn.Module | None = None,
    ) -> None:
        super().__init__(rank, heads, head_dim, bias=bias)
        if dim < 1:
            raise ArgumentError(f"BottleneckProjection(dim={dim}): it must be at least 1")
        self.down = Linear(dim, rank, bias=False)
        self.inner = nn.Identity() if inner is None else inner

    def forward(
        self, x: Float[Tensor, "B L M"], positions: Positions | None
    ) -> Float[Tensor, "B n L d"]:
        """Apply both maps and split the result into heads."""
        return super().forward(self.inner(self.down(x)), positions)


class ChannelLogDecay(nn.Module):
    """The logarithm of the decay of each channel of the state, computed from the token through a
    bottleneck.

    g = -exp(A_log) softplus(W_2 W_1 x + dt_bias);  with a lower bound,
    g = lower_bound * sigmoid(exp(A_log) (W_2 W_1 x + dt_bias)), in fp32 or better

    Args:
        dim: the model dim M.
        groups: the key heads G; with more value heads than key heads, the value heads N.
        head_dim: the head dim D.
        rank: the size of the bottleneck.
        lower_bound: the least logarithm of a decay, below 0; None: no bound.

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, or the bound is not below 0.

    >>> g = ChannelLogDecay(8, 2, 4, 3, lower_bound=-5.0)(torch.randn(1, 6, 8))
    >>> g.shape, bool(((g < 0) & (g > -5)).all())
    (torch.Size([1, 2, 6, 4]), True)

    Source: Kimi Team 2025 (arXiv 2510.26692), section 3; the bound: the published code of GLM-5 and
    of flash-linear-attention.
    """

    def __init__(
        self,
        dim: int,
        groups: int,
        head_dim: int,
        rank: int,
        *,
        lower_bound: float | None = None,
    ) -> None:
        super().__init__()
        check_number("lower_bound", lower_bound, float("-inf"), 0, "below 0")
        self.project = BottleneckProjection(dim, rank, groups, head_dim)
        self.A_log = nn.Parameter(torch.empty(groups).uniform_(1, 16).log())
        step = torch.empty(groups, head_dim).uniform_(math.log(0.001), math.log(0.1)).exp()
        # This is the inverse of softplus: softplus(dt_bias) = step.
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.lower_bound = lower_bound

    def forward(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B G T D"]:
        """Return the log decays [B,G,T,D] of tokens x [B,T,M]; they are at most 0."""
        gates = at_least_float32(self.project(x, None)) + at_least_float32(self.dt_bias)[:, None]
        rate = at_least_float32(self.A_log).exp()[:, None, None]
        if self.lower_bound is None:
            return -rate * F.softplus(gates)
        return self.lower_bound * torch.sigmoid(rate * gates)

    def extra_repr(self) -> str:
        """Return the lower bound of the logarithm of a decay."""
        return f"lower_bound={self.lower_bound}"


class EraseRule(nn.Module):
    """The rule of Gated DeltaNet-2, where one gate per key channel says what is erased. The gate of
    what is written, w, is part of the values (`ConvolvedQKV`).

    S' = diag(exp(g)) S;  S <- S' + k (w * v - S'^T (b * k))^T;  b = sigmoid(W_b x)

    Args:
        dim: the model dim M.
        groups: the value heads N.
        head_dim: the head dim D.
        decay: a module [B,T,M] -> log decays [B,N,T,D] or [B,N,T], such as `ChannelLogDecay`.

    Raises:
        ArgumentError: a size is less than 1.

    >>> rule = EraseRule(8, 2, 3, decay=ChannelLogDecay(8, 2, 3, 2))
    >>> k, v = torch.zeros(1, 2, 5, 3), torch.zeros(1, 2, 5, 4)
    >>> rule(torch.zeros(1, 5, 8), k, k, v, None, None, "auto")[0].shape
    torch.Size([1, 2, 5, 4])

    Source: Gated DeltaNet-2 (arXiv 2605.22791), its rule as in the code of flash-linear-attention.
    """

    def __init__(self, dim: int, groups: int, head_dim: int, *, decay: nn.Module) -> None:
        super().__init__()
        self.erase = HeadProjection(dim, groups, head_dim)
        self.decay = decay

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B N T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B O T E"], Parts]:
        """Return the results [B,max(H,N),T,E] and the state (S,) after the last token."""
        g = self.decay(x)
        erase = at_least_float32(self.erase(x, None)).sigmoid()
        keys = _per_value_head(k, v)
        c = (g if g.ndim == 4 else g[..., None]).exp() * erase * keys
        return generalised_delta_rule(q, k, v, c, g, state=state, k_positions=positions, form=form)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> DeltaSpec:
        """Return the cost of a layer with this rule."""
        return DeltaSpec(weights, (), shape, gated=True, mechanism="Gated DeltaNet-2")


class CombaRule(nn.Module):
    """The rule of Comba: what is erased is found by a key of its own, a learned share of the key,
    and the query is corrected by it.

    p = sigmoid(d_h) k;  S' = exp(g) S;  S <- S' + beta k (v - S'^T p)^T;  z = S^T (q - D_h p)

    Args:
        dim: the model dim M.
        heads: the query heads H, which are the key heads, too.
        groups: the value heads N.
        correction: the initial value of D_h, the share of p that is taken off the queries.

    Raises:
        ArgumentError: a size is less than 1.

    >>> rule = CombaRule(8, 2, 2)
    >>> k = torch.zeros(1, 2, 5, 3)
    >>> rule(torch.zeros(1, 5, 8), k, k, k, None, None, "auto")[0].shape
    torch.Size([1, 2, 5, 3])

    Source: Hu et al. 2025 (arXiv 2506.02475), section 3; the parameters: flash-linear-attention.
    """

    def __init__(self, dim: int, heads: int, groups: int, *, correction: float = 1.0) -> None:
        super().__init__()
        if min(dim, heads, groups) < 1:
            raise ArgumentError(
                f"CombaRule(dim={dim}, heads={heads}, groups={groups}): each must be at least 1"
            )
        self.beta_proj = nn.Linear(dim, groups, bias=False)
        self.decay = LogDecay(dim, groups)
        self.erase_share = nn.Parameter(torch.ones(heads))
        self.correction = nn.Parameter(torch.full((heads,), correction))

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B N T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B O T E"], Parts]:
        """Return the results [B,max(H,N),T,E] and the state (S,) after the last token."""
        beta = at_least_float32(self.beta_proj(x)).sigmoid().transpose(1, 2)[..., None]  # [B,N,T,1]
        g = self.decay(x)
        p = at_least_float32(self.erase_share).sigmoid()[:, None, None] * k
        q = (q - at_least_float32(self.correction)[:, None, None] * p).to(q.dtype)
        c = g.exp()[..., None] * beta * _per_value_head(p, v)
        written = (beta * v).to(v.dtype)
        return generalised_delta_rule(
            q, k, written, c, g, state=state, k_positions=positions, form=form
        )

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> DeltaSpec:
        """Return the cost of a layer with this rule."""
        return DeltaSpec(weights, (), shape, gated=True, mechanism="Comba")


class PreconditionedDeltaRule(nn.Module):
    """Preconditioned Kimi Delta Attention: channels in which the past keys were large are written
    with smaller steps. A second state sums the squares of the keys.

    A <- exp(h) A + a k^2;  r = log(A + eps) - center;  m = x^(-r / (1 + |r|));
    S' = diag(exp(g)) S;  S <- S' + beta (m * k) (v - S'^T k)^T

    Args:
        dim: the model dim M.
        groups: the heads, as many keys as values.
        decay: a module [B,T,M] -> log decays of S, such as `ChannelLogDecay`.
        bound: x, above 1 and at most 2: m is between 1/x and x.

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, or the bound is out of range.

    >>> rule = PreconditionedDeltaRule(8, 2, decay=ChannelLogDecay(8, 2, 3, 2))
    >>> k = torch.zeros(1, 2, 5, 3)
    >>> [tuple(part.shape) for part in rule(torch.zeros(1, 5, 8), k, k, k, None, None, "auto")[1]]
    [(1, 2, 3, 3), (1, 2, 1, 3)]

    Source: Preconditioned DeltaNet (arXiv 2604.21100); the code of flash-linear-attention.
    """

    def __init__(self, dim: int, groups: int, *, decay: nn.Module, bound: float = 1.5) -> None:
        super().__init__()
        check_number("bound", bound, 1, math.nextafter(2, 3), "above 1 and at most 2")
        self.beta_proj = nn.Linear(dim, groups, bias=False)
        self.square_proj = nn.Linear(dim, groups, bias=False)
        self.decay, self.square_decay = decay, LogDecay(dim, groups)
        self.center = nn.Parameter(torch.full((groups,), -0.2))
        self.bound = bound

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B N T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B O T E"], Parts]:
        """Return the results [B,H,T,E] and the state (S, A) after the last token."""
        m, squares = self.preconditioner(x, k, state, positions, form)
        beta = at_least_float32(self.beta_proj(x)).sigmoid().transpose(1, 2)[..., None]  # [B,N,T,1]
        g = self.decay(x)
        c = g.exp() * beta * k
        written, keys = (beta * v).to(v.dtype), (m * k).to(k.dtype)
        before = None if state is None else state[:1]
        out, (S,) = generalised_delta_rule(
            q, keys, written, c, g, state=before, k_positions=positions, form=form
        )
        return out, (S, squares)

    def preconditioner(
        self,
        x: Float[Tensor, "B T M"],
        k: Float[Tensor, "B G T D"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B G T D"], Float[Tensor, "B G 1 D"]]:
        """Return the factors m of the written keys, and the sum A after the last token."""
        empty = empty_slot_mask(positions, k)
        strength = at_least_float32(self.square_proj(x)).sigmoid().transpose(1, 2)[..., None]
        h = zero_empty_slots(self.square_decay(x)[..., None], empty)
        squares = zero_empty_slots(strength * at_least_float32(k).square(), empty)
        ones = torch.ones_like(squares[..., :1])
        before = squares.new_zeros(*squares.shape[:2], 1, squares.shape[-1])
        before = before if state is None else state[1]
        A, after = linear_recurrence(ones, ones, squares, h, before, form=form, chunk=64)
        r = torch.log(A + 1e-6) - at_least_float32(self.center)[:, None, None]
        return torch.exp(-math.log(self.bound) * r / (1 + r.abs())), after

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
        """Return the cost of a layer with this rule."""
        return preconditioned_spec(weights, shape)


def _per_value_head(k: Tensor, v: Tensor) -> Tensor:
    """Repeat keys [B,G,T,D] for the value heads [B,N,T,E] that share them."""
    repeats = v.shape[1] // k.shape[1]
    return k if repeats == 1 else k.repeat_interleave(repeats, 1)
