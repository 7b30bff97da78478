"""Record anything that runs on regard's kernels, and keep what its attention computed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor

from regard.arguments import check_names
from regard.errors import ArgumentError
from regard.inspect.record.recording import Recording
from regard.inspect.record.track import Kept, Track
from regard.tap import Opening, Trace

KEEP = ("v", "out")
"""What is kept beside q, k, lse and the rule, if asked for."""


class Selection(TypedDict, total=False):
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
        **select: see `Selection`.

    Raises:
        ArgumentError: rows is less than 1, or keep names something else.
        ArgumentTypeError: `Selection` has no such name.

    >>> import torch, regard
    >>> q = k = v = torch.eye(3)[None, None]
    >>> with Recorder() as recorder:
    ...     _ = regard.attend(q, k, v, mask=regard.masks.Causal())
    >>> recorder.recording().weights(0, 0).sum(1).round(decimals=6).tolist()
    [1.0, 1.0, 1.0]
    """

    watches: ClassVar[bool] = True

    def __init__(self, **select: Unpack[Selection]) -> None:
        super().__init__()
        check_names(type(self).__name__, select, Selection.__annotations__)
        self._at, self._heads = select.get("places"), select.get("heads")
        self._rows, self._keep = select.get("rows"), frozenset(select.get("keep", KEEP))
        if self._rows is not None and self._rows < 1:
            raise ArgumentError(f"rows is {self._rows}; it must be at least 1, or None for all")
        if not self._keep <= set(KEEP):
            raise ArgumentError(f"keep is {sorted(self._keep)}; it may name {', '.join(KEEP)}")
        self.met: dict[str, None] = {}
        self._tracks: dict[str, Track] = {}
        self._originals: dict[int, tuple[object, object]] = {}
        self._one_at_a_time = threading.RLock()  # threads may share a recorder

    def saw(self, call: Any, result: Any, kernel: str) -> None:
        """One call more at the current place."""
        here = self.where
        with torch.no_grad(), self._one_at_a_time:
            self.met[here] = None
            if self._at is not None and not names(here, self._at):
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
        unknown = [x for x in asked if not any(names(here, (x,)) for here in places)]
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

    def _track(self, here: str, call: Any) -> Track:
        """The calls that this one goes on from, or new ones."""
        name, part = here, 1
        while name in self._tracks and not self._tracks[name].goes_on(call):
            part += 1
            name = f"{here}.part{part}".lstrip(".")
        if name not in self._tracks:
            kept = Kept(self._keep, self._heads_at(here), self._rows)
            self._tracks[name] = Track(kept, self._originals)
        return self._tracks[name]

    def _heads_at(self, here: str) -> Collection[int] | None:
        if not isinstance(self._heads, Mapping):
            return self._heads
        return next((heads for key, heads in self._heads.items() if names(here, (key,))), ())


def names(place: str, wanted: Collection[str | int]) -> bool:
    """Whether a place is one of those, by its name or by the number of its layer.

    >>> names("layers.3", [3]), names("layers.3", [1])
    (True, False)
    >>> names("decoder.layers.3.cross", ["decoder.layers.3"])
    True
    """
    number = next((int(word) for word in place.split(".") if word.isdecimal()), None)
    return any(
        x == number if isinstance(x, int) else place == x or place.startswith(f"{x}.")
        for x in wanted
    )
