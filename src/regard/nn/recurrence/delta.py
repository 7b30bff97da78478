"""Delta rules of recurrences, in which a token corrects the state, and Mesa and Titans."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_number, check_positive_sizes, check_value_heads
from regard.caches import Parts
from regard.cost.delta_rules import delta_product_spec, mesa_spec, preconditioned_spec, titans_spec
from regard.cost.fixed_state import CountedSpec, DeltaSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError
from regard.nn.blocks.norms import L2Norm
from regard.nn.projections.heads import HeadProjection, ProjectionShape
from regard.nn.recurrence.projections import CausalConvolution, ConvolvedQKV
from regard.nn.recurrence.recurrent import (
    RecurrenceRule,
    RuleCall,
    RuleResult,
    initial_step_bias,
    wide,
)
from regard.nn.weights import Linear
from regard.ops.linear.call import empty_slot_mask, zero_empty_slots
from regard.ops.linear.delta_rules import (
    delta_product,
    delta_rule,
    gated_delta_rule,
    generalized_delta_rule,
)
from regard.ops.linear.linear_recurrence import linear_recurrence
from regard.ops.linear.regression import mesa, titans_memory
from regard.span import Positions


class LogDecay(nn.Module):
    """The logarithm of the decay of the state, one number per token and head.

    g = -exp(A_log) softplus(W x + dt_bias), in fp32 or better

    As in Mamba-2, exp(A_log) begins uniform between 1 and 16, and softplus(dt_bias) log-uniform
    between 0.001 and 0.1.

    Source: Yang et al. 2024 (arXiv 2412.06464), section 3.4; Dao and Gu 2024 (arXiv 2405.21060),
    listing 2.
    """

    def __init__(self, dim: int, groups: int) -> None:
        super().__init__()
        check_positive_sizes("LogDecay", dim=dim, groups=groups)
        self.linear = nn.Linear(dim, groups, bias=False)
        self.A_log = nn.Parameter(torch.empty(groups).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(initial_step_bias(groups))

    def forward(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B G T"]:
        """Return the log decays [B,G,T] of tokens x [B,T,M]; they are at most 0."""
        step = F.softplus(wide(self.linear(x)) + wide(self.dt_bias))
        return (-wide(self.A_log).exp() * step).transpose(1, 2)


class ChannelLogDecay(nn.Module):
    """The logarithm of the decay of each channel of the state, through a bottleneck.

    g = -exp(A_log) softplus(W_2 W_1 x + dt_bias);  with a lower bound,
    g = lower_bound * sigmoid(exp(A_log) (W_2 W_1 x + dt_bias)), in fp32 or better

    Source: Kimi Team 2025 (arXiv 2510.26692), section 3; the bound: the published code of GLM-5 and
    of flash-linear-attention.
    """

    def __init__(
        self, dim: int, groups: int, head_dim: int, rank: int, *, lower_bound: float | None = None
    ) -> None:
        super().__init__()
        check_number("lower_bound", lower_bound, float("-inf"), 0, "below 0")
        self.project = BottleneckProjection(dim, rank, groups, head_dim)
        self.A_log = nn.Parameter(torch.empty(groups).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(initial_step_bias(groups, head_dim))
        self.lower_bound = lower_bound

    def forward(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B G T D"]:
        """Return the log decays [B,G,T,D] of tokens x [B,T,M]; they are at most 0."""
        gates = wide(self.project(x, None)) + wide(self.dt_bias)[:, None]
        rate = wide(self.A_log).exp()[:, None, None]
        if self.lower_bound is None:
            return -rate * F.softplus(gates)
        return self.lower_bound * torch.sigmoid(rate * gates)

    def extra_repr(self) -> str:
        """Return the lower bound of the logarithm of a decay."""
        return f"lower_bound={self.lower_bound}"


class BottleneckProjection(HeadProjection):
    """A `HeadProjection` through a bottleneck: x -> W_2 f(W_1 x) + b -> split into heads."""

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


class DeltaRule(RecurrenceRule):
    """The delta rule: a token replaces a share beta = max_beta sigmoid(W x) of its key's value.

    With `decay`, a module [B,T,M] -> log decays [B,G,T], it is the gated delta rule. With a
    max_beta above 1, a token can reverse the sign of a value (negative eigenvalues).

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.3; max_beta = 2: Grazzi et al. 2024
    (arXiv 2411.12537), section 4.
    """

    shown = ("max_beta",)

    def __init__(
        self, dim: int, groups: int, *, decay: nn.Module | None = None, max_beta: float = 1.0
    ) -> None:
        super().__init__()
        check_positive_sizes("DeltaRule", dim=dim, groups=groups)
        check_number("max_beta", max_beta, 0, math.nextafter(2, 3), "greater than 0 and at most 2")
        self.beta_proj = nn.Linear(dim, groups, bias=False)
        self.decay, self.max_beta = decay, max_beta

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,max(H,N),T,E] and the state (S,) after the last token."""
        beta = self.max_beta * wide(self.beta_proj(x)).sigmoid().transpose(1, 2)
        if self.decay is None:
            return delta_rule(q, k, v, beta, **call)
        g = self.decay(x)
        return gated_delta_rule(q, k, v, beta, g, **call)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> DeltaSpec:
        """Return the cost of a layer with this rule."""
        return DeltaSpec(weights, (), shape, gated=self.decay is not None)


