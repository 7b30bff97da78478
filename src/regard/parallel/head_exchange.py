"""The methods "heads" and "both", in which each rank gets all tokens for some heads (Ulysses)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.errors import ArgumentError
from regard.ops.softmax import attend as attend_here
from regard.ops.softmax.merge import apply_sink
from regard.parallel.communication import Group, RankGroup
from regard.parallel.exchange import exchange
from regard.parallel.ranked_call import (
    CallShards,
    ParallelOptions,
    ParameterGradients,
    RankedCall,
    RankNumber,
    call_facts,
    check_call,
    shared_bias,
)
from regard.parallel.shards import Shards
from regard.sequence_scope import use_scope
from regard.span import Span
from regard.units import plural


def why_not_heads(H: int, G: int, W: int) -> str:
    """Return why W ranks cannot share H query and G key/value heads, or "" if they can."""
    if H % W:
        return (
            f"{plural(W, 'rank')} cannot share {plural(H, 'query head')} evenly; use the "
            "method 'exchange'"
        )
    if G % W and W % G:
        return (
            f"{plural(W, 'rank')} cannot share {plural(G, 'key/value head')} evenly; "
            "use the method 'exchange'"
        )
    return ""


@dataclass(frozen=True)
class _HeadExchange:
    """An exchange that gives each rank all tokens of some heads, and its inverse.

    The shards use the numbers `members` for these ranks; the order is by position or by rank.
    """

    ranks: RankGroup
    shards: Shards
    members: tuple[int, ...]
    by_position: bool

    @property
    def counts(self) -> list[int]:
        """The number of tokens of each rank."""
        return [self.shards.count(r) for r in self.members]

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans of all ranks, rank after rank."""
        return tuple(x for r in self.members for x in self.shards.spans(r))

    def tokens_of_all(self, x: Tensor) -> Tensor:
        """Send x [B, H, tokens of this rank, D]; return [B, H / W, all tokens, D]."""
        (B, H, _, D), W = x.shape, self.ranks.world
        parts = [part.contiguous().view(-1) for part in x.chunk(W, 1)]
        buffers = [x.new_empty(B * (H // W) * n * D) for n in self.counts]
        received = self.ranks.all_to_all("heads", parts, buffers)
        tensors = [p.view(B, H // W, n, D) for p, n in zip(received, self.counts, strict=True)]
        return self.shards.join(tensors) if self.by_position else torch.cat(tensors, 2)

    def heads_of_all(self, x: Tensor) -> Tensor:
        """Send x [B, H / W, all tokens, D]; return [B, H, tokens of this rank, D]."""
        B, n, _, D = x.shape
        tensors = (
            [self.shards.take(x, r) for r in self.members]
            if self.by_position
            else x.split(self.counts, 2)
        )
        count = self.counts[self.ranks.rank]
        buffers = [x.new_empty(B * n * count * D) for _ in tensors]
        received = self.ranks.all_to_all(
            "heads", [x.contiguous().view(-1) for x in tensors], buffers
        )
        return torch.cat([p.view(B, n, count, D) for p in received], 1)


class _ExchangeFunction(torch.autograd.Function):
    """Apply one direction of a `_HeadExchange`; the backward pass applies the other one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layout: _HeadExchange,
        to_heads: bool,  # noqa: FBT001  # `apply` takes no keywords
    ) -> Tensor:
        ctx.layout, ctx.to_heads = layout, to_heads
        return layout.tokens_of_all(x) if to_heads else layout.heads_of_all(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        layout, to_heads = ctx.layout, ctx.to_heads
        result = layout.heads_of_all(gradient) if to_heads else layout.tokens_of_all(gradient)
        return result, None, None


def _to_heads(x: Tensor, layout: _HeadExchange) -> Tensor:
    """Exchange x [B, H, tokens of this rank, D] for [B, H / W, all tokens, D], differentiably."""
    result: Tensor = _ExchangeFunction.apply(x, layout, True)  # type: ignore[no-untyped-call]
    return result


def _to_tokens(x: Tensor, layout: _HeadExchange) -> Tensor:
    """Exchange x [B, H / W, all tokens, D] for [B, H, tokens of this rank, D], differentiably."""
    result: Tensor = _ExchangeFunction.apply(x, layout, False)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, eq=False)
class _HeadShare:
    """What this rank holds after heads were exchanged."""

    q: Tensor
    k: Tensor
    v: Tensor
    heads: slice
    queries: _HeadExchange


def _share_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: RankGroup,
    shards: tuple[Shards, Shards],
    members: tuple[int, ...],
    *,
    by_position: bool,
) -> _HeadShare:
    """Exchange tokens for heads among ranks, with the shards of queries and of keys."""
    queries, keys = (_HeadExchange(ranks, x, members, by_position) for x in shards)
    n = q.shape[1] // ranks.world
    k, v = (_to_heads(_repeat_heads(x, ranks.world), keys) for x in (k, v))
    heads = slice(ranks.rank * n, (ranks.rank + 1) * n)
    return _HeadShare(_to_heads(q, queries), k, v, heads, queries)


def attend_by_heads(
    q: Tensor, k: Tensor, v: Tensor, call: RankedCall, sink: Tensor | None
) -> Tensor:
    """Compute the method "heads": every rank attends over all tokens with some of the heads."""
    ranks = call.ranks
    own = _share_heads(
        q,
        k,
        v,
        ranks,
        (call.q_shards, call.shards),
        tuple(range(ranks.world)),
        by_position=True,
    )
    bias = shared_bias(call, ranks)
    with use_scope(None):  # this rank has all tokens of its heads
        z = attend_here(
            own.q,
            own.k,
            own.v,
            mask=call.mask.select_heads(own.heads),
            bias=None if bias is None else bias.select_heads(own.heads),
            sink=None if sink is None else sink[own.heads],
            q_positions=Span(call.q_shards.start, own.q.shape[2]),
            k_positions=Span(call.shards.start, own.k.shape[2]),
            **call.options,
        )
    return _to_tokens(z, own.queries)


def _repeat_heads(x: Tensor, world: int) -> Tensor:
    """Repeat the key/value heads if there are fewer than ranks; autograd sums their gradients."""
    G = x.shape[1]
    return x if world <= G else x.repeat_interleave(world // G, 1)


def attend_by_nodes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards_and_gradients: tuple[Shards, Shards, ParameterGradients],
    group: Group | Sequence[Group] | None,
    options: ParallelOptions,
) -> Tensor:
    """Compute the method "both": exchange heads inside a node, and blocks between nodes.

    `shards_and_gradients` are those of keys and queries, and the gradients that a rank gets.
    """
    if not isinstance(group, Sequence) or len(group) != 2:
        raise ArgumentError(
            "the method 'both' needs two groups, group=(node, across): the ranks of this node, and "
            "the ranks that have the same number inside their nodes"
        )
    node, across = RankGroup(group[0]), RankGroup(group[1])
    shards, q_shards, parameter_gradients = shards_and_gradients
    world = node.world * across.world
    here = RankNumber(across.rank * node.world + node.rank, world)
    call = check_call(q, k, v, CallShards(here, q_shards, shards, parameter_gradients), options)
    for ranks in (node, across):
        ranks.agree("attend", call_facts(q, k, v, call, "both"))
    if why := why_not_heads(q.shape[1], k.shape[1], node.world):
        raise ArgumentError(why)
    members = tuple(across.rank * node.world + i for i in range(node.world))
    own = _share_heads(q, k, v, node, (q_shards, shards), members, by_position=False)
    bias = shared_bias(call, node)
    inner = RankedCall(
        across,
        _merge_ranks_of_nodes(q_shards, node.world),
        _merge_ranks_of_nodes(shards, node.world),
        call.mask.select_heads(own.heads),
        None if bias is None else bias.select_heads(own.heads),
        call.options,
        parameter_gradients,
    )
    out, lse = exchange(own.q, own.k, own.v, inner)
    sink = options.get("sink")
    if sink is not None:
        shared = call.parameter(call.parameter(sink, node), across)
        out = apply_sink(out, lse, shared[own.heads])
    return _to_tokens(out.to(q.dtype), own.queries)


def _merge_ranks_of_nodes(shards: Shards, size: int) -> Shards:
    """Return shards in which the `size` ranks of each node count as one rank."""
    return Shards(
        tuple(
            tuple(x for r in range(i, i + size) for x in shards.spans(r))
            for i in range(0, shards.world, size)
        )
    )
