"""Exact attention over a sequence whose tokens lie on several ranks: `regard.parallel.attend`.

Four methods give the same result, and differ in what moves:

    exchange   each rank keeps its queries; the keys and values that they see come to it
    gather     all keys and values come to every rank at once
    heads      tokens are exchanged so that each rank has all of them for some heads (Ulysses)
    both       heads inside a node, exchange between nodes, on a mesh of two dimensions

In the exchange every rank sends its own block to rank r + s at step s, rather than forwarding the
block that it has just received: the bytes are the same, no rank waits for another's forwarding,
what a mask does not show never moves, and gradients of keys and values go straight home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

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
from regard.parallel.exchange import Group, Ranks
from regard.parallel.shards import Shards, needed
from regard.span import Span

Method = Literal["auto", "exchange", "gather", "heads", "both"]
METHODS: tuple[Method, ...] = ("exchange", "gather", "heads", "both")


class Options(TypedDict, total=False):
    """What `regard.parallel.attend` takes besides q, k, v and shards, as `regard.attend` does.

    mask: a rule on positions; a dense tensor speaks of slots, and is refused.
    bias: a rule on positions; a dense tensor is refused.
    scale, softcap, sink: as in `regard.attend`; the sink is the same on every rank.
    backend: the kernel of each rank.
    """

    mask: Mask | None
    bias: Bias | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    backend: str


@dataclass(frozen=True)
class _Work:
    """One call as every method needs it: where queries and keys lie, and the options of a
    kernel.
    """

    ranks: Any
    q_shards: Shards
    shards: Shards
    mask: Mask
    bias: Bias | None
    options: dict[str, Any]

    @property
    def queries(self) -> tuple[Span, ...]:
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
    **options: Unpack[Options],
) -> Float[Tensor, "B H T E"]:
    """Softmax attention of this rank's queries over the keys of all ranks, exactly.

    out_i = sum_j softmax_j(scale q_i . k_j + bias_ij) v_j over the visible keys j of every rank

    Every rank of the group makes this call, with its own part of q, k and v. It is differentiable
    in q, k, v, sink and in the tensors of the bias; gradients of sink and bias are those of the
    whole sequence, on every rank.

    Args:
        q, k, v: the tokens that this rank holds, in the order of `shards.spans(rank)`.
        shards: who holds which keys.
        q_shards: who holds which queries; None is `shards`.
        group: a process group, None for the default one; for the method "both" two groups: that of
            the node, whose ranks share heads, and that across nodes.
        method: see above. "auto" takes "heads" where the heads divide and fewer numbers move,
            otherwise "exchange".
        options: see `Options`.

    Returns:
        The output of this rank's queries, [B, H, T, E].

    Raises:
        ArgumentError, ArgumentTypeError: an argument does not fit, or the ranks make different
            calls; raised on every rank before anything is computed.
        ParallelError: a rank ended or is late.

    >>> import torch, regard
    >>> def rank(r, x):
    ...     shards = regard.parallel.Shards.zigzag(16, 2)
    ...     mine = shards.take(x, r)
    ...     mask = regard.masks.Causal()
    ...     return regard.parallel.attend(mine, mine, mine, shards=shards, mask=mask)
    >>> rank.__name__  # regard.parallel.spawn(rank, 2, x) runs it on two processes
    'rank'

    Source: Liu et al. 2023 (arXiv 2310.01889) for blocks that move between ranks; Jacobs et al.
    2023 (arXiv 2309.14509) for heads; Fang and Zhao 2024 (arXiv 2405.07719) for both.
    """
    q_shards = shards if q_shards is None else q_shards
    if method == "both" or (isinstance(group, Sequence) and method == "auto"):
        return _both(q, k, v, (shards, q_shards), group, options)
    if isinstance(group, Sequence):
        raise ArgumentError(f"two groups are for the method 'both', not for {method!r}")
    ranks = Ranks(group)
    work = _checked(q, k, v, _Places(ranks, q_shards, shards), options)
    ranks.agree("attend", _facts(q, k, v, work, method))
    chosen = _chosen(q, k, v, work, method)
    sink = options.get("sink")
    if sink is not None:
        sink = _SharedParameter.apply(sink, ranks)  # type: ignore[no-untyped-call]
    if chosen == "heads":
        return _heads(q, k, v, work, sink)
    out, lse = (_exchange if chosen == "exchange" else _gather)(q, k, v, work)
    return (out if sink is None else apply_sink(out, lse, sink)).to(q.dtype)


@dataclass(frozen=True)
class _Numbered:
    """A rank by its number alone."""

    rank: int
    world: int


@dataclass(frozen=True)
class _Places:
    ranks: Ranks | _Numbered
    q_shards: Shards
    shards: Shards


def _checked(q: Tensor, k: Tensor, v: Tensor, places: _Places, options: Options) -> _Work:
    check_query_key_value(q, k, v)
    ranks = places.ranks
    for name, shards, x in (("q", places.q_shards, q), ("k", places.shards, k)):
        if not isinstance(shards, Shards):
            raise ArgumentTypeError(
                f"the shards of {name} are {type(shards).__name__}; make them: Shards.even(S, W)"
            )
        if shards.world != ranks.world:
            raise ArgumentError(
                f"{shards.world} shards of {name} for a group of {ranks.world} ranks"
            )
        if x.shape[2] != shards.count(ranks.rank):
            raise ArgumentError(
                f"{name} has {x.shape[2]} tokens on rank {ranks.rank}, whose shard has "
                f"{shards.count(ranks.rank)}: {shards}"
            )
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise ArgumentTypeError(
            f"regard.parallel.attend takes no {', '.join(sorted(unknown))}; it takes "
            f"{', '.join(Options.__annotations__)}"
        )
    mask, bias = options.get("mask"), options.get("bias")
    for name, rule, kind in (("mask", mask, Mask), ("bias", bias, Bias)):
        if rule is not None and (not isinstance(rule, kind) or _of_slots(rule)):
            raise ArgumentTypeError(
                f"{name} is {rule if isinstance(rule, kind) else type(rule).__name__}, which "
                "speaks of "
                "the slots of one call; ranks have different slots: give a rule on positions"
            )
    names = ("scale", "softcap", "backend")
    return _Work(
        ranks,
        places.q_shards,
        places.shards,
        Full() if mask is None else mask,
        bias,
        {name: options[name] for name in names if name in options},  # type: ignore[literal-required]
    )


def _of_slots(rule: Mask | Bias) -> bool:
    """Whether it speaks of the places of a call: of keys, as a dense tensor does, or of queries, as
    a selection does.
    """
    if rule.by_slot or isinstance(rule, Selected):
        return True
    return isinstance(rule, Mask) and any(map(_of_slots, rule.members()))


def _facts(q: Tensor, k: Tensor, v: Tensor, work: _Work, method: str) -> dict[str, object]:
    """What must be equal on all ranks."""
    sizes = [(x.shape[0], x.shape[1], x.shape[3]) for x in (q, k, v)]
    return {
        "the sizes [B, heads, dim] of q, k and v": sizes,
        "the dtypes": [x.dtype for x in (q, k, v)],
        "the shards of the keys": work.shards.ranks,
        "the shards of the queries": work.q_shards.ranks,
        "the mask": work.mask,
        "the bias": work.bias,
        "the options": sorted(work.options.items()),
        "the method": method,
        "which of q, k and v want a gradient": [
            torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)
        ],
    }


def _chosen(q: Tensor, k: Tensor, v: Tensor, work: _Work, method: Method) -> str:
    H, G, W = q.shape[1], k.shape[1], work.ranks.world
    why = why_not_heads(H, G, W)
    if method == "heads" and why:
        raise ArgumentError(why)
    if method == "auto":
        from regard.parallel.plan import plan

        if why or work.bias is not None:
            return "exchange"
        return plan(
            work.shards,
            work.mask,
            heads=(H, G),
            dims=(q.shape[3], v.shape[3]),
            dtype=q.dtype,
            q_shards=work.q_shards,
        ).method
    if method not in METHODS:
        raise ArgumentError(f"method is {method!r}; it is auto, or one of {', '.join(METHODS)}")
    return method


def why_not_heads(H: int, G: int, W: int) -> str:
    """Why W ranks cannot share the heads of a call; empty if they can."""
    if H % W:
        return f"{W} ranks cannot share {H} query heads evenly; use the method 'exchange'"
    if G % W and W % G:
        return f"{W} ranks cannot share {G} key/value heads evenly; use the method 'exchange'"
    return ""


class _SharedParameter(torch.autograd.Function):
    """A tensor that is the same on every rank: its gradient is the sum over ranks, in fp32 or
    better.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum("parameters", gradient), None


