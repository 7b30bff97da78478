"""Rules of recurrences whose state is a decayed sum, which `regard.nn.Recurrent` runs. With the
projection of Mamba.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_choice, check_number, check_positive_sizes
from regard.caches import Parts
from regard.cost.decayed_state import (
    lightnet_spec,
    log_linear_spec,
    mlstm_spec,
    rwkv4_spec,
    rwkv6_spec,
    slots_spec,
)
from regard.cost.fixed_state import CountedSpec, LinearSpec, ShortConvolution
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError
from regard.nn.explainable import InputSteps, MechanismStep, MechanismSteps, ProjectionQuery
from regard.nn.projections.heads import HeadProjection
from regard.nn.recurrence.projections import CausalConvolution, ProjectedQKV, StatefulQKV
from regard.nn.recurrence.recurrent import (
    RecurrenceRule,
    RuleCall,
    RuleResult,
    decayed_cost,
    initial_step_bias,
    wide,
)
from regard.nn.weights import Linear
from regard.ops.linear.feature_maps import cosine_features
from regard.ops.linear.linear_attention import (
    FeatureMap,
    feature_map_of,
    gated_linear,
    gated_slots,
    linear_attention,
    log_sum_exp_gates,
    mlstm,
    retention,
)
from regard.ops.linear.log_linear import MAX_LEVELS, log_linear
from regard.ops.linear.rwkv import rwkv4, rwkv6
from regard.ops.tokenwise import clip
from regard.process_state import ConstantTensor, is_compiling
from regard.span import Positions, Span, slice_positions
from regard.units import plural

MAX_DECAYS = 1 << 24
"""The largest number of decays that are in memory at a time: 64 MiB in fp32."""


class SelectiveQKV(StatefulQKV):
    """The projection of Mamba, whose queries and keys are computed from convolved values.

    v = convolution(W_v x);  q = W_q v;  k = W_k v, then the steps of each head

    Here q, k and v are the paper's C, B and x. Each channel of v is a head of size 1.

    Source: Gu and Dao 2023 (arXiv 2312.00752), section 3.4 and algorithm 2.
    """

    def __init__(
        self,
        q: HeadProjection,
        k: HeadProjection,
        v: HeadProjection,
        convolution: CausalConvolution,
    ) -> None:
        super().__init__(q, k, v)
        channels, inputs = v.heads * v.head_dim, {q.linear.in_features, k.linear.in_features}
        if v.head_dim != 1 or inputs != {channels} or convolution.weight.shape[0] != channels:
            raise ArgumentError(
                f"v is {v.extra_repr()}, q and k read {sorted(inputs)} channels, and the "
                f"convolution has {convolution.weight.shape[0]}; v must have heads of 1, and all "
                "others as many channels as there are"
            )
        self.convolution = convolution

    @property
    def cost(self) -> ShortConvolution:
        """The sizes of the convolution."""
        return self.convolution.cost

    def project(self, x: Tensor, positions: Positions | None, state: Parts | None) -> ProjectedQKV:
        """Compute the queries, keys and values of tokens, with the state of the convolution."""
        y, state = self.convolution(self.v.linear(x), state, positions)
        v = y.unflatten(-1, (self.v.heads, 1)).transpose(1, 2)  # [B,T,N] -> [B,N,T,1]
        return ProjectedQKV(self.q(y, positions), self.k(y, positions), v, state)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the queries, keys and values, each as one step."""
        q, k, v, _ = self.project(query.x, query.positions, None)

        def step(text: str, heads: Tensor) -> MechanismSteps:
            return (MechanismStep("behind the convolution", text, heads[0]),)

        return InputSteps(
            step("q_i ← W v_i", q), step("k_j ← W v_j", k), step("v_j ← conv(W x_j)", v)
        )


