"""What a cache is, what every cache can do with its contents, and the names by which generation
asks for caches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Mask
from regard.registry import Registry
from regard.span import Positions, Span, as_tensor, next_positions, slot_count

Parts: TypeAlias = tuple[Tensor, ...]
"""What a projection remembers: parts, each [B, n, T, d]. What they mean, the projection knows, not
the cache.
"""

Contents: TypeAlias = dict[str, "Tensor | Span | int"]
"""All that a cache holds, by name. Every tensor has the rows of the batch in front, or one row for
all of them.
"""


class LayerSize(NamedTuple):
    """What generation knows of a layer for which it makes a cache.

    Attributes:
        slots: the most that a row holds; None is no bound.
        rows: how many rows the batch has.
        widths: the dims of each part of the memory, for caches that `needs_widths`.
    """

    slots: int | None = None
    rows: int = 1
    widths: tuple[int, ...] = ()


CACHES: Registry[Cache] = Registry("cache")
"""The caches that `generate(cache=...)` can ask for, by their `kind`."""


class Cache(ABC):
    """Memory with positions in, memory with positions out.

    A kind of cache says how it stores (`update`, `crop`) and what it holds (`contents`, `fill`);
    the other operations follow from these. An operation that is refused leaves the cache as it was.

    A subclass, here or in your own code, that has a `kind` can be asked for by that name:
    `generate(cache=kind)`, `--cache`. `for_layer` makes it; `forgets`, `needs_slots`,
    `needs_widths`, `least` and `narrowing` say how it goes with `max_context`. If it is not of
    this package, `save` and `load` know it by its `kind`.

    A cache belongs to one thread at a time: two threads that change the same one lose tokens.
    Several threads may fork a cache that nobody changes meanwhile, and each may change its own
    fork.
    """

    kind: ClassVar[str | None] = None
    """The name by which generation asks for the cache; None: only modules make it."""
    forgets: ClassVar[bool] = False
    """Whether it goes on without end, because it forgets old tokens; it needs `max_context`."""
    needs_slots: ClassVar[bool] = False
    """Whether its memory is allocated once, so that the number of slots must be known."""
    needs_widths: ClassVar[bool] = False
    """Whether it must know the dims of the keys and values that it will hold."""
    least: ClassVar[int] = 1
    """The smallest `max_context`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if kind := cls.__dict__.get("kind"):
            CACHES.enter(kind, cls)

    @classmethod
    def for_layer(cls, size: LayerSize) -> Cache:  # noqa: ARG003  (the size of some)
        """An empty cache for a layer of a model that keeps everything."""
        return cls()

    @classmethod
    def narrowing(cls, most: int) -> Mask | None:  # noqa: ARG003  (of some)
        """What a layer that kept everything may still see, so that this cache serves it with `most`
        tokens; None changes no mask.
        """
        return None

    @abstractmethod
    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Store new memory, each part [B,n,T,d], at positions; return all that is visible now, each
        [B,n,S,d], and where.

        Slots at position -1 are no tokens. The order of the slots means nothing: their positions
        do. What is returned may be the cache's own memory, and holds good until the next operation
        on the cache.

        Raises:
            ArgumentError: the memory does not fit what is held, or there is no room for it.
        """

    @abstractmethod
    def crop(self, length: int) -> None:
        """Forget every token at position `length` or later, in every row.

        Raises:
            ArgumentError: length is negative, or tokens in front of it are needed that are no
                longer held.
        """

    @abstractmethod
    def contents(self) -> Contents:
        """All that is held, by name; empty when nothing is. The tensors are the cache's own, not
        copies.
        """

    @abstractmethod
    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Hold these contents, which a cache with the same settings gave, in place of all
        others.
        """

    @abstractmethod
    def __len__(self) -> int:
        """How many slots are held."""

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that make another cache like this one: plain values."""
        return {}

    @property
    def bytes(self) -> int:
        """Bytes of the memory held, positions not counted."""
        return sum(_bytes(x) for name, x in self.contents().items() if name != "positions")

    @property
    def batch(self) -> int | None:
        """How many rows are held; None while the cache is empty."""
        rows = [x.shape[0] for x in self.contents().values() if isinstance(x, Tensor)]
        return max(rows, default=None)

    def next(self, length: int) -> Positions:
        """Where the next `length` tokens stand by default: on from the last token of each row."""
        positions = self.contents().get("positions")
        if positions is None or isinstance(positions, int):
            return Span(0, length)
        return next_positions(positions, length)

    def fork(self) -> Cache:
        """Another cache with the same contents; what is done to one does not change the other."""
        other = type(self)(**self.settings)
        other.fill({name: _copy(x) for name, x in self.contents().items()})
        return other

    def repeated(self, rows: int, slots: int | None = None) -> Cache:
        """Another cache with the row of this one, so many times.

        Args:
            rows: how many times.
            slots: the most that a row will hold; None is no bound.
        """
        other = self.fork()
        if rows > 1:
            other.select(torch.zeros(rows, dtype=torch.int64))
        return other

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these rows of the batch, in this order; a row may come several times, or not at all.

        Raises:
            ArgumentError, ArgumentTypeError: rows are not a 1-D integer tensor of rows that are
                held.
        """
        self._check_rows(rows)
        held = self.contents()
        self.fill({name: _select_rows(x, rows, self.batch) for name, x in held.items()})

    def reorder(self, rows: Int[Tensor, " B"]) -> None:
        """Row i becomes what row rows[i] was, for beam search; as many rows as before.

        Raises:
            ArgumentError, ArgumentTypeError: as `select`, or the number of rows would change.
        """
        self._check_rows(rows)
        if self.batch is not None and len(rows) != self.batch:
            raise ArgumentError(
                f"reorder has {len(rows)} rows for a batch of {self.batch}; give one per row, or "
                "use select(rows)"
            )
        self.select(rows)

    def reset(self) -> None:
        """Forget everything."""
        self.fill({})

    def mark(self) -> Any:
        """A point to come back to with `restore`, before any other update than the next one."""
        return self.contents()

    def restore(self, mark: Any) -> None:
        """Take back the update that came after `mark`, if there was one."""
        self.fill(mark)

    def _check_rows(self, rows: Tensor) -> None:
        if not isinstance(rows, Tensor) or rows.dtype not in (torch.int64, torch.int32):
            got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
            raise ArgumentTypeError(f"rows are {got}; they must be a 1-D integer tensor")
        if rows.ndim != 1:
            raise ArgumentError(f"rows are {tuple(rows.shape)}; they must be 1-D")
        batch = self.batch
        if batch is not None and len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < batch:
            raise ArgumentError(f"rows are {rows.tolist()}; the cache holds rows 0 to {batch - 1}")