def _exchange(q: Tensor, k: Tensor, v: Tensor, work: _Work) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries, in fp32 or better."""
    tensors = () if work.bias is None else work.bias.tensors()
    result: tuple[Tensor, Tensor] = _Exchange.apply(work, q, k, v, *tensors)  # type: ignore[no-untyped-call]
    return result


def _blocks(work: _Work, receiver: int, sender: int) -> tuple[tuple[int, int, int], ...]:
    """The runs of the sender's keys that the receiver's queries see."""
    return needed(work.mask, work.q_shards.spans(receiver), work.shards.spans(sender))


def _cut(
    x: Tensor, spans: tuple[Span, ...], blocks: Sequence[tuple[int, int, int]]
) -> list[Tensor]:
    """The tokens of some blocks, out of the tensor of a rank."""
    offsets = [0]
    for span in spans:
        offsets.append(offsets[-1] + len(span))
    return [
        x[:, :, offsets[n] + a - spans[n].start : offsets[n] + b - spans[n].start]
        for n, a, b in blocks
    ]


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Tensors as one line of numbers."""
    return torch.cat([x.reshape(-1) for x in parts])


def _unpacked(line: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    found, at = [], 0
    for shape in shapes:
        size = int(torch.Size(shape).numel())
        found.append(line[at : at + size].view(shape))
        at += size
    return found


def _shapes(k: Tensor, v: Tensor, blocks: Sequence[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    return [(x.shape[0], x.shape[1], b - a, x.shape[3]) for x in (k, v) for _, a, b in blocks]


class _Exchange(torch.autograd.Function):
    """Attention by exchanged blocks, and its gradient, for which the blocks are exchanged again."""

    @staticmethod
    def forward(
        ctx: Any, work: _Work, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        for _, blocks, keys, values in _arriving(work, k, v, "keys and values"):
            for block, kj, vj in zip(blocks, keys, values, strict=True):
                for rows, span in _rows(work.queries):
                    if not needed(work.mask, (span,), (_span(block),)):
                        continue
                    part = _partial(work, q[:, :, rows], kj, vj, span, block, work.bias)
                    joined = merge(
                        [
                            Partial(out[:, :, rows], lse[:, :, rows]),
                            Partial(part.out.to(wide), part.lse.to(wide)),
                        ]
                    )
                    out[:, :, rows], lse[:, :, rows] = joined
        ctx.work, ctx.tensors = work, len(tensors)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        work: _Work = ctx.work
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        ranks, wide = work.ranks, out.dtype
        dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        d_tensors = [torch.zeros_like(x, dtype=wide) for x in tensors]
        # what the joined output takes of each part, but for that part's own share
        rest = d_lse - (d_out * out).sum(-1)
        own = work.shards.spans(ranks.rank)
        home: list[tuple[int, Callable[[], Tensor | None]]] = []
        for step, blocks, keys, values in _arriving(work, k, v, "keys and values again"):
            source = (ranks.rank - step) % ranks.world
            d_keys = [torch.zeros_like(x, dtype=wide) for x in keys]
            d_values = [torch.zeros_like(x, dtype=wide) for x in values]
            for n, block in enumerate(blocks):
                for rows, span in _rows(work.queries):
                    if not needed(work.mask, (span,), (_span(block),)):
                        continue
                    found = _partial_gradient(
                        work,
                        (q[:, :, rows], keys[n], values[n], *tensors),
                        span,
                        block,
                        (lse[:, :, rows], d_out[:, :, rows], rest[:, :, rows]),
                    )
                    for total, gradient in zip(
                        (dq[:, :, rows], d_keys[n], d_values[n], *d_tensors), found, strict=True
                    ):
                        if gradient is not None:
                            total += gradient
            if step == 0:
                _add(dk, dv, own, blocks, d_keys, d_values)
                continue
            to_me = _blocks(work, (ranks.rank + step) % ranks.world, ranks.rank)
            shapes = _shapes(k, v, to_me)
            like = q.new_empty(sum(int(torch.Size(x).numel()) for x in shapes), dtype=wide)
            sent = _packed([*d_keys, *d_values]) if blocks else None
            message = ranks.send_receive(
                "gradients of keys and values",
                step,
                sent,
                source,
                like if to_me else None,
                (ranks.rank + step) % ranks.world,
            )
            home.append((step, message.wait))
        for step, wait in home:
            line = wait()
            if line is not None:
                to_me = _blocks(work, (ranks.rank + step) % ranks.world, ranks.rank)
                parts = _unpacked(line, _shapes(k, v, to_me))
                _add(dk, dv, own, to_me, parts[: len(to_me)], parts[len(to_me) :])
        sums = [ranks.sum("parameters", x) for x in d_tensors]
        gradients = zip((dq, dk, dv, *sums), (q, k, v, *tensors), strict=True)
        return None, *(x.to(like.dtype) for x, like in gradients)


def _add(
    dk: Tensor,
    dv: Tensor,
    spans: tuple[Span, ...],
    blocks: Sequence[tuple[int, int, int]],
    d_keys: Sequence[Tensor],
    d_values: Sequence[Tensor],
) -> None:
    for total, parts in ((dk, d_keys), (dv, d_values)):
        for place, part in zip(_cut(total, spans, blocks), parts, strict=True):
            place += part


def _arriving(work: _Work, k: Tensor, v: Tensor, call: str) -> Any:
    """Each step's blocks with their keys and values, this rank's own first; sends are a step ahead.

    Yields:
        The step, its blocks, and a tensor of keys and one of values for each.
    """
    ranks, spans = work.ranks, work.shards.spans(work.ranks.rank)

    def post(step: int) -> Any:
        to, source = (ranks.rank + step) % ranks.world, (ranks.rank - step) % ranks.world
        leaving, coming = _blocks(work, to, ranks.rank), _blocks(work, ranks.rank, source)
        send = _packed([*_cut(k, spans, leaving), *_cut(v, spans, leaving)]) if leaving else None
        shapes = _shapes(k, v, coming)
        like = k.new_empty(sum(int(torch.Size(x).numel()) for x in shapes)) if coming else None
        return ranks.send_receive(call, step, send, to, like, source), coming, shapes

    ahead = post(1) if ranks.world > 1 else None
    blocks = _blocks(work, ranks.rank, ranks.rank)
    yield 0, blocks, _cut(k, spans, blocks), _cut(v, spans, blocks)
    for step in range(1, ranks.world):
        assert ahead is not None
        message, coming, shapes = ahead
        ahead = post(step + 1) if step + 1 < ranks.world else None
        line = message.wait()
        parts = [] if line is None else _unpacked(line, shapes)
        yield step, coming, parts[: len(coming)], parts[len(coming) :]


def _rows(spans: tuple[Span, ...]) -> list[tuple[slice, Span]]:
    """Each span of queries with its rows in the rank's tensors."""
    found, at = [], 0
    for span in spans:
        found.append((slice(at, at + len(span)), span))
        at += len(span)
    return found


def _span(block: tuple[int, int, int]) -> Span:
    return Span(block[1], block[2] - block[1])


def _partial(
    work: _Work,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Span,
    block: tuple[int, int, int],
    bias: Bias | None,
) -> Partial:
    return attend_partial(
        q,
        k,
        v,
        mask=work.mask,
        bias=bias,
        q_positions=span,
        k_positions=_span(block),
        **work.options,
    )


def _partial_gradient(
    work: _Work,
    inputs: tuple[Tensor, ...],
    span: Span,
    block: tuple[int, int, int],
    joined: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor | None, ...]:
    """The gradient of one part in q, k, v and the bias's tensors.

    share = exp(lse_p - lse);  d_out_p = share dO;  d_lse_p = share (dO . out_p - dO . out + d_lse)
    """
    lse, d_out, rest = joined
    with torch.enable_grad():
        q, k, v, *tensors = (x.detach().requires_grad_() for x in inputs)
        bias = None if work.bias is None else work.bias.with_tensors(tensors)
        part = _partial(work, q, k, v, span, block, bias)
    share = torch.exp(part.lse.detach() - lse.masked_fill(lse.isneginf(), 0))
    share = share.masked_fill(lse.isneginf(), 0)
    d_part = share[..., None] * d_out
    d_lse = share * ((d_out * part.out.detach()).sum(-1) + rest)
    return torch.autograd.grad(
        (part.out, part.lse),
        (q, k, v, *tensors),
        (d_part.to(part.out.dtype), d_lse.to(part.lse.dtype)),
        allow_unused=True,
    )


class _GatherTokens(torch.autograd.Function):
    """The tokens of all ranks in order of their positions; the gradient goes home, summed in
    fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, ranks: Ranks) -> Tensor:
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
        every = ranks.all_to_all(
            "gradients of keys and values", parts, [torch.empty_like(mine) for _ in parts]
        )
        B, G, _, D = gradient.shape
        total = torch.stack(every).sum(0).view(B, G, shards.count(ranks.rank), D)
        return total.to(gradient.dtype), None, None


def _gather(q: Tensor, k: Tensor, v: Tensor, work: _Work) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries over all keys at once."""
    keys, values = (_GatherTokens.apply(x, work.shards, work.ranks) for x in (k, v))  # type: ignore[no-untyped-call]
    block = (0, work.shards.start, work.shards.stop)
    bias = _shared_bias(work.bias, work.ranks)
    parts = [
        _partial(work, q[:, :, rows], keys, values, span, block, bias)
        for rows, span in _rows(work.queries)
    ]
    if not parts:
        return _nothing(q, keys, values, bias)
    return torch.cat([x.out for x in parts], 2), torch.cat([x.lse for x in parts], 2)


def _nothing(q: Tensor, k: Tensor, v: Tensor, bias: Bias | None) -> tuple[Tensor, Tensor]:
    """The result of no queries, from which gradients of zero still reach every rank."""
    zero = (q.sum() + k.sum() + v.sum()) * 0
    for x in () if bias is None else bias.tensors():
        zero = zero + x.sum() * 0
    return q.new_zeros(*q.shape[:3], v.shape[3]) + zero, q.new_zeros(q.shape[:3]) + zero


def _shared_bias(bias: Bias | None, ranks: Ranks) -> Bias | None:
    if bias is None:
        return None
    return bias.with_tensors([_SharedParameter.apply(x, ranks) for x in bias.tensors()])  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Layout:
    """How the tokens of some ranks lie in the tensor of all their tokens.

    Args:
        ranks: the group whose ranks exchange heads.
        shards: who holds which tokens.
        members: the ranks of the group, as the shards number them.
        by_position: whether the tokens are put in the order of their positions; otherwise rank by
            rank.
    """

    ranks: Ranks
    shards: Shards
    members: tuple[int, ...]
    by_position: bool

    @property
    def counts(self) -> list[int]:
        return [self.shards.count(r) for r in self.members]

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(x for r in self.members for x in self.shards.spans(r))

    def tokens_of_all(self, x: Tensor) -> Tensor:
        """[B, H, tokens of this rank, D] -> [B, H / W, all tokens, D]."""
        (B, H, _, D), W = x.shape, self.ranks.world
        parts = [part.contiguous().view(-1) for part in x.chunk(W, 1)]
        like = [x.new_empty(B * (H // W) * n * D) for n in self.counts]
        every = self.ranks.all_to_all("heads", parts, like)
        tensors = [p.view(B, H // W, n, D) for p, n in zip(every, self.counts, strict=True)]
        return self.shards.join(tensors) if self.by_position else torch.cat(tensors, 2)

    def heads_of_all(self, x: Tensor) -> Tensor:
        """[B, H / W, all tokens, D] -> [B, H, tokens of this rank, D]."""
        B, n, _, D = x.shape
        tensors = (
            [self.shards.take(x, r) for r in self.members]
            if self.by_position
            else x.split(self.counts, 2)
        )
        count = self.counts[self.ranks.rank]
        like = [x.new_empty(B * n * count * D) for _ in tensors]
        every = self.ranks.all_to_all("heads", [x.contiguous().view(-1) for x in tensors], like)
        return torch.cat([p.view(B, n, count, D) for p in every], 1)


class _ToHeads(torch.autograd.Function):
    """`_Layout.tokens_of_all`; its gradient is `heads_of_all`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: _Layout) -> Tensor:
        ctx.layout = layout
        return layout.tokens_of_all(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.heads_of_all(gradient), None


class _ToTokens(torch.autograd.Function):
    """`_Layout.heads_of_all`; its gradient is `tokens_of_all`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: _Layout) -> Tensor:
        ctx.layout = layout
        return layout.heads_of_all(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.tokens_of_all(gradient), None


def _heads(q: Tensor, k: Tensor, v: Tensor, work: _Work, sink: Tensor | None) -> Tensor:
    """The output of this rank's queries: every rank computes some heads over all tokens."""
    ranks = work.ranks
    members = tuple(range(ranks.world))
    queries = _Layout(ranks, work.q_shards, members, by_position=True)
    keys = _Layout(ranks, work.shards, members, by_position=True)
    qh = _ToHeads.apply(q, queries)  # type: ignore[no-untyped-call]
    kh, vh = (_ToHeads.apply(_repeated(x, ranks.world), keys) for x in (k, v))  # type: ignore[no-untyped-call]
    n = q.shape[1] // ranks.world
    mine = slice(ranks.rank * n, (ranks.rank + 1) * n)
    bias = _shared_bias(work.bias, ranks)
    z = attend_here(
        qh,
        kh,
        vh,
        mask=work.mask.select_heads(mine),
        bias=None if bias is None else bias.select_heads(mine),
        sink=None if sink is None else sink[mine],
        q_positions=Span(work.q_shards.start, qh.shape[2]),
        k_positions=Span(work.shards.start, kh.shape[2]),
        **work.options,
    )
    result: Tensor = _ToTokens.apply(z, queries)  # type: ignore[no-untyped-call]
    return result


def _repeated(x: Tensor, world: int) -> Tensor:
    """Key/value heads, repeated where there are fewer than ranks; autograd sums their gradients."""
    G = x.shape[1]
    return x if world <= G else x.repeat_interleave(world // G, 1)


def _both(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: tuple[Shards, Shards],
    group: Group | Sequence[Group] | None,
    options: Options,
) -> Tensor:
    """Heads are exchanged inside a node, and blocks between nodes."""
    if not isinstance(group, Sequence) or len(group) != 2:
        raise ArgumentError(
            "the method 'both' takes group=(node, across): the ranks that share heads, and those "
            "at the "
            "same place in every node"
        )
    node, across = Ranks(group[0]), Ranks(group[1])
    shards, q_shards = places
    world = node.world * across.world
    here = _Numbered(across.rank * node.world + node.rank, world)
    work = _checked(q, k, v, _Places(here, q_shards, shards), options)
    for ranks in (node, across):
        ranks.agree("attend", _facts(q, k, v, work, "both"))
    if why := why_not_heads(q.shape[1], k.shape[1], node.world):
        raise ArgumentError(why)
    members = tuple(across.rank * node.world + i for i in range(node.world))
    queries = _Layout(node, q_shards, members, by_position=False)
    keys = _Layout(node, shards, members, by_position=False)
    qh = _ToHeads.apply(q, queries)  # type: ignore[no-untyped-call]
    kh, vh = (_ToHeads.apply(_repeated(x, node.world), keys) for x in (k, v))  # type: ignore[no-untyped-call]
    n = q.shape[1] // node.world
    mine = slice(node.rank * n, (node.rank + 1) * n)
    bias = _shared_bias(work.bias, node)
    inner = _Work(
        across,
        _of_nodes(q_shards, node.world),
        _of_nodes(shards, node.world),
        work.mask.select_heads(mine),
        None if bias is None else bias.select_heads(mine),
        work.options,
    )
    out, lse = _exchange(qh, kh, vh, inner)
    sink = options.get("sink")
    if sink is not None:
        shared = _SharedParameter.apply(_SharedParameter.apply(sink, node), across)  # type: ignore[no-untyped-call]
        out = apply_sink(out, lse, shared[mine])
    result: Tensor = _ToTokens.apply(out.to(q.dtype), queries)  # type: ignore[no-untyped-call]
    return result


def _of_nodes(shards: Shards, size: int) -> Shards:
    """The shards of nodes of `size` ranks each."""
    return Shards(
        tuple(
            tuple(x for r in range(i, i + size) for x in shards.spans(r))
            for i in range(0, shards.world, size)
        )
    )
