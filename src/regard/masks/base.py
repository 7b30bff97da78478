"""The base class `Mask`, `Reach` and `Refusal`, and the combinations `And`, `Or`, `Not`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property, reduce
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Int, Int8
from torch import Tensor

from regard.argument_checks import check_int
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks.tiling import (
    UNKNOWN,
    CallSlice,
    Intervals,
    SlotPair,
    and_states,
    broadcast,
    clear_rows,
    complement,
    count_filled_slots,
    count_visible,
    device_of_positions,
    evaluate_unknown_blocks,
    intersect,
    normalize_intervals,
    not_states,
    or_states,
    states_from_intervals,
    states_without_rows,
    to_4d,
    union,
)
from regard.registry import Registry
from regard.serialization import Serializable
from regard.span import Positions, Span, as_tensor, find_empty_slots, slice_positions, slot_count

Lengths: TypeAlias = Sequence[int] | Tensor
"""A sequence or 1-D tensor of integers, such as one length per batch row."""


def check_ints(name: str, xs: object, least: int) -> tuple[int, ...]:
    """Return a sequence or 1-D tensor of ints, each at least `least`, as a tuple."""
    if isinstance(xs, Tensor):
        xs = xs.tolist()
    if isinstance(xs, (str, bytes)) or not isinstance(xs, Iterable):
        raise ArgumentTypeError(
            f"{name} is {type(xs).__name__} {xs!r}; it must be a sequence of ints"
        )
    return tuple(check_int(f"{name}[{i}]", x, least) for i, x in enumerate(xs))


ALL_SLOTS = slice(None)
"""The slice of all queries or all keys of a call."""
ROWS_AT_ONCE = 128
"""The number of queries for which a mask without intervals is evaluated at a time."""


@dataclass(frozen=True)
class Reach:
    """The old keys that a later query may still see; a cache may evict all others.

    For a query at p: the keys at k > p - window, and those at the first `sinks` positions.

    Args:
        window: the keys back from the query, its own included; None means all.
        sinks: the number of positions at the start of the sequence that stay visible.

    >>> Reach(window=8, sinks=4).tokens
    12
    """

    window: int | None
    sinks: int = 0

    @property
    def tokens(self) -> int | None:
        """The most keys that a query may see up to its own; None without a bound."""
        return None if self.window is None else self.window + self.sinks


RefusalKey: TypeAlias = Literal[
    "outside", "inside", "future", "padding", "document", "chunk", "selected", "given"
]
"""The names of the translated sentences of a report page on forbidden keys."""


class Refusal(NamedTuple):
    """The reason why a mask forbids a query to attend to a key.

    Attributes:
        words: the reason in English, for a terminal: "outside window 512".
        key: the name of the sentence in the language tables (`why.<key>`).
        mask: the text of the mask, which the sentence quotes.
    """

    words: str
    key: RefusalKey
    mask: str


MASKS: Registry[Mask] = Registry("mask")
"""All mask classes by their `kind`, the name that `parse` reads and that recordings store."""


@dataclass(frozen=True, eq=False)
class Mask(Serializable, ABC):
    """A frozen rule on absolute positions that says which keys a query may attend to.

    Masks with equal fields are equal (tensors by identity). A slot at position -1 holds no token:
    it sees nothing and is never visible, also under `~`, because the public methods see to it.

    A new mask is a subclass, decorated with `@dataclass(frozen=True, eq=False)`, with `allows`,
    which depends on fields and positions only, and `_intervals` where the visible keys have a
    closed form; both ignore empty slots. `masks.parse`, `regard show` and recordings find it by its
    name or `kind`.

    >>> from regard import masks
    >>> mask = masks.Causal() & masks.Window(4) | masks.Sinks(1)
    >>> print(mask)
    causal & window(4) | sinks(1)
    >>> mask.count(Span(0, 8), Span(0, 8))
    30
    """

    has_text: ClassVar[bool] = True
    """Whether the mask can be written as text. It is False if fields are tensors or functions."""
    why_hidden: ClassVar[tuple[str, RefusalKey]] = ("outside {}", "outside")
    """The words and the key of `refusal`; {} stands for the mask, {name} for one of its fields."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = cls.__dict__.get("kind", cls.__name__).lower()
        MASKS.register(cls.kind, cls)

    @abstractmethod
    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Evaluate the rule for positions.

        Args:
            q: positions of queries, `[B or 1, 1, T, 1]`.
            k: positions of keys, `[B or 1, 1, 1, S]`.

        Returns:
            A bool tensor that broadcasts to `[B, H, T, S]`, True where a query may attend.
        """

    def block(
        self,
        q_positions: Positions,
        k_positions: Positions,
        rows: slice = ALL_SLOTS,
        columns: slice = ALL_SLOTS,
        *,
        device: torch.device | str | None = None,
    ) -> Bool[Tensor, "B H t s"]:
        """Return the dense mask of a slice of an attention call.

        Args:
            q_positions, k_positions: positions of all T queries and S keys of the call.
            rows, columns: the t queries and s keys to include; all by default.
            device: where to compute; by default the device of the positions.

        Returns:
            A bool tensor `[B or 1, H or 1, t, s]`, False at empty slots.

        >>> from regard import masks
        >>> masks.Causal().block(Span(0, 3), Span(0, 3)).int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]]
        """
        device = device_of_positions(q_positions, k_positions, device)
        part = CallSlice(q_positions, k_positions, rows, columns, device)
        out, keys = self._block(part), slice_positions(k_positions, columns)
        if not isinstance(keys, Span) or keys.start < 0:
            out = out & (part.k >= 0)[:, None, None]
        if (empty := find_empty_slots(slice_positions(q_positions, rows), device)) is not None:
            out = out & ~empty[:, None, :, None]
        return out.expand(-1, -1, slot_count(slice_positions(q_positions, rows)), slot_count(keys))

    def _block(self, part: CallSlice) -> Tensor:
        """Return the rule for a slice of a call as a 4-D tensor, without regard to empty slots."""
        return to_4d(self.allows(part.q[:, None, :, None], part.k[:, None, None, :]))

    def intervals(
        self, q: Positions, *, device: torch.device | str | None = None
    ) -> Intervals | None:
        """Return the key positions that each query sees, as ranges.

        Args:
            q: positions of t queries.
            device: where to compute; by default the device of the positions.

        Returns:
            n half-open ranges per query, disjoint and sorted: int64 `[B or 1, H or 1, t, n]`; one
            without an end stops at `UNBOUNDED`, 2^62. None if the rule has no closed form.

        >>> from regard import masks
        >>> ranges = (masks.Causal() & masks.Window(2)).intervals(torch.tensor([[0, 5]]))
        >>> ranges.starts.tolist(), ranges.stops.tolist()
        ([[[[0], [4]]]], [[[[1], [6]]]])
        """
        positions = as_tensor(q, device)
        ranges = self._ranges(positions if device is None else positions.to(device))
        if ranges is None or (empty := find_empty_slots(q, device)) is None:
            return ranges
        return clear_rows(ranges, empty)

    def _ranges(self, q: Tensor) -> Intervals | None:
        """Return the normalized intervals of queries `[B or 1, t]`."""
        ranges = self._intervals(q.long()[:, None, :, None])
        return None if ranges is None else normalize_intervals(Intervals(*broadcast(*ranges)))

    def _intervals(self, q: Tensor) -> Intervals | None:
        """Return the ranges of key positions by the rule alone, or None if there is no closed form.

        They may overlap, or begin below 0; `q` is `[B or 1, 1, t, 1]`.
        """
        return None

    def tiles(
        self,
        q_positions: Positions,
        k_positions: Positions,
        size: tuple[int, int] = (128, 128),
        *,
        device: torch.device | str | None = None,
    ) -> Int8[Tensor, "B H nQ nK"]:
        """Classify each tile of the call as empty, partial or full, without the T x S mask.

        Args:
            q_positions, k_positions: positions of the T queries and S keys.
            size: queries and keys per tile.
            device: where to compute; by default the device of the positions.

        Returns:
            An int8 tensor `[B or 1, H or 1, nQ, nK]` of EMPTY = 0, PARTIAL = 1 and FULL = 2, exact.

        Raises:
            ArgumentError: a tile size is less than 1.

        >>> from regard import masks
        >>> masks.Causal().tiles(Span(0, 8), Span(0, 8), (4, 4)).tolist()
        [[[[1, 0], [2, 1]]]]
        """
        bq, bk = size
        if bq < 1 or bk < 1:
            raise ArgumentError(f"tile size is {size}; both sizes must be 1 or more")
        T = slot_count(q_positions)
        tile_rows = [
            self.tile_row(q_positions, k_positions, slice(i, min(i + bq, T)), bk, device=device)
            for i in range(0, T, bq)
        ]
        if not tile_rows:
            device = device_of_positions(q_positions, k_positions, device)
            return torch.zeros(
                1, 1, 0, -(-slot_count(k_positions) // bk), dtype=torch.int8, device=device
            )
        return torch.stack(broadcast(*tile_rows), 2)

    def tile_row(
        self,
        q_positions: Positions,
        k_positions: Positions,
        rows: slice,
        bk: int,
        *,
        device: torch.device | str | None = None,
    ) -> Int8[Tensor, "B H nK"]:
        """Classify the tiles of one block of queries; kernels call this once per block.

        Args:
            q_positions, k_positions: positions of the T queries and S keys of the call.
            rows: the slice of the queries in the block.
            bk: keys per tile.
            device: where to compute; by default the device of the positions.

        Returns:
            An int8 tensor `[B or 1, H or 1, nK]` of EMPTY, PARTIAL and FULL.
        """
        S, device = slot_count(k_positions), device_of_positions(q_positions, k_positions, device)
        queries = slice_positions(q_positions, rows)
        if S == 0 or slot_count(queries) == 0:
            return torch.zeros(1, 1, -(-S // bk), dtype=torch.int8, device=device)

        def evaluate(columns: slice) -> Tensor:
            return self.block(q_positions, k_positions, rows, columns, device=device)

        part = CallSlice(q_positions, k_positions, rows, ALL_SLOTS, device)
        if (ranges := self.intervals(queries, device=device)) is not None:
            states = states_from_intervals(ranges, part.keys, bk)
        else:
            states = states_without_rows(
                self._states_without_intervals(part, bk), find_empty_slots(queries, device)
            )
        return evaluate_unknown_blocks(
            states, count_filled_slots(k_positions, bk).to(device), S, bk, evaluate
        )

    def _states(self, part: CallSlice, bk: int) -> Tensor:
        """Return the tile states `[B or 1, H or 1, nK]` without evaluating the rule for pairs.

        A tile whose state cannot be derived otherwise is UNKNOWN; empty slots do not count.
        """
        ranges = self._ranges(part.q)
        return (
            self._states_without_intervals(part, bk)
            if ranges is None
            else states_from_intervals(ranges, part.keys, bk)
        )

    def _states_without_intervals(self, part: CallSlice, bk: int) -> Tensor:
        """Return the tile states for a mask without intervals: UNKNOWN everywhere by default."""
        nK = -(-slot_count(part.k_positions) // bk)
        return torch.full((1, 1, nK), UNKNOWN, dtype=torch.int8, device=part.device)

    def visible(
        self,
        q_positions: Positions,
        k_positions: Positions,
        *,
        device: torch.device | str | None = None,
    ) -> Int[Tensor, "B H T"]:
        """Count the keys that each query sees.

        Args:
            q_positions, k_positions: positions of the T queries and S keys.
            device: where to compute; by default the device of the positions.

        Returns:
            An int64 tensor `[B or 1, H or 1, T]`.

        >>> from regard import masks
        >>> masks.Window(2).visible(Span(0, 4), Span(0, 4)).tolist()
        [[[4, 4, 3, 2]]]
        """
        device = device_of_positions(q_positions, k_positions, device)
        ranges = self.intervals(q_positions, device=device)
        if ranges is not None:
            keys = k_positions if isinstance(k_positions, Span) else k_positions.to(device)
            return count_visible(ranges, keys)
        T = max(slot_count(q_positions), 1)
        counts = [
            self.block(q_positions, k_positions, slice(i, i + ROWS_AT_ONCE), device=device).sum(-1)
            for i in range(0, T, ROWS_AT_ONCE)
        ]
        return torch.cat(counts, -1)

    def count(self, q_positions: Positions, k_positions: Positions) -> int:
        """Count the visible query-key pairs.

        Pairs count for each batch row and head if these differ in the mask.

        Args:
            q_positions, k_positions: positions of the queries and keys.

        Returns:
            The number of pairs.

        >>> from regard import masks
        >>> masks.Causal().count(Span(0, 64), Span(0, 64))
        2080
        """
        return int(self.visible(q_positions, k_positions).sum())

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that the mask fits an attention call of this shape.

        Args:
            B, H, T, S: batch size, query heads, queries and keys.

        Raises:
            ArgumentError: the mask stores values for another number of one of these.
        """

    def mask_mod(
        self, q_positions: Positions, k_positions: Positions
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return the rule as a `mask_mod` function for `torch.nn.attention.flex_attention`.

        Args:
            q_positions, k_positions: positions of the queries and keys of the call.

        Returns:
            A function `mask_mod(b, h, q_idx, kv_idx)` of slot indices in this call.
        """
        device = device_of_positions(q_positions, k_positions, None)
        q_all, k_all = (as_tensor(x, device).to(device) for x in (q_positions, k_positions))
        empty = find_empty_slots(q_positions, device)

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            row = b * (q_all.shape[0] > 1)
            q, k = q_all[row, q_idx], k_all[b * (k_all.shape[0] > 1), kv_idx]
            visible = self._allows_pair(SlotPair(b, h, q_idx, kv_idx, q, k)) & (k >= 0)
            return visible if empty is None else visible & ~empty[row, q_idx]

        return mask_mod

    def _allows_pair(self, slot: SlotPair) -> Tensor:
        """Evaluate the rule for one pair of slots, as a scalar tensor; it runs under vmap."""
        out = to_4d(self.allows(slot.q.view(1, 1, 1, 1), slot.k.view(1, 1, 1, 1)))
        return out[slot.b * (out.shape[0] > 1), slot.h * (out.shape[1] > 1), 0, 0]

    def reach(self) -> Reach:
        """Return a bound on how far back a query may attend. By default, there is no bound.

        Returns:
            The keys that later queries may still see; a cache may evict the others.

        >>> from regard import masks
        >>> (masks.Causal() & (masks.Window(8) | masks.Sinks(4))).reach()
        Reach(window=8, sinks=4)
        """
        return Reach(None)

    def causal_from(self) -> int | None:
        """Return a position from which on every key is hidden from all earlier queries.

        Returns:
            0 for a causal mask, `UNBOUNDED` if none, None if only evaluation can tell.

        >>> from regard import masks
        >>> (masks.Causal() & masks.Chunk(4)).causal_from()
        0
        >>> (masks.Causal() | masks.Prefix(3)).causal_from()
        3
        """
        return None

    @cached_property
    def is_static(self) -> bool:
        """Whether the rule can never change: by default, if its fields are plain and static."""
        own = "__dataclass_fields__" in type(self).__dict__
        return own and all(_is_fixed(getattr(self, x.name)) for x in fields(self))

    @property
    def by_slot(self) -> bool:
        """Whether the mask refers to keys by their index in the call, as a dense tensor does."""
        return any(mask.by_slot for mask in self.members())

    def refusal(self) -> Refusal:
        """Return the reason why this mask forbids a query to attend to a key.

        Returns:
            The reason as text and as the name of a translated sentence.

        >>> from regard import masks
        >>> masks.Window(512).refusal().words, masks.Strided(4).refusal().words
        ('outside window 512', 'outside strided(4)')
        """
        words, key = self.why_hidden
        return Refusal(words.format(self, **vars(self)), key, str(self))

    def near_misses(self) -> tuple[Mask, ...]:
        """Return masks that a faulty kernel may have applied, such as an off-by-one window.

        Returns:
            The similar masks; none by default.
        """
        return ()

    def select_heads(self, heads: slice) -> Mask:
        """Return the mask of some of the query heads.

        Args:
            heads: the slice of the query heads.

        Returns:
            A mask for these heads; the mask itself if all heads share it.
        """
        return self

    def terms(self) -> tuple[Mask, ...]:
        """Return the masks that are combined by `&`.

        Returns:
            The members of an `And`; for any other mask, the mask alone.
        """
        return (self,)

    def operands(self) -> tuple[Mask, ...]:
        """Return the members of a combination by `&` or `|`.

        Returns:
            The members; none for a mask that is not a combination.
        """
        return ()

    def members(self) -> tuple[Mask, ...]:
        """Return the masks that are stored in the fields of this mask.

        Returns:
            The masks in the order of the fields.
        """
        values = (getattr(self, x.name) for x in fields(self))
        inside = (x for value in values for x in (value if isinstance(value, tuple) else (value,)))
        return tuple(x for x in inside if isinstance(x, Mask))

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Mask:
        """Return the same mask with each tensor replaced.

        Args:
            change: a function from an old tensor to its replacement.

        Returns:
            A new mask; the mask itself if no tensor changed.
        """
        old = {x.name: getattr(self, x.name) for x in fields(self) if x.init}
        new = {name: _with_tensors(value, change) for name, value in old.items()}
        return replace(self, **new) if any(new[name] is not old[name] for name in old) else self

    def __and__(self, other: Mask) -> Mask:
        return And((self, other)) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Or((self, other)) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)

    def _key(self) -> tuple[object, ...]:
        values = (getattr(self, field.name) for field in fields(self))
        return (type(self), *(id(x) if isinstance(x, Tensor) else x for x in values))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        shown = [
            repr(value) if field.default is MISSING else f"{field.name}={value!r}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return self.kind + f"({', '.join(shown)})" * bool(shown)


def reach(mask: Mask | None) -> Reach:
    """Return the old keys that queries under a mask may still see.

    Args:
        mask: the mask; None means that all keys are visible.

    Returns:
        The reach of the mask.

    >>> from regard.masks import Causal, Window
    >>> reach(Causal() & Window(8)), reach(None)
    (Reach(window=8, sinks=0), Reach(window=None, sinks=0))
    """
    return Reach(None) if mask is None else mask.reach()


def _is_fixed(x: object) -> bool:
    """Return whether the value of a field can never change; see `Mask.is_static`."""
    if isinstance(x, tuple):
        return all(map(_is_fixed, x))
    return x.is_static if isinstance(x, Mask) else isinstance(x, int | float | str | None)


def _with_tensors(x: object, change: Callable[[Tensor], Tensor]) -> object:
    """Return the value of a field with its tensors replaced; the same object if nothing changed."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, Mask):
        return x.with_tensors(change)
    if isinstance(x, tuple):
        new = tuple(_with_tensors(y, change) for y in x)
        return new if any(a is not b for a, b in zip(new, x, strict=True)) else x
    return x


def widest_reach(bounds: Sequence[Reach]) -> Reach:
    """Return a reach that covers all of the given ones."""
    windows = [x.window for x in bounds if x.window is not None]
    if len(windows) < len(bounds):
        return Reach(None)
    return Reach(max(windows), max(x.sinks for x in bounds))


def last_causal_from(masks: Sequence[Mask]) -> int | None:
    """Return the largest `Mask.causal_from` of masks of which each adds visible keys."""
    positions = [mask.causal_from() for mask in masks]
    known = [x for x in positions if x is not None]
    return max(known) if len(known) == len(positions) else None


class Operation(NamedTuple):
    """One operation on what masks allow, on their intervals, and on the states of tiles."""

    on_bool: Callable[[Tensor, Tensor], Tensor]
    on_intervals: Callable[[Intervals, Intervals], Intervals]
    on_states: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class _Combination(Mask):
    """Masks combined by one operation, flattened: (a & b) & c stores a, b and c."""

    has_text: ClassVar[bool] = False  # text uses the operators instead
    operation: ClassVar[Operation]

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        name = type(self).__name__
        flat: list[Mask] = []
        for mask in self.masks:
            if not isinstance(mask, Mask):
                raise ArgumentTypeError(
                    f"{name} got {type(mask).__name__}; it takes masks of regard.masks"
                )
            flat += mask.masks if isinstance(mask, type(self)) else [mask]
        if not flat:
            raise ArgumentError(f"{name} got no masks; give at least one")
        object.__setattr__(self, "masks", tuple(flat))

    def operands(self) -> tuple[Mask, ...]:
        """Return the masks that are combined."""
        return self.masks

    def select_heads(self, heads: slice) -> Mask:
        """Apply `select_heads` to each member."""
        return type(self)(tuple(mask.select_heads(heads) for mask in self.masks))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that each member fits the call."""
        for mask in self.masks:
            mask.require(B, H, T, S)

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return the members' rules, joined."""
        return reduce(self.operation.on_bool, (mask.allows(q, k) for mask in self.masks))

    def _block(self, part: CallSlice) -> Tensor:
        return reduce(self.operation.on_bool, (mask._block(part) for mask in self.masks))

    def _allows_pair(self, slot: SlotPair) -> Tensor:
        return reduce(self.operation.on_bool, (mask._allows_pair(slot) for mask in self.masks))

    def _intervals(self, q: Tensor) -> Intervals | None:
        """Return the members' intervals, joined, or None if a member has none."""
        intervals = []
        for mask in self.masks:
            ranges = mask._ranges(q[:, 0, :, 0])
            if ranges is None:
                return None
            intervals.append(ranges)
        return reduce(self.operation.on_intervals, intervals)

    def _states_without_intervals(self, part: CallSlice, bk: int) -> Tensor:
        return reduce(self.operation.on_states, (mask._states(part, bk) for mask in self.masks))


@dataclass(frozen=True, eq=False)
class And(_Combination):
    """The intersection of masks: a key is visible if all members allow it; `a & b` creates it.

    Args:
        masks: the members; a member that is an `And` is flattened.

    Raises:
        ArgumentError, ArgumentTypeError: no members, or members that are not masks.

    >>> from regard.masks import Causal, Sinks, Window
    >>> print(Causal() & (Window(4) | Sinks(1)))
    causal & (window(4) | sinks(1))
    """

    kind = "all"  # in recordings, too
    operation = Operation(torch.logical_and, intersect, and_states)

    def terms(self) -> tuple[Mask, ...]:
        """Return the masks that are combined."""
        return self.masks

    def causal_from(self) -> int | None:
        """Return the smallest position of the members, since each of them bounds the whole."""
        positions = [mask.causal_from() for mask in self.masks]
        known = [x for x in positions if x is not None]
        return min(known) if known else None  # torch.compile traces no `default`

    def reach(self) -> Reach:
        """Return the smallest reach of the members, since each of them bounds the whole."""
        bounds = [mask.reach() for mask in self.masks]
        return min(bounds, key=lambda x: float("inf") if x.tokens is None else x.tokens)

    def __str__(self) -> str:
        return " & ".join(f"({mask})" if isinstance(mask, Or) else str(mask) for mask in self.masks)


@dataclass(frozen=True, eq=False)
class Or(_Combination):
    """The union of masks: a key is visible if a member allows it; `a | b` creates it.

    Args:
        masks: the members; a member that is an `Or` is flattened.

    Raises:
        ArgumentError, ArgumentTypeError: no members, or members that are not masks.

    >>> from regard.masks import Causal, Sinks, Window
    >>> print(Causal() & Window(4) | Sinks(1))
    causal & window(4) | sinks(1)
    """

    kind = "any"  # in recordings, too
    operation = Operation(torch.logical_or, union, or_states)

    def causal_from(self) -> int | None:
        """Return the largest position of the members."""
        return last_causal_from(self.masks)

    def reach(self) -> Reach:
        """Return a reach that covers the reach of each member."""
        return widest_reach([mask.reach() for mask in self.masks])

    def __str__(self) -> str:
        return " | ".join(map(str, self.masks))


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """The complement of a mask: a key is visible if the mask forbids it. `~a` creates it.

    A slot at position -1 stays invisible.

    Args:
        mask: the mask to negate.

    Raises:
        ArgumentTypeError: `mask` is not a mask.

    >>> from regard.masks import Causal, Window
    >>> print(Causal() & ~Window(4))
    causal & ~window(4)
    """

    has_text: ClassVar[bool] = False  # text uses the operator instead

    mask: Mask

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise ArgumentTypeError(
                f"Not got {type(self.mask).__name__}; it takes a mask of regard.masks"
            )

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return the logical not of the mask's rule."""
        return ~self.mask.allows(q, k)

    def _block(self, part: CallSlice) -> Tensor:
        return ~self.mask._block(part)

    def _allows_pair(self, slot: SlotPair) -> Tensor:
        return ~self.mask._allows_pair(slot)

    def _intervals(self, q: Tensor) -> Intervals | None:
        ranges = self.mask._ranges(q[:, 0, :, 0])
        return None if ranges is None else complement(ranges)

    def _states_without_intervals(self, part: CallSlice, bk: int) -> Tensor:
        return not_states(self.mask._states(part, bk))

    def select_heads(self, heads: slice) -> Mask:
        """Return the complement of the mask of these heads."""
        return Not(self.mask.select_heads(heads))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that the negated mask fits the call."""
        self.mask.require(B, H, T, S)

    def refusal(self) -> Refusal:
        """Explain that the key is inside the negated mask."""
        words = self.mask.refusal().words
        outside = "outside "
        inner = words.removeprefix(outside) if words.startswith(outside) else str(self.mask)
        return Refusal(f"inside {inner}", "inside", str(self.mask))

    def __str__(self) -> str:
        return f"~({self.mask})" if isinstance(self.mask, _Combination) else f"~{self.mask}"
