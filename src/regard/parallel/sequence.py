"""`regard.parallel.sequence` runs unchanged models on a sequence over several ranks, and
`generation` generates text with prompts and caches that lie on several ranks.

Softmax attention runs through `regard.parallel.attend`, and `decode` for later tokens. The state of
a recurrence is passed on from the rank with the tokens before. Every other part of a model works on
each token alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard import tracing
from regard.caches import Cache, Parts, rollback_on_error
from regard.caches.cross_layer import LendingCache
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.mixer import Mixer
from regard.nn.projections.dynamic_rotary import PerRowRotary
from regard.ops.softmax import Call, KernelResult
from regard.parallel.attend import attend, decode
from regard.parallel.communication import Group, RankGroup
from regard.parallel.ranked_call import Method
from regard.parallel.shards import Shards
from regard.positions import Rotary
from regard.sequence_scope import use_scope
from regard.span import Positions, Span
from regard.units import plural


@contextmanager
def sequence(
    shards: Shards,
    group: Group | Sequence[Group] | None = None,
    *,
    method: Method = "auto",
) -> Iterator[None]:
    """Run the models of this thread on a sequence whose tokens lie on several ranks.

    Each rank gives the model its own tokens and their positions, and gets their results, which
    equal those of one process, as do gradients once those of parameters are summed over the ranks.

    Each rank caches its shard. Tokens behind the shards are decoded: every rank gives the same new
    tokens and gets their results, and one rank appends them, in turns.

    Args:
        shards: which rank holds which positions.
        group: a process group, as in `regard.parallel.attend`; None means the default group.
        method: how softmax attention exchanges tokens, as in `regard.parallel.attend`.

    Returns:
        A context manager for `with`.

    Raises:
        ArgumentError, ArgumentTypeError: the shards do not fit the group; in the block, positions
            are not those of the shard, or a mechanism or option cannot run over ranks. A backward
            pass with `torch.utils.checkpoint` must run inside the block.

    Every rank runs this code; here there is one rank, and torchrun starts more.

    >>> import torch, regard
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model, ids = regard.load("tiny"), torch.arange(12)[None]
    >>> shards = regard.parallel.Shards.zigzag(12, dist.get_world_size())
    >>> own = shards.positions(dist.get_rank())
    >>> with torch.no_grad(), regard.parallel.sequence(shards):
    ...     logits = model(ids[:, own[0]], own)  # of this rank's tokens
    >>> with torch.no_grad():
    ...     torch.allclose(logits, model(ids)[:, own[0]], atol=1e-4)
    True
    >>> dist.destroy_process_group()

    Source: `regard.parallel.attend`; passing on a state: Sun et al. 2024 (arXiv 2404.02882),
    section 3.
    """
    if not isinstance(shards, Shards):
        raise ArgumentTypeError(
            f"shards is {type(shards).__name__}; it must be Shards, for example Shards.even(S, W)"
        )
    scope = _RankScope(shards, group, method)
    if shards.world != scope.world:
        raise ArgumentError(
            f"the shards are for {plural(shards.world, 'rank')}, but the group has {scope.world}; "
            f"make shards for {scope.world}"
        )
    with use_scope(scope):
        yield


@dataclass
class _RankScope:
    """What one rank computes in a `sequence` block."""

    shards: Shards
    group: Group | Sequence[Group] | None
    method: Method
    rank: int = field(init=False)
    world: int = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.group, Sequence):
            node, across = (RankGroup(x) for x in self.group)
            self.rank = across.rank * node.world + node.rank
            self.world = node.world * across.world
        else:
            ranks = RankGroup(self.group)
            self.rank, self.world = ranks.rank, ranks.world

    @property
    def spans(self) -> tuple[Span, ...]:
        """The positions that this rank holds."""
        return self.shards.spans(self.rank)

    def run_attention(self, call: Call, backend: str) -> KernelResult:
        """Run an attention call over the keys of all ranks."""
        _refuse_unsupported(call)
        options: dict[str, Any] = {
            "mask": call.mask,
            "bias": call.bias,
            "scale": call.scale,
            "softcap": call.softcap,
            "sink": call.sink,
            "backend": backend,
        }
        if self._holds(call.q_positions) and self._holds(call.k_positions):
            out = attend(
                call.q,
                call.k,
                call.v,
                shards=self.shards,
                group=self.group,
                method=self.method,
                parameter_gradients="share",
                **options,
            )
            return KernelResult(out, None)
        if not self._is_behind(call.q_positions):
            raise ArgumentError(
                f"the queries have {_text(call.q_positions)} and the keys "
                f"{_text(call.k_positions)}; rank {self.rank} must give the model its tokens at "
                f"{self._expected()}"
            )
        if isinstance(self.group, Sequence):
            raise ArgumentError(
                "new tokens cannot be decoded over two groups; open sequence with one group"
            )
        out = decode(
            call.q,
            call.k,
            call.v,
            q_positions=call.q_positions,
            k_positions=call.k_positions,
            group=self.group,
            **options,
        )
        return KernelResult(out, None)

    def run_mixer(
        self,
        mixer: Mixer,
        x: Tensor,
        positions: Positions | None,
        cache: Cache | None,
        backend: str,
    ) -> Tensor:
        """Run a mechanism on this rank's tokens."""
        name = type(mixer).__name__
        if mixer.across_ranks is None:
            raise ArgumentError(
                f"{name} cannot run over several ranks: it uses other tokens by more than "
                "regard.attend and the state of a recurrence; run it in one process"
            )
        _refuse_length_dependent(mixer, name)
        if positions is None:
            raise ArgumentError(
                f"{name} got no positions, and a rank's tokens need not begin at 0; give the model "
                f"{self._expected()}"
            )
        if mixer.across_ranks == "state":
            return self._scan(mixer, x, positions, cache, backend)
        if not (self._holds(positions) or self._is_behind(positions)):
            raise ArgumentError(
                f"{name} got {_text(positions)}; rank {self.rank} must give the model its tokens "
                f"at {self._expected()}"
            )
        if cache is None:
            return mixer.mix(x, positions, None, backend)
        owns = self._holds(positions) or _last(positions) % self.world == self.rank
        with rollback_on_error(cache):
            return mixer.mix(x, positions, cache if owns else _NotAppended(cache), backend)

    def append_tokens(
        self, decoder: object, caches: object, ids: object, positions: object, progress: object
    ) -> tuple[Tensor, object]:
        """Refuse a generation, whose prompt has no shards yet."""
        raise ArgumentError(
            "model.generate cannot run inside regard.parallel.sequence; use "
            "regard.parallel.generation()"
        )

    def _expected(self) -> str:
        """Describe the positions that a call of this rank must have."""
        return f"the positions of its shard, shards.positions({self.rank})"

    def _scan(
        self,
        mixer: Mixer,
        x: Tensor,
        positions: Positions,
        cache: Cache | None,
        backend: str,
    ) -> Tensor:
        """Run a recurrence over this rank's spans, each from the state after the span before."""
        name = type(mixer).__name__
        if cache is not None or not self._holds(positions):
            raise ArgumentError(
                f"{name} over several ranks takes this rank's tokens at {self._expected()}, and no "
                "cache; to decode, run the prompt in one process"
            )
        if isinstance(self.group, Sequence):
            raise ArgumentError(f"{name} passes its state along one group; open sequence with one")
        chain = _StateChain(RankGroup(self.group), torch.is_grad_enabled())
        chain.ranks.agree(
            "sequence",
            {
                "the mechanism": [type(part).__name__ for part in mixer.modules()],
                "the sizes [B, M]": (x.shape[0], x.shape[2]),
                "the dtype": x.dtype,
                "the shards": self.shards.ranks,
                "whether gradients are wanted": chain.with_gradient,
            },
        )
        every_span = [(r, span) for r in range(self.world) for span in self.shards.spans(r)]
        every_span.sort(key=lambda x: x[1].start)
        rows = dict(zip(self.spans, x.split([len(span) for span in self.spans], 1), strict=True))
        results: dict[Span, Tensor] = {}
        state = mixer.new_cache()
        for index, (owner, span) in enumerate(every_span):
            if owner != self.rank:
                continue
            before = every_span[index - 1][0] if index else owner
            if before != owner:
                state = mixer.new_cache()
                chain.receive(state, before)
            with use_scope(None):
                z = mixer.mix(rows[span], span, state, backend)
            after = every_span[index + 1][0] if index + 1 < len(every_span) else owner
            results[span] = z if after == owner else chain.send(z, state, after)
        if not results:
            with use_scope(None):
                return mixer.mix(x, Span(0, 0), None, backend)
        return torch.cat([results[span] for span in self.spans], 1)

    def own_positions(self) -> Tensor:
        """Return the positions of this rank, [1, count]."""
        return self.shards.positions(self.rank)

    def _holds(self, positions: Positions) -> bool:
        """Return whether positions are those of this rank's shard, in its order, in every row."""
        if isinstance(positions, Span):
            return self.spans == ((positions,) if len(positions) else ())
        own = self.own_positions().to(positions.device)
        return positions.shape[1] == own.shape[1] and bool((positions == own).all())

    def _is_behind(self, positions: Positions) -> bool:
        """Return whether all positions come after those of the shards."""
        if isinstance(positions, Span):
            return positions.start >= self.shards.stop and len(positions) > 0
        return positions.numel() > 0 and bool((positions >= self.shards.stop).all())


