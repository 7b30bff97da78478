"""`Recorder`: record the attention of any code that calls regard's kernels.

A `Recorder` observes the calls of attention. For each place a `PlaceBuilder` determines which keys
of a call are already stored, and a `KeyValueStore` stores each key and value once.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from regard import biases, masks
from regard.argument_checks import check_keyword_names
from regard.biases import Bias
from regard.caches.lazy_tensor import LazyTensor
from regard.errors import ArgumentError
from regard.inspect.record.recorded_place import KeyValuePool, Place, RecordedStep
from regard.inspect.record.recording import Recording
from regard.masks import Mask
from regard.ops.softmax.call import Call
from regard.ops.softmax.kernel import KernelResult
from regard.scores import ScoreRule
from regard.span import Positions, Span, as_tensor
from regard.tracing import ActiveTrace, Trace

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes per element, to the integer dtype of that size; used to compare floats bit by bit."""


OPTIONAL_PARTS = ("v", "out")
"""Tensors that `keep` may leave out; q, k, the lse, the mask and the bias are always kept."""


class KeyValueStore:
    """Keys and values of one layout, in buffers that double when they are full.

    Each column has a newest key; older keys of the same column remain stored.

    Args:
        like: a pair (k `[B, g, s, D]`, v `[B, g, s, E]` or None) with the layout that is stored.
        groups: indices of the key/value heads that are stored.
        G: number of key/value heads of the model.
    """

    def __init__(
        self, like: tuple[Tensor, Tensor | None], groups: tuple[int, ...], G: int, key_kind: str
    ) -> None:
        self.groups, self.G, self.key_kind = groups, G, key_kind
        self._parts = [None if x is None else x[:, :, :0] for x in like]
        self._columns = torch.zeros(0, dtype=torch.int64)
        self._newest = torch.zeros(0, dtype=torch.int64)  # column -> index of its newest key
        self.length = 0

    def indices(
        self,
        columns: Tensor,
        keys_and_values: tuple[Tensor, Tensor | None],
        present: Tensor | None = None,
    ) -> Tensor:
        """Return the index `[s]` of each key, and append the keys that are not in the store.

        A key is there if it is equal, bit for bit, to the newest key of its column.
        """
        num_missing = int(columns.max()) + 1 - len(self._newest) if len(columns) else 0
        if num_missing > 0:
            self._newest = torch.cat([self._newest, torch.full((num_missing,), -1)])
        indices = self._newest[columns]
        known = (indices >= 0).nonzero()[:, 0]
        if len(known):
            is_equal = self._same(indices, known, keys_and_values, present)
            indices[known[~is_equal]] = -1
        new = (indices < 0).nonzero()[:, 0]
        if len(new):
            indices[new] = self._append(columns[new], keys_and_values, new)
        return indices

    def pool(self) -> KeyValuePool:
        """Return the stored keys and values, on the CPU."""
        k, v = (None if x is None else x[:, :, : self.length].cpu() for x in self._parts)
        assert k is not None, "keys are always kept"
        return KeyValuePool(
            k, v, self._columns[: self.length].clone(), self.groups, self.G, self.key_kind
        )

    def _same(
        self,
        indices: Tensor,
        known: Tensor,
        keys_and_values: tuple[Tensor, Tensor | None],
        present: Tensor | None,
    ) -> Tensor:
        """Return which known keys equal the newest of their columns, bit for bit."""
        same = torch.ones(len(known), dtype=torch.bool)
        old, new = _as_slice(indices[known]), _as_slice(known)
        for stored, x in zip(self._parts, keys_and_values, strict=True):
            if stored is None or x is None:
                continue
            a, b = _bits(stored[:, :, : self.length])[:, :, old], _bits(x)[:, :, new]
            equal = (a == b).all(3).all(1).cpu()  # [B,n]
            equal = equal if present is None else equal | ~present[:, known]
            same &= equal.all(0)
        return same

    def _append(
        self, columns: Tensor, keys_and_values: tuple[Tensor, Tensor | None], which: Tensor
    ) -> Tensor:
        """Append keys and values, and return their indices."""
        n, start = len(columns), self.length
        if start + n > len(self._columns):
            size = max(2 * len(self._columns), start + n)
            self._parts = [None if x is None else _grow(x, start, size) for x in self._parts]
            self._columns = torch.cat(
                [self._columns, torch.zeros(size - len(self._columns), dtype=torch.int64)]
            )
        for stored, x in zip(self._parts, keys_and_values, strict=True):
            if stored is not None and x is not None:
                stored[:, :, start : start + n] = x[:, :, _as_slice(which)]
        numbers = torch.arange(start, start + n)
        self._columns[start : start + n] = columns
        self._newest[columns] = numbers
        self.length += n
        return numbers


