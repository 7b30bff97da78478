"""Attention to a window and a few other tokens: StreamingLLM and Longformer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from regard.argument_checks import check_int
from regard.biases import Bias
from regard.caches import Cache, Growing, Parts
from regard.cost.softmax import SoftmaxSpec
from regard.errors import ArgumentError
from regard.masks import Causal, Dilated, Global, Mask, Sinks, Window
from regard.nn.attention.attention import Attention, Places
from regard.nn.explainable import Explainable, InputSteps, MechanismStep, ProjectionQuery
from regard.nn.mixer import MaskVisibility, Mixer, count_weights
from regard.nn.projections.heads import Projection, SeparateQKV, check_shared_rotary, shared_rotary
from regard.ops.softmax import attend, attend_partial, merge
from regard.positions import rotate
from regard.process_state import is_exporting, is_jit_tracing
from regard.span import Positions, Span, as_tensor
from regard.tracing import requested_taps, tap


class StreamingAttention(Attention):
    """StreamingLLM attention: the s first tokens and the R last ones, as if next to each other.

    A query at p sees the keys p - R < j <= p at their distance p - j, and the sinks j < s at the
    distance min(p, s + R - 1) - j, as in a cache of s + R numbered slots.

    The paper rotates all cached keys by their slots at every step. Here keys are cached as rotated
    by their own positions, and the query is rotated back for the sinks: the scores are the same.

    The model can generate text of any length, without access to the evicted tokens.

    Args:
        project: a `SeparateQKV` whose query and key heads end with the same `Rotary` object.
        output: a module [B,T,H*E] -> [B,T,M].
        sinks: the number s of first tokens that are always kept; 0 gives a sliding window.
        recent: the number R of last tokens that are kept, the query's own included.
        scale, softcap, sink: as in `Attention`; `sink` is a learned logit per head, not a token.

    Raises:
        ArgumentError, ArgumentTypeError: a number is out of range, or queries and keys do not end
            with the same rotary of fixed frequencies.

    >>> from regard.nn.variants.projections import separate_qkv
    >>> from regard.positions import Rotary
    >>> project = separate_qkv(8, 4, 2, 2, Rotary(2))
    >>> attention = StreamingAttention(project, nn.Linear(8, 8), sinks=2, recent=4)
    >>> cache = attention.new_cache()
    >>> attention(torch.zeros(1, 50, 8), cache=cache).shape, len(cache)
    (torch.Size([1, 50, 8]), 6)

    Source: Xiao et al. 2024 (arXiv 2309.17453), section 3.2.
    """

    across_ranks = None

    def __init__(
        self,
        project: SeparateQKV,
        output: nn.Module,
        *,
        sinks: int,
        recent: int,
        scale: float | None = None,
        softcap: float | None = None,
        sink: nn.Parameter | None = None,
    ) -> None:
        check_int("sinks", sinks, 0)
        check_int("recent", recent, 1, "a query always sees itself")
        mask = Causal() & (Window(recent) | Sinks(sinks))
        check_shared_rotary(project)
        super().__init__(project, output, mask=mask, scale=scale, softcap=softcap, sink=sink)
        self.sinks, self.recent = sinks, recent
        self._recent_mask = Causal() & Window(recent) & ~Sinks(sinks)
        self._sinks_mask = Causal() & Sinks(sinks)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, places: Places, backend: str
    ) -> Tensor:
        """Attend in one call while no token is evicted; otherwise merge sinks and recent tokens."""
        if bias is not None:
            raise ArgumentError(
                f"StreamingAttention got the bias {bias} of its projection; its positions move, "
                "and a bias would not follow them: use a projection without data_bias"
            )
        if is_jit_tracing():
            raise ArgumentError(
                "torch.jit.trace or torch.onnx.export(dynamo=False) was given a "
                "StreamingAttention, whose sinks are cut from the keys by a number that depends on "
                "the length: use torch.export.export, or dynamo=True"
            )
        positions, k_positions = places
        evicted = self._evicted(q, positions)
        if evicted is None:
            return super()._attend(q, k, v, None, places, backend)
        rotary = shared_rotary(self.project)
        q_sinks = rotate(q, -evicted, rotary.inv_freq, layout=rotary.layout)
        if not requested_taps().isdisjoint(("scores", "pattern")):
            # A trace needs the scores of both parts in one call.
            q, k = stack_query_forms(q, q_sinks, k, k_positions, self.sinks)
            return super()._attend(q, k, v, None, places, backend)
        attend_to = partial(
            attend_partial,
            scale=self.scale,
            softcap=self.softcap,
            q_positions=positions,
            backend=backend,
        )
        recent = attend_to(q, k, v, mask=self._recent_mask, k_positions=k_positions)
        k, v, k_positions = slots_below(k, v, k_positions, self.sinks)
        sinks = attend_to(q_sinks, k, v, mask=self._sinks_mask, k_positions=k_positions)
        return merge([recent, sinks], sink=self.sink).out

    def _evicted(self, q: Tensor, positions: Positions) -> Tensor | None:
        """Return the number of evicted tokens before each query [B or 1, T]; None if it is 0."""
        capacity = self.sinks + self.recent
        if self.sinks == 0:
            return None
        # an exported program serves every length, so that it may not depend on this one
        if isinstance(positions, Span) and not is_exporting() and positions.stop <= capacity:
            return None
        return (as_tensor(positions, q.device) - (capacity - 1)).clamp(min=0)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of the projection; for the sinks, a last step rotates queries back."""
        steps = super().explain_inputs(query)
        if not query.call_index:
            return steps
        evicted = (as_tensor(query.positions) - (self.sinks + self.recent - 1)).clamp(min=0)
        q = steps.q[-1].values[None]
        rotary = shared_rotary(self.project)
        rotated = rotate(q, -evicted.to(q.device), rotary.inv_freq, layout=rotary.layout)
        equation = f"q_i ← R(-{int(evicted[0, query.row])}) q_i, by the number of evicted tokens"
        return steps._replace(q=(*steps.q, MechanismStep("rotated back", equation, rotated[0])))


