"""The methods of `attend`: "exchange" and "gather", in which keys and values move to the queries,
and "heads" and "both", in which each rank gets all tokens for some heads (Ulysses).

In "exchange" every rank sends its own block to rank r + s at step s. Unlike in a ring, no rank
waits for another to forward, hidden blocks are never sent, and gradients go directly to their rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.biases import Bias
from regard.errors import ArgumentError
from regard.ops.softmax import Partial
from regard.ops.softmax import attend as attend_here
from regard.ops.softmax.merge import apply_sink, merge_into
from regard.parallel.communication import Group, PendingMessage, RankGroup
from regard.parallel.ranked_call import (
    Block,
    CallShards,
    ParallelOptions,
    ParameterGradients,
    RankedCall,
    RankNumber,
    attend_block,
    block_gradients,
    block_span,
    call_facts,
    check_call,
    query_rows,
    shared_bias,
)
from regard.parallel.shards import Shards, needed_keys, needed_queries
from regard.sequence_scope import use_scope
from regard.span import Span
from regard.units import plural


def exchange(q: Tensor, k: Tensor, v: Tensor, call: RankedCall) -> tuple[Tensor, Tensor]:
    """Compute the method "exchange": out [B,H,T,E] and lse [B,H,T] of this rank's queries."""
    tensors = () if call.bias is None else call.bias.tensors()
    result: tuple[Tensor, Tensor] = _ExchangeBlocks.apply(call, q, k, v, *tensors)  # type: ignore[no-untyped-call]
    return result


def _blocks(call: RankedCall, receiver: int, sender: int) -> tuple[Block, ...]:
    """Return blocks of the sender's keys with all keys that the receiver's queries see."""
    return needed_keys(call.mask, call.q_shards.spans(receiver), call.shards.spans(sender))


def _seeing_rows(call: RankedCall, block: Block) -> Iterator[tuple[slice, Span]]:
    """Yield the runs of this rank's queries that see a block, with their rows."""
    for rows, span in query_rows(call.queries):
        seeing = needed_queries(call.mask, span, block_span(block))
        if seeing is not None:
            first, stop = seeing
            yield slice(rows.start + first, rows.start + stop), span[first:stop]


def _take_blocks(x: Tensor, spans: tuple[Span, ...], blocks: Sequence[Block]) -> list[Tensor]:
    """Return the tokens of each block, [B, heads, n, dim], as views of x, the tokens of a rank."""
    offsets = [0]
    for span in spans:
        offsets.append(offsets[-1] + len(span))
    return [
        x[:, :, offsets[n] + a - spans[n].start : offsets[n] + b - spans[n].start]
        for n, a, b in blocks
    ]


