"""`regard.parallel.attend`: exact attention over a sequence whose tokens lie on several ranks.

Four methods give the same result; they differ in what is sent between ranks:

    exchange   each rank keeps its queries and receives the keys and values that they see
    gather     every rank receives all keys and values at once
    heads      tokens are exchanged so that each rank has all tokens for some heads (Ulysses)
    both       heads are exchanged inside a node, keys and values between nodes

In the method "exchange" every rank sends its own block to rank r + s at step s; a ring would
instead forward the block that was just received. The number of bytes is the same, but no rank waits
for another to forward a block, blocks that the mask hides are never sent, and the gradients of keys
and values go directly to the rank that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.argument_checks import check_query_key_value
from regard.biases import Bias
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Full, Mask, Selected
from regard.ops.softmax import Partial, attend_partial, merge
from regard.ops.softmax import attend as attend_here
from regard.ops.softmax.merge import apply_sink
from regard.parallel.communication import Group, RankGroup
from regard.parallel.shards import Shards, needed_keys
from regard.sequence_scope import use_scope
from regard.span import Span
from regard.units import plural

Method = Literal["auto", "exchange", "gather", "heads", "both"]
ParameterGradients = Literal["whole", "share"]
METHODS: tuple[Method, ...] = ("exchange", "gather", "heads", "both")

Block: TypeAlias = tuple[int, int, int]
"""A run of keys on one rank: (index of the rank's span, first position, one past the last)."""


class ParallelOptions(TypedDict, total=False):
    """The options of `regard.parallel.attend` and `decode` besides q, k, v and shards.

    Attributes:
        mask: a mask that is computed from positions, such as `Causal()`; a dense tensor is refused,
            because its indices are not the same on every rank.
        bias: a bias that is computed from positions; a dense tensor is refused.
        scale: the factor on the scores, as in `regard.attend`.
        softcap: c in c tanh(score / c), as in `regard.attend`.
        sink: one sink logit for each query head, [H], the same on every rank.
        backend: the name of the kernel that each rank uses.
    """

    mask: Mask | None
    bias: Bias | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    backend: str


@dataclass(frozen=True)
class _RankedCall:
    """One checked call.

    Attributes:
        ranks: the ranks that make the call.
        q_shards: which rank holds which queries.
        shards: which rank holds which keys.
        mask: the mask.
        bias: the bias, or None.
        options: scale, softcap and backend, if they were given.
        parameter_gradients: which gradients of sink and bias a rank gets, as in `attend`.
    """

    ranks: Any
    q_shards: Shards
    shards: Shards
    mask: Mask
    bias: Bias | None
    options: dict[str, Any]
    parameter_gradients: ParameterGradients = "whole"

    def parameter(self, x: Tensor, ranks: RankGroup | None = None) -> Tensor:
        """Return a tensor that is equal on all ranks, with the gradient that the caller wants."""
        if self.parameter_gradients == "share":
            return x
        shared: Tensor = _SharedParameter.apply(x, ranks or self.ranks)  # type: ignore[no-untyped-call]
        return shared

    @property
    def queries(self) -> tuple[Span, ...]:
        """The spans of the queries that this rank holds."""
        return self.q_shards.spans(self.ranks.rank)


def attend(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    *,
    shards: Shards,
    q_shards: Shards | None = None,
    group: Group | Sequence[Group] | None = None,
    method: Method = "auto",
    parameter_gradients: ParameterGradients = "whole",
    **options: Unpack[ParallelOptions],
) -> Float[Tensor, "B H T E"]:
    """Compute softmax attention of this rank's queries over the keys of all ranks, exactly.

    out_i = sum_j softmax_j(scale q_i . k_j + bias_ij) v_j over the visible keys j of every rank

    Every rank of the group makes this call, with its own part of q, k and v. The result is
    differentiable in q, k, v, sink and the tensors of the bias.

    Args:
        q: the queries that this rank holds, [B, H, T, D], in the order of `q_shards.spans(rank)`.
        k: the keys that this rank holds, [B, G, S, D], in the order of `shards.spans(rank)`.
        v: the values of these keys, [B, G, S, E].
        shards: which rank holds which keys.
        q_shards: which rank holds which queries; None means `shards`.
        group: a process group; None means the default group. The method "both" takes two groups:
            the ranks of this node, which exchange heads, and the ranks that have the same number
            inside their nodes.
        method: how tokens are exchanged; every method gives the same result. "exchange": each rank
            keeps its queries and receives the keys and values that they see. "gather": every rank
            receives all keys and values. "heads": each rank receives all tokens of some heads.
            "both": "heads" inside a node, "exchange" between nodes. "auto": "both" with two
            groups; otherwise "heads" if there is no bias, the heads can be divided among the ranks
            and fewer bytes are sent; otherwise "exchange".
        parameter_gradients: the gradients of sink and bias on each rank. "whole": those of the
            whole sequence, equal on every rank. "share": a part on each rank, and the sum over the
            ranks is the whole, as for the other parameters of a model.
        options: mask, bias, scale, softcap, sink and backend: see `ParallelOptions`.

    Returns:
        The output of this rank's queries, [B, H, T, E].

    Raises:
        ArgumentError, ArgumentTypeError: an argument does not fit, or the ranks make different
            calls; every rank raises it before anything is computed.
        ParallelError: a rank has ended or did not answer in time.

    Every rank runs this code; here there is one rank, and torchrun starts more.

    >>> import torch, regard
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x, mask = torch.randn(1, 2, 16, 8), regard.masks.Causal()
    >>> shards = regard.parallel.Shards.zigzag(16, dist.get_world_size())
    >>> own = shards.take(x, dist.get_rank())  # the tokens that this rank holds
    >>> z = regard.parallel.attend(own, own, own, shards=shards, mask=mask)
    >>> torch.allclose(z, regard.attend(x, x, x, mask=mask), atol=1e-5)
    True
    >>> dist.destroy_process_group()

    Source: Liu et al. 2023 (arXiv 2310.01889) for blocks that move between ranks; Jacobs et al.
    2023 (arXiv 2309.14509) for heads; Fang and Zhao 2024 (arXiv 2405.07719) for both.
    """
    q_shards = shards if q_shards is None else q_shards
    if method == "both" or (isinstance(group, Sequence) and method == "auto"):
        return _hybrid(q, k, v, (shards, q_shards, parameter_gradients), group, options)
    if isinstance(group, Sequence):
        raise ArgumentError(
            f"two groups were given for the method {method!r}; only the method 'both' takes two"
        )
    ranks = RankGroup(group)
    call = _check_call(q, k, v, _CallShards(ranks, q_shards, shards, parameter_gradients), options)
    ranks.agree("attend", _call_facts(q, k, v, call, method))
    chosen = _choose_method(q, k, v, call, method)
    sink = options.get("sink")
    if sink is not None:
        sink = call.parameter(sink)
    if chosen == "heads":
        return _heads(q, k, v, call, sink)
    out, lse = (_exchange if chosen == "exchange" else _gather)(q, k, v, call)
    return (out if sink is None else apply_sink(out, lse, sink)).to(q.dtype)


@dataclass(frozen=True)
class _RankNumber:
    """The number of this rank and of all ranks, without a process group."""

    rank: int
    world: int


@dataclass(frozen=True)
class _CallShards:
    """The ranks of a call, the shards of its queries and keys, and the gradients that it wants."""

    ranks: RankGroup | _RankNumber
    q_shards: Shards
    shards: Shards
    parameter_gradients: ParameterGradients


def _check_call(
    q: Tensor, k: Tensor, v: Tensor, call_shards: _CallShards, options: ParallelOptions
) -> _RankedCall:
    """Check the arguments of a call on this rank."""
    check_query_key_value(q, k, v)
    ranks = call_shards.ranks
    for name, shards, x in (("q", call_shards.q_shards, q), ("k", call_shards.shards, k)):
        if not isinstance(shards, Shards):
            raise ArgumentTypeError(
                f"the shards of {name} are {type(shards).__name__}; they must be Shards, for "
                "example Shards.even(S, W)"
            )
        if shards.world != ranks.world:
            raise ArgumentError(
                f"the shards of {name} are for {plural(shards.world, 'rank')}, but the group has "
                f"{ranks.world}; make shards for {ranks.world}"
            )
        if x.shape[2] != shards.count(ranks.rank):
            raise ArgumentError(
                f"{name} has {plural(x.shape[2], 'token')} on rank {ranks.rank}, but its shard has "
                f"{shards.count(ranks.rank)}; give shards.take({name}, {ranks.rank}). "
                f"The shards are {shards}"
            )
    unknown = set(options) - set(ParallelOptions.__annotations__)
    if unknown:
        raise ArgumentTypeError(
            f"regard.parallel.attend has no argument {', '.join(sorted(unknown))}; its options are "
            f"{', '.join(ParallelOptions.__annotations__)}"
        )
    if call_shards.parameter_gradients not in ("whole", "share"):
        raise ArgumentError(
            f"parameter_gradients is {call_shards.parameter_gradients!r}; it must be 'whole' or "
            "'share'"
        )
    mask, bias = options.get("mask"), options.get("bias")
    for name, rule, kind in (("mask", mask, Mask), ("bias", bias, Bias)):
        if rule is not None and (not isinstance(rule, kind) or _depends_on_slots(rule)):
            raise ArgumentTypeError(
                f"{name} is {rule if isinstance(rule, kind) else type(rule).__name__}, which "
                "depends on the indices of one call's tensors, which differ between ranks; give a "
                f"{name} that is computed from positions"
            )
    names = ("scale", "softcap", "backend")
    return _RankedCall(
        ranks,
        call_shards.q_shards,
        call_shards.shards,
        Full() if mask is None else mask,
        bias,
        {name: options[name] for name in names if name in options},  # type: ignore[literal-required]
        call_shards.parameter_gradients,
    )


def _depends_on_slots(rule: Mask | Bias) -> bool:
    """Whether a mask or bias depends on tensor indices instead of positions, as a dense tensor or
    a selection does.
    """
    if rule.by_slot or isinstance(rule, Selected):
        return True
    return isinstance(rule, Mask) and any(map(_depends_on_slots, rule.members()))


def _call_facts(
    q: Tensor, k: Tensor, v: Tensor, call: _RankedCall, method: str
) -> dict[str, object]:
    """Return the facts that must be equal on all ranks, by name."""
    sizes = [(x.shape[0], x.shape[1], x.shape[3]) for x in (q, k, v)]
    return {
        "the sizes [B, heads, dim] of q, k and v": sizes,
        "the dtypes": [x.dtype for x in (q, k, v)],
        "the shards of the keys": call.shards.ranks,
        "the shards of the queries": call.q_shards.ranks,
        "the mask": call.mask,
        "the bias": call.bias,
        "the options": sorted(call.options.items()),
        "the method": method,
        "parameter_gradients": call.parameter_gradients,
        "which of q, k and v want a gradient": [
            torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)
        ],
    }