def slots_below(
    k: Tensor, v: Tensor, k_positions: Positions, n: int
) -> tuple[Tensor, Tensor, Positions]:
    """Select at most n slots that include all slots at positions below n; others may be added."""
    if isinstance(k_positions, Span):
        stop = min(max(n - k_positions.start, 0), k_positions.length)
        return k[:, :, :stop], v[:, :, :stop], k_positions[:stop]
    bounded = torch.where((k_positions >= 0) & (k_positions < n), k_positions, n)
    slots = bounded.topk(min(n, k_positions.shape[1]), dim=1, largest=False).indices  # [B or 1, n]
    index = slots.to(k.device)[:, None, :, None].expand(k.shape[0], k.shape[1], -1, 1)
    return (
        k.gather(2, index.expand(-1, -1, -1, k.shape[3])),
        v.gather(2, index.expand(-1, -1, -1, v.shape[3])),
        k_positions.gather(1, slots),
    )


def stack_query_forms(
    q: Tensor, q_sinks: Tensor, k: Tensor, k_positions: Positions, n: int
) -> tuple[Tensor, Tensor]:
    """Build queries [q, q_sinks] and keys [k, 0] or [0, k], so that a trace has one call."""
    k_positions = as_tensor(k_positions, q.device).to(q.device)

    is_sink = (k_positions < n)[:, None, :, None]
    halves = (torch.where(is_sink, 0, k), torch.where(is_sink, k, 0))
    return torch.cat((q, q_sinks), -1), torch.cat(halves, -1)


