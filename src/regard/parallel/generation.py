"""`regard.parallel.generation`: generate text with prompts and caches that lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import Tensor

from regard.caches import Cache
from regard.errors import ArgumentError
from regard.ops.softmax import KernelResult
from regard.parallel.communication import Group, RankGroup
from regard.parallel.ranked_call import Method
from regard.parallel.sequence import sequence
from regard.parallel.shards import Shards
from regard.sequence_scope import use_scope
from regard.span import Positions, Span
from regard.units import plural


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
