"""Layers of RWKV: the time mixing of RWKV-7, and the channel mixing of RWKV-4."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_number, check_positive_sizes
from regard.caches import Cache, Parts, State
from regard.caches.cross_layer import FirstValues, split_first_values
from regard.caches.joined import Joined
from regard.cost import Spec
from regard.cost.decayed_state import channel_mix_spec
from regard.cost.delta_rules import rwkv7_spec
from regard.cost.fixed_state import ShortConvolution
from regard.cost.spec import HeadShape
from regard.errors import ArgumentTypeError
from regard.masks import Document
from regard.nn.attention.cross import require_first
from regard.nn.blocks.blocks import Block, PreNorm
from regard.nn.blocks.norms import HeadNorm
from regard.nn.explainable import EffectiveRow, InputSteps, LayerRun, MechanismStep, ProjectionQuery
from regard.nn.mixer import Mixer, count_weights
from regard.nn.projections.heads import HeadProjection
from regard.nn.recurrence.delta import BottleneckProjection
from regard.nn.recurrence.projections import token_before
from regard.nn.recurrence.recurrent import StateMixer, Tensors, over_documents, row_of_state, wide
from regard.nn.weights import Linear
from regard.ops.linear.delta_rules import generalized_delta_rule
from regard.span import Positions, Span
from regard.tracing import is_tracing, named_scope, parent_scope, tap

LARGEST_RATE = math.exp(-0.5)
"""The largest rate of decay: no factor is below exp(-LARGEST_RATE) = 0.545."""


class RWKV7Vectors(NamedTuple):
    """What the recurrence of RWKV-7 reads and writes for some tokens.

    All are [B,H,T,D]: `removal` keys of length 1, `rate` between 0 and 1, `log_decay` from
    -exp(-0.5).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    removal: Tensor
    rate: Tensor
    log_decay: Tensor
    gate: Tensor