def make_full_cache(
    kind: str, slots: int | None = None, *, rows: int = 1, widths: Sequence[int] = ()
) -> Cache:
    """An empty cache that keeps every token, of a kind by its name.

    Args:
        kind: "growing", "fixed", "paged", "quantised" (8 bits, but for the last 128 slots), or the
            `kind` of a cache of your own.
        slots: the most of a row, for "fixed" and "paged".
        rows: of the batch: a paged cache has pages for all of them.
        widths: for "quantised", the dims of each part of the memory.

    Raises:
        ArgumentError: the kind is unknown, or lacks its slots.

    >>> make_full_cache("paged", 100, rows=2).settings
    {'page_size': 16, 'pages': 14}
    """
    found = CACHES.find(kind, [name for name, x in CACHES if not x.forgets])
    if found.needs_slots and slots is None:
        raise ArgumentError(f"a {kind} cache needs slots, the most that a row holds")
    return found.for_layer(LayerSize(slots, rows, tuple(widths)))


class rollback_on_error:  # noqa: N801  (a context manager, used like a function)
    """A context manager: if its block raises, the caches are afterwards as they were before it.

    Blocks may be nested. A model marks the caches of all its layers in one place (`layers=True`):
    the first block inside that names one of them uses the mark that is already there, and only a
    later one makes a mark of its own. So each cache is marked once a call, by the outermost caller.

    Args:
        *caches: the caches; None is passed over.
        layers: whether the block calls layers that have blocks of their own for these caches. The
            caches must not be changed between the two blocks.

    >>> from regard.caches import Growing
    >>> cache = Growing()
    >>> try:
    ...     with rollback_on_error(cache):
    ...         _ = cache.update((torch.ones(1, 1, 2, 4),), Span(0, 2))
    ...         _ = 1 / 0
    ... except ZeroDivisionError:
    ...     len(cache)
    0
    """

    __slots__ = ("_caches", "_layers", "_marks")

    def __init__(self, *caches: Cache | None, layers: bool = False) -> None:
        self._caches, self._layers = caches, layers
        self._marks: list[tuple[Cache, Any]] = []

    def __enter__(self) -> None:
        marks = self._marks = []
        for cache in self._caches:
            if cache is not None:
                offered = cache.__dict__.pop(_OFFERED_MARK, None)
                marks.append((cache, cache.mark() if offered is None else offered[0]))
        if self._layers:  # a cache that is named twice has one mark, and offers the first
            for cache, mark in reversed(marks):
                cache.__dict__[_OFFERED_MARK] = (mark,)

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        if self._layers:
            for cache, _ in self._marks:
                cache.__dict__.pop(_OFFERED_MARK, None)
        if kind is not None:
            for cache, mark in self._marks:
                cache.restore(mark)


