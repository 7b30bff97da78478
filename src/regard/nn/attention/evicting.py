"""Softmax attention whose cache has a budget, in which a rule decides what stays."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.caches import Cache, Evicting
from regard.caches.eviction import EvictionRule, HeldTokens, QueryMoments, tokens_to_keep
from regard.cost.bounded import EvictingSpec
from regard.errors import ArgumentError
from regard.masks import Causal, Dense
from regard.nn.attention.attention import Attention, Places
from regard.nn.mixer import AcrossRanks, count_weights
from regard.nn.projections.heads import (
    Projection,
    SeparateQKV,
    check_adds_no_bias,
    check_shared_rotary,
    shared_rotary,
)
from regard.ops.softmax import Partial, attend, attend_partial, attention_weights, merge
from regard.positions import rotate
from regard.positions.rotary import apply_rotary, cos_sin
from regard.process_state import is_compiling
from regard.span import Positions, Span, as_tensor
from regard.tracing import tap


class _Slots(NamedTuple):
    """The contents of the cache: R = B G rows of C slots in the order of positions.

    k [R,C,D], v [R,C,E], positions [R,C] (-1: empty), sums [R,C], and the last w queries q
    [R,n,w,D] at q_positions [R,w]. If the rule expects queries: their number [R], their mean
    [R,n,D] before the rotation, and the sum `spread` [R,n,D,D] of outer products around it.
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    sums: Tensor
    q: Tensor
    q_positions: Tensor
    query_count: Tensor
    mean: Tensor
    spread: Tensor