def _as_slice(which: Tensor) -> slice | Tensor:
    """Return consecutive indices as a slice, because that copies nothing."""
    n, start = len(which), int(which[0])
    return slice(start, start + n) if torch.equal(which, torch.arange(start, start + n)) else which


def _bits(x: Tensor) -> Tensor:
    """Return the bits of numbers as integers, so that NaN equals itself and 0 differs from -0."""
    return x.view(_INTEGER_OF_SIZE[x.element_size()])


def _grow(x: Tensor, used: int, size: int) -> Tensor:
    """Return a copy with capacity for `size` keys."""
    grown = x.new_zeros((*x.shape[:2], size, x.shape[3]))
    grown[:, :, :used] = x[:, :, :used]
    return grown


def _copy(x: Any) -> Any:
    """Return a copy of a tensor on the CPU, which no later change affects; or a span as it is."""
    return x if isinstance(x, Span) else x.detach().to("cpu", copy=True)


def copy_rule(rule: Any) -> Any:
    """Return a mask, a bias or a score rule with copies of its tensors on the CPU."""
    if isinstance(rule, (Bias, ScoreRule)):
        own = rule.tensors()
        return rule.with_tensors(list(map(_copy, own))) if own else rule
    return rule.with_tensors(_copy)


def to_dense_rules(
    call: Call, mask: Mask, bias: Bias | None, slots: Tensor
) -> tuple[Mask, Bias | None]:
    """Evaluate a mask and a bias for some slots of a call, and return them as dense tables."""
    positions = as_tensor(call.q_positions).cpu(), as_tensor(call.k_positions).cpu()

    def gather_slots(x: Tensor) -> Tensor:
        rows = max(x.shape[0], slots.shape[0])
        return x.expand(rows, -1, -1, -1).gather(3, slots.expand(rows, *x.shape[1:3], -1))

    if bias is not None:
        bias = biases.DenseBias(gather_slots(bias.block(*positions, dtype=torch.float64)))
    return masks.Dense(gather_slots(mask.block(*positions))), bias


class KeptParts(NamedTuple):
    """Which parts of a call are kept: "v", "out", query heads, and last queries; None is all."""

    names: Collection[str]
    heads: Collection[int] | None = None
    rows: int | None = None


class CallKeys(NamedTuple):
    """The keys of a call in the order of the columns of the pattern.

    Args:
        columns: column of each key, `[s]`.
        present: which rows of the batch have the key, `[B, s]`; None means all.
        call_slots: which slots of the call these keys are, `[b or 1, s]`; None means all, in order.
    """

    columns: Tensor
    k: Tensor
    v: Tensor
    positions: Positions
    mask: Mask
    bias: Bias | None
    present: Tensor | None
    call_slots: Tensor | None = None