_OFFERED_MARK = "_offered_mark"
"""The attribute of a cache that holds the mark which the next block inside takes: a tuple of
one.
"""


def check_update(memory: Parts, positions: Positions) -> None:
    """New memory is parts [B,n,T,d] of one batch, with one position per slot, in rows B or 1."""
    if not isinstance(positions, Span):
        _check_integers(positions)
    length = slot_count(positions)
    batches: dict[int, None] = {}
    for i, new in enumerate(memory):
        if new.ndim != 4 or new.shape[2] != length:
            raise ArgumentError(
                f"memory {i} is {tuple(new.shape)} at {length} positions; "
                "it must be [batch, heads, length, dim] with one position per slot"
            )
        batches[new.shape[0]] = None
    if len(batches) > 1:
        sizes = " and ".join(str(b) for b in batches)
        raise ArgumentError(f"memory has parts of batch {sizes}; all must have one batch")
    for B in batches:
        if not isinstance(positions, Span) and positions.shape[0] not in (1, B):
            raise ArgumentError(
                f"positions are {tuple(positions.shape)} for memory of batch {B}; "
                f"they must be ({B}, {length}) or (1, {length})"
            )


def _check_integers(positions: Tensor) -> None:
    if (
        not isinstance(positions, Tensor)
        or positions.dtype == torch.bool
        or positions.is_floating_point()
    ):
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise ArgumentTypeError(
            f"positions are {got}; they must be a regard.Span or integers [batch or 1, length]: "
            "use .long()"
        )
    if positions.ndim != 2:
        raise ArgumentError(
            f"positions are {tuple(positions.shape)}; they must be [batch or 1, length]"
        )


def check_same_layout(held: Parts, memory: Parts) -> None:
    """New memory has the parts, batch, heads, dims and dtypes of what is held."""
    fits = len(held) == len(memory)
    for old, new in zip(held, memory, strict=False):
        a, b = old.shape, new.shape
        fits = fits and a[:2] == b[:2] and a[3] == b[3]
        fits = fits and old.dtype == new.dtype and old.device == new.device
    if fits:  # what is wrong is found out only when something is
        return
    kept_, given = ([_layout(m) for m in ms] for ms in (held, memory))
    if kept_ != given:
        raise ArgumentError(
            f"memory {given} does not fit what is held, {kept_}; "
            "start a new cache for another batch or model"
        )
    for i, (old, new) in enumerate(zip(held, memory, strict=True)):
        if old.device != new.device:
            raise ArgumentError(
                f"memory {i} is on {new.device}, and the cache holds it on {old.device}; move it "
                "with .to()"
            )


def check_crop(length: int) -> None:
    """A length to crop to is not negative."""
    if length < 0:
        raise ArgumentError(f"crop length is {length}; it must be 0 or more")


def parts_of(contents: Mapping[str, Tensor | Span | int], name: str = "memory") -> Parts:
    """The parts `memory.0`, `memory.1`, ... of contents."""
    parts: list[Tensor] = []
    while isinstance(x := contents.get(f"{name}.{len(parts)}"), Tensor):
        parts.append(x)
    return tuple(parts)


def named_parts(memory: Parts, name: str = "memory") -> dict[str, Tensor]:
    """Parts as contents: `memory.0`, `memory.1`, ..."""
    return {f"{name}.{i}": m for i, m in enumerate(memory)}


def positions_before(positions: Positions, length: int) -> Positions:
    """Positions with every slot at `length` or later emptied (-1), or cut off where they are a
    `Span`.
    """
    if isinstance(positions, Span):
        return Span(positions.start, min(positions.length, max(0, length - positions.start)))
    return positions.masked_fill(as_tensor(positions) >= length, -1)


def _layout(memory: Tensor) -> tuple[tuple[int, int, int], torch.dtype]:
    """What no update may change: (batch, heads, dim) and dtype."""
    return (memory.shape[0], memory.shape[1], memory.shape[3]), memory.dtype


def _bytes(x: Tensor | Span | int) -> int:
    return x.numel() * x.element_size() if isinstance(x, Tensor) else 0


def _copy(x: Tensor | Span | int) -> Tensor | Span | int:
    return x.clone() if isinstance(x, Tensor) else x


def _select_rows(x: Tensor | Span | int, rows: Tensor, batch: int | None) -> Tensor | Span | int:
    if not isinstance(x, Tensor) or x.shape[0] != batch:
        return x  # the same for every row
    return x.index_select(0, rows.to(x.device))