class EvictingAttention(Attention):
    """Softmax attention with a cache of at most budget + interval tokens per key/value head.

    When budget + interval tokens are held, the `budget` tokens with the largest scores of the rule
    stay, head by head, at their positions. With interval 1 a token is evicted at every step.

    Evictions depend on the number of tokens that a row has read, not on the calls, and without a
    cache the module computes the same through a mask. What was evicted is lost.

    A rule with a `floor` below 1 (`regard.caches.eviction.AcrossHeads`) divides G budget tokens
    among the heads.

    Args:
        project: a projection that stores keys and values per head, such as `SeparateQKV`.
        output: a module [B,T,H*E] -> [B,T,M].
        rule: an eviction rule (`regard.caches.eviction`).
        budget: the number of tokens that stay after an eviction.
        interval: the number of tokens between two evictions.
        scale, softcap, sink: as in `Attention`.

    Raises:
        ArgumentError: a number is less than 1, the rule keeps more tokens than the budget, the
            projection does not store keys and values, or a rule that expects queries lacks one
            rotary.

    >>> from regard.caches.eviction import HeavyHitters
    >>> from regard.nn.variants.projections import separate_qkv
    >>> layer = EvictingAttention(
    ...     separate_qkv(8, 4, 2, 2), nn.Linear(8, 8), rule=HeavyHitters(2), budget=6)
    >>> cache = layer.new_cache()
    >>> layer(torch.zeros(1, 50, 8), cache=cache).shape, cache.bytes
    (torch.Size([1, 50, 8]), 280)

    Source: Zhang et al. 2023 (arXiv 2306.14048), algorithm 1.
    """

    across_ranks: ClassVar[AcrossRanks] = None
    recording_refusal = "evicts tokens after a number of them that depends on the length"

    def __init__(
        self,
        project: Projection,
        output: nn.Module,
        *,
        rule: EvictionRule,
        budget: int,
        interval: int = 1,
        scale: float | None = None,
        softcap: float | None = None,
        sink: nn.Parameter | None = None,
    ) -> None:
        if budget < 1 or interval < 1:
            raise ArgumentError(
                f"budget is {budget} and interval {interval}; both must be at least 1"
            )
        if rule.recent + rule.sinks > budget:
            raise ArgumentError(
                f"{rule} always keeps {rule.recent} of the newest tokens and {rule.sinks} of the "
                f"first, and budget is {budget}; give a larger budget"
            )
        _, G, D, E, memory = project.shape
        if memory != (G * D, G * E) or project.cache_unsafe_reason:
            raise ArgumentError(
                f"{type(project).__name__} stores parts of {memory} per token; eviction needs keys "
                f"and values per head, ({G * D}, {G * E}), whose rotation is final"
            )
        check_adds_no_bias(project, "EvictingAttention")
        if rule.future:
            check_shared_rotary(cast("SeparateQKV", project))  # it checks the class, too
            if softcap is not None:
                raise ArgumentError(
                    f"{rule} expects the mean of exponentials of scores, which is not known with "
                    f"softcap={softcap}; use another rule"
                )
        super().__init__(project, output, mask=Causal(), scale=scale, softcap=softcap, sink=sink)
        self.rule, self.budget, self.interval = rule, budget, interval

    @property
    def capacity(self) -> int:
        """The number of held tokens that causes an eviction, budget + interval."""
        return self.budget + self.interval

    @property
    def slots(self) -> int:
        """The most tokens that one head may hold: above `capacity` with a rule across heads."""
        others = self.project.shape.G - 1
        return self.capacity + others * (self.budget - int(self.rule.floor * self.budget))

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] to the held tokens and to its own, and evict."""
        project = self.project
        q = tap("q", project.query(x, positions))
        memory, cache = self._remember(x, positions, cache)
        k, v = project.recall(memory, positions)
        k, v = tap("k", k), tap("v", v)
        if cache is None:
            z = self._attend_without_cache(q, k, v, positions, backend)
        else:
            assert isinstance(cache, Evicting), "`check_cache` accepts no other cache"
            parts = cache.state
            slots = self._empty(q, k, v) if parts is None else self._fold(parts, q, k)
            z, slots = self._run(q, k, v, positions, slots, backend, starts_empty=parts is None)
            cache.store(self._unfold(slots, k.shape[0]), positions)
        z = tap("z", project.postprocess(z, x))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def _attend_without_cache(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Positions, backend: str
    ) -> Tensor:
        """Attend in one call, through the mask of what each query would find in the cache."""
        if isinstance(positions, Span) and positions.length <= self.capacity:
            return self._attend(q, k, v, None, Places(positions, positions), backend)
        with torch.no_grad():
            visible = self._visible(q.detach(), k.detach(), v.detach(), positions)
        sees = visible.repeat_interleave(q.shape[1] // k.shape[1], 1)
        return attend(
            q,
            k,
            v,
            mask=Causal() & Dense(sees),
            scale=self._scale,
            softcap=self.softcap,
            sink=self.sink,
            q_positions=positions,
            k_positions=positions,
            backend=backend,
        )

    def _visible(self, q: Tensor, k: Tensor, v: Tensor, positions: Positions) -> Tensor:
        """Return which keys the cache would hold at each query: bool [B,G,T,T]."""
        B, G, T, _ = k.shape
        # a first channel of the values is the columns of the tokens
        columns = torch.arange(T, device=k.device, dtype=torch.float64)[None, None, :, None]
        columns = torch.cat([columns.expand(B, G, -1, -1), v.double()], -1)
        slots = self._empty(q, k, columns)
        visible = torch.zeros(B * G, T, T + 1, dtype=torch.bool, device=k.device)
        start = 0
        for stop, slots_before in self._pieces(q, k, columns, positions, slots):
            stored = torch.where(slots_before.positions >= 0, slots_before.v[..., 0], T).long()
            rows = torch.zeros(B * G, T + 1, dtype=torch.bool, device=k.device)
            rows = rows.scatter(1, stored, True)
            rows[:, start:stop] = True
            visible[:, start:stop] = rows[:, None]
            start = stop
        return torch.unflatten(visible[..., :T], 0, (B, G))

    def _pieces(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Positions, slots: _Slots
    ) -> list[tuple[int, _Slots]]:
        """Return the end of each piece and the slots before it, without computing outputs."""
        pieces, start, T = [], 0, q.shape[2]
        where = as_tensor(positions, q.device).long()
        while start < T:
            stop = self._piece_end(positions, where, slots, start, starts_empty=True)
            pieces.append((stop, slots))
            part = slice(start, stop)
            own = self._piece(q[:, :, part], k[:, :, part], v[:, :, part], where[:, part])
            slots = self._after(own, self._joined(slots, own), slots)
            start = stop
        return pieces

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        slots: _Slots,
        backend: str,
        *,
        starts_empty: bool,
    ) -> tuple[Tensor, _Slots]:
        """Attend piece by piece, so that every eviction comes after the right token."""
        B, H, T, _ = q.shape
        where, start, out = as_tensor(positions, q.device).long(), 0, []
        while start < T:
            stop = self._piece_end(positions, where, slots, start, starts_empty=starts_empty)
            part = slice(start, stop)
            own = self._piece(q[:, :, part], k[:, :, part], v[:, :, part], where[:, part])
            joined = self._joined(slots, own)
            z = attend_partial(
                own.q,
                joined.k[:, None],
                joined.v[:, None],
                mask=Causal(),
                scale=self._scale,
                softcap=self.softcap,
                q_positions=own.positions,
                k_positions=joined.positions,
                backend=backend,
            )
            heads = Partial(z.out.reshape(B, H, stop - start, -1), z.lse.reshape(B, H, -1))
            out.append(heads.out if self.sink is None else merge([heads], sink=self.sink).out)
            slots, start = self._after(own, joined, slots), stop
        return torch.cat(out, 2) if out else q.new_zeros(B, H, 0, v.shape[3]), slots

    def _piece_end(
        self, positions: Positions, where: Tensor, slots: _Slots, start: int, *, starts_empty: bool
    ) -> int:
        """Return the end of the piece from `start`: at the first token that fills a row."""
        T = where.shape[1]
        if starts_empty and isinstance(positions, Span) and positions.start >= 0:
            return min(T, self.capacity if start == 0 else start + self.interval)
        if is_compiling() or T - start == 1:
            return start + 1
        G = self.project.shape.G
        counts = (slots.positions >= 0).sum(-1).unflatten(0, (-1, G)).sum(1, keepdim=True)
        total = counts + G * (where[:, start:] >= 0).cumsum(1)
        full = (total >= G * self.capacity).any(0).nonzero()
        return start + int(full[0]) + 1 if len(full) else T

    def _piece(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> _Slots:
        """Return the tokens of a piece as rows of one key/value head each; `sums` is empty."""
        B, G, P, _ = k.shape
        where = positions.expand(B, -1)[:, None].expand(B, G, P).flatten(0, 1)
        queries = torch.unflatten(q, 1, (G, -1)).flatten(0, 1)  # [B,H,P,D] -> [R,n,P,D]
        sums = torch.zeros(B * G, P, dtype=_sum_dtype(k), device=k.device)
        moments = _no_moments(queries, stored=False)
        return _Slots(k.flatten(0, 1), v.flatten(0, 1), where, sums, queries, where, *moments)

    def _joined(self, slots: _Slots, own: _Slots) -> _Slots:
        """Return the held tokens followed by those of a piece."""
        k, v = torch.cat([slots.k, own.k], 1), torch.cat([slots.v, own.v], 1)
        positions = torch.cat([slots.positions, own.positions], 1)
        sums = torch.cat([slots.sums, own.sums], 1)
        moments = slots.query_count, slots.mean, slots.spread
        return _Slots(k, v, positions, sums, own.q, own.q_positions, *moments)

    def _after(self, own: _Slots, joined: _Slots, before: _Slots) -> _Slots:
        """Return the slots after a piece: its weights are added, and full rows evict."""
        C, rule, sums = self.slots, self.rule, joined.sums
        if rule.accumulates:
            with torch.no_grad():
                weights = self._weights(own.q, own.q_positions, joined)
            sums = sums + weights
        q, q_positions = before.q, before.q_positions
        if w := rule.observed:
            q = torch.cat([q, own.q.detach()], 2)
            q_positions = torch.cat([q_positions, own.q_positions], 1)
            last = q_positions.topk(w, dim=1).indices  # -1 is an empty slot: the smallest
            index = last[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
            q, q_positions = q.gather(2, index), q_positions.gather(1, last)
            q = torch.where((q_positions >= 0)[:, None, :, None], q, 0)
        moments = before.query_count, before.mean, before.spread
        if rule.future:
            with torch.no_grad():
                moments = self._with_queries(before, own)
        order = torch.where(joined.positions >= 0, joined.positions, 2**62).argsort(
            dim=1, stable=True
        )
        positions, sums = joined.positions.gather(1, order), sums.gather(1, order)
        k, v = (_gather(x, order, positions) for x in (joined.k, joined.v))
        keep = positions >= 0
        # on another device, the question costs more than the rule
        if is_compiling() or not keep.is_cpu or bool(self._is_full(keep).any()):
            with torch.no_grad():
                ordered = _Slots(k.detach(), v.detach(), positions, sums, q, q_positions, *moments)
                keep = self._keep(ordered)
        first_slots = (~keep).to(torch.int8).argsort(dim=1, stable=True)[:, :C]
        positions = torch.where(keep, positions, -1).gather(1, first_slots)
        sums = torch.where(positions >= 0, sums.gather(1, first_slots), 0)
        k, v = _gather(k, first_slots, positions), _gather(v, first_slots, positions)
        return _Slots(k, v, positions, sums, q, q_positions, *moments)

    def _is_full(self, is_held: Tensor) -> Tensor:
        """Return for each row [R] whether the heads of its layer hold enough tokens to evict."""
        G = self.project.shape.G
        total: Tensor = torch.unflatten(is_held.sum(-1), 0, (-1, G)).sum(1)
        return (total >= G * self.capacity).repeat_interleave(G)

    def _keep(self, slots: _Slots) -> Tensor:
        """Return which tokens stay: all in rows that are not full."""
        is_held = slots.positions >= 0
        observed = torch.zeros_like(slots.sums)
        if self.rule.observed:
            observed = self._weights(slots.q, slots.q_positions, slots)
        values = slots.v[..., -self.project.shape.E :]
        expected = self._expected(slots) if self.rule.future else None
        tokens = HeldTokens(
            slots.k, is_held, slots.sums, observed, values, slots.positions, expected
        )
        keep, _ = tokens_to_keep(self.rule, tokens, self.budget, self.project.shape.G)
        return torch.where(self._is_full(is_held)[:, None], keep, is_held)

    def _with_queries(self, before: _Slots, own: _Slots) -> tuple[Tensor, Tensor, Tensor]:
        """Return number, mean before the rotation and spread of the queries, with a piece's."""
        rotary = shared_rotary(self.project)
        q = own.q.detach().to(before.mean.dtype)
        q = rotate(q, -own.q_positions, rotary.inv_freq, layout=rotary.layout)
        counts = own.q_positions >= self.rule.sinks  # [R,P]
        q = torch.where(counts[:, None, :, None], q, 0)
        new, old = counts.sum(1), before.query_count
        total = (old + new).clamp(min=1)[:, None, None]
        mean = q.sum(2) / new.clamp(min=1)[:, None, None]
        apart = torch.where(counts[:, None, :, None], q - mean[:, :, None], 0)
        gap = mean - before.mean  # [R,n,D]
        share = new[:, None, None].to(mean.dtype) / total
        between = gap[..., None] * gap[..., None, :] * (old[:, None, None] * share)[..., None]
        return old + new, before.mean + gap * share, before.spread + apart.mT @ apart + between

    def _expected(self, slots: _Slots) -> QueryMoments:
        """Return the moments of the queries at the next positions, times the scale."""
        rotary, newest = shared_rotary(self.project), slots.positions.amax(1, keepdim=True)
        later = newest + torch.arange(1, self.rule.future + 1, device=newest.device)
        double = torch.float64 if newest.device.type != "mps" else torch.float32
        cos, sin = cos_sin(later, rotary.inv_freq, double, newest.device)
        cos, sin = (x.mean(2).to(slots.mean.dtype) for x in (cos, sin))  # [R,1,D/2]
        mean = apply_rotary(slots.mean, cos, sin, rotary.layout)
        covariance = slots.spread / slots.query_count.clamp(min=1)[:, None, None, None]
        for _ in range(2):  # R C R^T: first the columns, then the rows
            covariance = apply_rotary(covariance, cos[:, None], sin[:, None], rotary.layout).mT
        return QueryMoments(mean * self._scale, covariance * self._scale**2)

    def _weights(self, q: Tensor, q_positions: Tensor, slots: _Slots) -> Tensor:
        """Return the weights that queries [R,n,w,D] give to the slots, summed over both: [R,S]."""
        weights = attention_weights(
            q,
            slots.k[:, None],
            mask=Causal(),
            scale=self._scale,
            softcap=self.softcap,
            q_positions=q_positions,
            k_positions=slots.positions,
        )
        return weights.sum((1, 2), dtype=slots.sums.dtype)

    def _empty(self, q: Tensor, k: Tensor, v: Tensor) -> _Slots:
        """Return slots that hold nothing."""
        (B, G, _, D), C, w = k.shape, self.slots, self.rule.observed
        R, n = B * G, q.shape[1] // G
        queries = q.new_zeros(R, n, w, D)
        return _Slots(
            k.new_zeros(R, C, D),
            v.new_zeros(R, C, v.shape[3]),
            torch.full((R, C), -1, dtype=torch.int64, device=k.device),
            torch.zeros(R, C, dtype=_sum_dtype(k), device=k.device),
            queries,
            torch.full((R, w), -1, dtype=torch.int64, device=k.device),
            *_no_moments(queries, stored=bool(self.rule.future)),
        )

    def _fold(self, parts: tuple[Tensor, ...], q: Tensor, k: Tensor) -> _Slots:
        """Return the parts of the cache [B,G,...] as rows [R,...]."""
        stored = parts[0]
        if stored.shape[0] != k.shape[0] or stored.dtype != k.dtype:
            raise ArgumentError(
                f"x is a batch of {k.shape[0]} in {k.dtype}, and the cache has a batch of "
                f"{stored.shape[0]} in {stored.dtype}; start a new cache for another batch or model"
            )
        if self.rule.floor < 1:
            parts = self._unpooled(parts)
        k, v, positions, sums, q, q_positions, *moments = (x.flatten(0, 1) for x in parts)
        if not self.rule.accumulates:
            sums = torch.zeros(positions.shape, dtype=_sum_dtype(k), device=k.device)
        if not moments:
            moments = list(_no_moments(q, stored=False))
        return _Slots(k, v, positions, sums, q, q_positions, *moments)

    def _unfold(self, slots: _Slots, batch: int) -> tuple[Tensor, ...]:
        """Return rows [R,...] as the parts of the cache [B,G,...], as far as they are needed."""
        if not self.rule.accumulates:
            slots = slots._replace(sums=slots.sums[:, :0])
        parts = tuple(slots) if self.rule.future else tuple(slots)[:6]
        parts = tuple(torch.unflatten(x, 0, (batch, self.project.shape.G)) for x in parts)
        return self._pooled(parts) if self.rule.floor < 1 else parts

    def _pooled(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tokens of all heads [B,G,C,...] in one pool [B,1,P,...], and their heads."""
        k, v, positions, sums, *others = parts
        G, C, P = self.project.shape.G, positions.shape[2], self.project.shape.G * self.capacity
        where = positions.flatten(1)  # [B, G C]
        first = (where < 0).to(torch.int8).argsort(dim=1, stable=True)[:, :P]
        pool = where.gather(1, first)
        k, v = (_gather(x.flatten(1, 2), first, pool)[:, None] for x in (k, v))
        if sums.shape[2]:
            sums = torch.where(pool >= 0, sums.flatten(1).gather(1, first), 0)[:, None]
        heads = torch.where(pool >= 0, first // C, G)
        return (k, v, pool[:, None], sums, *others, heads[:, None])

    def _unpooled(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the parts of `_pooled` as rows of each head [B,G,C,...]."""
        k, v, pool, sums, *others, heads = parts
        G, C, pool, heads = self.project.shape.G, self.slots, pool[:, 0], heads[:, 0]
        counts = (heads[..., None] == torch.arange(G + 1, device=heads.device)).sum(1)  # [B,G+1]
        before = (counts.cumsum(1) - counts).gather(1, heads)
        place = torch.arange(heads.shape[1], device=heads.device) - before
        slot = torch.where(pool >= 0, heads * C + place, G * C)  # the last slot is dropped

        def spread(x: Tensor, empty: int) -> Tensor:
            B, P, *rest = x.shape
            index = slot.view(B, P, *(1 for _ in rest)).expand(x.shape)
            rows = x.new_full((B, G * C + 1, *rest), empty).scatter(1, index, x)
            return torch.unflatten(rows[:, :-1], 1, (G, C))

        k, v = spread(k[:, 0], 0), spread(v[:, 0], 0)
        if sums.shape[2]:
            sums = spread(sums[:, 0], 0)
        return (k, v, spread(pool, -1), sums, *others)

    @property
    def _scale(self) -> float:
        """The factor on the scores."""
        return self._default_scale if self.scale is None else self.scale

    def check_cache(self, cache: Cache) -> None:
        """Raise unless the cache is an `Evicting` one."""
        if not isinstance(cache, Evicting):
            raise ArgumentError(
                f"the cache is a {type(cache).__name__}; eviction needs an Evicting cache: use "
                "new_cache()"
            )

    def new_cache(self) -> Evicting:
        """Return an empty cache, whose slots the first call allocates."""
        return Evicting()

    @property
    def spec(self) -> EvictingSpec:
        """The cost of this layer: a cache of budget + interval tokens, and what the rule needs."""
        shape, rule = self.project.shape, self.rule
        return EvictingSpec(
            count_weights(self),
            (*shape.parts, *([(shape.G, 1)] if rule.accumulates else [])),
            shape.heads,
            budget=self.budget,
            interval=self.interval,
            observed=rule.observed,
            accumulates=rule.accumulates,
            expects=bool(rule.future),
        )

    def extra_repr(self) -> str:
        """Return the rule, the budget and the interval."""
        return f"{self.rule}, budget={self.budget}, interval={self.interval}"


def _gather(x: Tensor, index: Tensor, positions: Tensor) -> Tensor:
    """Return tokens x [R,S,d] in another order, 0 where the new slot is empty."""
    x = x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
    return torch.where((positions >= 0)[..., None], x, 0)


def _no_moments(q: Tensor, *, stored: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the moments of no queries for rows of q [R,n,w,D]."""
    (R, n, _, D), dtype = q.shape, _sum_dtype(q)
    D = D if stored else 0
    count = torch.zeros(R, dtype=torch.int64, device=q.device)
    mean = torch.zeros(R, n, D, dtype=dtype, device=q.device)
    return count, mean, torch.zeros(R, n, D, D, dtype=dtype, device=q.device)


def _sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of summed weights, which must tell many small ones apart."""
    return torch.promote_types(x.dtype, torch.float32)