def _last(positions: Positions) -> int:
    """Return the largest of the positions."""
    return positions.stop - 1 if isinstance(positions, Span) else int(positions.max())


def _text(positions: Positions) -> str:
    """Describe positions for an error message."""
    if isinstance(positions, Span):
        return f"the positions {positions.start} to {positions.stop - 1}"
    if not positions.numel():
        return "no positions"
    return f"positions from {int(positions.min())} to {int(positions.max())}"


def _refuse_unsupported(call: Call) -> None:
    """Raise for options of a call that cannot run over ranks."""
    if call.dropout:
        raise ArgumentError(
            "dropout over several ranks is not supported, because each rank draws other random "
            "numbers; set dropout=0"
        )
    if call.score is not None:
        raise ArgumentError(
            f"the score rule {call.score} cannot run over several ranks, each of which sees some "
            "of the keys; run the model in one process"
        )
    if call.wants_lse:
        raise ArgumentError(
            "attend_partial cannot run inside regard.parallel.sequence; call it outside, or use "
            "regard.parallel.attend"
        )
    if call.needs or tracing.call_observers():
        raise ArgumentError(
            "scores and patterns cannot be captured, edited or recorded over several ranks; trace "
            "q, k, v, z and out, or run the model in one process"
        )


def _refuse_length_dependent(mixer: Mixer, name: str) -> None:
    """Raise if a rotary embedding depends on the length of the call, which differs on each rank."""
    for module in mixer.modules():
        if isinstance(module, PerRowRotary) or (
            isinstance(module, Rotary) and module.follows_length
        ):
            raise ArgumentError(
                f"the rotary embedding of {name} follows the length of each call, and a rank sees "
                "only its own positions; build the model with a fixed length"
            )