class SelectiveScanRule(RecurrenceRule):
    """The rule of Mamba (S6): a state of D values for every channel, with decays of their own.

    S[n] <- exp(-s[n] exp(A[n])) S[n] + k (s[n] v[n]);  z[n] = S[n]^T q + d[n] v[n];
    s = softplus(W_2 norm(W_1 v) + b)

    It is gated linear attention with one query head, one key head, and value heads of size 1.
    `piece` tokens of a long text are computed at a time, without an effect on the result.

    Source: Gu and Dao 2023 (arXiv 2312.00752), section 3.2 and algorithm 2; with a norm: Lieber et
    al. 2024 (arXiv 2403.19887), section 2.
    """

    explain_refusal = (
        "has no row of weights that is the same for all values: the decays of a channel depend on "
        "the values themselves; read the state in its cache, or explain a layer of attention"
    )
    """Why `Recurrent.explain_row` cannot give a row."""

    cost = decayed_cost("Mamba")

    def __init__(
        self,
        channels: int,
        state: int,
        rank: int,
        *,
        norm: nn.Module | None = None,
        piece: int | None = None,
    ) -> None:
        super().__init__()
        check_positive_sizes("SelectiveScanRule", channels=channels, state=state, rank=rank)
        self.down = Linear(channels, rank, bias=False)
        self.up = Linear(rank, channels, bias=False)
        self.norm, self.piece = norm, piece
        self.A_log = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(channels, 1))
        self.skip = nn.Parameter(torch.ones(channels))
        self.dt_bias = nn.Parameter(initial_step_bias(channels))

    def step(self, v: Float[Tensor, "B N T 1"]) -> Float[Tensor, "B N T"]:
        """Return the step sizes s [B,N,T] of tokens with the values v [B,N,T,1]."""
        low = self.down(v[..., 0].transpose(1, 2))
        low = low if self.norm is None else self.norm(low)
        return F.softplus(wide(self.up(low)) + wide(self.dt_bias)).transpose(1, 2)

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,N,T,1] and the last state (S,), piece by piece."""
        T, form, state, positions = v.shape[2], call["form"], call["state"], call["k_positions"]
        if form == "auto" and v.device.type == "cpu" and not torch.is_grad_enabled():
            # A head has one value, so that products over a chunk do far more work than the tokens
            # one by one. Autograd would keep each of them, and a compiled graph unrolls them.
            form = "auto" if is_compiling() else "recurrent"
        piece = self.piece
        if piece is None:
            piece = max(64, MAX_DECAYS // max(1, v.shape[0] * self.A_log.numel()))
        results: list[Tensor] = []
        for start in range(0, max(T, 1), piece):
            where = slice(start, min(start + piece, T))
            own = None if positions is None else slice_positions(positions, where)
            part: RuleCall = {"state": state, "k_positions": own, "form": form}
            z, state = self._scan(q[:, :, where], k[:, :, where], v[:, :, where], part)
            results.append(z)
        assert state is not None, "there is at least one piece"
        return torch.cat(results, 2), state

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> tuple[Tensor, Parts]:
        """Run the recurrence over a piece of the tokens."""
        step = self.step(v)[..., None]
        g = -wide(self.A_log).exp()[:, None] * step
        z, state = gated_linear(wide(q), wide(k), wide(v) * step, g, scale=1.0, **call)
        return (z + wide(self.skip)[:, None, None] * wide(v)).to(q.dtype), state


def _by_head(x: Float[Tensor, "B T n"], heads: int) -> Float[Tensor, "B G T d"]:
    """Split the channels of tokens into heads, in fp32 or better."""
    return torch.unflatten(wide(x), -1, (heads, -1)).transpose(1, 2)  # [B,T,n] -> [B,G,T,d]


class LinearAttentionRule(RecurrenceRule):
    """Linear attention with a feature map, with or without a normalizer.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4.
    """

    scale: float

    def __init__(
        self, feature_map: FeatureMap = "elu+1", *, normalize: bool = True, scale: float = 1.0
    ) -> None:
        super().__init__()
        feature_map_of(feature_map)
        check_number("scale", scale, float("-inf"), float("inf"), "finite")
        self.feature_map, self.normalize, self.scale = feature_map, normalize, scale

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,max(H,N),T,E] and the last state: (S, z), or (S,)."""
        return linear_attention(
            q,
            k,
            v,
            feature_map=self.feature_map,
            normalize=self.normalize,
            scale=self.scale,
            **call,
        )

    def unnormalized(self) -> LinearAttentionRule:
        """Return this rule without the division by the sum of the weights."""
        return LinearAttentionRule(self.feature_map, normalize=False)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> LinearSpec:
        """Return the cost of a layer with this rule."""
        count = getattr(self.feature_map, "feature_count", None)
        features = None if count is None else count(shape.head_dim)
        return LinearSpec(weights, (), shape, normalized=self.normalize, features=features)

    def extra_repr(self) -> str:
        """Return the feature map, and whether the weights are normalized."""
        name = self.feature_map if isinstance(self.feature_map, str) else "a function"
        return f"{name}, normalize={self.normalize}"