def _choose_method(q: Tensor, k: Tensor, v: Tensor, call: _RankedCall, method: Method) -> str:
    """Return the method to use; "auto" compares the plans of the methods."""
    H, G, W = q.shape[1], k.shape[1], call.ranks.world
    why = why_not_heads(H, G, W)
    if method == "heads" and why:
        raise ArgumentError(why)
    if method == "auto":
        from regard.parallel.plan import plan

        if why or call.bias is not None:
            return "exchange"
        return plan(
            call.shards,
            call.mask,
            heads=(H, G),
            dims=(q.shape[3], v.shape[3]),
            dtype=q.dtype,
            q_shards=call.q_shards,
        ).method
    if method not in METHODS:
        raise ArgumentError(f"method is {method!r}; it must be auto or one of {', '.join(METHODS)}")
    return method


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


class _SharedParameter(torch.autograd.Function):
    """Mark a tensor that is equal on all ranks: its gradient is summed over the ranks in fp32 or
    wider.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum("parameters", gradient), None


def _exchange(q: Tensor, k: Tensor, v: Tensor, call: _RankedCall) -> tuple[Tensor, Tensor]:
    """Compute the method "exchange": out [B,H,T,E] and lse [B,H,T] of this rank's queries, in fp32
    or wider.
    """
    tensors = () if call.bias is None else call.bias.tensors()
    result: tuple[Tensor, Tensor] = _ExchangeBlocks.apply(call, q, k, v, *tensors)  # type: ignore[no-untyped-call]
    return result


def _blocks(call: _RankedCall, receiver: int, sender: int) -> tuple[Block, ...]:
    """Return blocks of the sender's keys with all keys that the receiver's queries see."""
    return needed_keys(call.mask, call.q_shards.spans(receiver), call.shards.spans(sender))


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


class _ExchangeBlocks(torch.autograd.Function):
    """Attention over exchanged blocks of keys; the backward pass exchanges the blocks again.

    The results are out [B, H, T, E] and lse [B, H, T].
    """

    @staticmethod
    def forward(
        ctx: Any, call: _RankedCall, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide_dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide_dtype)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide_dtype)
        for _, blocks, keys, values in _receive_blocks(call, k, v, "keys and values"):
            for block, kj, vj in zip(blocks, keys, values, strict=True):
                for rows, span in _query_rows(call.queries):
                    if not needed_keys(call.mask, (span,), (_span(block),)):
                        continue
                    part = _partial(call, q[:, :, rows], kj, vj, span, block, call.bias)
                    merged = merge(
                        [
                            Partial(out[:, :, rows], lse[:, :, rows]),
                            Partial(part.out.to(wide_dtype), part.lse.to(wide_dtype)),
                        ]
                    )
                    out[:, :, rows], lse[:, :, rows] = merged
        ctx.call, ctx.tensors = call, len(tensors)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        call: _RankedCall = ctx.call
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        ranks, wide_dtype = call.ranks, out.dtype
        dq, dk, dv = (torch.zeros_like(x, dtype=wide_dtype) for x in (q, k, v))
        d_tensors = [torch.zeros_like(x, dtype=wide_dtype) for x in tensors]
        # the part of the gradient of each block's lse that does not depend on the block
        lse_term = d_lse - (d_out * out).sum(-1)
        own = call.shards.spans(ranks.rank)
        pending: list[tuple[int, Callable[[], Tensor | None]]] = []
        for step, blocks, keys, values in _receive_blocks(call, k, v, "keys and values again"):
            source = (ranks.rank - step) % ranks.world
            d_keys = [torch.zeros_like(x, dtype=wide_dtype) for x in keys]
            d_values = [torch.zeros_like(x, dtype=wide_dtype) for x in values]
            for n, block in enumerate(blocks):
                for rows, span in _query_rows(call.queries):
                    if not needed_keys(call.mask, (span,), (_span(block),)):
                        continue
                    gradients_of_part = _partial_gradients(
                        call,
                        (q[:, :, rows], keys[n], values[n], *tensors),
                        span,
                        block,
                        (lse[:, :, rows], d_out[:, :, rows], lse_term[:, :, rows]),
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


def _receive_blocks(call: _RankedCall, k: Tensor, v: Tensor, message_name: str) -> Any:
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


def _query_rows(spans: tuple[Span, ...]) -> list[tuple[slice, Span]]:
    """Return each span of queries with its rows in the rank's tensors."""
    rows, start = [], 0
    for span in spans:
        rows.append((slice(start, start + len(span)), span))
        start += len(span)
    return rows