@dataclass(frozen=True)
class _StateChain:
    """Passes the contents of a recurrence's cache from rank to rank, perhaps with gradients."""

    ranks: RankGroup
    with_gradient: bool

    def send(self, z: Tensor, cache: Cache, to: int) -> Tensor:
        """Send the contents of a cache."""
        contents = cache.contents()
        tensors = {name: x for name, x in contents.items() if isinstance(x, Tensor)}
        values = {name: x for name, x in contents.items() if name not in tensors}
        shapes = {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}
        self.ranks.send_object("state", (values, shapes), to)
        sent: Tensor = _SendState.apply(  # type: ignore[no-untyped-call]
            self._anchor(), z, self.ranks, to, *tensors.values()
        )
        return sent

    def receive(self, cache: Cache, source: int) -> None:
        """Fill an empty cache with the contents that another rank sends."""
        header: Any = self.ranks.receive_object("state", source)
        values, shapes = header
        tensors = _ReceiveState.apply(  # type: ignore[no-untyped-call]
            self._anchor(), self.ranks, source, tuple(shapes.values())
        )
        cache.fill({**values, **dict(zip(shapes, tensors, strict=True))})

    def _anchor(self) -> Tensor:
        """Return an input that makes autograd call the backward pass, on both ends of a message."""
        return torch.zeros((), requires_grad=self.with_gradient, dtype=torch.float32, device="cpu")