class RetentionRule(RecurrenceRule):
    """Retention: the state of each key/value head decays at a fixed rate.

    Source: Sun et al. 2023 (arXiv 2307.08621), equations 6 and 8.
    """

    cost = decayed_cost("retention")

    def __init__(
        self, groups: int, decay: Sequence[float] | None = None, *, scale: float | None = None
    ) -> None:
        super().__init__()
        check_number("scale", scale, float("-inf"), float("inf"), "finite")
        if groups < 1:
            raise ArgumentError(f"RetentionRule(groups={groups}): groups must be at least 1")
        if decay is not None:
            if len(decay) != groups:
                raise ArgumentError(
                    f"decay has length {len(decay)}; it must have one number for each of the "
                    f"{plural(groups, 'key/value head')}, or be None"
                )
            for g, gamma in enumerate(decay):
                if not 0 <= gamma <= 1:
                    raise ArgumentError(
                        f"decay of head {g} is {gamma}; it must be from 0 (forget at once) to 1 "
                        "(never forget)"
                    )
        self.decay = decay
        self.scale = scale

    @property
    def decay(self) -> tuple[float, ...] | None:
        """The decay factor of each key/value head; None is 1 - 2^(-5-g)."""
        return self._decay

    @decay.setter
    def decay(self, decay: Sequence[float] | None) -> None:
        self._decay = None if decay is None else tuple(float(gamma) for gamma in decay)
        self._decay_tensor = ConstantTensor(
            torch.tensor(self._decay or (), dtype=torch.float64, device="cpu")
        )

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,max(H,N),T,E] and the state (S,) after the last token."""
        decay = None
        if self.decay is not None:
            decay = self._decay_tensor.on(k.device)
        return retention(q, k, v, decay=decay, scale=self.scale, **call)

    def extra_repr(self) -> str:
        """Return the decays, if they are not those of the paper."""
        return "" if self.decay is None else f"decay={list(self.decay)}"


class GatedLinearRule(RecurrenceRule):
    """Gated linear attention: a low-rank map of each token decays every channel of the state.

    g = log sigmoid(W_2 W_1 x + b) / temperature, in fp32 or better

    Source: Yang et al. 2023 (arXiv 2312.06635), section 4.4.
    """

    cost = decayed_cost("gated linear attention")
    shown = ("temperature",)

    def __init__(
        self, dim: int, groups: int, head_dim: int, *, rank: int = 16, temperature: float = 16.0
    ) -> None:
        super().__init__()
        check_positive_sizes(
            "GatedLinearRule", dim=dim, groups=groups, head_dim=head_dim, rank=rank
        )
        check_number("temperature", temperature, 0, float("inf"), "greater than 0")
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, groups * head_dim)
        self.groups, self.temperature = groups, temperature

    def log_decay(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B G T D"]:
        """Return the logarithms of the gates [B,G,T,D] for tokens x [B,T,M]; they are at most 0."""
        gates = torch.unflatten(self.up(self.down(x)), -1, (self.groups, -1)).transpose(1, 2)
        return F.logsigmoid(wide(gates)) / self.temperature

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,max(H,N),T,E] and the state (S,) after the last token."""
        g = self.log_decay(x)
        return gated_linear(q, k, v, g, **call)


