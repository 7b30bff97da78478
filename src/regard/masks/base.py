"""What a mask is: a rule on positions, its structure, its drawing, and the checks that masks
share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from jaxtyping import Bool, Int, Int8
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.foreign import shown
from regard.masks.tiling import (
    UNKNOWN,
    Intervals,
    broadcast,
    count_visible,
    from_intervals,
    held,
    none_for,
    settle,
    tidy,
    without_rows,
)
from regard.span import Positions, Span, as_tensor, count, part, vacant


class Part(NamedTuple):
    """Some rows and columns of a call, and the device to compute on."""

    q_positions: Positions
    k_positions: Positions
    rows: slice
    columns: slice
    device: torch.device

    @property
    def q(self) -> Tensor:
        """The positions of the queries, [B or 1, t]."""
        return as_tensor(part(self.q_positions, self.rows), self.device).to(self.device)

    @property
    def k(self) -> Tensor:
        """The positions of the keys, [B or 1, s]."""
        return as_tensor(part(self.k_positions, self.columns), self.device).to(self.device)

    @property
    def keys(self) -> Positions:
        """The positions of all keys, a Span as it is."""
        keys = self.k_positions
        return keys if isinstance(keys, Span) else keys.to(self.device)


class Slot(NamedTuple):
    """One pair of slots of a call, scalars: its batch row, head and places, and the positions
    stored there.
    """

    b: Tensor
    h: Tensor
    q_idx: Tensor
    kv_idx: Tensor
    q: Tensor
    k: Tensor


def device_of(q: Positions, k: Positions, device: torch.device | str | None) -> torch.device:
    """The device that was asked for, else that of the stored positions, else the CPU."""
    if device is None:
        device = next((x.device for x in (k, q) if isinstance(x, Tensor)), "cpu")
    return torch.device(device)


Rows = TypeVar("Rows", bound=tuple[Any, ...])
Lengths: TypeAlias = Sequence[int] | Tensor

LARGEST = (1 << 62) - 1


def whole(name: str, x: object, least: int, advice: str = "") -> int:
    """x as an int of at least `least`, with room for a sum of two in 64 bits; `name` is "Window
    size" or the like.
    """
    if isinstance(x, bool) or not isinstance(x, int):
        raise ArgumentTypeError(f"{name} is {_say(x)}; it must be an int, {least} or more")
    if x < least:
        raise ArgumentError(f"{name} is {x}; it must be {least} or more{advice and ': ' + advice}")
    if x > LARGEST:
        raise ArgumentError(f"{name} is {shown(x)}; positions have 64 bits: give at most {LARGEST}")
    return x


def wholes(name: str, xs: object, least: int) -> tuple[int, ...]:
    """xs, a sequence or 1-D tensor of ints of at least `least`, as a tuple."""
    if isinstance(xs, Tensor):
        xs = xs.tolist()
    if isinstance(xs, (str, bytes)) or not isinstance(xs, Iterable):
        raise ArgumentTypeError(f"{name} is {_say(xs)}; it must be a sequence of ints")
    return tuple(whole(f"{name}[{i}]", x, least) for i, x in enumerate(xs))


def some(rows: Rows, name: str) -> Rows:
    """Rows, at least one."""
    if not rows:
        raise ArgumentError(f"{name} of no batch rows; give at least one")
    return rows


def row(values: tuple[int, ...], like: Tensor) -> Tensor:
    """One number per batch row, [B,1,1,1]."""
    return torch.tensor(values, dtype=torch.int64, device=like.device)[:, None, None, None]


def table(rows: tuple[tuple[int, ...], ...], fill: int | None, like: Tensor) -> Tensor:
    """Lists of different lengths as one tensor [B, n], filled up with `fill` (None: each one's last
    number).
    """
    n = max(map(len, rows))
    filled = [[*x, *[x[-1] if fill is None else fill] * (n - len(x))] for x in rows]
    return torch.tensor(filled, dtype=torch.int64, device=like.device).reshape(len(rows), n)


def four(x: Tensor) -> Tensor:
    """x with dimensions of size 1 in front, 4 in all."""
    return x if x.ndim == 4 else x[(None,) * (4 - x.ndim)]


def locate(bounds: Tensor, x: Tensor) -> Tensor:
    """How many of the sorted bounds [B, n] are <= x, for x of up to 4 dimensions with the batch
    first of 4.
    """
    if x.numel() == 1:  # also what a mask_mod sees, under vmap, which searchsorted does not like
        return (bounds[:, None, None, None] <= x[..., None]).sum(-1)
    if bounds.shape[0] == 1:
        return torch.searchsorted(bounds[0], x.contiguous(), right=True)
    x = four(x)
    x = x.expand(bounds.shape[0], *x.shape[1:])
    found = torch.searchsorted(bounds, x.flatten(1).contiguous(), right=True)
    return found.reshape(x.shape)


def check_rows(mask: str, rows: int, B: int) -> None:
    """The mask holds something for each of `rows` batch rows; a call has B."""
    if rows not in (1, B):
        raise ArgumentError(
            f"{mask} holds {rows} batch rows, but the call has batch {B}; "
            f"give one entry per batch row, or one for all"
        )


def _say(x: object) -> str:
    return f"{type(x).__name__} {x!r}"


EVERY = slice(None)
ROWS = 128
"""Queries that are evaluated together, where a mask has no intervals."""


@dataclass(frozen=True, eq=False)
class Mask(ABC):
    """A frozen rule on absolute positions: which key may a query see? `&`, `|` and `~` make masks
    of masks.

    Masks of equal fields are equal and hash alike; tensors in fields count by identity. A slot at
    position -1 holds nothing, whatever the rule says: as a key it is never visible, as a query it
    sees nothing. The public methods see to that once, for the mask as a whole, so that `~` cannot
    turn it round. A subclass writes `allows`, and `_intervals` where it has a closed form; both
    speak of tokens only.

    >>> from regard import masks
    >>> mask = masks.Causal() & masks.Window(4) | masks.Sinks(1)
    >>> print(mask)
    causal & window(4) | sinks(1)
    >>> mask.count(Span(0, 8), Span(0, 8))
    30
    """

    @abstractmethod
    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """The rule: positions q [B or 1, 1, T, 1] and k [B or 1, 1, 1, S] -> bool, broadcastable to
        [B, H, T, S].
        """

    def block(
        self,
        q_positions: Positions,
        k_positions: Positions,
        rows: slice = EVERY,
        columns: slice = EVERY,
        *,
        device: torch.device | str | None = None,
    ) -> Bool[Tensor, "B H t s"]:
        """The dense mask [B or 1, H or 1, t, s] of a slice of the call; a slot at position -1 sees
        nothing and is not seen.

        >>> from regard import masks
        >>> masks.Causal().block(Span(0, 3), Span(0, 3)).int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]]
        """
        device = device_of(q_positions, k_positions, device)
        where = Part(q_positions, k_positions, rows, columns, device)
        out, keys = self._block(where), part(k_positions, columns)
        if not isinstance(keys, Span) or keys.start < 0:
            out = out & (where.k >= 0)[:, None, None]
        if (empty := vacant(part(q_positions, rows), device)) is not None:
            out = out & ~empty[:, None, :, None]
        return out.expand(-1, -1, count(part(q_positions, rows)), count(keys))

    def _block(self, where: Part) -> Tensor:
        """The rule, 4-D; empty slots are not looked at."""
        return four(self.allows(where.q[:, None, :, None], where.k[:, None, None, :]))

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
        if found is None or (empty := vacant(q, device)) is None:
            return found
        return none_for(found, empty)

    def _ranges(self, q: Tensor) -> Intervals | None:
        """The same by the rule alone, for q [B or 1, t]; empty slots are not looked at."""
        found = self._intervals(q.long()[:, None, :, None])
        return None if found is None else tidy(Intervals(*broadcast(*found)))

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
        T = count(q_positions)
        lines = [
            self.tile_row(q_positions, k_positions, slice(i, min(i + bq, T)), bk, device=device)
            for i in range(0, T, bq)
        ]
        if not lines:
            return torch.zeros(
                1, 1, 0, -(-count(k_positions) // bk), dtype=torch.int8, device=device
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
        S, device = count(k_positions), device_of(q_positions, k_positions, device)
        queries = part(q_positions, rows)
        if S == 0 or count(queries) == 0:
            return torch.zeros(1, 1, -(-S // bk), dtype=torch.int8, device=device)

        def evaluate(columns: slice) -> Tensor:
            return self.block(q_positions, k_positions, rows, columns, device=device)

        where = Part(q_positions, k_positions, rows, EVERY, device)
        if (found := self.intervals(queries, device=device)) is not None:
            states = from_intervals(found, where.keys, bk)
        else:
            states = without_rows(self._undecided(where, bk), vacant(queries, device))
        return settle(states, held(k_positions, bk).to(device), S, bk, evaluate)

    def _states(self, where: Part, bk: int) -> Tensor:
        """The states [B,H,nK] by the rule alone, over the keys that blocks hold, UNKNOWN where it
        must be evaluated.
        """
        found = self._ranges(where.q)
        return (
            self._undecided(where, bk) if found is None else from_intervals(found, where.keys, bk)
        )

    def _undecided(self, where: Part, bk: int) -> Tensor:
        """The states where the mask has no intervals."""
        nK = -(-count(where.k_positions) // bk)
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
        device = device_of(q_positions, k_positions, device)
        found = self.intervals(q_positions, device=device)
        if found is not None:
            keys = k_positions if isinstance(k_positions, Span) else k_positions.to(device)
            return count_visible(found, keys)
        T = max(count(q_positions), 1)
        lines = [
            self.block(q_positions, k_positions, slice(i, i + ROWS), device=device).sum(-1)
            for i in range(0, T, ROWS)
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

    def require(self, B: int, H: int, T: int, S: int) -> None:  # noqa: B027  (most serve any shape)
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
        device = device_of(q_positions, k_positions, None)
        q_all, k_all = (as_tensor(x, device).to(device) for x in (q_positions, k_positions))
        empty = vacant(q_positions, device)

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            row = b * (q_all.shape[0] > 1)
            q, k = q_all[row, q_idx], k_all[b * (k_all.shape[0] > 1), kv_idx]
            seen = self._at(Slot(b, h, q_idx, kv_idx, q, k)) & (k >= 0)
            return seen if empty is None else seen & ~empty[row, q_idx]

        return mask_mod

    def _at(self, slot: Slot) -> Tensor:
        """The rule for one pair of slots, as a scalar; it runs under vmap."""
        out = four(self.allows(slot.q.view(1, 1, 1, 1), slot.k.view(1, 1, 1, 1)))
        return out[slot.b * (out.shape[0] > 1), slot.h * (out.shape[1] > 1), 0, 0]

    def terms(self) -> tuple[Mask, ...]:
        """The masks whose `&` this is: itself alone, unless it is an `All`."""
        return (self,)

    def __and__(self, other: Mask) -> Mask:
        from regard.masks.algebra import All

        return All((self, other)) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        from regard.masks.algebra import Any

        return Any((self, other)) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        from regard.masks.algebra import Not

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
        return type(self).__name__.lower() + f"({', '.join(shown)})" * bool(shown)


@lru_cache(maxsize=64)
def is_static(mask: Mask) -> bool:
    """Whether a mask is one of this package's, and no field of it can change: no tensor, no
    function.
    """
    ours = type(mask).__module__.startswith(f"{__package__}.")
    return ours and all(_is_number(getattr(mask, x.name)) for x in fields(mask))


def _is_number(x: object) -> bool:
    if isinstance(x, tuple):
        return all(map(_is_number, x))
    return is_static(x) if isinstance(x, Mask) else isinstance(x, int | None)