def _span(block: Block) -> Span:
    """Return the positions of a block as a `Span`."""
    return Span(block[1], block[2] - block[1])


def _partial(
    call: _RankedCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Span,
    block: Block,
    bias: Bias | None,
) -> Partial:
    """Compute attention of one span of queries over one block of keys: (out, lse)."""
    with use_scope(None):  # the block itself is computed on this rank
        return attend_partial(
            q,
            k,
            v,
            mask=call.mask,
            bias=bias,
            q_positions=span,
            k_positions=_span(block),
            **call.options,
        )


def _partial_gradients(
    call: _RankedCall,
    inputs: tuple[Tensor, ...],
    span: Span,
    block: Block,
    whole: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of one block's attention with respect to q, k, v and the bias tensors.

    `inputs` are q, k, v and the bias tensors. `whole` has the lse over all blocks, the gradient
    dO of the whole output, and d_lse - dO . out. The index p marks the results of this block alone.

    share = exp(lse_p - lse);  d_out_p = share dO;  d_lse_p = share (dO . out_p - dO . out + d_lse)
    """
    lse, d_out, lse_term = whole
    with torch.enable_grad():
        q, k, v, *tensors = (x.detach().requires_grad_() for x in inputs)
        bias = None if call.bias is None else call.bias.with_tensors(tensors)
        part = _partial(call, q, k, v, span, block, bias)
    share = torch.exp(part.lse.detach() - lse.masked_fill(lse.isneginf(), 0))
    share = share.masked_fill(lse.isneginf(), 0)
    d_part = share[..., None] * d_out
    d_lse = share * ((d_out * part.out.detach()).sum(-1) + lse_term)
    return torch.autograd.grad(
        (part.out, part.lse),
        (q, k, v, *tensors),
        (d_part.to(part.out.dtype), d_lse.to(part.lse.dtype)),
        allow_unused=True,
    )


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


def _gather(q: Tensor, k: Tensor, v: Tensor, call: _RankedCall) -> tuple[Tensor, Tensor]:
    """Compute the method "gather": (out, lse) of this rank's queries over all keys at once."""
    keys, values = (_GatherTokens.apply(x, call.shards, call.ranks) for x in (k, v))  # type: ignore[no-untyped-call]
    block = (0, call.shards.start, call.shards.stop)
    bias = _shared_bias(call, call.ranks)
    parts = [
        _partial(call, q[:, :, rows], keys, values, span, block, bias)
        for rows, span in _query_rows(call.queries)
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


def _shared_bias(call: _RankedCall, ranks: RankGroup) -> Bias | None:
    """Return the bias with tensors whose gradients are summed over the ranks, if the caller wants
    it.
    """
    if call.bias is None:
        return None
    return call.bias.with_tensors([call.parameter(x, ranks) for x in call.bias.tensors()])


@dataclass(frozen=True)
class _HeadExchange:
    """An exchange that gives each rank all tokens of some heads, and its inverse.

    Args:
        ranks: the ranks that exchange heads.
        shards: which rank holds which tokens.
        members: the numbers that the shards use for these ranks.
        by_position: True puts the tokens in the order of their positions, False rank after rank.
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


class _TokensToHeads(torch.autograd.Function):
    """Apply `_HeadExchange.tokens_of_all`; the backward pass is `heads_of_all`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: _HeadExchange) -> Tensor:
        ctx.layout = layout
        return layout.tokens_of_all(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.heads_of_all(gradient), None


class _HeadsToTokens(torch.autograd.Function):
    """Apply `_HeadExchange.heads_of_all`; the backward pass is `tokens_of_all`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: _HeadExchange) -> Tensor:
        ctx.layout = layout
        return layout.heads_of_all(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.tokens_of_all(gradient), None


def _heads(q: Tensor, k: Tensor, v: Tensor, call: _RankedCall, sink: Tensor | None) -> Tensor:
    """Compute the method "heads": every rank attends over all tokens with some of the heads."""
    ranks = call.ranks
    members = tuple(range(ranks.world))
    queries = _HeadExchange(ranks, call.q_shards, members, by_position=True)
    keys = _HeadExchange(ranks, call.shards, members, by_position=True)
    qh = _TokensToHeads.apply(q, queries)  # type: ignore[no-untyped-call]
    kh, vh = (_TokensToHeads.apply(_repeat_heads(x, ranks.world), keys) for x in (k, v))  # type: ignore[no-untyped-call]
    n = q.shape[1] // ranks.world
    own_heads = slice(ranks.rank * n, (ranks.rank + 1) * n)
    bias = _shared_bias(call, ranks)
    with use_scope(None):  # this rank has all tokens of its heads
        z = attend_here(
            qh,
            kh,
            vh,
            mask=call.mask.select_heads(own_heads),
            bias=None if bias is None else bias.select_heads(own_heads),
            sink=None if sink is None else sink[own_heads],
            q_positions=Span(call.q_shards.start, qh.shape[2]),
            k_positions=Span(call.shards.start, kh.shape[2]),
            **call.options,
        )
    result: Tensor = _HeadsToTokens.apply(z, queries)  # type: ignore[no-untyped-call]
    return result


def _repeat_heads(x: Tensor, world: int) -> Tensor:
    """Repeat the key/value heads if there are fewer than ranks; autograd sums their gradients."""
    G = x.shape[1]
    return x if world <= G else x.repeat_interleave(world // G, 1)


def _hybrid(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards_and_gradients: tuple[Shards, Shards, ParameterGradients],
    group: Group | Sequence[Group] | None,
    options: ParallelOptions,
) -> Tensor:
    """Compute the method "both": exchange heads inside a node, and blocks between nodes.

    `shards_and_gradients` are the shards of the keys, those of the queries, and which gradients of
    sink and bias a rank gets.
    """
    if not isinstance(group, Sequence) or len(group) != 2:
        raise ArgumentError(
            "the method 'both' needs two groups, group=(node, across): the ranks of this node, and "
            "the ranks that have the same number inside their nodes"
        )
    node, across = RankGroup(group[0]), RankGroup(group[1])
    shards, q_shards, parameter_gradients = shards_and_gradients
    world = node.world * across.world
    here = _RankNumber(across.rank * node.world + node.rank, world)
    call = _check_call(q, k, v, _CallShards(here, q_shards, shards, parameter_gradients), options)
    for ranks in (node, across):
        ranks.agree("attend", _call_facts(q, k, v, call, "both"))
    if why := why_not_heads(q.shape[1], k.shape[1], node.world):
        raise ArgumentError(why)
    members = tuple(across.rank * node.world + i for i in range(node.world))
    queries = _HeadExchange(node, q_shards, members, by_position=False)
    keys = _HeadExchange(node, shards, members, by_position=False)
    qh = _TokensToHeads.apply(q, queries)  # type: ignore[no-untyped-call]
    kh, vh = (_TokensToHeads.apply(_repeat_heads(x, node.world), keys) for x in (k, v))  # type: ignore[no-untyped-call]
    n = q.shape[1] // node.world
    own_heads = slice(node.rank * n, (node.rank + 1) * n)
    bias = _shared_bias(call, node)
    inner = _RankedCall(
        across,
        _merge_ranks_of_nodes(q_shards, node.world),
        _merge_ranks_of_nodes(shards, node.world),
        call.mask.select_heads(own_heads),
        None if bias is None else bias.select_heads(own_heads),
        call.options,
        parameter_gradients,
    )
    out, lse = _exchange(qh, kh, vh, inner)
    sink = options.get("sink")
    if sink is not None:
        shared = call.parameter(call.parameter(sink, node), across)
        out = apply_sink(out, lse, shared[own_heads])
    result: Tensor = _HeadsToTokens.apply(out.to(q.dtype), queries)  # type: ignore[no-untyped-call]
    return result


def _merge_ranks_of_nodes(shards: Shards, size: int) -> Shards:
    """Return shards in which the `size` ranks of each node count as one rank."""
    return Shards(
        tuple(
            tuple(x for r in range(i, i + size) for x in shards.spans(r))
            for i in range(0, shards.world, size)
        )
    )