class HGRN2Rule(RecurrenceRule):
    """The rule of HGRN2: gated linear attention whose key is what the forget gate leaves free.

    f = b + (1 - b) sigmoid(k);  S <- diag(f) S + (1 - f) v^T;  z = S^T q / sqrt(D)

    The smallest forget gate b is in [0, 1); upper layers of the paper have a larger one.

    Source: Qin et al. 2024 (arXiv 2404.07904), equation 5; lower bounds: arXiv 2311.04823.
    """

    cost = decayed_cost("HGRN2")
    shown = ("lower_bound",)

    def __init__(self, lower_bound: float = 0.0) -> None:
        super().__init__()
        check_number("lower_bound", lower_bound, -1e-300, 1.0, "at least 0 and below 1")
        self.lower_bound = lower_bound

    def written_keys(self, k: Float[Tensor, "B G T D"]) -> Float[Tensor, "B G T D"]:
        """Return the keys 1 - f that the state receives, from the logits of the gates."""
        return (1 - self.lower_bound) * torch.sigmoid(-wide(k))

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,H,T,E] and the state (S,) after the last token."""
        g = F.logsigmoid(wide(k))
        if self.lower_bound:
            g = torch.log(self.lower_bound + (1 - self.lower_bound) * g.exp())
        keys = self.written_keys(k)
        z, state = gated_linear(wide(q), keys, wide(v), g, **call)
        return z.to(q.dtype), state


class LightNetRule(RecurrenceRule):
    """The rule of LightNet: decays from a running log-sum-exp, so that weights are a softmax.

    L_t = log(exp(k_1) + ... + exp(k_t));  S <- diag(exp(L_{t-1} - L_t)) S + exp(k_t - L_t) v_t^T

    Source: Qin et al. 2024 (arXiv 2405.21022), section 3.
    """

    cost = staticmethod(lightnet_spec)

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,H,T,E] and the state (S, L) after the last token."""
        state = call["state"]
        sums, total = (None, None) if state is None else (state[:1], state[1:])
        g, total = log_sum_exp_gates(k, state=total, k_positions=call["k_positions"])
        keys = -torch.expm1(g)
        call = {**call, "state": sums}
        z, sums = gated_linear(wide(q), keys, wide(v), g, **call)
        return z.to(q.dtype), (*sums, *total)


class RWKV6Rule(RecurrenceRule):
    """The rule of RWKV-6: a decay for every channel by a low-rank map, and a learned own weight.

    z = S^T q + (q . (u k)) v;  S <- diag(exp(g)) S + k v^T;  g = -exp(w + W_2 tanh(W_1 x))

    Source: Peng et al. 2024 (arXiv 2404.05892), section 4.
    """

    scale = 1.0

    cost = staticmethod(rwkv6_spec)

    def __init__(self, dim: int, heads: int, head_dim: int, *, rank: int = 64) -> None:
        super().__init__()
        check_positive_sizes("RWKV6Rule", dim=dim, heads=heads, head_dim=head_dim, rank=rank)
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, heads * head_dim, bias=False)
        # channels start with memories of different lengths
        self.decay = nn.Parameter(torch.linspace(-6, -1, heads * head_dim))
        self.bonus = nn.Parameter(torch.full((heads, head_dim), 0.5))

    def log_decay(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B G T D"]:
        """Return the logarithms of the decays [B,H,T,D] for tokens x [B,T,M]; they are below 0."""
        rate = wide(self.decay) + wide(self.up(torch.tanh(self.down(x))))
        return -_by_head(rate, self.bonus.shape[0]).exp()

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,H,T,E] and the state (S,) after the last token."""
        g = self.log_decay(x)
        return rwkv6(q, k, v, g, self.bonus, **call)


class RWKV4Rule(RecurrenceRule):
    """The rule of RWKV-4: in each channel a decaying mean of values, gated by the receptance q.

    z = sigmoid(q) (a + exp(u + k) v) / (b + exp(u + k));  a <- exp(-exp(w)) a + exp(k) v,
    b <- exp(-exp(w)) b + exp(k)

    Source: Peng et al. 2023 (arXiv 2305.13048), equations 14 to 18.
    """

    explain_refusal = (
        "has no row of weights for a head as a whole: each channel has its own; read the state in "
        "its cache, or explain a layer of attention"
    )
    """Why `Recurrent.explain_row` cannot give a row."""

    cost = staticmethod(rwkv4_spec)

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        check_positive_sizes("RWKV4Rule", heads=heads, head_dim=head_dim)
        # channels start with memories of different lengths
        self.decay = nn.Parameter(torch.linspace(-5, 3, heads * head_dim).view(heads, head_dim))
        self.bonus = nn.Parameter(torch.full((heads, head_dim), math.log(0.3)))

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,H,T,D] and the state (a, b, m) after the last token."""
        g = -wide(self.decay).exp()
        z, state = rwkv4(k, v, g, self.bonus, **call)
        return torch.sigmoid(q) * z, state