class EraseRule(RecurrenceRule):
    """The rule of Gated DeltaNet-2, with a gate per erased channel, and w in the values.

    S' = diag(exp(g)) S;  S <- S' + k (w * v - S'^T (b * k))^T;  b = sigmoid(W_b x)

    Source: Gated DeltaNet-2 (arXiv 2605.22791), its rule as in the code of flash-linear-attention.
    """

    def __init__(self, dim: int, groups: int, head_dim: int, *, decay: nn.Module) -> None:
        super().__init__()
        self.erase = HeadProjection(dim, groups, head_dim)
        self.decay = decay

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,max(H,N),T,E] and the state (S,) after the last token."""
        g = self.decay(x)
        erase = wide(self.erase(x, None)).sigmoid()
        keys = _per_value_head(k, v)
        c = (g if g.ndim == 4 else g[..., None]).exp() * erase * keys
        return generalized_delta_rule(q, k, v, c, g, **call)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> DeltaSpec:
        """Return the cost of a layer with this rule."""
        return DeltaSpec(weights, (), shape, gated=True, mechanism="Gated DeltaNet-2")


class CombaRule(RecurrenceRule):
    """The rule of Comba: what is erased has a key of its own, and the query is corrected by it.

    p = sigmoid(d_h) k;  S' = exp(g) S;  S <- S' + beta k (v - S'^T p)^T;  z = S^T (q - D_h p)

    Source: Hu et al. 2025 (arXiv 2506.02475), section 3; the parameters: flash-linear-attention.
    """

    def __init__(self, dim: int, heads: int, groups: int, *, correction: float = 1.0) -> None:
        super().__init__()
        check_positive_sizes("CombaRule", dim=dim, heads=heads, groups=groups)
        self.beta_proj = nn.Linear(dim, groups, bias=False)
        self.decay = LogDecay(dim, groups)
        self.erase_share = nn.Parameter(torch.ones(heads))
        self.correction = nn.Parameter(torch.full((heads,), correction))

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,max(H,N),T,E] and the state (S,) after the last token."""
        beta = wide(self.beta_proj(x)).sigmoid().transpose(1, 2)[..., None]  # [B,N,T,1]
        g = self.decay(x)
        p = wide(self.erase_share).sigmoid()[:, None, None] * k
        q = (q - wide(self.correction)[:, None, None] * p).to(q.dtype)
        c = g.exp()[..., None] * beta * _per_value_head(p, v)
        written = (beta * v).to(v.dtype)
        return generalized_delta_rule(q, k, written, c, g, **call)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> DeltaSpec:
        """Return the cost of a layer with this rule."""
        return DeltaSpec(weights, (), shape, gated=True, mechanism="Comba")


class PreconditionedDeltaRule(RecurrenceRule):
    """Preconditioned Kimi Delta Attention: smaller steps where past keys were large.

    A <- exp(h) A + a k^2;  r = log(A + eps) - center;  m = x^(-r / (1 + |r|));
    S' = diag(exp(g)) S;  S <- S' + beta (m * k) (v - S'^T k)^T

    Source: Preconditioned DeltaNet (arXiv 2604.21100); the code of flash-linear-attention.
    """

    cost = staticmethod(preconditioned_spec)

    def __init__(self, dim: int, groups: int, *, decay: nn.Module, bound: float = 1.5) -> None:
        super().__init__()
        check_number("bound", bound, 1, math.nextafter(2, 3), "above 1 and at most 2")
        self.beta_proj = nn.Linear(dim, groups, bias=False)
        self.square_proj = nn.Linear(dim, groups, bias=False)
        self.decay, self.square_decay = decay, LogDecay(dim, groups)
        self.center = nn.Parameter(torch.full((groups,), -0.2))
        self.bound = bound

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,H,T,E] and the state (S, A) after the last token."""
        m, squares = self.preconditioner(x, k, **call)
        beta = wide(self.beta_proj(x)).sigmoid().transpose(1, 2)[..., None]  # [B,N,T,1]
        g = self.decay(x)
        c = g.exp() * beta * k
        written, keys = (beta * v).to(v.dtype), (m * k).to(k.dtype)
        state = None if call["state"] is None else call["state"][:1]
        call = {**call, "state": state}
        out, (S,) = generalized_delta_rule(q, keys, written, c, g, **call)
        return out, (S, squares)

    def preconditioner(
        self,
        x: Float[Tensor, "B T M"],
        k: Float[Tensor, "B G T D"],
        state: Parts | None,
        k_positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B G T D"], Float[Tensor, "B G 1 D"]]:
        """Return the factors m of the written keys, and the sum A after the last token."""
        empty = empty_slot_mask(k_positions, k)
        strength = wide(self.square_proj(x)).sigmoid().transpose(1, 2)[..., None]
        h = zero_empty_slots(self.square_decay(x)[..., None], empty)
        squares = zero_empty_slots(strength * wide(k).square(), empty)
        ones = torch.ones_like(squares[..., :1])
        before = squares.new_zeros(*squares.shape[:2], 1, squares.shape[-1])
        before = before if state is None else state[1]
        A, after = linear_recurrence(ones, ones, squares, h, before, form=form, chunk=64)
        r = torch.log(A + 1e-6) - wide(self.center)[:, None, None]
        return torch.exp(-math.log(self.bound) * r / (1 + r.abs())), after


class SeveralKeysQKV(ConvolvedQKV):
    """A projection with n keys and n values per token, in one head of width n D and n E.

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