class RWKV7(StateMixer):
    """The time mixing of RWKV-7 (Goose): tokens remove what a state holds for one key, write
    another.

    y_c = c x + (1 - c) x', with a share c per channel for each of six inputs, x' the token before;
    q, k, v = W y;  w = exp(-exp(-0.5) sigmoid(w_0 + W_2 tanh(W_1 y)));
    a = sigmoid(a_0 + W_2 W_1 y);  r = m_r k / |m_r k|;  k' = k (1 + (a - 1) m_a);
    v' = v + sigmoid(v_0 + W_2 W_1 y) (v_1 - v), where v_1 are the values of the first layer;
    S <- diag(w) S - (a r) (S^T r)^T + k' v'^T;  z = (norm(S^T q) + (q . (u k')) v') g

    A cache stores S and the last token. The first layer has v' = v.

    Source: Peng et al. 2025 (arXiv 2503.14456), section 4.
    """

    recording_refusal = "splits the sequence into chunks, whose number depends on its length"
    carries_values = True  # the first layer gives its values, and the others read them

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        *,
        is_first: bool,
        rank: int = 64,
        value_rank: int = 32,
        gate_rank: int = 128,
        eps: float = 64e-5,
        documents: Document | None = None,
    ) -> None:
        super().__init__()
        check_number("eps", eps, 0, float("inf"), "greater than 0")
        check_positive_sizes("RWKV7", dim=dim, value_rank=value_rank)  # also of the first layer
        H, D, share = heads, head_dim, torch.linspace(0, 1, dim)
        # channels start with shares of the present token from 0 to 1
        self.mix_q, self.mix_k, self.mix_v, self.mix_decay, self.mix_rate, self.mix_gate = (
            nn.Parameter(share.clone()) for _ in range(6)
        )
        self.q, self.k, self.v = (HeadProjection(dim, H, D) for _ in "qkv")
        self.decay = BottleneckProjection(dim, rank, H, D, inner=nn.Tanh())
        self.rate = BottleneckProjection(dim, rank, H, D)
        self.gate = BottleneckProjection(dim, gate_rank, H, D, inner=nn.Sigmoid())
        # channels start with memories of different lengths
        self.decay_bias = nn.Parameter(torch.linspace(-6, -1, H * D).view(H, D))
        self.rate_bias = nn.Parameter(torch.zeros(H, D))
        self.first_share: BottleneckProjection | None = None
        self.first_share_bias: nn.Parameter | None = None
        if not is_first:
            self.first_share = BottleneckProjection(dim, value_rank, H, D)
            self.first_share_bias = nn.Parameter(torch.ones(H, D))
        self.removal_scale = nn.Parameter(torch.full((H, D), 0.85))
        self.rate_scale = nn.Parameter(torch.ones(H, D))
        self.bonus = nn.Parameter(torch.zeros(H, D))
        self.norm = HeadNorm(H, D, eps=eps)
        self.output = Linear(H * D, dim, bias=False)
        self.heads, self.documents = HeadShape(H, H, D, D), documents

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Run the recurrence over x [B,T,M] from the cached state, in the form `backend`."""
        own, first = split_first_values(cache)
        assert own is None or isinstance(own, State)
        form = "recurrent" if backend == "reference" else backend
        state = None if own is None else own.state
        before, past = self._token_before(x, positions, None if state is None else state[1:])
        vectors = self._vectors(x, before, first)
        q, k, v = tap("q", vectors.q), tap("k", vectors.k), tap("v", vectors.v)
        vectors = vectors._replace(q=q, k=k, v=v)
        read, after = self._recur(vectors, positions, None if state is None else state[:1], form)
        if own is not None:
            own.store((*after, *past), positions)
        z = tap("z", self._finish(read, vectors))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def _token_before(
        self, x: Tensor, positions: Positions, past: Parts | None
    ) -> tuple[Tensor, Parts]:
        """Return the token before each of x [B,T,M], zeros in a new document, and the last."""

        def shift(
            part: Tensors, positions: Positions, state: Parts | None
        ) -> tuple[Tensors, Parts]:
            before, state = token_before(part[0], self.mix_q, state, positions)
            return (before,), state

        (before,), past = over_documents(self.documents, shift, (x,), positions, past)
        return before, past

    def _vectors(self, x: Tensor, before: Tensor, first: FirstValues | None) -> RWKV7Vectors:
        """Return what the recurrence reads and writes for tokens x [B,T,M], given those before."""

        def heads(part: HeadProjection, share: Tensor) -> Tensor:
            y: Tensor = part(before + (x - before) * share, None)
            return y

        q, k, v = (
            heads(part, share)
            for part, share in ((self.q, self.mix_q), (self.k, self.mix_k), (self.v, self.mix_v))
        )
        rate = _gate(heads(self.rate, self.mix_rate), self.rate_bias)
        log_decay = -LARGEST_RATE * _gate(heads(self.decay, self.mix_decay), self.decay_bias)
        removal = F.normalize(wide(k) * _by_channel(self.removal_scale), dim=-1)
        written = wide(k) * (1 + (rate - 1) * _by_channel(self.rate_scale))
        if self.first_share is None:
            if first is not None:
                first.give(v)
        else:
            v = self._with_first(v, heads(self.first_share, self.mix_v), first)
        gate = heads(self.gate, self.mix_gate)
        return RWKV7Vectors(q, written.to(k.dtype), v, removal, rate, log_decay, gate)

    def _with_first(self, v: Tensor, share: Tensor, first: FirstValues | None) -> Tensor:
        """Return values v [B,H,T,D], mixed with those of the first layer by logits `share`."""
        assert self.first_share_bias is not None, "a later layer has it"
        start = require_first(first).take(self.heads.heads, self.heads.head_dim)
        return torch.lerp(v, start, _gate(share, self.first_share_bias).to(v.dtype))

    def _recur(
        self, vectors: RWKV7Vectors, positions: Positions, state: Parts | None, form: str
    ) -> tuple[Tensor, Parts]:
        """Run the recurrence, in every document from an empty state; return S^T q [B,H,T,D]."""

        def run(part: Tensors, positions: Positions, state: Parts | None) -> tuple[Tensors, Parts]:
            q, k, v, removal, rate, log_decay = part
            z, state = generalized_delta_rule(
                q,
                k,
                v,
                -removal,
                log_decay,
                a=removal * rate,
                scale=1.0,
                state=state,
                k_positions=positions,
                form=form,
            )
            return (z,), state

        (z,), state = over_documents(self.documents, run, vectors[:6], positions, state)
        return z, state

    def _finish(self, read: Tensor, vectors: RWKV7Vectors) -> Tensor:
        """Return z of what was read [B,H,T,D]: the norm, the token itself, and the gate."""
        own = (wide(vectors.q) * vectors.k * _by_channel(self.bonus)).sum(-1, keepdim=True)
        z: Tensor = self.norm(read)
        return (z + own.sum(-1, keepdim=True).to(z.dtype) * vectors.v) * vectors.gate

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the queries, the written keys and the values, each as one step."""
        x, first = query.x, FirstValues(query.first_values)
        before, _ = self._token_before(x, query.positions, None)
        vectors = self._vectors(x, before, None if self.first_share is None else first)
        mix = "W (c * x_{i} + (1 - c) * x_{{{i}-1}})"
        name, key, value = "mixed with the token before", "the written key", "the written value"
        later = " and v1_j of the first layer" if self.first_share is not None else ""
        return InputSteps(
            (MechanismStep(name, f"q_i ← {mix.format(i='i')}", vectors.q[0]),),
            (MechanismStep(key, f"k_j ← (1 + (a_j - 1) m) * {mix.format(i='j')}", vectors.k[0]),),
            (MechanismStep(value, f"v_j ← {mix.format(i='j')}{later}", vectors.v[0]),),
        )

    def explain_row(self, run: LayerRun, head: int, row: int) -> EffectiveRow:
        """Return the coefficients of the state before norm and gate, and the states around."""
        T = run.q.shape[2]
        before, _ = self._token_before(run.x, Span(0, T), None)
        # the values of the run contain the mix with the first layer
        unused = FirstValues(torch.zeros_like(run.v).transpose(1, 2).flatten(2))
        vectors = self._vectors(run.x, before, None if self.first_share is None else unused)
        vectors = vectors._replace(q=run.q, k=run.k, v=run.v)

        def read(v: Tensor, n: int = T) -> tuple[Tensor, Parts]:
            cut = [x[..., :n, :] for x in vectors._replace(v=v)]
            return self._recur(RWKV7Vectors(*cut), Span(0, n), None, "auto")

        dots = (run.k[0, head].double() @ run.q[0, head, row].double()).cpu()
        result, _ = read(run.v)
        scores = [MechanismStep("dot", "", dots)]
        explained = row_of_state(run, head, row, read, result, scores, 1.0)
        z = self._finish(result, vectors)
        return explained._replace(checks={"z of the recurrence": float((z - run.z).abs().max())})

    @property
    def spec(self) -> Spec:
        """The cost of this layer."""
        convolution = ShortConvolution(self.mix_q.shape[0], 2)
        return rwkv7_spec(count_weights(self), self.heads, convolution)