class _SendState(torch.autograd.Function):
    """Send tensors to another rank; the backward pass receives their gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, z: Tensor, ranks: RankGroup, to: int, *tensors: Tensor
    ) -> Tensor:
        ctx.ranks, ctx.other = ranks, to
        ctx.shapes = [(tuple(x.shape), x.dtype) for x in tensors]
        _send(ranks, "state", tensors, to)
        ctx.save_for_backward(anchor)
        return z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # torch.utils.checkpoint runs a layer again when saved tensors are read: its messages must
        # come before those of the gradients, on every rank
        _ = ctx.saved_tensors
        learned = [shape if shape[1].is_floating_point else None for shape in ctx.shapes]
        gradients = _receive(ctx.ranks, "gradient of the state", learned, ctx.other)
        return (None, gradient, None, None, *gradients)


class _ReceiveState(torch.autograd.Function):
    """Receive tensors from another rank; the backward pass sends their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        ranks: RankGroup,
        source: int,
        shapes: Sequence[TensorShape],
    ) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.other, ctx.shapes = ranks, source, shapes
        tensors = tuple(x for x in _receive(ranks, "state", shapes, source) if x is not None)
        ctx.mark_non_differentiable(*(x for x in tensors if not x.is_floating_point()))
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        learned = [
            x if dtype.is_floating_point else None
            for x, (_, dtype) in zip(gradients, ctx.shapes, strict=True)
        ]
        _send(ctx.ranks, "gradient of the state", learned, ctx.other)
        return None, None, None, None


TensorShape: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of a tensor."""


def _send(ranks: RankGroup, call: str, tensors: Sequence[Tensor | None], to: int) -> None:
    """Send tensors to another rank, each at a step of its own, and wait until it has them."""
    messages = [
        ranks.send_receive(call, step, x.contiguous(), to, None, to)
        for step, x in enumerate(tensors)
        if x is not None
    ]
    for message in messages:
        message.wait()


def _receive(
    ranks: RankGroup, call: str, shapes: Sequence[TensorShape | None], source: int
) -> list[Tensor | None]:
    """Receive the tensors that `_send` sends; None stands for those that are not sent."""
    received: list[Tensor | None] = []
    for step, of_tensor in enumerate(shapes):
        buffer = None
        if of_tensor is not None:
            buffer = torch.empty(of_tensor[0], dtype=of_tensor[1], device="cpu")
            ranks.send_receive(call, step, None, source, buffer, source).wait()
        received.append(buffer)
    return received


class _NotAppended(LendingCache):
    """A cache on a rank that does not own the new tokens: `update` reads it without adding them."""

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Return what the cache stores."""
        none = Span(positions.start, 0) if isinstance(positions, Span) else positions[:, :0]
        return super().update(tuple(x[:, :, :0] for x in memory), none)


