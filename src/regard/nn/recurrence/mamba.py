"""The parts of Mamba (Mamba-1): its projection, and the rule of the selective scan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_positive_sizes
from regard.caches import Parts
from regard.cost.fixed_state import ShortConvolution
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
from regard.ops.linear.linear_attention import gated_linear
from regard.process_state import is_compiling
from regard.span import Positions, slice_positions

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