class DeltaProductRule(RecurrenceRule):
    """The rule of DeltaProduct: the state decays once, then each of n keys corrects its value.

    beta = max_beta sigmoid(W x), one for each key; keys are scaled to length 1

    Source: Siems et al. 2025 (arXiv 2502.10297), section 3; max_beta = 2: Grazzi et al. 2024 (arXiv
    2411.12537).
    """

    explain_refusal = (
        "has no single weight for a token, because each token writes several values; read the "
        "state in its cache, or explain a layer of attention"
    )
    """Why `Recurrent.explain_row` cannot give a row."""

    shown = ("writes", "max_beta")

    def __init__(self, dim: int, groups: int, *, writes: int, max_beta: float = 2.0) -> None:
        super().__init__()
        check_positive_sizes("DeltaProductRule", dim=dim, groups=groups, writes=writes)
        check_number("max_beta", max_beta, 0, math.nextafter(2, 3), "greater than 0 and at most 2")
        self.beta_proj = nn.Linear(dim, groups * writes, bias=False)
        self.decay, self.normalize = LogDecay(dim, groups), L2Norm()
        self.writes, self.max_beta = writes, max_beta

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,max(H,N),T,E] and the state (S,) after the last token."""
        n = self.writes
        beta = self.max_beta * wide(self.beta_proj(x)).sigmoid()
        beta = beta.unflatten(-1, (-1, n)).transpose(1, 2)  # [B,N,T,n]
        keys, values = (y.unflatten(-1, (n, -1)) for y in (k, v))  # [B,G,T,n D] -> [B,G,T,n,D]
        keys = self.normalize(keys)
        return delta_product(q, keys, values, beta, self.decay(x), **call)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
        """Return the cost of a layer with this rule."""
        return delta_product_spec(weights, shape, self.writes)


class MesaRule(RecurrenceRule):
    """The Mesa layer: each token solves the regularized regression from all past keys to values.

    o = C^T (A + diag(ridge))^{-1} q;  g = -softplus(-(W_a x + b_a)), beta = sigmoid(W_b x + b_b),
    ridge = softplus(r) + least_ridge

    Source: von Oswald et al. 2025 (arXiv 2506.05233), section 3; the parameters:
    flash-linear-attention.
    """

    cost = staticmethod(mesa_spec)

    def __init__(self, dim: int, heads: int, head_dim: int, *, least_ridge: float = 0.25) -> None:
        super().__init__()
        check_positive_sizes("MesaRule", dim=dim, heads=heads, head_dim=head_dim)
        check_number("least_ridge", least_ridge, 0, float("inf"), "above 0")
        self.decay_proj, self.beta_proj = nn.Linear(dim, heads), nn.Linear(dim, heads)
        first = math.log(math.expm1(max(1.0 - least_ridge, 0.1)))  # a ridge of 1 at the start
        self.ridge = nn.Parameter(torch.full((heads, head_dim), first))
        self.least_ridge = least_ridge

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,H,T,E] and the state (C, A) after the last token."""
        beta = wide(self.beta_proj(x)).sigmoid().transpose(1, 2)
        g = F.logsigmoid(wide(self.decay_proj(x))).transpose(1, 2)
        ridge = F.softplus(wide(self.ridge)) + self.least_ridge
        return mesa(q, k, v, beta, g, ridge, **call)