def _gate(logits: Tensor, bias: Tensor) -> Tensor:
    """Return sigmoid(bias + logits) [B,H,T,D] in fp32 or better, with a bias [H,D]."""
    return torch.sigmoid(wide(logits) + _by_channel(bias))


def _by_channel(weight: Tensor) -> Tensor:
    """Return weights [H,D] as [H,1,D], in fp32 or better."""
    return wide(weight)[:, None]


class ChannelMix(StateMixer):
    """The feed-forward layer of RWKV-4, of a mix with the token before, its state.

    y_t = sigmoid(W_r (c_r x_t + (1 - c_r) x_{t-1})) * W_v max(W_k (c_k x_t + (1 - c_k) x_{t-1}),
    0)^2, with c per channel

    Source: Peng et al. 2023 (arXiv 2305.13048), equations 17 and 18.
    """

    explain_refusal = (
        "mixes a token with the one before it only, so that there is no row of weights; explain a "
        "layer of attention"
    )

    recording_refusal = "skips empty slots, whose places depend on the positions"

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        check_positive_sizes("ChannelMix", dim=dim, hidden=hidden)
        share = torch.linspace(0, 1, dim)
        self.mix_k, self.mix_r = (nn.Parameter(share.clone()) for _ in "kr")
        self.up = Linear(dim, hidden, bias=False)
        self.receptance = Linear(dim, dim, bias=False)
        self.down = Linear(hidden, dim, bias=False)

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Apply the layer to x [B,T,M] behind the token in the cache."""
        assert cache is None or isinstance(cache, State)
        past: Parts | None = None if cache is None else cache.state
        before, past = token_before(x, self.mix_k, past, positions)
        if cache is not None:
            cache.store(past, positions)
        k, r = (x * c + before * (1 - c) for c in (self.mix_k, self.mix_r))
        y: Tensor = self.receptance(r).sigmoid() * self.down(self.up(k).relu().square())
        return y

    @property
    def spec(self) -> Spec:
        """The cost of this layer."""
        return channel_mix_spec(count_weights(self), self.mix_k.shape[0], self.up.out_features)


class TwoMixerBlock(Block):
    """A block of two mechanisms, each with a residual connection; its cache is a `Joined`.

    Source: Peng et al. 2023 (arXiv 2305.13048), figure 2.
    """

    def __init__(
        self,
        attention: Mixer,
        feed_forward: Mixer,
        attention_residual: PreNorm,
        feed_forward_residual: PreNorm,
    ) -> None:
        super().__init__(attention, feed_forward, attention_residual, feed_forward_residual)

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M"]:
        """Apply both mechanisms to hidden states [B,T,M], each with its part of the cache."""
        if cache is not None and (not isinstance(cache, Joined) or len(cache.parts) != 2):
            raise ArgumentTypeError(
                f"the cache is {type(cache).__name__}; a block of two mechanisms needs a Joined of "
                "two: use new_cache()"
            )
        first, second = (None, None) if cache is None else cache.parts
        if positions is None and cache is not None:
            positions = cache.next(x.shape[1])

        def feed_forward(normed: Tensor) -> Tensor:
            y: Tensor = self.feed_forward(normed, positions, second, backend=backend)
            if not is_tracing():
                return y
            with parent_scope():
                return tap("mlp", y)

        if not is_tracing():
            x = self.attention_residual(
                x, lambda normed: self.attention(normed, positions, first, backend=backend)
            )
            result: Tensor = self.feed_forward_residual(x, feed_forward)
            return result
        with named_scope("attention"):
            x = self.attention_residual(x, self._tapped_attention(positions, first, backend))
        with named_scope("mlp"):
            x = self.feed_forward_residual(x, feed_forward)
        return tap("residual", x)

    def new_cache(self) -> Joined:
        """Return an empty cache with a part for each mechanism."""
        parts = (self.attention, self.feed_forward)
        return Joined([mixer.new_cache() for mixer in parts if isinstance(mixer, Mixer)])