class Mamba2Rule(RecurrenceRule):
    """The rule of Mamba-2 (SSD): one decay per head from a step size, and a skip of the value.

    S <- exp(-s exp(A)) S + k (s v)^T;  z = S^T q + d v;  s = clip(softplus(W x + b), limits)

    Here k, q and v are the paper's B, C and x. The limits hold in every form.

    Source: Dao and Gu 2024 (arXiv 2405.21060), section 7 and listing 2.
    """

    scale = 1.0

    cost = decayed_cost("Mamba-2")

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        bias: bool = False,
        step_limits: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        super().__init__()
        check_positive_sizes("Mamba2Rule", dim=dim, heads=heads)
        if not 0 <= step_limits[0] <= step_limits[1]:
            raise ArgumentError(
                f"step_limits is {step_limits}; it must be two numbers, at least 0, the smaller "
                "one first"
            )
        self.linear = Linear(dim, heads, bias=bias)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(initial_step_bias(heads))
        self.skip = nn.Parameter(torch.ones(heads))
        self.step_limits = step_limits

    def step(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B N T"]:
        """Return the step sizes s [B,N,T] of tokens x [B,T,M]."""
        step = F.softplus(wide(self.linear(x)) + wide(self.dt_bias)).transpose(1, 2)
        return step if self.step_limits == (0, math.inf) else clip(step, *self.step_limits)

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,max(H,N),T,E] and the state (S,) after the last token."""
        step = self.step(x)[..., None]
        g = -wide(self.A_log).exp()[:, None, None] * step
        z, state = self.sum_values(x, wide(q), wide(k), wide(v) * step, g, call)
        skip = wide(self.skip)[:, None, None] * wide(v)
        z = z + skip.repeat_interleave(z.shape[1] // v.shape[1], 1)
        return z.to(q.dtype), state

    def sum_values(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, call: RuleCall
    ) -> RuleResult:
        """Return the decayed sums of values [B,N,T,E], in fp32 or better, and the state."""
        return gated_linear(q, k, v, g, scale=1.0, **call)


class LogLinearRule(Mamba2Rule):
    """The rule of log-linear Mamba-2: that of Mamba-2, with a state and a weight for each level.

    z = lambda_0 S[0]^T q + ... + lambda_{L-1} S[L-1]^T q + d v;  lambda = softplus(c W x)

    The levels and their states are those of `regard.linear.log_linear`.

    Source: Guo et al. 2025 (arXiv 2506.04761), section 3; the map to lambda: the released code.
    """

    shown = ("levels",)

    def __init__(self, dim: int, heads: int, levels: int = 16) -> None:
        super().__init__(dim, heads)
        if not 1 <= levels <= MAX_LEVELS:
            raise ArgumentError(
                f"levels is {levels}; it must be from 1 to {MAX_LEVELS}", argument="levels"
            )
        self.level_linear = Linear(dim, heads * levels, bias=False)
        self.level_scale = nn.Parameter(torch.ones(heads, levels))
        self.levels = levels

    def level_weights(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B N T L"]:
        """Return the weights lambda [B,N,T,L] of the levels for tokens x [B,T,M]."""
        logits = torch.unflatten(wide(self.level_linear(x)), -1, self.level_scale.shape)
        return F.softplus(logits * wide(self.level_scale)).transpose(1, 2)  # [B,T,N,L] -> [B,N,T,L]

    def sum_values(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, call: RuleCall
    ) -> RuleResult:
        """Return the weighted sums of values [B,N,T,E], in fp32 or better, and the state (S, n)."""
        return log_linear(q, k, v, g, self.level_weights(x), scale=1.0, **call)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
        """Return the cost of a layer with this rule."""
        return log_linear_spec(weights, shape, self.levels)


class MLSTMRule(RecurrenceRule):
    """The rule of the matrix memory of xLSTM, whose result a running sum of keys bounds.

    C <- f C + i k v^T, n <- f n + i k;  z = C^T q / max(|n . q|, 1) with q / sqrt(D);
    i = exp(cap(W_i x + b_i)), f = sigmoid(cap(W_f x + b_f)), cap(y) = c tanh(y / c)

    Source: Beck et al. 2024 (arXiv 2405.04517), section 2.3; the cap: Beck et al. 2025 (arXiv
    2503.13427), section 3.2.
    """

    cost = staticmethod(mlstm_spec)
    shown = ("gate_cap",)

    def __init__(self, dim: int, heads: int, *, gate_cap: float | None = 15.0) -> None:
        super().__init__()
        check_positive_sizes("MLSTMRule", dim=dim, heads=heads)
        if gate_cap is not None:
            check_number("gate_cap", gate_cap, 0, float("inf"), "greater than 0")
        self.input_gate, self.forget_gate = nn.Linear(dim, heads), nn.Linear(dim, heads)
        with torch.no_grad():  # an untrained layer writes little and keeps it
            self.input_gate.bias.fill_(-10.0)
            self.forget_gate.bias.copy_(torch.linspace(3.0, 6.0, heads))
        self.gate_cap = gate_cap

    def gates(self, x: Float[Tensor, "B T M"]) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the input and the forget gates [B,H,T] of tokens x [B,T,M]."""
        logits = [wide(gate(x)).transpose(1, 2) for gate in (self.input_gate, self.forget_gate)]
        if self.gate_cap is not None:
            logits = [self.gate_cap * torch.tanh(y / self.gate_cap) for y in logits]
        return logits[0], F.logsigmoid(logits[1])

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,H,T,E] and the state (C, n, m) after the last token."""
        return mlstm(q, k, v, *self.gates(x), **call)


class SlotRule(RecurrenceRule):
    """The rule of gated slot attention and ABC: a softmax over a few slots of all tokens.

    K <- K diag(a) + k (1 - a)^T, V <- diag(a) V + (1 - a) v^T;  z = V^T softmax(K^T q / sqrt(D))

    With gates "sigmoid", a = sigmoid(W x)^(1/temperature). With "softmax", 1 - a is the token's
    share in the sum of exp(W x), so that a slot is a weighted mean.

    Source: Zhang et al. 2024 (arXiv 2409.07146), section 3; ABC: Peng et al. 2021 (arXiv
    2110.02488), section 3.
    """

    shown = ("slots", "gates")

    def __init__(
        self,
        dim: int,
        groups: int,
        slots: int,
        *,
        gates: Literal["sigmoid", "softmax"] = "sigmoid",
        temperature: float = 8.0,
    ) -> None:
        super().__init__()
        check_positive_sizes("SlotRule", dim=dim, groups=groups, slots=slots)
        check_choice("gates", gates, ("sigmoid", "softmax"))
        check_number("temperature", temperature, 0, float("inf"), "greater than 0")
        self.linear = nn.Linear(dim, groups * slots, bias=False)
        self.groups, self.slots = groups, slots
        self.gates, self.temperature = gates, temperature

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,H,T,E] and the last state: (K, V), and the lse with "softmax"."""
        logits = _by_head(self.linear(x), self.groups)
        state = call["state"]
        slots, total = (None, None) if state is None else (state[:2], state[2:])
        sums: Parts = ()
        if self.gates == "sigmoid":
            g = F.logsigmoid(logits) / self.temperature
        else:
            g, sums = log_sum_exp_gates(logits, state=total, k_positions=call["k_positions"])
        call = {**call, "state": slots}
        z, slots = gated_slots(q, k, v, g, **call)
        return z, (*slots, *sums)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
        """Return the cost of a layer with this rule."""
        return slots_spec(weights, shape, self.slots, summed=self.gates == "softmax")