class TitansRule(RecurrenceRule):
    """The linear memory of Titans: gradient descent with momentum, on a memory that forgets.

    step = max_step sigmoid(W_s x);  g = log sigmoid(W_g x + b_g);  e = log sigmoid(W_e x + b_e)

    Source: Behrouz et al. 2024 (arXiv 2501.00663), section 3.1 with a memory that is a matrix.
    """

    cost = staticmethod(titans_spec)

    def __init__(self, dim: int, heads: int, *, max_step: float = 1.0) -> None:
        super().__init__()
        check_positive_sizes("TitansRule", dim=dim, heads=heads)
        check_number("max_step", max_step, 0, float("inf"), "above 0")
        self.step_proj = nn.Linear(dim, heads, bias=False)
        self.keep_proj, self.momentum_proj = nn.Linear(dim, heads), nn.Linear(dim, heads)
        nn.init.constant_(self.keep_proj.bias, 4.0)  # keeps 98 % at the start
        self.max_step = max_step

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,H,T,E] and the state (M, N) after the last token."""
        step = self.max_step * wide(self.step_proj(x)).sigmoid().transpose(1, 2)
        g = F.logsigmoid(wide(self.keep_proj(x))).transpose(1, 2)
        e = F.logsigmoid(wide(self.momentum_proj(x))).transpose(1, 2)
        return titans_memory(q, k, v, step, g, e, **call)


def _per_value_head(k: Tensor, v: Tensor) -> Tensor:
    """Repeat keys [B,G,T,D] for the value heads [B,N,T,E] that share them."""
    repeats = v.shape[1] // k.shape[1]
    return k if repeats == 1 else k.repeat_interleave(repeats, 1)