class Longformer(Mixer):
    """Longformer attention: every token sees its window and the global tokens, which see all.

    z_t = softmax(q'_t K'^T / sqrt(D) over all) V', for a global token t;
    z_t = softmax(q_t K^T / sqrt(D) over window(t) and globals) V, for every other token t

    Args:
        local_project, global_project: the projections for the queries of other and of global
            tokens, and for the keys and values that these see.
        output: a module [B,T,H*E] -> [B,T,M].
        positions: the positions of the global tokens.
        window: how many keys a token sees up to and including itself.
        ahead: how many later keys a token sees; None makes the layer causal, as generation needs.
        step: the dilation of the window: a token sees every step-th key, as many as without.

    Raises:
        ArgumentError: the two projections differ in shape, or a size is out of range for its mask.

    >>> from regard.nn.variants.projections import separate_qkv
    >>> local, other = separate_qkv(8, 2, 2, 4), separate_qkv(8, 2, 2, 4)
    >>> layer = Longformer(local, other, nn.Linear(8, 8), positions=(0,), window=3, ahead=2)
    >>> layer(torch.zeros(1, 7, 8)).shape
    torch.Size([1, 7, 8])

    Source: Beltagy et al. 2020 (arXiv 2004.05150), section 3.1.
    """

    recording_refusal = "computes the global queries separately, whose number depends on the length"

    def __init__(
        self,
        local_project: Projection,
        global_project: Projection,
        output: nn.Module,
        *,
        positions: tuple[int, ...] = (0,),
        window: int,
        ahead: int | None = None,
        step: int = 1,
    ) -> None:
        super().__init__()
        if local_project.shape != global_project.shape:
            raise ArgumentError(
                f"local_project is {local_project.shape}, global_project is "
                f"{global_project.shape}; both need the same shape"
            )
        self.local_project, self.global_project, self.output = local_project, global_project, output
        self.globals = Global(positions)
        self.causal = ahead is None
        dilated, reach = Dilated(window, step), (window - 1) * step + 1
        window_mask: Mask = Window(reach) if ahead is None else Window(reach, ahead=ahead * step)
        if step != 1:
            window_mask = window_mask & dilated
        # Every query sees the global keys; the second mask is for global queries, which see all.
        self.mask: Mask = window_mask | self.globals
        self.global_mask: Mask | None = None
        if self.causal:
            self.mask, self.global_mask = Causal() & self.mask, Causal()

    # A global query is computed by both projections, and the second result replaces the first.
    replaces_calls = True

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of the local projection, or of the global one in the second call."""
        project = self.global_project if query.call_index else self.local_project
        return project.explain_inputs(query) if isinstance(project, Explainable) else InputSteps()

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] to its own tokens and, if causal, to those in the cache."""
        local_memory = self.local_project.remember(x, positions)
        global_memory = self.global_project.remember(x, positions)
        memory, k_positions, n = (*local_memory, *global_memory), positions, len(local_memory)
        if cache is not None:
            memory, k_positions = cache.update(memory, positions)
        q = tap("q", self.local_project.query(x, positions))
        k, v = self.local_project.recall(memory[:n], k_positions)
        z = attend(
            q,
            tap("k", k),
            tap("v", v),
            mask=self.mask,
            q_positions=positions,
            k_positions=k_positions,
            backend=backend,
        )
        z = tap("z", self._replace_global_rows(z, x, positions, memory[n:], k_positions, backend))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def _replace_global_rows(
        self,
        z: Tensor,
        x: Tensor,
        positions: Positions,
        memory: Parts,
        k_positions: Positions,
        backend: str,
    ) -> Tensor:
        """Return heads z [B,H,T,E] with the rows of global tokens by the global projection."""
        rows = self._global_rows(positions)
        if rows is not None:  # the rows are known without a copy from the device: compute only them
            if not len(rows):
                return z

            index = torch.tensor(rows, device=x.device)
            x, positions = x[:, index], as_tensor(positions, x.device)[:, index]
        q = self.global_project.query(x, positions)
        k, v = self.global_project.recall(memory, k_positions)

        global_z = attend(
            q,
            k,
            v,
            mask=self.global_mask,
            q_positions=positions,
            k_positions=k_positions,
            backend=backend,
        )
        if rows is not None:
            return z.index_copy(2, index, global_z)
        return torch.where(self.globals.has(as_tensor(positions))[:, None, :, None], global_z, z)

    def _global_rows(self, positions: Positions) -> list[int] | None:
        """Return the indices of the global tokens in the call; None for positions in a tensor."""
        if not isinstance(positions, Span):
            return None
        first = positions.start
        return [p - first for p in self.globals.positions if first <= p < positions.stop]

    def new_cache(self) -> Cache:
        """Return an empty cache of all tokens, since global tokens reach any distance."""
        return Growing()

    @property
    def spec(self) -> SoftmaxSpec:
        """The cost of this layer: both projections are cached, and a token reads one of them."""
        shape, visible = self.local_project.shape, MaskVisibility(self.mask, keeps_all=True)
        return SoftmaxSpec(count_weights(self), 2 * shape.parts, shape.heads, visible)