class PlaceBuilder:
    """Collects the steps of one place during a run."""

    def __init__(self, kept_parts: KeptParts, originals: dict[int, tuple[object, object]]) -> None:
        self._kept_parts, self._originals = kept_parts, originals
        self._steps: list[RecordedStep] = []
        self._stores: dict[tuple[object, ...], KeyValueStore] = {}
        self._column_positions = torch.zeros(1, 0, dtype=torch.int64)  # [b,N]
        self._last_position: Tensor | None = None  # [b] the last position of a query
        self._batch, self._H, self._queries = 0, 0, 0
        self.heads: tuple[int, ...] = ()

    def follows(self, call: Call) -> bool:
        """Return whether all queries of a call have later positions than the calls before it."""
        if self._last_position is None:
            return True
        q_positions = as_tensor(call.q_positions).cpu()
        first = torch.where(q_positions >= 0, q_positions, 1 << 62).amin(1)
        same = (self._batch, self._H) == (call.B, call.H)
        return same and bool((first > self._last_position).all())

    def add(self, call: Call, result: KernelResult, kernel: str) -> None:
        """Add a call and its result. Tensors are copied, because caches overwrite their own."""
        if self._last_position is None:
            self._batch, self._H = call.B, call.H
            wanted = range(call.H) if self._kept_parts.heads is None else self._kept_parts.heads
            self.heads = tuple(h for h in range(call.H) if h in wanted)
        q_positions = as_tensor(call.q_positions).cpu()
        last = q_positions.amax(1) if call.T else q_positions.new_full((len(q_positions),), -1)
        if self._last_position is not None:
            last = torch.maximum(self._last_position, last)
        self._last_position = last
        if self.heads:
            self._steps.append(self._step(call, result, kernel))
        self._queries += call.T

    def place(self, name: str) -> Place:
        """Return what was recorded as a `Place`."""
        pools = tuple(store.pool() for store in self._stores.values())
        return Place(
            name, tuple(self._steps), pools, self._H, self.heads, self._column_positions.shape[1]
        )

    @property
    def empty(self) -> bool:
        """Return whether no step was recorded."""
        return not self._steps

    def _step(self, call: Call, result: KernelResult, kernel: str) -> RecordedStep:
        """Return a call and its result as a recorded step."""
        assert result.lse is not None, "an observed call asks for its lse"
        heads, n = list(self.heads), call.H // call.G
        first = 0 if self._kept_parts.rows is None else max(0, call.T - self._kept_parts.rows)

        def recorded_part(x: Tensor) -> Any:
            return _copy(x[:, heads, first:])

        groups = sorted({h // n for h in heads})
        slots = self._slots(call)

        def replaced(x: Tensor | None) -> Any:
            if x is None or slots.call_slots is None:
                return None if x is None else recorded_part(x)
            which = slots.call_slots[:, None, None].expand(x.shape[0], x.shape[1], x.shape[2], -1)
            return recorded_part(x.gather(3, which.to(x.device)))

        pool, store = self._store(call, tuple(groups))
        keys_and_values = (
            slots.k[:, groups],
            (slots.v[:, groups] if "v" in self._kept_parts.names else None),
        )
        keys = store.indices(slots.columns, keys_and_values, slots.present)
        return RecordedStep(
            recorded_part(call.q),
            recorded_part(result.lse),
            recorded_part(result.out) if "out" in self._kept_parts.names else None,
            slots.columns,
            _copy(call.q_positions),
            _copy(slots.positions),
            slots.mask,
            slots.bias,
            call.scale,
            call.softcap,
            None if call.sink is None else _copy(call.sink[heads]),
            kernel,
            first,
            self._queries + first,
            call.dropout,
            pool,
            None if torch.equal(keys, slots.columns) else keys,
            replaced(result.scores),
            replaced(result.pattern),
            self._original(call.score),
        )

    def _store(self, call: Call, groups: tuple[int, ...]) -> tuple[int, KeyValueStore]:
        """Return the store for keys of this layout, which a place may have several of."""
        coded = isinstance(call.k, LazyTensor) and call.k.is_inexact
        layout = (call.G, call.D, call.E, call.k.dtype, call.v.dtype, coded)
        if layout not in self._stores:
            latents = call.E < call.D and call.k.data_ptr() == call.v.data_ptr()
            key_kind = "latents" if latents else "keys"
            key_kind += " from a quantized cache" if coded else ""
            v = call.v.detach()[:, list(groups)] if "v" in self._kept_parts.names else None
            like = call.k.detach()[:, list(groups)], v
            self._stores[layout] = KeyValueStore(like, groups, call.G, key_kind)
        return list(self._stores).index(layout), self._stores[layout]

    def _slots(self, call: Call) -> CallKeys:
        """Assign a column to each key of a call, and return the keys in order of their columns."""
        k, v = call.k.detach(), call.v.detach()
        positions = as_tensor(call.k_positions).cpu().long()
        mask, bias = self._original(call.mask), self._original(call.bias)
        N = self._column_positions.shape[1]
        same = positions.shape[1] >= N and bool((positions[:, :N] == self._column_positions).all())
        if same and (N or not _in_other_slots(positions, as_tensor(call.q_positions).cpu())):
            # the same slots as before, followed by new ones
            rows = max(positions.shape[0], self._column_positions.shape[0])
            self._column_positions = torch.cat(
                [self._column_positions.expand(rows, -1), positions[:, N:].expand(rows, -1)], 1
            )
            return CallKeys(
                torch.arange(positions.shape[1]), k, v, call.k_positions, mask, bias, None
            )
        return self._by_position(call, positions, mask, bias)

    def _by_position(
        self, call: Call, positions: Tensor, mask: Mask, bias: Bias | None
    ) -> CallKeys:
        """Return the keys of a call by position, without empty slots, as of a ring cache."""
        asked = as_tensor(call.q_positions).cpu()
        column = self._columns_of(positions, asked)  # [b,s], -1 = empty
        k, v = call.k.detach(), call.v.detach()
        by_slot = mask.by_slot or (bias is not None and bias.by_slot)
        used = (column >= 0).any(0)
        if bool(((column == column[:1]) | ~used).all()):  # every row of the batch in one order
            which = used.nonzero()[:, 0]
            if by_slot:
                mask, bias = to_dense_rules(call, mask, bias, which[None, None, None])
            k, v = (x[:, :, which.to(k.device)] for x in (k, v))
            place = column[0, which], k, v, positions[:, which]
            return CallKeys(*place, mask, bias, None, which[None])
        columns = column[column >= 0].unique()
        match = column[:, :, None] == columns  # [b,s,n]
        present, slot = match.any(1), match.to(torch.uint8).argmax(1)
        key_positions = positions.gather(1, slot).masked_fill(~present, -1)
        if by_slot:
            mask, bias = to_dense_rules(call, mask, bias, slot[:, None, None])
        k, v = (
            x.gather(2, slot.to(x.device)[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3]))
            for x in (k, v)
        )
        return CallKeys(columns, k, v, key_positions, mask, bias, present, slot)

    def _columns_of(self, positions: Tensor, q_positions: Tensor) -> Tensor:
        """Return each key's column `[b, s]`, -1 for an empty slot; new ones are at the end.

        If the new keys belong to the tokens of the queries, their columns are in the order of the
        queries; otherwise the rows of the batch are aligned at the end.
        """
        rows = max(positions.shape[0], self._column_positions.shape[0], q_positions.shape[0])
        known, positions, q_positions = (
            x.expand(rows, -1) for x in (self._column_positions, positions, q_positions)
        )
        column, N = torch.full(positions.shape, -1), known.shape[1]
        for b in range(rows if N else 0):
            own, order = known[b].sort()
            index = torch.searchsorted(own, positions[b]).clamp(max=N - 1)
            is_known = (own[index] == positions[b]) & (positions[b] >= 0)
            column[b] = torch.where(is_known, order[index], -1)
        new = (column < 0) & (positions >= 0)
        slots = [_query_slots(positions[b, new[b]], q_positions[b]) for b in range(rows)]
        if any(x is None for x in slots):
            counts = new.sum(1)
            ranks = (positions[b, new[b]].argsort().argsort() for b in range(rows))
            slots = [counts.max() - n + rank for n, rank in zip(counts, ranks, strict=True)]
        query_slots = [x for x in slots if x is not None]
        used = torch.cat(query_slots).unique()
        added = torch.full((rows, len(used)), -1)
        for b, x in enumerate(query_slots):
            where = torch.searchsorted(used, x)
            added[b, where], column[b, new[b]] = positions[b, new[b]], N + where
        self._column_positions = torch.cat([known, added], 1)
        return column

    def _original(self, rule: object) -> Any:
        """Return the one copy of a mask, a bias or a score rule, with copies of its tensors."""
        if rule is None:
            return None
        if id(rule) not in self._originals:
            self._originals[id(rule)] = (rule, copy_rule(rule))
        return self._originals[id(rule)][1]


def _query_slots(positions: Tensor, asked: Tensor) -> Tensor | None:
    """Return the index of the query at each of these positions; None if a position has no query."""
    match = positions[:, None] == asked
    return match.to(torch.uint8).argmax(1) if bool(match.any(1).all()) else None


def _in_other_slots(k_positions: Tensor, q_positions: Tensor) -> bool:
    """Return whether a first call's keys are its queries' tokens in other slots."""
    rows = max(k_positions.shape[0], q_positions.shape[0])
    k_positions, q_positions = k_positions.expand(rows, -1), q_positions.expand(rows, -1)
    if torch.equal(k_positions, q_positions):
        return False
    same = (
        torch.equal(a[a >= 0].sort().values, b[b >= 0].sort().values)
        for a, b in zip(k_positions, q_positions, strict=True)
    )
    return all(same)


class RecordingOptions(TypedDict, total=False):
    """Which parts of a run are recorded; everything by default.

    Args:
        places: names ("layers.3") or indices of layers; None means all.
        heads: query heads, for every place or in a mapping by place or layer; None means all. Keys
            are kept only for the key/value heads that these query heads read.
        rows: number of last queries of each call to keep; None means all. All keys are kept.
        keep: "v" (values), "out" (outputs), or both.
    """

    places: Collection[str | int] | None
    heads: Collection[int] | Mapping[str | int, Collection[int]] | None
    rows: int | None
    keep: Collection[str]


class Recorder(Trace):
    """Record every softmax attention call of this thread while the `with` block runs.

    Recording does not change which kernel is chosen. Several calls at one place become its steps,
    as long as the queries of each call have later positions than those of the calls before it. A
    call whose queries are not later (a second branch of the attention of a layer, a second run,
    another batch) is recorded as `<place>.part2`, and so on. If another active `regard.Trace` edits
    tensors, the recording contains what the edited network computed. Edited scores or patterns are
    stored themselves, because they can no longer be computed from q and k.

    Args:
        **select: which places, heads, rows and tensors are kept; see `RecordingOptions`.

    Raises:
        ArgumentError: `rows` is less than 1, or `keep` has an unknown name.
        ArgumentTypeError: `RecordingOptions` has no such name.

    >>> import torch, regard
    >>> q = k = v = torch.eye(3)[None, None]
    >>> with Recorder() as recorder:
    ...     _ = regard.attend(q, k, v, mask=regard.masks.Causal())
    >>> recorder.recording().weights(0, 0).sum(1).round(decimals=6).tolist()
    [1.0, 1.0, 1.0]
    """

    observes_calls: ClassVar[bool] = True

    def __init__(self, **select: Unpack[RecordingOptions]) -> None:
        super().__init__()
        check_keyword_names(type(self).__name__, select, RecordingOptions.__annotations__)
        self.selected = {n: x for n, x in select.items() if x not in (None, OPTIONAL_PARTS)}
        self._places, self._heads = select.get("places"), select.get("heads")
        self._rows, self._keep = select.get("rows"), frozenset(select.get("keep", OPTIONAL_PARTS))
        if self._rows is not None and self._rows < 1:
            raise ArgumentError(f"rows is {self._rows}; it must be at least 1, or None for all")
        if not self._keep <= set(OPTIONAL_PARTS):
            raise ArgumentError(
                f"keep is {sorted(self._keep)}; it may contain {', '.join(OPTIONAL_PARTS)}"
            )
        self.seen_places: dict[str, None] = {}
        self._builders: dict[str, PlaceBuilder] = {}
        self._originals: dict[int, tuple[object, object]] = {}
        self._lock = threading.RLock()  # threads may share a recorder

    def on_attention_call(self, call: Any, result: Any, kernel: str) -> None:
        """Record one call of attention at the current place."""
        place = self.where
        with torch.no_grad(), self._lock:
            self.seen_places[place] = None
            if self._places is not None and not matches_place(place, self._places):
                return
            name = self._name(place, call)
            self._builders[name].add(call, result, kernel)
            self.on_place(name)

    def on_place(self, name: str) -> None:
        """Do something with a place whenever a call of it was recorded.

        Args:
            name: the name of the place.
        """

    def place(self, name: str) -> Place | None:
        """Return a place as far as it was recorded.

        Args:
            name: the name of the place.

        Returns:
            The place, or None if none of its heads is kept.
        """
        builder = self._builders[name]
        return None if builder.empty else builder.place(name)

    def recording(
        self, *, ids: Tensor | None = None, pieces: tuple[str, ...] = (), **metadata: str
    ) -> Recording:
        """Return what was recorded so far.

        Args:
            ids: token ids of the run, `[B, T]`, or None.
            pieces: text of each token, or ().
            **metadata: facts about the run, as text.

        Returns:
            The recording.
        """
        with self._lock:
            places = {n: place for n in self._builders if (place := self.place(n)) is not None}
        return Recording(places, ids, pieces, metadata)

    def missing_selection(self) -> str:
        """Describe what was selected but does not exist.

        Returns:
            A sentence, or an empty string if everything was recorded.
        """
        with self._lock:
            recorded = {head for builder in self._builders.values() for head in builder.heads}
            places = list(self.seen_places)
        by_place = self._heads if isinstance(self._heads, Mapping) else {}
        everywhere = () if isinstance(self._heads, Mapping) else self._heads or ()
        asked = dict.fromkeys([*(self._places or ()), *by_place])
        unknown = [x for x in asked if not any(matches_place(here, (x,)) for here in places)]
        if unknown:
            met = ", ".join(here or "(no name)" for here in places) or "none"
            return (
                f"there were no calls at the places {unknown}; the places that called regard's "
                f"softmax attention are: {met}"
            )
        wanted = {head for heads in (everywhere, *by_place.values()) for head in heads}
        if missing := sorted(wanted - recorded):
            return f"heads {missing} were not recorded: no selected place has them"
        return ""

    def _finish(self, opening: ActiveTrace) -> None:
        """Warn of what was requested but not recorded."""
        super()._finish(opening)
        if self.missing == "ignore":
            return
        if not self.seen_places:
            warnings.warn(
                "nothing was recorded: regard's softmax attention was never called; the code must "
                "call regard.attend, a "
                'transformers model must have attn_implementation="regard", and any other module '
                "must run within regard.inspect.watch(model)",
                stacklevel=3,
            )
        elif missing := self.missing_selection():
            warnings.warn(missing, stacklevel=3)

    def _name(self, place: str, call: Call) -> str:
        """Return the name of the calls that this call continues, or a new one."""
        name, part = place, 1
        while name in self._builders and not self._builders[name].follows(call):
            part += 1
            name = f"{place}.part{part}".lstrip(".")
        if name not in self._builders:
            kept_parts = KeptParts(self._keep, self._heads_at(place), self._rows)
            self._builders[name] = PlaceBuilder(kept_parts, self._originals)
        return name

    def _heads_at(self, here: str) -> Collection[int] | None:
        if not isinstance(self._heads, Mapping):
            return self._heads
        return next(
            (heads for key, heads in self._heads.items() if matches_place(here, (key,))), ()
        )


def matches_place(place: str, wanted: Collection[str | int]) -> bool:
    """Return whether a place is among the requested ones, by its name or by the index of its layer.

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