def _pack(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors into one flat tensor, to be sent as one message."""
    return torch.cat([x.reshape(-1) for x in parts])


def _unpack(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Split a flat tensor into tensors of the given shapes: the inverse of `_pack`."""
    parts, offset = [], 0
    for shape in shapes:
        size = int(torch.Size(shape).numel())
        parts.append(flat[offset : offset + size].view(shape))
        offset += size
    return parts


def _block_shapes(k: Tensor, v: Tensor, blocks: Sequence[Block]) -> list[tuple[int, ...]]:
    """Return the shapes of the keys, then of the values, of each block."""
    return [(x.shape[0], x.shape[1], b - a, x.shape[3]) for x in (k, v) for _, a, b in blocks]


ReceivedStep: TypeAlias = tuple[int, tuple[Block, ...], Sequence[Tensor], Sequence[Tensor]]
"""A step, its blocks, and for each block a tensor of keys and one of values."""


class _RunningTotal:
    """Attention over the blocks so far, for all queries of a rank, in fp32 or wider."""

    def __init__(self, q: Tensor, E: int) -> None:
        self._q, self._E = q, E
        self._dtype = torch.promote_types(q.dtype, torch.float32)
        self._total: Partial | None = None

    def add(self, part: Partial, rows: slice) -> None:
        """Join a part for some of the queries; the memory of the part may be kept."""
        part = Partial(part.out.to(self._dtype), part.lse.to(self._dtype))
        if self._total is None and part.out.shape[2] == self._q.shape[2]:
            self._total = part
            return
        total = self.joined()
        merge_into(Partial(total.out[:, :, rows], total.lse[:, :, rows]), part)

    def joined(self) -> Partial:
        """Return attention over all parts; a query without keys has the output 0."""
        if self._total is None:
            rows, q = self._q.shape[:3], self._q
            self._total = Partial(
                q.new_zeros(*rows, self._E, dtype=self._dtype),
                q.new_full(rows, -torch.inf, dtype=self._dtype),
            )
        return self._total


def _attend_blocks(
    call: RankedCall,
    q: Tensor,
    blocks: Sequence[Block],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    total: _RunningTotal,
) -> None:
    """Attend to the blocks of one step, and join the results to the total."""
    for block, k, v in zip(blocks, keys, values, strict=True):
        for rows, span in _seeing_rows(call, block):
            total.add(attend_block(call, q[:, :, rows], k, v, span, block, call.bias), rows)


class _ExchangeBlocks(torch.autograd.Function):
    """Attention over exchanged blocks of keys, out and lse; the backward pass exchanges again."""

    @staticmethod
    def forward(
        ctx: Any, call: RankedCall, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = _RunningTotal(q, v.shape[3])
        for _, blocks, keys, values in _receive_blocks(call, k, v, "keys and values"):
            _attend_blocks(call, q, blocks, keys, values, total)
        out, lse = total.joined()
        ctx.call, ctx.tensors = call, len(tensors)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        call: RankedCall = ctx.call
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        dq, *d_tensors = (torch.zeros_like(x, dtype=out.dtype) for x in (q, *tensors))
        dk, dv = (torch.zeros_like(x, dtype=out.dtype) for x in (k, v))
        home = _KeyGradients(call, dk, dv)
        for step, blocks, keys, values in _receive_blocks(call, k, v, "keys and values again"):
            d_keys, d_values = (
                [torch.zeros_like(x, dtype=out.dtype) for x in tokens] for tokens in (keys, values)
            )
            for n, block in enumerate(blocks):
                for rows, span in _seeing_rows(call, block):
                    gradients_of_part = block_gradients(
                        call,
                        (q[:, :, rows], keys[n], values[n], *tensors),
                        span,
                        block,
                        Partial(out[:, :, rows], lse[:, :, rows]),
                        (d_out[:, :, rows], None if d_lse is None else d_lse[:, :, rows]),
                    )
                    totals = (dq[:, :, rows], d_keys[n], d_values[n], *d_tensors)
                    for total, gradient in zip(totals, gradients_of_part, strict=True):
                        if gradient is not None:
                            total += gradient
            if step:
                home.exchange(step, [*d_keys, *d_values])
            else:
                home.add(blocks, [*d_keys, *d_values])
        home.wait()
        if call.parameter_gradients == "whole":
            d_tensors = [call.ranks.sum("parameters", x) for x in d_tensors]
        gradients = zip((dq, home.dk, home.dv, *d_tensors), (q, k, v, *tensors), strict=True)
        return None, *(x.to(like.dtype) for x, like in gradients)


@dataclass(eq=False)
class _KeyGradients:
    """The gradients of a rank's keys and values, to which other ranks send parts."""

    call: RankedCall
    dk: Tensor
    dv: Tensor
    _pending: list[tuple[tuple[Block, ...], PendingMessage]] = field(default_factory=list)

    def add(self, blocks: Sequence[Block], gradients: Sequence[Tensor]) -> None:
        """Add the gradients of the keys, then of the values, of some blocks of this rank."""
        spans, n = self.call.shards.spans(self.call.ranks.rank), len(blocks)
        for total, parts in ((self.dk, gradients[:n]), (self.dv, gradients[n:])):
            for run, part in zip(_take_blocks(total, spans, blocks), parts, strict=True):
                run += part

    def exchange(self, step: int, gradients: Sequence[Tensor]) -> None:
        """Start to send the gradients of the blocks of a step back, and to receive its own."""
        ranks = self.call.ranks
        source, to = (ranks.rank - step) % ranks.world, (ranks.rank + step) % ranks.world
        blocks = _blocks(self.call, to, ranks.rank)
        size = sum(torch.Size(x).numel() for x in _block_shapes(self.dk, self.dv, blocks))
        message = ranks.send_receive(
            "gradients of keys and values",
            step,
            _pack(gradients) if gradients else None,
            source,
            self.dk.new_empty(size),
            to,
        )
        self._pending.append((blocks, message))

    def wait(self) -> None:
        """Wait for the gradients that other ranks send, and add them."""
        for blocks, message in self._pending:
            flat = message.wait()
            if flat is not None:
                self.add(blocks, _unpack(flat, _block_shapes(self.dk, self.dv, blocks)))


def _receive_blocks(
    call: RankedCall, k: Tensor, v: Tensor, message_name: str
) -> Iterator[ReceivedStep]:
    """Yield the blocks of each step, this rank's own first. Messages start one step in advance."""
    ranks, spans = call.ranks, call.shards.spans(call.ranks.rank)
    sent: dict[tuple[Block, ...], list[Tensor]] = {}  # the last messages, which the next may repeat

    def start_messages(step: int) -> tuple[list[PendingMessage], tuple[Block, ...]]:
        """Start sending and receiving the keys, then the values, of a step."""
        to, source = (ranks.rank + step) % ranks.world, (ranks.rank - step) % ranks.world
        blocks_sent, blocks = _blocks(call, to, ranks.rank), _blocks(call, ranks.rank, source)
        if blocks_sent not in sent:
            sent.clear()
            sent[blocks_sent] = [_tokens_of_blocks(x, spans, blocks_sent) for x in (k, v)]
        count = sum(stop - first for _, first, stop in blocks)
        buffers = (x.new_empty(*x.shape[:2], count, x.shape[3]) for x in (k, v))
        return [
            ranks.send_receive(message_name, step, x, to, buffer, source)
            for x, buffer in zip(sent[blocks_sent], buffers, strict=True)
        ], blocks

    next_messages = start_messages(1) if ranks.world > 1 else None
    blocks = _blocks(call, ranks.rank, ranks.rank)
    yield 0, blocks, _take_blocks(k, spans, blocks), _take_blocks(v, spans, blocks)
    for step in range(1, ranks.world):
        assert next_messages is not None
        messages, blocks = next_messages
        next_messages = start_messages(step + 1) if step + 1 < ranks.world else None
        counts = [stop - first for _, first, stop in blocks]
        received = (message.wait() for message in messages)
        keys, values = (list(x.split(counts, 2)) for x in received if x is not None)
        del messages
        yield step, blocks, keys, values
        for tensors in (keys, values):  # the caller's lists: two steps are in memory, not three
            tensors.clear()


def _tokens_of_blocks(x: Tensor, spans: tuple[Span, ...], blocks: Sequence[Block]) -> Tensor:
    """Return the tokens of all blocks, [B, heads, n, dim], contiguous; x itself if they are all."""
    if sum(stop - first for _, first, stop in blocks) == x.shape[2]:
        return x.contiguous()
    return torch.cat([x[:, :, :0], *_take_blocks(x, spans, blocks)], 2)


class _GatherTokens(torch.autograd.Function):
    """Gather the tokens of all ranks by position; the backward pass sums gradients in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, ranks: RankGroup) -> Tensor:
        ctx.shards, ctx.ranks = shards, ranks
        B, G, _, D = x.shape
        counts = [shards.count(r) for r in range(ranks.world)]
        parts = ranks.gather("keys and values", x, [B * G * n * D for n in counts])
        return shards.join([p.view(B, G, n, D) for p, n in zip(parts, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shards, ranks = ctx.shards, ctx.ranks
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        parts = [shards.take(wide, r).contiguous().view(-1) for r in range(ranks.world)]
        mine = parts[ranks.rank]
        received = ranks.all_to_all(
            "gradients of keys and values", parts, [torch.empty_like(mine) for _ in parts]
        )
        B, G, _, D = gradient.shape
        total = torch.stack(received).sum(0).view(B, G, shards.count(ranks.rank), D)
        return total.to(gradient.dtype), None, None


def gather(q: Tensor, k: Tensor, v: Tensor, call: RankedCall) -> tuple[Tensor, Tensor]:
    """Compute the method "gather": (out, lse) of this rank's queries over all keys at once."""
    keys, values = (_GatherTokens.apply(x, call.shards, call.ranks) for x in (k, v))  # type: ignore[no-untyped-call]
    block = (0, call.shards.start, call.shards.stop)
    bias = shared_bias(call, call.ranks)
    parts = [
        attend_block(call, q[:, :, rows], keys, values, span, block, bias)
        for rows, span in query_rows(call.queries)
    ]
    if not parts:
        return _no_queries(q, keys, values, bias)
    return torch.cat([x.out for x in parts], 2), torch.cat([x.lse for x in parts], 2)


def _no_queries(q: Tensor, k: Tensor, v: Tensor, bias: Bias | None) -> tuple[Tensor, Tensor]:
    """Return the result of a call without queries; gradients of zero still reach every rank."""
    zero = (q.sum() + k.sum() + v.sum()) * 0
    for x in () if bias is None else bias.tensors():
        zero = zero + x.sum() * 0
    return q.new_zeros(*q.shape[:3], v.shape[3]) + zero, q.new_zeros(q.shape[:3]) + zero


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
