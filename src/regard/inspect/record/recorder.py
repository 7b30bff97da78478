"""Record anything that runs on regard's kernels, and keep what its attention computed.

A `Recorder` watches the calls of attention. Each place has a `PlaceBuilder`, which finds out for every
call which of its keys are already there, and a `KeyValueStore`, which keeps each key and value once.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from regard.arguments import check_names
from regard.biases import Bias
from regard.caches.codes import Packed
from regard.errors import ArgumentError
from regard.inspect.record.mask_and_bias_data import copy_rule, depends_on_slots, to_dense_rules
from regard.inspect.record.recorded_place import KeyValuePool, Place, RecordedStep
from regard.inspect.record.recording import Recording
from regard.masks import Mask
from regard.ops.softmax.call import Call, Result
from regard.span import Positions, Span, as_tensor
from regard.tap import Opening, Trace

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


OPTIONAL_PARTS = ("v", "out")
"""What is kept beside q, k, lse and the rule, if asked for."""


class KeyValueStore:
    """Keys of one form, in memory that doubles when it is full. A column's newest key is known,
    older ones stay.

    Args:
        like: a pair (k [B,g,s,D], v [B,g,s,E] or None) of the form that is kept.
        groups: which key/value heads these are.
        G: of so many.
        held: what the keys are, in words.
    """

    def __init__(
        self, like: tuple[Tensor, Tensor | None], groups: tuple[int, ...], G: int, held: str
    ) -> None:
        self.groups, self.G, self.held = groups, G, held
        self._parts = [None if x is None else x[:, :, :0] for x in like]
        self._columns = torch.zeros(0, dtype=torch.int64)
        self._newest = torch.zeros(0, dtype=torch.int64)  # column -> number of its newest key
        self.length = 0

    def numbers(
        self, columns: Tensor, given: tuple[Tensor, Tensor | None], there: Tensor | None = None
    ) -> Tensor:
        """The numbers [s] of keys at these columns; one that is not bit for bit the newest of its
        column is kept anew.

        there: [B,s], which rows of the batch hold the key at all; None: all.
        """
        missing = int(columns.max()) + 1 - len(self._newest) if len(columns) else 0
        if missing > 0:
            self._newest = torch.cat([self._newest, torch.full((missing,), -1)])
        found = self._newest[columns]
        known = (found >= 0).nonzero()[:, 0]
        if len(known):
            same = self._same(found, known, given, there)
            found[known[~same]] = -1
        new = (found < 0).nonzero()[:, 0]
        if len(new):
            found[new] = self._append(columns[new], given, new)
        return found

    def pool(self) -> KeyValuePool:
        """What is kept, on the CPU."""
        k, v = (None if x is None else x[:, :, : self.length].cpu() for x in self._parts)
        assert k is not None, "keys are always kept"
        return KeyValuePool(
            k, v, self._columns[: self.length].clone(), self.groups, self.G, self.held
        )

    def _same(
        self,
        found: Tensor,
        known: Tensor,
        given: tuple[Tensor, Tensor | None],
        there: Tensor | None,
    ) -> Tensor:
        """Which of the known keys are the newest of their columns, bit for bit, in every row that
        holds them.
        """
        same = torch.ones(len(known), dtype=torch.bool)
        old, new = _as_slice(found[known]), _as_slice(known)
        for held, x in zip(self._parts, given, strict=True):
            if held is None or x is None:
                continue
            a, b = _bits(held[:, :, : self.length])[:, :, old], _bits(x)[:, :, new]
            equal = (a == b).all(3).all(1).cpu()  # [B,n]
            equal = equal if there is None else equal | ~there[:, known]
            same &= equal.all(0)
        return same

    def _append(
        self, columns: Tensor, given: tuple[Tensor, Tensor | None], which: Tensor
    ) -> Tensor:
        n, start = len(columns), self.length
        if start + n > len(self._columns):
            size = max(2 * len(self._columns), start + n)
            self._parts = [None if x is None else _grow(x, start, size) for x in self._parts]
            self._columns = torch.cat(
                [self._columns, torch.zeros(size - len(self._columns), dtype=torch.int64)]
            )
        for held, x in zip(self._parts, given, strict=True):
            if held is not None and x is not None:
                held[:, :, start : start + n] = x[:, :, _as_slice(which)]
        numbers = torch.arange(start, start + n)
        self._columns[start : start + n] = columns
        self._newest[columns] = numbers
        self.length += n
        return numbers


def _as_slice(which: Tensor) -> slice | Tensor:
    """Numbers as a slice if they are a run: indexing by it copies nothing."""
    n, start = len(which), int(which[0])
    return slice(start, start + n) if torch.equal(which, torch.arange(start, start + n)) else which


def _bits(x: Tensor) -> Tensor:
    """The bits of numbers as integers: NaN equals itself, and 0 is not -0."""
    return x.view(_BITS[x.element_size()])


def _grow(x: Tensor, used: int, size: int) -> Tensor:
    """A copy with room for `size` keys."""
    made = x.new_zeros((*x.shape[:2], size, x.shape[3]))
    made[:, :, :used] = x[:, :, :used]
    return made


class KeptParts(NamedTuple):
    """What is kept of a call: "v" and "out" or not; these heads, or all; the last so many rows of a
    call, or all.
    """

    matches_place: Collection[str]
    heads: Collection[int] | None = None
    rows: int | None = None


class CallKeys(NamedTuple):
    """Keys of a call in the order of the columns that they are: which slots, whose positions, under
    which rule.
    """

    columns: Tensor
    k: Tensor
    v: Tensor
    positions: Positions
    mask: Mask
    bias: Bias | None
    there: Tensor | None
    picked: Tensor | None = (
        None  # [b or 1,n], which slots of the call these are; None: all, in order
    )


class PlaceBuilder:
    """The steps of one place so far."""

    def __init__(self, kept: KeptParts, originals: dict[int, tuple[object, object]]) -> None:
        self._kept, self._originals = kept, originals
        self._steps: list[RecordedStep] = []
        self._stores: dict[tuple[Any, ...], KeyValueStore] = {}
        self._at = torch.zeros(1, 0, dtype=torch.int64)  # [b,N] positions of the columns
        self._last: Tensor | None = None  # [b] the last position that asked
        self._batch, self._H, self._queries = 0, 0, 0
        self.heads: tuple[int, ...] = ()

    def goes_on(self, call: Call) -> bool:
        """Whether the call's queries stand behind all those before, in every row of the batch."""
        if self._last is None:
            return True
        asked = as_tensor(call.q_positions).cpu()
        first = torch.where(asked >= 0, asked, 1 << 62).amin(1)
        same = (self._batch, self._H) == (call.B, call.H)
        return same and bool((first > self._last).all())

    def add(self, call: Call, result: Result, kernel: str) -> None:
        """A call and its result; tensors are copied, since caches write over their own."""
        if self._last is None:
            self._batch, self._H = call.B, call.H
            wanted = range(call.H) if self._kept.heads is None else self._kept.heads
            self.heads = tuple(h for h in range(call.H) if h in wanted)
        asked = as_tensor(call.q_positions).cpu()
        last = asked.amax(1) if asked.shape[1] else asked.new_full((asked.shape[0],), -1)
        self._last = last if self._last is None else torch.maximum(self._last, last)
        if self.heads:
            self._steps.append(self._step(call, result, kernel))
        self._queries += call.T

    def place(self, name: str) -> Place:
        """What was kept, as one place."""
        pools = tuple(store.pool() for store in self._stores.values())
        return Place(name, tuple(self._steps), pools, self._H, self.heads, self._at.shape[1])

    @property
    def empty(self) -> bool:
        """Nothing was kept."""
        return not self._steps

    def _step(self, call: Call, result: Result, kernel: str) -> RecordedStep:
        assert result.lse is not None, "an observed call asks for its lse"
        heads, n = list(self.heads), call.H // call.G
        first = 0 if self._kept.rows is None else max(0, call.T - self._kept.rows)

        def own(x: Tensor) -> Tensor:
            return x.detach()[:, heads, first:].to("cpu", copy=True)

        groups = sorted({h // n for h in heads})
        slots = self._slots(call)

        def replaced(x: Tensor | None) -> Tensor | None:
            if x is None or slots.picked is None:
                return None if x is None else own(x)
            which = slots.picked[:, None, None].expand(x.shape[0], x.shape[1], x.shape[2], -1)
            return own(x.gather(3, which.to(x.device)))

        pool, store = self._store(call, tuple(groups))
        given = slots.k[:, groups], (slots.v[:, groups] if "v" in self._kept.names else None)
        keys = store.numbers(slots.columns, given, slots.there)
        return RecordedStep(
            own(call.q),
            own(result.lse),
            own(result.out) if "out" in self._kept.names else None,
            slots.columns,
            _copy_positions(call.q_positions),
            _copy_positions(slots.positions),
            slots.mask,
            slots.bias,
            call.scale,
            call.softcap,
            None if call.sink is None else call.sink.detach()[heads].to("cpu", copy=True),
            kernel,
            first,
            self._queries + first,
            call.dropout,
            pool,
            None if torch.equal(keys, slots.columns) else keys,
            replaced(result.scores),
            replaced(result.pattern),
        )

    def _store(self, call: Call, groups: tuple[int, ...]) -> tuple[int, KeyValueStore]:
        """The store of keys of this form: a projection may answer a prompt in one, and a token in
        another.
        """
        coded = isinstance(call.k, Packed)
        form = (call.G, call.D, call.E, call.k.dtype, call.v.dtype, coded)
        if form not in self._stores:
            latents = call.E < call.D and call.k.data_ptr() == call.v.data_ptr()
            held = "latents" if latents else "keys"
            held += " from a quantised cache" if coded else ""
            v = call.v.detach()[:, list(groups)] if "v" in self._kept.names else None
            like = call.k.detach()[:, list(groups)], v
            self._stores[form] = KeyValueStore(like, groups, call.G, held)
        return list(self._stores).index(form), self._stores[form]

    def _slots(self, call: Call) -> CallKeys:
        """The call's keys by column."""
        k, v = call.k.detach(), call.v.detach()
        at = as_tensor(call.k_positions).cpu().long()
        mask, bias = self._original(call.mask), self._original(call.bias)
        N = self._at.shape[1]
        same = at.shape[1] >= N and bool((at[:, :N] == self._at).all())
        if same and (N or not _in_other_slots(at, as_tensor(call.q_positions).cpu())):
            # the same slots as before, and new ones behind them
            rows = max(at.shape[0], self._at.shape[0])
            self._at = torch.cat([self._at.expand(rows, -1), at[:, N:].expand(rows, -1)], 1)
            return CallKeys(torch.arange(at.shape[1]), k, v, call.k_positions, mask, bias, None)
        return self._by_position(call, at, mask, bias)

    def _by_position(self, call: Call, at: Tensor, mask: Mask, bias: Bias | None) -> CallKeys:
        """Slots in any order, as of a ring: a key is the column that had its position; empty slots
        are left out.
        """
        asked = as_tensor(call.q_positions).cpu()
        column = self._columns_of(at, asked)  # [b,s], -1 = empty
        k, v = call.k.detach(), call.v.detach()
        by_slot = depends_on_slots(mask, bias)
        used = (column >= 0).any(0)
        if bool(((column == column[:1]) | ~used).all()):  # one order for all rows
            which = used.nonzero()[:, 0]
            if by_slot:
                mask, bias = to_dense_rules(call, mask, bias, which[None, None, None])
            here = which.to(k.device)
            positions = at[:, which]
            return CallKeys(
                column[0, which],
                k[:, :, here],
                v[:, :, here],
                positions,
                mask,
                bias,
                None,
                which[None],
            )
        columns = column[column >= 0].unique()
        match = column[:, :, None] == columns  # [b,s,n]
        there, slot = match.any(1), match.to(torch.uint8).argmax(1)
        positions = at.gather(1, slot).masked_fill(~there, -1)
        if by_slot:
            mask, bias = to_dense_rules(call, mask, bias, slot[:, None, None])
        k, v = (
            x.gather(2, slot.to(x.device)[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3]))
            for x in (k, v)
        )
        return CallKeys(columns, k, v, positions, mask, bias, there, slot)

    def _columns_of(self, at: Tensor, asked: Tensor) -> Tensor:
        """The columns [b,s] of keys at positions [b,s], -1 for -1; new positions get new columns at
        the end.

        Where the new keys are those of the queries, their columns stand as the queries do; else
        they end together.
        """
        rows = max(at.shape[0], self._at.shape[0], asked.shape[0])
        known, at, asked = (x.expand(rows, -1) for x in (self._at, at, asked))
        column, N = torch.full(at.shape, -1), known.shape[1]
        for b in range(rows if N else 0):
            own, order = known[b].sort()
            place = torch.searchsorted(own, at[b]).clamp(max=N - 1)
            column[b] = torch.where((own[place] == at[b]) & (at[b] >= 0), order[place], -1)
        new = (column < 0) & (at >= 0)
        slots = [_query_slots(at[b, new[b]], asked[b]) for b in range(rows)]
        if any(x is None for x in slots):
            most = int(new.sum(1).max())
            slots = [most - n + at[b, new[b]].argsort().argsort() for b, n in enumerate(new.sum(1))]
        found = [x for x in slots if x is not None]
        used = torch.cat(found).unique()
        added = torch.full((rows, len(used)), -1)
        for b, x in enumerate(found):
            where = torch.searchsorted(used, x)
            added[b, where], column[b, new[b]] = at[b, new[b]], N + where
        self._at = torch.cat([known, added], 1)
        return column

    def _original(self, rule: Any) -> Any:
        """A mask or bias of which the tensors are copies, made once however many calls share it."""
        if rule is None:
            return None
        if id(rule) not in self._originals:
            self._originals[id(rule)] = (rule, copy_rule(rule))
        return self._originals[id(rule)][1]


def _query_slots(positions: Tensor, asked: Tensor) -> Tensor | None:
    """Which queries stand at these positions; None if one has no query."""
    match = positions[:, None] == asked
    return match.to(torch.uint8).argmax(1) if bool(match.any(1).all()) else None


def _in_other_slots(at: Tensor, asked: Tensor) -> bool:
    """Whether the keys of a first call are its queries' tokens, but in other slots: a cache that
    leaves padding out.
    """
    rows = max(at.shape[0], asked.shape[0])
    at, asked = at.expand(rows, -1), asked.expand(rows, -1)
    if torch.equal(at, asked):
        return False
    same = (
        torch.equal(a[a >= 0].sort().values, b[b >= 0].sort().values)
        for a, b in zip(at, asked, strict=True)
    )
    return all(same)


def _copy_positions(positions: Positions) -> Positions:
    return positions if isinstance(positions, Span) else positions.detach().to("cpu", copy=True)


class RecordingOptions(TypedDict, total=False):
    """What of a run is recorded; all of it by default.

    places: names ("layers.3"), or numbers of layers; None: all.
    heads: numbers of query heads, for every place, or by place or layer; None: all. Keys are kept
        for their groups only.
    rows: the last so many queries of each call; None: all. Keys are kept all the same.
    keep: of "v" and "out".
    """

    places: Collection[str | int] | None
    heads: Collection[int] | Mapping[str | int, Collection[int]] | None
    rows: int | None
    keep: Collection[str]


class Recorder(Trace):
    """Records every softmax attention call of this thread while the `with` block runs; the kernel's
    choice stays its own.

    Several calls at one place are steps of it, as long as each one's queries stand behind those
    before. A call that asks again (a second part of one layer's attention, a second run, another
    batch) is recorded as `<place>.part2`, and so on. Edits of other open traces are part of the
    run: what is recorded is what the edited network computed. Where scores or patterns are edited,
    they are kept themselves, since they no longer follow from q and k.

    Args:
        **select: see `RecordingOptions`.

    Raises:
        ArgumentError: rows is less than 1, or keep names something else.
        ArgumentTypeError: `RecordingOptions` has no such name.

    >>> import torch, regard
    >>> q = k = v = torch.eye(3)[None, None]
    >>> with Recorder() as recorder:
    ...     _ = regard.attend(q, k, v, mask=regard.masks.Causal())
    >>> recorder.recording().weights(0, 0).sum(1).round(decimals=6).tolist()
    [1.0, 1.0, 1.0]
    """

    watches: ClassVar[bool] = True

    def __init__(self, **select: Unpack[RecordingOptions]) -> None:
        super().__init__()
        check_names(type(self).__name__, select, RecordingOptions.__annotations__)
        self._at, self._heads = select.get("places"), select.get("heads")
        self._rows, self._keep = select.get("rows"), frozenset(select.get("keep", OPTIONAL_PARTS))
        if self._rows is not None and self._rows < 1:
            raise ArgumentError(f"rows is {self._rows}; it must be at least 1, or None for all")
        if not self._keep <= set(OPTIONAL_PARTS):
            raise ArgumentError(
                f"keep is {sorted(self._keep)}; it may name {', '.join(OPTIONAL_PARTS)}"
            )
        self.met: dict[str, None] = {}
        self._tracks: dict[str, PlaceBuilder] = {}
        self._originals: dict[int, tuple[object, object]] = {}
        self._one_at_a_time = threading.RLock()  # threads may share a recorder

    def saw(self, call: Any, result: Any, kernel: str) -> None:
        """One call more at the current place."""
        here = self.where
        with torch.no_grad(), self._one_at_a_time:
            self.met[here] = None
            if self._at is not None and not matches_place(here, self._at):
                return
            self._track(here, call).add(call, result, kernel)

    def recording(
        self, *, ids: Tensor | None = None, pieces: tuple[str, ...] = (), **about: str
    ) -> Recording:
        """What was recorded so far."""
        with self._one_at_a_time:
            places = {n: track.place(n) for n, track in self._tracks.items() if not track.empty}
        return Recording(places, ids, pieces, about)

    def lacking(self) -> str:
        """What was selected and does not exist, in words; empty if everything was recorded."""
        with self._one_at_a_time:
            recorded = {head for track in self._tracks.values() for head in track.heads}
            places = list(self.met)
        by_place = self._heads if isinstance(self._heads, Mapping) else {}
        flat = () if self._heads is None or isinstance(self._heads, Mapping) else self._heads
        asked = dict.fromkeys([*(self._at or ()), *by_place])
        unknown = [x for x in asked if not any(matches_place(here, (x,)) for here in places)]
        if unknown:
            met = ", ".join(here or "(no name)" for here in places) or "none"
            return (
                f"places {unknown} were not met; the places that called regard's softmax "
                f"attention: {met}"
            )
        wanted = {head for heads in (flat, *by_place.values()) for head in heads}
        gone = sorted(wanted - recorded)
        return f"heads {gone} were not recorded: no selected place has them" if gone else ""

    def _settle(self, opening: Opening) -> None:
        """Say what was asked for and not recorded."""
        super()._settle(opening)
        if self.missing == "ignore":
            return
        if not self.met:
            warnings.warn(
                "nothing was recorded: regard's softmax attention was never called; other code "
                "must call regard.attend, and a "
                'transformers model must have attn_implementation="regard"',
                stacklevel=3,
            )
        elif lacking := self.lacking():
            warnings.warn(lacking, stacklevel=3)

    def _track(self, here: str, call: Any) -> PlaceBuilder:
        """The calls that this one goes on from, or new ones."""
        name, part = here, 1
        while name in self._tracks and not self._tracks[name].goes_on(call):
            part += 1
            name = f"{here}.part{part}".lstrip(".")
        if name not in self._tracks:
            kept = KeptParts(self._keep, self._heads_at(here), self._rows)
            self._tracks[name] = PlaceBuilder(kept, self._originals)
        return self._tracks[name]

    def _heads_at(self, here: str) -> Collection[int] | None:
        if not isinstance(self._heads, Mapping):
            return self._heads
        return next(
            (heads for key, heads in self._heads.items() if matches_place(here, (key,))), ()
        )


def matches_place(place: str, wanted: Collection[str | int]) -> bool:
    """Whether a place is one of those, by its name or by the number of its layer.

    >>> matches_place("layers.3", [3]), matches_place("layers.3", [1])
    (True, False)
    >>> matches_place("decoder.layers.3.cross", ["decoder.layers.3"])
    True
    """
    number = next((int(word) for word in place.split(".") if word.isdecimal()), None)
    return any(
        x == number if isinstance(x, int) else place == x or place.startswith(f"{x}.")
        for x in wanted
    )
