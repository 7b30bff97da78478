"""The base class `Cache`, rollback after errors, and the lookup of cache kinds by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from regard.caches.quantization import CodedSlots
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Mask
from regard.registry import Registry
from regard.span import Positions, Span, as_tensor, next_positions, slot_count
from regard.units import plural

Parts: TypeAlias = tuple[Tensor, ...]
"""The tensors that a projection stores for each token, each `[B, n, T, d]`, such as keys."""

Contents: TypeAlias = dict[str, "Tensor | Span | int"]
"""All contents of a cache, by name; a tensor has the batch as its first dimension, or 1."""


class LayerSize(NamedTuple):
    """The sizes for which generation creates the cache of a layer.

    Attributes:
        slots: the largest number of slots per row; None means no bound.
        widths: the last dimension of each part of the memory, for caches with `needs_widths`.
    """

    slots: int | None = None
    rows: int = 1
    widths: tuple[int, ...] = ()


class StaticSize(NamedTuple):
    """The sizes for which the static form of a cache is made (`Cache.to_static`)."""

    slots: int
    rows: int
    device: torch.device


class OpenSlot(NamedTuple):
    """Memory for the new tokens of each row, of `Cache.open_slot`; the first goes to `slot`.

    Attributes:
        buffers: `[B, n, c, d]` with room for them; the same tuple while they are the same.
        after: the positions of all slots with the new token; None if it follows all others.
        pages: if buffers consist of pages, slot s of row r is slot pages[r, s // page_size] *
            page_size + s % page_size of them.
        coded: the slots before those of the buffers, stored as codes, or None.
    """

    buffers: Parts
    slot: int
    positions: Positions
    after: Int[Tensor, "b S"] | None = None
    slots: Int[Tensor, " B"] | None = None
    pages: Int[Tensor, "B n"] | None = None
    page_size: int = 1
    coded: CodedSlots | None = None
    state: Any = None


CACHES: Registry[Cache] = Registry("cache")
"""All cache classes by their `kind`, the name that `generate(cache=...)` takes."""


class Cache(ABC):
    """Base class of caches: `update` stores the memory of new tokens and returns all that is
    visible.

    A subclass defines `update`, `crop`, `contents` and `fill`, from which the other operations are
    derived. An operation that raises leaves the cache unchanged.

    A subclass with a `kind` can be requested by that name (`generate(cache=kind)`), and `for_layer`
    creates it.

    A cache may be used by one thread at a time. Several may fork it while none changes it.
    """

    kind: ClassVar[str | None] = None
    """The name by which generation requests the cache; None if only modules create it."""
    evicts: ClassVar[bool] = False
    """Whether queries lose sight of old tokens, because the cache evicts them or leaves them
    unread; generation then requires `max_context`.
    """
    needs_slots: ClassVar[bool] = False
    """Whether memory is allocated once, so that `LayerSize.slots` must be given."""
    needs_widths: ClassVar[bool] = False
    """Whether the cache needs `LayerSize.widths`, the last dimensions of the keys and values."""
    savable: ClassVar[bool] = True
    """Whether `save` can write the cache, because its settings are plain values."""
    min_context: ClassVar[int] = 1
    """The smallest `max_context` that is allowed."""
    crop_is_exact: ClassVar[bool] = True
    """Whether `crop` removes the last tokens as if they had never come; else `restore` does."""
    fields: ClassVar[tuple[str, ...]] = ()
    """The attributes that an update replaces, which `mark` keeps and `restore` sets again. Without
    any, these use `contents` and `fill`.
    """
    static_step_refusal: ClassVar[str | None] = (
        "its steps depend on numbers that change and that Python holds"
    )
    """Why a step cannot run as a CUDA graph; None if `to_static` makes a cache that can."""

    _offered_mark: tuple[object] | None = None
    """The snapshot of an outer `rollback_on_error`, for the next inner block."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if kind := cls.__dict__.get("kind"):
            CACHES.register(kind, cls)

    @classmethod
    def for_layer(cls, size: LayerSize) -> Cache:  # noqa: ARG003  (subclasses use it)
        """Create an empty cache for a layer of a model in which no mask limits what is visible.

        Args:
            size: the sizes of the layer.

        Returns:
            The cache.
        """
        return cls()

    @classmethod
    def narrowing_mask(cls, max_context: int) -> Mask | None:  # noqa: ARG003  (subclasses use it)
        """Return the mask that a layer needs so that no query sees a token which was evicted.

        Args:
            max_context: the number of tokens that the cache may hold.

        Returns:
            The mask, to be combined with the layer's own by `&`; None if none is needed.
        """
        return None

    @abstractmethod
    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Store the memory of new tokens, and return all that is visible now.

        Args:
            memory: parts, each `[B, n, T, d]`.
            positions: the positions of the T tokens; a slot at position -1 holds no token.

        Returns:
            The visible memory, each part `[B, n, S, d]`, and its positions, in any order of the
            slots. The tensors may be the cache's own, valid until its next operation.

        Raises:
            ArgumentError: the memory does not fit the contents, or there is no room for it.
        """

    @abstractmethod
    def crop(self, length: int) -> None:
        """Remove every token at position `length` or later, in every row.

        Args:
            length: the number of positions to keep.

        Raises:
            ArgumentError: length is negative, or tokens that are needed were already evicted.
        """

    @abstractmethod
    def contents(self) -> Contents:
        """Return all contents by name.

        Returns:
            Tensors, spans and numbers, the cache's own; empty if the cache is empty.
        """

    @abstractmethod
    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace all contents.

        Args:
            contents: contents of a cache with the same settings.
        """

    @abstractmethod
    def __len__(self) -> int:
        """How many slots are held."""

    @property
    def settings(self) -> Mapping[str, object]:
        """The constructor arguments that create another cache like this one, as plain values."""
        return {name: getattr(self, name) for name in signature(type(self)).parameters}

    @property
    def bytes(self) -> int:
        """Bytes of the memory that is held, without positions."""
        contents = self.contents().items()
        return bytes_of(
            [x for name, x in contents if name != "positions" and isinstance(x, Tensor)]
        )

    @property
    def batch(self) -> int | None:
        """The number of batch rows; None while the cache is empty."""
        rows = [x.shape[0] for x in self.contents().values() if isinstance(x, Tensor)]
        return max(rows, default=None)

    def next(self, length: int) -> Positions:
        """Return the default positions of the next tokens: they follow the last token of each row.

        Args:
            length: the number of new tokens.

        Returns:
            The positions.
        """
        positions = self.contents().get("positions")
        if positions is None or isinstance(positions, int):
            return Span(0, length)
        return next_positions(positions, length)

    def fork(self) -> Cache:
        """Return an independent cache with the same contents.

        Returns:
            The new cache.
        """
        other = type(self)(**self.settings)
        other.fill({name: _copy(x) for name, x in self.contents().items()})
        return other

    def repeated(self, rows: int, slots: int | None = None) -> Cache:
        """Return a new cache in which the only row of this one is repeated.

        Args:
            rows: how many times.
            slots: the largest number of slots that a row will hold; None means no bound.

        Returns:
            The new cache.
        """
        other = self.fork()
        if rows > 1:
            other.select(torch.zeros(rows, dtype=torch.int64, device="cpu"))
        return other

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these batch rows, in this order; a row may be repeated or left out.

        Args:
            rows: row numbers, an integer tensor `[rows]`.

        Raises:
            ArgumentError, ArgumentTypeError: `rows` is no 1-D integer tensor of rows.
        """
        self._check_rows(rows)
        contents = self.contents()
        self.fill({name: _select_rows(x, rows, self.batch) for name, x in contents.items()})

    def reorder(self, rows: Int[Tensor, " B"]) -> None:
        """Replace row i by row rows[i], as beam search does; the number of rows stays the same.

        Args:
            rows: row numbers, an integer tensor `[B]`.

        Raises:
            ArgumentError, ArgumentTypeError: `rows` does not suit `select`, or has another length.
        """
        self._check_rows(rows)
        if self.batch is not None and len(rows) != self.batch:
            raise ArgumentError(
                f"reorder got {plural(len(rows), 'row')} for a batch of {self.batch}; give one per "
                "row, or use select(rows)"
            )
        self.select(rows)

    def reset(self) -> None:
        """Remove all contents of the cache."""
        self.fill({})

    def mark(self) -> object:
        """Return a snapshot from which `restore` can undo the next update.

        Returns:
            The snapshot; it is valid until the second update after it.
        """
        if not self.fields:
            return self.contents()
        return tuple(getattr(self, name) for name in self.fields)

    def restore(self, mark: Any) -> None:
        """Undo the update that came after a snapshot, if there was one.

        Args:
            mark: the result of `mark`.
        """
        if not self.fields:
            self.fill(mark)
        for name, value in zip(self.fields, mark, strict=False):
            setattr(self, name, value)

    def to_static(self, size: StaticSize) -> Cache:
        """Return a copy whose steps of one token per row can be captured as a CUDA graph.

        Args:
            size: the largest number of tokens of a row, the rows, and the device.

        Returns:
            The static form, with the contents of this cache.

        Raises:
            ArgumentError: this kind of cache has no static form, or it holds nothing yet.
        """
        if self.static_step_refusal is not None:
            raise ArgumentError(
                f"a {type(self).__name__} cache has no static form: {self.static_step_refusal}; "
                'choose cache="growing", "fixed", "ring" or "streaming"'
            )
        if not self.contents():
            raise ArgumentError(
                f"a {type(self).__name__} cache that holds nothing has no static form; read a "
                "prompt first"
            )
        return self._to_static(size)

    def _to_static(self, size: StaticSize) -> Cache:
        """Return the static form of a cache that has one and holds something."""
        raise NotImplementedError(f"{type(self).__name__} makes no static form")

    def open_slot(self, positions: Positions) -> OpenSlot | None:
        """Return memory into which a compiled step may write the memory of new tokens.

        The contents do not change before `close_slot` is called.

        Args:
            positions: the positions of the new tokens, of one per row, or of one row.

        Returns:
            The buffers and the slot; None if `update` is to be used.
        """
        return None

    def close_slot(self, opened: OpenSlot, positions: Positions) -> None:
        """Count the slot of `open_slot` as written, as `update` would have written it.

        Args:
            opened: the result of `open_slot`; the caller writes the slot before anything else.
            positions: the positions of all slots with the new token.
        """
        raise NotImplementedError(f"{type(self).__name__} opens no slots")

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
    """Create an empty cache that keeps every token, by the name of its kind.

    Args:
        kind: "growing", "fixed", "paged", "quantized" (8 bits, except for the last 128 slots),
            "fp8", or the `kind` of your own class.
        slots: the largest number of slots per row, for "fixed" and "paged".
        rows: the number of batch rows; a paged cache has pages for all of them.
        widths: the last dimension of each part of the memory, for "quantized" and "fp8".

    Returns:
        The cache.

    Raises:
        ArgumentError: the kind is unknown, or `slots` is needed and missing.

    >>> make_full_cache("paged", 100, rows=2).settings
    {'page_size': 16, 'pages': 14}
    """
    kind_class = CACHES.find(kind, [name for name, x in CACHES if not x.evicts])
    if kind_class.needs_slots and slots is None:
        raise ArgumentError(f"a {kind} cache needs slots, the largest number of slots per row")
    return kind_class.for_layer(LayerSize(slots, rows, tuple(widths)))


class ForwardingCache(Cache):
    """A cache that keeps its contents in another one."""

    _store: Cache

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Store the memory of new tokens, and return all that is visible."""
        return self._store.update(memory, positions)

    def crop(self, length: int) -> None:
        """Remove every token at position `length` or later."""
        self._store.crop(length)

    def contents(self) -> Contents:
        """Return the contents of the other cache."""
        return self._store.contents()

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace the contents of the other cache."""
        self._store.fill(contents)

    def mark(self) -> object:
        """Return a snapshot of the other cache."""
        return self._store.mark()

    def restore(self, mark: Any) -> None:
        """Undo the update that came after a snapshot of the other cache."""
        self._store.restore(mark)

    def __len__(self) -> int:
        return len(self._store)


class rollback_on_error:  # noqa: N801  (a context manager, used like a function)
    """Context manager that restores caches to their earlier state if its block raises.

    Blocks may be nested. A model opens one for the caches of all layers with `layers=True`, whose
    snapshot the block of each layer uses.

    Args:
        *caches: the caches; None is ignored.
        layers: whether the first inner block of each cache uses this block's snapshot.

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
        self._marks: list[tuple[Cache, object]] = []

    def __enter__(self) -> None:
        marks = self._marks = []
        for cache in self._caches:
            if cache is not None:
                offered, cache._offered_mark = cache._offered_mark, None
                marks.append((cache, cache.mark() if offered is None else offered[0]))
        if self._layers:  # a cache that is passed twice offers its first mark
            for cache, mark in reversed(marks):
                cache._offered_mark = (mark,)

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        if self._layers:
            for cache, _ in self._marks:
                cache._offered_mark = None
        if kind is not None:
            for cache, mark in self._marks:
                cache.restore(mark)


def check_update(memory: Parts, positions: Positions) -> None:
    """Raise unless new memory is parts `[B, n, T, d]` of one batch with one position per slot."""
    if not isinstance(positions, Span):
        _check_integers(positions)
    length = slot_count(positions)
    batches = [new.shape[0] for new in memory]
    for i, new in enumerate(memory):
        if new.ndim != 4 or new.shape[2] != length:
            raise ArgumentError(
                f"memory {i} is {tuple(new.shape)} at {plural(length, 'position')}; it must be "
                "[batch, heads, length, dim] with one position per slot"
            )
    # torch.jit.trace makes tensors of sizes: they can be compared, but not be keys of a dictionary
    if any(batches[0] != B for B in batches):
        sizes = " and ".join(str(B) for B in dict.fromkeys(batches))
        raise ArgumentError(f"memory has parts of batch {sizes}; all must have the same batch size")
    for B in batches[:1]:
        if not isinstance(positions, Span) and positions.shape[0] not in (1, B):
            raise ArgumentError(
                f"positions are {tuple(positions.shape)} for memory of batch {B}; they must be "
                f"({B}, {length}) or (1, {length})"
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


def check_same_layout(stored: Parts, memory: Parts) -> None:
    """Raise unless new memory has the parts, sizes, dtypes and devices of the old one."""
    fits = len(stored) == len(memory)
    for old, new in zip(stored, memory, strict=False):
        a, b = old.shape, new.shape
        fits = fits and a[:2] == b[:2] and a[3] == b[3]
        fits = fits and old.dtype == new.dtype and old.device == new.device
    if fits:  # the details are computed only for an error
        return
    expected, actual = ([_layout(m) for m in ms] for ms in (stored, memory))
    if expected != actual:
        raise ArgumentError(
            f"memory {actual} does not fit the contents of the cache, {expected}; start a new "
            "cache for another batch or model"
        )
    for i, (old, new) in enumerate(zip(stored, memory, strict=True)):
        if old.device != new.device:
            raise ArgumentError(
                f"memory {i} is on {new.device}, and the cache holds it on {old.device}; move it "
                "with .to()"
            )


def check_crop(length: int) -> None:
    """Raise if a length to crop to is negative."""
    if length < 0:
        raise ArgumentError(f"crop length is {length}; it must be 0 or more")


def parts_of(contents: Mapping[str, Tensor | Span | int], name: str = "memory") -> Parts:
    """Return the parts `<name>.0`, `<name>.1`, ... of contents as a tuple."""
    parts: list[Tensor] = []
    while isinstance(x := contents.get(f"{name}.{len(parts)}"), Tensor):
        parts.append(x)
    return tuple(parts)


def named_parts(memory: Parts, name: str = "memory") -> dict[str, Tensor]:
    """Return parts as contents with the names `<name>.0`, `<name>.1`, ..."""
    return {f"{name}.{i}": m for i, m in enumerate(memory)}


def positions_before(positions: Positions, length: int) -> Positions:
    """Return the positions with every slot at `length` or later set to -1 or left out."""
    if isinstance(positions, Span):
        return Span(positions.start, min(positions.length, max(0, length - positions.start)))
    return positions.masked_fill(as_tensor(positions) >= length, -1)


def _layout(memory: Tensor) -> tuple[tuple[int, int, int], torch.dtype]:
    """Return the properties that no update may change: (batch, heads, dim) and the dtype."""
    return (memory.shape[0], memory.shape[1], memory.shape[3]), memory.dtype


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the number of bytes of some tensors."""
    return sum(x.numel() * x.element_size() for x in tensors)


def _copy(x: Tensor | Span | int) -> Tensor | Span | int:
    return x.clone() if isinstance(x, Tensor) else x


def _select_rows(x: Tensor | Span | int, rows: Tensor, batch: int | None) -> Tensor | Span | int:
    if not isinstance(x, Tensor) or x.shape[0] != batch:
        return x  # shared by all rows
    return x.index_select(0, rows.to(x.device))
