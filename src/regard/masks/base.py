"""What a mask is: a rule on positions, and what it says of itself: its structure, its reach and
its words. `&`, `|` and `~` make masks of masks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property, reduce
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Int, Int8
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks.tiling import (
    UNKNOWN,
    Intervals,
    and_states,
    broadcast,
    clear_rows,
    complement,
    count_held,
    count_visible,
    evaluate_unknown_blocks,
    intersect,
    normalize_intervals,
    not_states,
    or_states,
    states_from_intervals,
    states_without_rows,
    union,
)
from regard.registry import Registry
from regard.serialization import Serializable
from regard.span import Positions, Span, as_tensor, find_empty_slots, slice_positions, slot_count
from regard.untrusted_text import short_repr


class CallSlice(NamedTuple):
    """Some rows and columns of a call, and the device to compute on."""

    q_positions: Positions
    k_positions: Positions
    rows: slice
    columns: slice
    device: torch.device

    @property
    def q(self) -> Tensor:
        """The positions of the queries, [B or 1, t]."""
        return as_tensor(slice_positions(self.q_positions, self.rows), self.device).to(self.device)

    @property
    def k(self) -> Tensor:
        """The positions of the keys, [B or 1, s]."""
        return as_tensor(slice_positions(self.k_positions, self.columns), self.device).to(
            self.device
        )

    @property
    def keys(self) -> Positions:
        """The positions of all keys, a Span as it is."""
        keys = self.k_positions
        return keys if isinstance(keys, Span) else keys.to(self.device)


class SlotPair(NamedTuple):
    """One pair of slots of a call, scalars: its batch row, head and places, and the positions
    stored there.
    """

    b: Tensor
    h: Tensor
    q_idx: Tensor
    kv_idx: Tensor
    q: Tensor
    k: Tensor


def device_of_positions(
    q: Positions, k: Positions, device: torch.device | str | None
) -> torch.device:
    """The device that was asked for, else that of the stored positions, else the CPU."""
    if device is None:
        device = next((x.device for x in (k, q) if isinstance(x, Tensor)), "cpu")
    return torch.device(device)


Lengths: TypeAlias = Sequence[int] | Tensor

MAX_INT = (1 << 62) - 1


def check_int(name: str, x: object, least: int, advice: str = "") -> int:
    """x as an int of at least `least`, with room for a sum of two in 64 bits; `name` is "Window
    size" or the like.
    """
    if isinstance(x, bool) or not isinstance(x, int):
        raise ArgumentTypeError(
            f"{name} is {_type_and_value(x)}; it must be an int, {least} or more"
        )
    if x < least:
        raise ArgumentError(f"{name} is {x}; it must be {least} or more{advice and ': ' + advice}")
    if x > MAX_INT:
        raise ArgumentError(
            f"{name} is {short_repr(x)}; positions have 64 bits: give at most {MAX_INT}"
        )
    return x


def check_ints(name: str, xs: object, least: int) -> tuple[int, ...]:
    """xs, a sequence or 1-D tensor of ints of at least `least`, as a tuple."""
    if isinstance(xs, Tensor):
        xs = xs.tolist()
    if isinstance(xs, (str, bytes)) or not isinstance(xs, Iterable):
        raise ArgumentTypeError(f"{name} is {_type_and_value(xs)}; it must be a sequence of ints")
    return tuple(check_int(f"{name}[{i}]", x, least) for i, x in enumerate(xs))


def to_4d(x: Tensor) -> Tensor:
    """x with dimensions of size 1 in front, 4 in all."""
    return x if x.ndim == 4 else x[(None,) * (4 - x.ndim)]


def check_batch_rows(mask: str, rows: int, B: int) -> None:
    """The mask holds something for each of `rows` batch rows; a call has B."""
    if rows not in (1, B):
        raise ArgumentError(
            f"{mask} holds {rows} batch rows, but the call has batch {B}; "
            f"give one entry per batch row, or one for all"
        )


def _type_and_value(x: object) -> str:
    return f"{type(x).__name__} {x!r}"


ALL_SLOTS = slice(None)
ROWS_AT_ONCE = 128
"""Queries that are evaluated together, where a mask has no intervals."""


@dataclass(frozen=True)
class Reach:
    """Which old keys a later query may still see: those at the first `sinks` positions, and those
    with p - window < k for a query at position p. A cache may forget all others.

    Args:
        window: the last keys, the query's own included; None is all of them.
        sinks: the first positions.

    >>> Reach(window=8, sinks=4).tokens
    12
    """

    window: int | None
    sinks: int = 0

    @property
    def tokens(self) -> int | None:
        """The most keys behind a query, its own included; None without a bound."""
        return None if self.window is None else self.window + self.sinks


RefusalKey: TypeAlias = Literal[
    "outside", "inside", "future", "padding", "document", "chunk", "selected", "given"
]
"""The sentences that a page has for a refusal, in each of its languages."""


class Refusal(NamedTuple):
    """Why a mask keeps a query from a key.

    Attributes:
        words: in English, for a terminal: "outside window 512".
        key: the sentence that a page says in its own language, `why.<key>` of its strings.
        mask: what the sentence names.
    """

    words: str
    key: RefusalKey
    mask: str


MASKS: Registry[Mask] = Registry("mask")
"""Every class of masks by its `kind`: what `parse` reads, and recordings are read back by."""


@dataclass(frozen=True, eq=False)
class Mask(Serializable, ABC):
    """A frozen rule on absolute positions: which key may a query see? `&`, `|` and `~` make masks
    of masks.

    Masks of equal fields are equal and hash alike; tensors in fields count by identity. A slot at
    position -1 holds nothing, whatever the rule says: as a key it is never visible, as a query it
    sees nothing. The public methods see to that once, for the mask as a whole, so that `~` cannot
    turn it round.

    A new mask is a subclass, `@dataclass(frozen=True, eq=False)`, here or in your own code. It
    writes `allows`, which depends on its fields and the positions alone, and `_intervals` where
    they have a closed form; both speak of tokens only. It may override `reach`, `refusal`,
    `near_misses`, `is_static` and `require`. The class is found by its name in small letters, or by
    `kind = "..."`: in `masks.parse`, `regard show` and recordings.

    >>> from regard import masks
    >>> mask = masks.Causal() & masks.Window(4) | masks.Sinks(1)
    >>> print(mask)
    causal & window(4) | sinks(1)
    >>> mask.count(Span(0, 8), Span(0, 8))
    30
    """

    has_text: ClassVar[bool] = True
    """Whether text can name the mask: not if its fields are tensors or functions."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = cls.__dict__.get("kind", cls.__name__).lower()
        MASKS.enter(cls.kind, cls)

    @abstractmethod
    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """The rule: positions q [B or 1, 1, T, 1] and k [B or 1, 1, 1, S] -> bool, broadcastable to
        [B, H, T, S].
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
        """The dense mask [B or 1, H or 1, t, s] of a slice of the call; a slot at position -1 sees
        nothing and is not seen.

        >>> from regard import masks
        >>> masks.Causal().block(Span(0, 3), Span(0, 3)).int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]]
        """
        device = device_of_positions(q_positions, k_positions, device)
        where = CallSlice(q_positions, k_positions, rows, columns, device)
        out, keys = self._block(where), slice_positions(k_positions, columns)
        if not isinstance(keys, Span) or keys.start < 0:
            out = out & (where.k >= 0)[:, None, None]
        if (empty := find_empty_slots(slice_positions(q_positions, rows), device)) is not None:
            out = out & ~empty[:, None, :, None]
        return out.expand(-1, -1, slot_count(slice_positions(q_positions, rows)), slot_count(keys))

    def _block(self, where: CallSlice) -> Tensor:
        """The rule, 4-D; empty slots are not looked at."""
        return to_4d(self.allows(where.q[:, None, :, None], where.k[:, None, None, :]))

    def intervals(
        self, q: Positions, *, device: torch.device | str | None = None
    ) -> Intervals | None:
        """The key positions that each query sees, as n half-open ranges, disjoint and sorted; None
        without structure.

        q: positions of the queries, t of them; the ranges are int64 [B or 1, H or 1, t, n] and may
            end at 2^62: without an end. A query at position -1 has none.

        >>> from regard import masks
        >>> found = (masks.Causal() & masks.Window(2)).intervals(torch.tensor([[0, 5]]))
        >>> found.starts.tolist(), found.stops.tolist()
        ([[[[0], [4]]]], [[[[1], [6]]]])
        """
        positions = as_tensor(q, device)
        found = self._ranges(positions if device is None else positions.to(device))
        if found is None or (empty := find_empty_slots(q, device)) is None:
            return found
        return clear_rows(found, empty)

    def _ranges(self, q: Tensor) -> Intervals | None:
        """The same by the rule alone, for q [B or 1, t]; empty slots are not looked at."""
        found = self._intervals(q.long()[:, None, :, None])
        return None if found is None else normalize_intervals(Intervals(*broadcast(*found)))

    def _intervals(self, q: Tensor) -> Intervals | None:
        """For q [B or 1, 1, t, 1]: ranges in any order, overlapping or not, below 0 or not."""
        return None

    def tiles(
        self,
        q_positions: Positions,
        k_positions: Positions,
        size: tuple[int, int] = (128, 128),
        *,
        device: torch.device | str | None = None,
    ) -> Int8[Tensor, "B H nQ nK"]:
        """EMPTY = 0, PARTIAL = 1 or FULL = 2 for each block of queries and keys, exactly; never a T
        x S mask at once.

        Raises:
            ArgumentError: a block size below 1.

        >>> from regard import masks
        >>> masks.Causal().tiles(Span(0, 8), Span(0, 8), (4, 4)).tolist()
        [[[[1, 0], [2, 1]]]]
        """
        bq, bk = size
        if bq < 1 or bk < 1:
            raise ArgumentError(f"tile size is {size}; both sizes must be 1 or more")
        T = slot_count(q_positions)
        lines = [
            self.tile_row(q_positions, k_positions, slice(i, min(i + bq, T)), bk, device=device)
            for i in range(0, T, bq)
        ]
        if not lines:
            return torch.zeros(
                1, 1, 0, -(-slot_count(k_positions) // bk), dtype=torch.int8, device=device
            )
        return torch.stack(broadcast(*lines), 2)

    def tile_row(
        self,
        q_positions: Positions,
        k_positions: Positions,
        rows: slice,
        bk: int,
        *,
        device: torch.device | str | None = None,
    ) -> Int8[Tensor, "B H nK"]:
        """The tiles of one block of queries, [B or 1, H or 1, nK]: what a kernel asks for when it
        comes to the block.
        """
        S, device = slot_count(k_positions), device_of_positions(q_positions, k_positions, device)
        queries = slice_positions(q_positions, rows)
        if S == 0 or slot_count(queries) == 0:
            return torch.zeros(1, 1, -(-S // bk), dtype=torch.int8, device=device)

        def evaluate(columns: slice) -> Tensor:
            return self.block(q_positions, k_positions, rows, columns, device=device)

        where = CallSlice(q_positions, k_positions, rows, ALL_SLOTS, device)
        if (found := self.intervals(queries, device=device)) is not None:
            states = states_from_intervals(found, where.keys, bk)
        else:
            states = states_without_rows(
                self._undecided(where, bk), find_empty_slots(queries, device)
            )
        return evaluate_unknown_blocks(
            states, count_held(k_positions, bk).to(device), S, bk, evaluate
        )

    def _states(self, where: CallSlice, bk: int) -> Tensor:
        """The states [B,H,nK] by the rule alone, over the keys that blocks hold, UNKNOWN where it
        must be evaluated.
        """
        found = self._ranges(where.q)
        return (
            self._undecided(where, bk)
            if found is None
            else states_from_intervals(found, where.keys, bk)
        )

    def _undecided(self, where: CallSlice, bk: int) -> Tensor:
        """The states where the mask has no intervals."""
        nK = -(-slot_count(where.k_positions) // bk)
        return torch.full((1, 1, nK), UNKNOWN, dtype=torch.int8, device=where.device)

    def visible(
        self,
        q_positions: Positions,
        k_positions: Positions,
        *,
        device: torch.device | str | None = None,
    ) -> Int[Tensor, "B H T"]:
        """How many keys each query sees, int64 [B or 1, H or 1, T].

        >>> from regard import masks
        >>> masks.Window(2).visible(Span(0, 4), Span(0, 4)).tolist()
        [[[4, 4, 3, 2]]]
        """
        device = device_of_positions(q_positions, k_positions, device)
        found = self.intervals(q_positions, device=device)
        if found is not None:
            keys = k_positions if isinstance(k_positions, Span) else k_positions.to(device)
            return count_visible(found, keys)
        T = max(slot_count(q_positions), 1)
        lines = [
            self.block(q_positions, k_positions, slice(i, i + ROWS_AT_ONCE), device=device).sum(-1)
            for i in range(0, T, ROWS_AT_ONCE)
        ]
        return torch.cat(lines, -1)

    def count(self, q_positions: Positions, k_positions: Positions) -> int:
        """The query-key pairs that are visible, over every batch row and head that the mask tells
        apart.

        >>> from regard import masks
        >>> masks.Causal().count(Span(0, 64), Span(0, 64))
        2080
        """
        return int(self.visible(q_positions, k_positions).sum())

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that the mask can serve a call of this shape.

        Raises:
            ArgumentError: the mask holds something per batch row, head, query or key, for another
                number of them.
        """

    def mask_mod(
        self, q_positions: Positions, k_positions: Positions
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The rule as a `mask_mod(b, h, q_idx, kv_idx)` of `torch.nn.attention.flex_attention`, for
        slots of this call.
        """
        device = device_of_positions(q_positions, k_positions, None)
        q_all, k_all = (as_tensor(x, device).to(device) for x in (q_positions, k_positions))
        empty = find_empty_slots(q_positions, device)

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            row = b * (q_all.shape[0] > 1)
            q, k = q_all[row, q_idx], k_all[b * (k_all.shape[0] > 1), kv_idx]
            seen = self._at(SlotPair(b, h, q_idx, kv_idx, q, k)) & (k >= 0)
            return seen if empty is None else seen & ~empty[row, q_idx]

        return mask_mod

    def _at(self, slot: SlotPair) -> Tensor:
        """The rule for one pair of slots, as a scalar; it runs under vmap."""
        out = to_4d(self.allows(slot.q.view(1, 1, 1, 1), slot.k.view(1, 1, 1, 1)))
        return out[slot.b * (out.shape[0] > 1), slot.h * (out.shape[1] > 1), 0, 0]

    def reach(self) -> Reach:
        """How far back the mask looks: a bound, which it keeps within. Without an override, all
        keys.

        >>> from regard import masks
        >>> (masks.Causal() & (masks.Window(8) | masks.Sinks(4))).reach()
        Reach(window=8, sinks=4)
        """
        return Reach(None)

    @cached_property
    def is_static(self) -> bool:
        """Whether the rule can never change, so that what was computed from it may be kept.

        Without an override: the class is a dataclass of its own, and its fields are numbers, words,
        None, static masks, or tuples of these.
        """
        own = "__dataclass_fields__" in type(self).__dict__
        return own and all(_is_fixed(getattr(self, x.name)) for x in fields(self))

    @property
    def by_slot(self) -> bool:
        """Whether the rule speaks of the keys' places in the call, as a dense tensor does, and not
        of their positions. Without an override: whether a mask in its fields does.
        """
        return any(mask.by_slot for mask in self.members())

    def refusal(self) -> Refusal:
        """Why this mask, as one rule, keeps a query from a key.

        >>> from regard import masks
        >>> masks.Window(512).refusal().words, masks.Strided(4).refusal().words
        ('outside window 512', 'outside strided(4)')
        """
        return Refusal(f"outside {self}", "outside", str(self))

    def near_misses(self) -> tuple[Mask, ...]:
        """Masks that a wrong kernel may have computed instead: a window that is one off."""
        return ()

    def select_heads(self, heads: slice) -> Mask:
        """The mask of some of the query heads; itself, unless it holds one for each head."""
        return self

    def terms(self) -> tuple[Mask, ...]:
        """The masks whose `&` this is: itself alone, unless it is an `All`."""
        return (self,)

    def operands(self) -> tuple[Mask, ...]:
        """The masks whose `&` or `|` this is, each of which may be why it says no; else none."""
        return ()

    def members(self) -> tuple[Mask, ...]:
        """The masks that stand in its fields."""
        values = (getattr(self, x.name) for x in fields(self))
        inside = (x for value in values for x in (value if isinstance(value, tuple) else (value,)))
        return tuple(x for x in inside if isinstance(x, Mask))

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Mask:
        """The same mask over other tensors: each tensor x in it is change(x).

        >>> from regard import masks
        >>> rule = masks.Causal() & masks.Dense(torch.ones(2, 2).bool())
        >>> rule.with_tensors(lambda x: ~x).block(Span(0, 2), Span(0, 2)).any().item()
        False
        """
        old = {x.name: getattr(self, x.name) for x in fields(self) if x.init}
        new = {name: _with_tensors(value, change) for name, value in old.items()}
        return replace(self, **new) if any(new[name] is not old[name] for name in old) else self

    def __and__(self, other: Mask) -> Mask:
        return All((self, other)) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Any((self, other)) if isinstance(other, Mask) else NotImplemented

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
    """The old keys that a mask may still show; no mask shows all of them.

    >>> from regard.masks import Causal, Window
    >>> reach(Causal() & Window(8)), reach(None)
    (Reach(window=8, sinks=0), Reach(window=None, sinks=0))
    """
    return Reach(None) if mask is None else mask.reach()


def _is_fixed(x: object) -> bool:
    if isinstance(x, tuple):
        return all(map(_is_fixed, x))
    return x.is_static if isinstance(x, Mask) else isinstance(x, int | float | str | None)


def _with_tensors(x: object, change: Callable[[Tensor], Tensor]) -> object:
    """A value of a field with other tensors; the value itself where it has none."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, Mask):
        return x.with_tensors(change)
    if isinstance(x, tuple):
        new = tuple(_with_tensors(y, change) for y in x)
        return new if any(a is not b for a, b in zip(new, x, strict=True)) else x
    return x


def widest_reach(bounds: Sequence[Reach]) -> Reach:
    """A bound for whatever one of several masks may show."""
    windows = [x.window for x in bounds if x.window is not None]
    if len(windows) < len(bounds):
        return Reach(None)
    return Reach(max(windows), max(x.sinks for x in bounds))


@dataclass(frozen=True, eq=False)
class _Combination(Mask):
    """Masks of one operation, flat: (a & b) & c holds a, b and c."""

    has_text: ClassVar[bool] = False  # written with operators

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
            raise ArgumentError(f"{name} of no masks; give it at least one")
        object.__setattr__(self, "masks", tuple(flat))

    def operands(self) -> tuple[Mask, ...]:
        """The members."""
        return self.masks

    def select_heads(self, heads: slice) -> Mask:
        """The same operation on the members for these heads."""
        return type(self)(tuple(mask.select_heads(heads) for mask in self.masks))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that every member can serve the call."""
        for mask in self.masks:
            mask.require(B, H, T, S)

    def _found(self, q: Tensor) -> list[Intervals] | None:
        """Every member's intervals, or None where one has none."""
        found = []
        for mask in self.masks:
            x = mask._ranges(q[:, 0, :, 0])
            if x is None:
                return None
            found.append(x)
        return found


@dataclass(frozen=True, eq=False)
class All(_Combination):
    """What every member allows: a & b & c.

    Raises:
        ArgumentError, ArgumentTypeError: no members, or members that are not masks.

    >>> from regard.masks import Causal, Sinks, Window
    >>> print(Causal() & (Window(4) | Sinks(1)))
    causal & (window(4) | sinks(1))
    """

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Every member's rule."""
        return reduce(torch.logical_and, (mask.allows(q, k) for mask in self.masks))

    def _block(self, where: CallSlice) -> Tensor:
        return reduce(torch.logical_and, (mask._block(where) for mask in self.masks))

    def _at(self, slot: SlotPair) -> Tensor:
        return reduce(torch.logical_and, (mask._at(slot) for mask in self.masks))

    def _intervals(self, q: Tensor) -> Intervals | None:
        found = self._found(q)
        return None if found is None else reduce(intersect, found)

    def _undecided(self, where: CallSlice, bk: int) -> Tensor:
        return reduce(and_states, (mask._states(where, bk) for mask in self.masks))

    def terms(self) -> tuple[Mask, ...]:
        """The members."""
        return self.masks

    def reach(self) -> Reach:
        """The tightest of the members' bounds: each of them bounds the whole."""
        bounds = [mask.reach() for mask in self.masks]
        return min(bounds, key=lambda x: float("inf") if x.tokens is None else x.tokens)

    def __str__(self) -> str:
        return " & ".join(
            f"({mask})" if isinstance(mask, Any) else str(mask) for mask in self.masks
        )


@dataclass(frozen=True, eq=False)
class Any(_Combination):
    """What at least one member allows: a | b | c.

    Raises:
        ArgumentError, ArgumentTypeError: no members, or members that are not masks.

    >>> from regard.masks import Causal, Sinks, Window
    >>> print(Causal() & Window(4) | Sinks(1))
    causal & window(4) | sinks(1)
    """

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Some member's rule."""
        return reduce(torch.logical_or, (mask.allows(q, k) for mask in self.masks))

    def _block(self, where: CallSlice) -> Tensor:
        return reduce(torch.logical_or, (mask._block(where) for mask in self.masks))

    def _at(self, slot: SlotPair) -> Tensor:
        return reduce(torch.logical_or, (mask._at(slot) for mask in self.masks))

    def _intervals(self, q: Tensor) -> Intervals | None:
        found = self._found(q)
        return None if found is None else reduce(union, found)

    def _undecided(self, where: CallSlice, bk: int) -> Tensor:
        return reduce(or_states, (mask._states(where, bk) for mask in self.masks))

    def reach(self) -> Reach:
        """A bound for what any of the members shows."""
        return widest_reach([mask.reach() for mask in self.masks])

    def __str__(self) -> str:
        return " | ".join(map(str, self.masks))


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """What a mask forbids: ~a. A slot without a key stays invisible.

    Raises:
        ArgumentTypeError: what is negated is not a mask.

    >>> from regard.masks import Causal, Window
    >>> print(Causal() & ~Window(4))
    causal & ~window(4)
    """

    has_text: ClassVar[bool] = False  # written with an operator

    mask: Mask

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise ArgumentTypeError(
                f"Not got {type(self.mask).__name__}; it takes a mask of regard.masks"
            )

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """The opposite of the rule."""
        return ~self.mask.allows(q, k)

    def _block(self, where: CallSlice) -> Tensor:
        return ~self.mask._block(where)

    def _at(self, slot: SlotPair) -> Tensor:
        return ~self.mask._at(slot)

    def _intervals(self, q: Tensor) -> Intervals | None:
        found = self.mask._ranges(q[:, 0, :, 0])
        return None if found is None else complement(found)

    def _undecided(self, where: CallSlice, bk: int) -> Tensor:
        return not_states(self.mask._states(where, bk))

    def select_heads(self, heads: slice) -> Mask:
        """What the mask of these heads forbids."""
        return Not(self.mask.select_heads(heads))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that the mask can serve the call."""
        self.mask.require(B, H, T, S)

    def refusal(self) -> Refusal:
        """A key inside the mask is what this one forbids."""
        words = self.mask.refusal().words
        outside = "outside "
        inner = words.removeprefix(outside) if words.startswith(outside) else str(self.mask)
        return Refusal(f"inside {inner}", "inside", str(self.mask))

    def __str__(self) -> str:
        return f"~({self.mask})" if isinstance(self.mask, _Combination) else f"~{self.mask}"