class CosineRule(LinearAttentionRule):
    """The rule of cosFormer: linear attention whose weights fall with the distance as a cosine.

    a_ij = relu(q_i) . relu(k_j) cos(pi (i - j) / (2 period)), divided by the sum of the row

    At a distance of `period` tokens a weight is 0; texts must not be longer.

    Source: Qin et al. 2022 (arXiv 2202.08791), section 3.
    """

    def __init__(self, period: int, *, normalize: bool = True) -> None:
        super().__init__("identity", normalize=normalize)
        if period < 1:
            raise ArgumentError(f"period is {period}; it must be at least 1")
        self.period = period

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Return the results [B,H,T,E] and the state after the last token."""
        positions = call["k_positions"]
        where = Span(0, q.shape[2]) if positions is None else positions
        queries, keys = (cosine_features(wide(part), where, self.period) for part in (q, k))
        z, state = linear_attention(
            queries, keys, wide(v), feature_map="identity", normalize=self.normalize, **call
        )
        return z.to(q.dtype), state

    def unnormalized(self) -> CosineRule:
        """Return this rule without the division by the sum of the weights."""
        return CosineRule(self.period, normalize=False)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> LinearSpec:
        """Return the cost of a layer with this rule."""
        features = 2 * shape.head_dim
        return LinearSpec(weights, (), shape, normalized=self.normalize, features=features)

    def extra_repr(self) -> str:
        """Return the period of the cosine."""
        return f"period={self.period}"
