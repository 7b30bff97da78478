"""The methods "exchange" and "gather", in which keys and values move to the queries.

In the method "exchange" every rank sends its own block to rank r + s at step s; a ring would
instead forward the block that was just received. The number of bytes is the same, but no rank waits
for another to forward a block, blocks that the mask hides are never sent, and the gradients of keys
and values go directly to the rank that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.biases import Bias
from regard.ops.softmax import Partial
from regard.ops.softmax.merge import merge_into
from regard.parallel.communication import RankGroup
from regard.parallel.ranked_call import (
    Block,
    RankedCall,
    attend_block,
    block_gradients,
    block_span,
    query_rows,
    shared_bias,
)
from regard.parallel.shards import Shards, needed_keys, needed_queries
from regard.span import Span


def exchange(q: Tensor, k: Tensor, v: Tensor, call: RankedCall) -> tuple[Tensor, Tensor]:
    """Compute the method "exchange": out [B,H,T,E] and lse [B,H,T] of this rank's queries, in fp32
    or wider.
    """
    tensors = () if call.bias is None else call.bias.tensors()
    result: tuple[Tensor, Tensor] = _ExchangeBlocks.apply(call, q, k, v, *tensors)  # type: ignore[no-untyped-call]
    return result


def _blocks(call: RankedCall, receiver: int, sender: int) -> tuple[Block, ...]:
    """Return blocks of the sender's keys with all keys that the receiver's queries see."""
    return needed_keys(call.mask, call.q_shards.spans(receiver), call.shards.spans(sender))


def _seeing_rows(call: RankedCall, block: Block) -> Iterator[tuple[slice, Span]]:
    """Yield, for each span of this rank's queries, the run of queries that see a block, with its
    rows in the rank's tensors.
    """
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


class _RunningTotal:
    """Attention over the blocks so far, for all queries of a rank, in fp32 or wider.

    Args:
        q: the queries, [B, H, T, D].
        E: the features of a value.
    """

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


class _ExchangeBlocks(torch.autograd.Function):
    """Attention over exchanged blocks of keys; the backward pass exchanges the blocks again.

    The results are out [B, H, T, E] and lse [B, H, T].
    """

    @staticmethod
    def forward(
        ctx: Any, call: RankedCall, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = _RunningTotal(q, v.shape[3])
        for _, blocks, keys, values in _receive_blocks(call, k, v, "keys and values"):
            for block, kj, vj in zip(blocks, keys, values, strict=True):
                for rows, span in _seeing_rows(call, block):
                    part = attend_block(call, q[:, :, rows], kj, vj, span, block, call.bias)
                    total.add(part, rows)
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
        ranks, wide_dtype = call.ranks, out.dtype
        dq, dk, dv = (torch.zeros_like(x, dtype=wide_dtype) for x in (q, k, v))
        d_tensors = [torch.zeros_like(x, dtype=wide_dtype) for x in tensors]
        own = call.shards.spans(ranks.rank)
        pending: list[tuple[int, Callable[[], Tensor | None]]] = []
        for step, blocks, keys, values in _receive_blocks(call, k, v, "keys and values again"):
            source = (ranks.rank - step) % ranks.world
            d_keys = [torch.zeros_like(x, dtype=wide_dtype) for x in keys]
            d_values = [torch.zeros_like(x, dtype=wide_dtype) for x in values]
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
                    for total, gradient in zip(
                        (dq[:, :, rows], d_keys[n], d_values[n], *d_tensors),
                        gradients_of_part,
                        strict=True,
                    ):
                        if gradient is not None:
                            total += gradient
            if step == 0:
                _add(dk, dv, own, blocks, d_keys, d_values)
                continue
            blocks_returned = _blocks(call, (ranks.rank + step) % ranks.world, ranks.rank)
            shapes = _block_shapes(k, v, blocks_returned)
            buffer = q.new_empty(sum(int(torch.Size(x).numel()) for x in shapes), dtype=wide_dtype)
            sent = _pack([*d_keys, *d_values]) if blocks else None
            message = ranks.send_receive(
                "gradients of keys and values",
                step,
                sent,
                source,
                buffer if blocks_returned else None,
                (ranks.rank + step) % ranks.world,
            )
            pending.append((step, message.wait))
        for step, wait in pending:
            flat = wait()
            if flat is not None:
                blocks_returned = _blocks(call, (ranks.rank + step) % ranks.world, ranks.rank)
                parts = _unpack(flat, _block_shapes(k, v, blocks_returned))
                _add(
                    dk,
                    dv,
                    own,
                    blocks_returned,
                    parts[: len(blocks_returned)],
                    parts[len(blocks_returned) :],
                )
        if call.parameter_gradients == "whole":
            d_tensors = [ranks.sum("parameters", x) for x in d_tensors]
        gradients = zip((dq, dk, dv, *d_tensors), (q, k, v, *tensors), strict=True)
        return None, *(x.to(like.dtype) for x, like in gradients)


def _add(
    dk: Tensor,
    dv: Tensor,
    spans: tuple[Span, ...],
    blocks: Sequence[Block],
    d_keys: Sequence[Tensor],
    d_values: Sequence[Tensor],
) -> None:
    """Add the gradients of blocks to the gradients of all keys and values of a rank."""
    for total, parts in ((dk, d_keys), (dv, d_values)):
        for block_of_total, part in zip(_take_blocks(total, spans, blocks), parts, strict=True):
            block_of_total += part


def _receive_blocks(call: RankedCall, k: Tensor, v: Tensor, message_name: str) -> Any:
    """Yield the blocks of each step, this rank's own first. Messages start one step in advance.

    Yields:
        The step, its blocks, and for each block a tensor of keys and one of values.
    """
    ranks, spans = call.ranks, call.shards.spans(call.ranks.rank)

    def start_messages(step: int) -> Any:
        """Start sending and receiving the blocks of a step."""
        to, source = (ranks.rank + step) % ranks.world, (ranks.rank - step) % ranks.world
        blocks_sent, blocks_received = (
            _blocks(call, to, ranks.rank),
            _blocks(call, ranks.rank, source),
        )
        send = (
            _pack([*_take_blocks(k, spans, blocks_sent), *_take_blocks(v, spans, blocks_sent)])
            if blocks_sent
            else None
        )
        shapes = _block_shapes(k, v, blocks_received)
        buffer = (
            k.new_empty(sum(int(torch.Size(x).numel()) for x in shapes))
            if blocks_received
            else None
        )
        return (
            ranks.send_receive(message_name, step, send, to, buffer, source),
            blocks_received,
            shapes,
        )

    next_message = start_messages(1) if ranks.world > 1 else None
    blocks = _blocks(call, ranks.rank, ranks.rank)
    yield 0, blocks, _take_blocks(k, spans, blocks), _take_blocks(v, spans, blocks)
    for step in range(1, ranks.world):
        assert next_message is not None
        message, blocks_received, shapes = next_message
        next_message = start_messages(step + 1) if step + 1 < ranks.world else None
        flat = message.wait()
        parts = [] if flat is None else _unpack(flat, shapes)
        yield step, blocks_received, parts[: len(blocks_received)], parts[len(blocks_received) :]


class _GatherTokens(torch.autograd.Function):
    """Gather the tokens of all ranks in the order of their positions; the backward pass returns the
    gradients to their ranks and sums them in fp32.
    """

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