@contextmanager
def generation(group: Group | None = None, *, method: Method = "auto") -> Iterator[None]:
    """Generate text over several ranks: in the block, `model.generate` caches on all of them.

    Every rank makes the same calls and gets the same text. Each reads and caches its zigzag shard
    of a prompt; new tokens are appended in turns.

    Args:
        group: a process group; None means the default group.
        method: how the prompt's tokens are exchanged, as in `regard.parallel.attend`.

    Returns:
        A context manager for `with`.

    Raises:
        ArgumentError: torch.distributed is not initialized; or, in the block, a prompt is too short
            or differs in length, or a layer cannot run over ranks (see `sequence`).

    Every rank runs this code; here there is one rank, and torchrun starts more.

    >>> import regard
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = regard.load("tiny")
    >>> with regard.parallel.generation():
    ...     text = "".join(model.generate("def add(a, b): return", max_tokens=4))
    >>> text == "".join(model.generate("def add(a, b): return", max_tokens=4))
    True
    >>> dist.destroy_process_group()

    Source: the prompt as in `sequence`, new tokens as in `decode`.
    """
    with use_scope(_GenerationScope(RankGroup(group), group, method)):
        yield


@dataclass(frozen=True)
class RankProgress:
    """The tokens that a session has read over several ranks."""

    shards: Shards
    length: int


@dataclass(frozen=True)
class _GenerationScope:
    """Runs the sessions of a thread over ranks, whose prompts are exchanged by a method."""

    ranks: RankGroup
    group: Group | None
    method: Method

    def append_tokens(
        self,
        decoder: Callable[..., Tensor],
        caches: Sequence[Cache],
        ids: Tensor,
        positions: Positions | None,
        progress: Any,
    ) -> tuple[Tensor, RankProgress]:
        """Read tokens that continue those before; see `SequenceScope.append_tokens`."""
        if isinstance(positions, Tensor):
            raise ArgumentError(
                "prompts of different lengths cannot be read over several ranks; generate one "
                "prompt at a time"
            )
        T = ids.shape[1]
        if progress is None:
            if 2 * self.ranks.world > T:
                raise ArgumentError(
                    f"the prompt has {plural(T, 'token')}, too few to be cut into two runs for "
                    f"each of {plural(self.ranks.world, 'rank')}; give a longer one or fewer ranks"
                )
            progress = RankProgress(Shards.zigzag(T, self.ranks.world), 0)
            own = progress.shards.positions(self.ranks.rank).to(ids.device)
            where: Positions = own
            ids, owner = ids[:, own[0]], _owner_of_last(progress.shards)
        else:
            where, owner = Span(progress.length, T), 0
        with sequence(progress.shards, self.group, method=self.method):
            logits = decoder(ids, where, caches, last=1)[:, -1]
        parts = self.ranks.gather("logits", logits, [logits.numel()] * self.ranks.world)
        logits = parts[owner].view_as(logits)
        return logits, replace(progress, length=progress.length + T)

    def own_positions(self) -> Tensor:
        """Refuse: positions are known inside a session only."""
        _refuse_outside_session()

    def run_attention(self, call: object, backend: str) -> KernelResult:
        """Refuse attention outside a session."""
        _refuse_outside_session()

    def run_mixer(
        self, mixer: object, x: object, positions: object, cache: object, backend: str
    ) -> Tensor:
        """Refuse a mechanism outside a session."""
        _refuse_outside_session()


def _owner_of_last(shards: Shards) -> int:
    """Return the rank that holds the last position."""
    last = shards.stop - 1
    return next(
        rank
        for rank in range(shards.world)
        if any(span.start <= last < span.stop for span in shards.spans(rank))
    )


def _refuse_outside_session() -> NoReturn:
    """Raise for attention that does not belong to a generation."""
    raise ArgumentError(
        "regard.parallel.generation runs model.generate and beam search over ranks; to call a "
        "model directly, use regard.parallel.sequence(shards)"
    )
