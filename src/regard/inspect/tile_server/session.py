"""The state of a served recording: its heads, a cache of tiles bounded in bytes, and one thread
that computes coarse levels exactly while no request waits.

Levels 0 to 3 are computed when they are asked for. A coarser tile is answered at once with a
preview of exact rows, and its parts, tiles of level 5, are computed behind it; a part replaces its
blocks of the preview as soon as it is there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.freed_memory import give_back_freed_memory
from regard.inspect.record.recorded_place import Place
from regard.inspect.record.recording import Recording
from regard.inspect.report.page_rules import split_by_pool
from regard.inspect.tile_server.exact_tiles import (
    BLOCKS,
    HeadTiles,
    Peak,
    TileData,
    coarser_blocks,
    merge_peaks,
)
from regard.inspect.tile_server.head_overviews import HeadOverview, Overviews, head_overview

R = TypeVar("R")


class KeptResults(Generic[R]):
    """The last results; a thread waits for a result that another thread computes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, Lock()
        self._results: OrderedDict[Hashable, Future[R]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], R]) -> R:
        """Return a result; it is computed if it is not kept. A failed computation is not kept."""
        with self._lock:
            result = self._results.get(key)
            is_new = result is None
            if result is None:
                result = self._results[key] = Future()
            self._results.move_to_end(key)
            while len(self._results) > self._limit:
                self._results.popitem(last=False)
        if is_new:
            try:
                result.set_result(make())
            except BaseException as error:
                with self._lock:
                    self._results.pop(key, None)
                result.set_exception(error)
        return result.result()


EXACT_LEVEL = 3
"""The coarsest level that is computed exactly before it is answered."""
PART_LEVEL = 5
"""The level of the parts of coarser tiles: 8,192 x 8,192 cells take about 0.3 s."""
CACHE_BYTES = 160 << 20
"""Bytes of cached tiles: the 136 parts of a head of 131,072 tokens take 70 MB of them."""
TRIM_AFTER = 32
"""Number of tiles after which freed memory is given back to the system: the products of a tile take
many times its size, and pieces of them would stay between the tiles that are kept.
"""
PREPARED_HEADS = 16
"""Number of heads of the first place that are compared before the first answer."""
OPEN_HEADS = 4
"""Number of heads whose keys are kept in the dtype of the products."""


class ViewSession:
    """What is served: the places and heads of a recording; while its model still runs, `expected`
    is the number of places at the end, and 0 afterwards.
    """

    def __init__(
        self,
        recording: Recording,
        overviews: Overviews | None = None,
        *,
        b: Recording | None = None,
        batch: int = 0,
    ) -> None:
        self.recordings, self.batch = [recording] if b is None else [recording, b], batch
        self.expected = 0
        self.places: list[Place] = []
        self.names: list[str] = []
        self.sources: list[int] = []
        self._lock = threading.RLock()
        for source, one in enumerate(self.recordings):
            if not one.places:
                raise ArgumentError("the recording contains no attention call; record one first")
            for name, whole in one.places.items():
                self._add(name, whole, source)
        self.overviews = overviews or Overviews()
        self._overviews: dict[tuple[int, int], HeadOverview] = {}
        self._like: HeadTiles | None = None
        self._heads: OrderedDict[tuple[int, int], HeadTiles] = OrderedDict()
        self._cache: OrderedDict[tuple[Any, ...], TileData | _Mosaic] = OrderedDict()
        self._used = 0
        self._new_mosaics: KeptResults[_Mosaic] = KeptResults(limit=2)
        self._stored = 0
        self._parts: deque[tuple[int, int, int, int, int]] = deque()
        self._wake, self._idle, self._closed = threading.Event(), threading.Event(), False
        self._idle.set()
        self._waiting = 0
        self._worker: threading.Thread | None = None

    # ---- places
    def _add(self, name: str, whole: Place, source: int) -> None:
        whole.check_batch(self.batch)
        with self._lock:
            for place in split_by_pool(whole):
                self.places.append(place)
                self.names.append(name)
                self.sources.append(source)

    def arrived(self, recording: Recording, expected: int) -> None:
        """Serve what has arrived of the first recording, whose model still runs."""
        with self._lock:
            known = dict(zip(self.names, self.places, strict=True))
            places = recording.places.items()
            if any(n in known and len(x.steps) > len(known[n].steps) for n, x in places):
                # a place went on after it was served: its tiles are others now
                known = {}
                for served in (self.places, self.names, self.sources):
                    served.clear()
                for results in (self._heads, self._cache, self._overviews, self._parts):
                    results.clear()
                self._used = 0
            for name, whole in places:
                if name not in known:
                    self._add(name, whole, 0)
            self.recordings[0], self.expected = recording, expected
        self._wake.set()

    @property
    def version(self) -> int:
        """Return a number that grows with everything that arrives."""
        return sum(len(place.steps) for place in self.places)

    def yield_to_requests(self) -> None:
        """Wait while a request is being answered."""
        self._idle.wait()

    # ---- heads
    def head(self, place: int, head: int) -> HeadTiles:
        """Return what computes the tiles of a recorded head."""
        with self._lock:
            key = (place, head)
            if key not in self._heads:
                like = next((x for (p, _), x in self._heads.items() if p == place), None)
                self._heads[key] = HeadTiles(self.places[place], head, self.batch, like=like)
            self._heads.move_to_end(key)
            while len(self._heads) > OPEN_HEADS:
                self._heads.popitem(last=False)
            return self._heads[key]

    def overview(self, place: int, head: int) -> HeadOverview:
        """Return the overview of a head: the one made while the model ran, or one computed now."""
        overview = self._known(place, head)
        if overview is None:
            like = self._like
            like = like if like is not None and like.place is self.places[place] else None
            self._like = HeadTiles(self.places[place], head, self.batch, like=like)
            overview = self._overviews[place, head] = head_overview(self._like)
        return overview

    def _known(self, place: int, head: int) -> HeadOverview | None:
        reduced = self.overviews.heads.get((self.names[place], head))
        own = self._overviews.get((place, head))
        return own if reduced is None or self.sources[place] else reduced

    def all_heads(self) -> list[tuple[int, int]]:
        """Return (index of the place, query head) of every head, in the order of the page."""
        return [(p, h) for p, place in enumerate(self.places) for h in place.heads]

    def notable(self) -> tuple[int, int, int, int]:
        """Return (place, head, row, column) of the most notable weight of the heads that have an
        overview so far: `HeadOverview.notable` is largest.
        """
        for head in self.places[0].heads[:PREPARED_HEADS]:
            self.overview(0, head)
        known = [(x, *key) for key in self.all_heads() if (x := self._known(*key)) is not None]
        best, place, head = max(known, key=lambda x: (x[0].notable, -x[1], -x[2]))
        if not best.blocks.peaks:
            return 0, self.places[0].heads[0], max(0, self.places[0].T - 1), 0
        return place, head, best.blocks.peaks[0].row, best.blocks.peaks[0].column

    @property
    def unmeasured(self) -> tuple[int, int] | None:
        """Return the first head without an overview, which the thread behind computes; or None."""
        return next((key for key in self.all_heads() if self._known(*key) is None), None)

    # ---- tiles
    def tile(self, place: int, head: int, level: int, i: int, j: int) -> TileData | None:
        """Return the best known tile, exact up to `EXACT_LEVEL`; None if masked throughout."""
        tiles, key = self.head(place, head), (place, head, level, i, j)
        if tiles.is_empty(tiles.range(level, i, j)):
            return None
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
        if isinstance(known, TileData):
            return known
        if level <= EXACT_LEVEL:
            tile = tiles.tile(level, i, j)
            self._keep(key, tile)
            return tile
        if known is None:
            known = self._new_mosaic(tiles, key)
        self._fill(known, place, head)
        return known.tile()

    def _new_mosaic(self, tiles: HeadTiles, key: tuple[int, int, int, int, int]) -> _Mosaic:
        """Compute the preview of a coarse tile once, also if two threads ask for it."""
        mosaic = self._new_mosaics.get(key, lambda: _Mosaic(tiles, *key[2:]))
        self._keep(key, mosaic)
        return mosaic

    def prepare(self) -> None:
        """Compute the map on which the page opens, before a browser asks for it, and then, while no
        request waits, the overviews of all heads.
        """
        place, head, _, _ = self.notable()
        tiles = self.head(place, head)
        level = tiles.top_level
        if level <= EXACT_LEVEL:
            self.tile(place, head, level, 0, 0)
        elif not tiles.is_empty(tiles.range(level, 0, 0)):
            self._new_mosaic(tiles, (place, head, level, 0, 0))
        self._begin()

    def _begin(self) -> None:
        """Start the thread behind, or wake it."""
        with self._lock:
            if self._worker is None and not self._closed:
                self._worker = threading.Thread(target=self._work, daemon=True)
                self._worker.start()
        self._wake.set()

    def _fill(self, mosaic: _Mosaic, place: int, head: int) -> None:
        """Put known parts into a coarse tile, and ask for the others before anything else."""
        missing = []
        for part in mosaic.missing():
            with self._lock:
                known = self._cache.get((place, head, mosaic.part_level, *part))
            if isinstance(known, TileData):
                mosaic.add(part, known)
            else:
                missing.append((place, head, mosaic.part_level, *part))
        if not missing:
            return
        with self._lock:
            asked = set(missing)
            self._parts = deque([*missing, *(x for x in self._parts if x not in asked)])
        self._begin()

    def _keep(self, key: tuple[Any, ...], tile: TileData | _Mosaic) -> None:
        """Store a tile, and drop the oldest ones beyond the bound."""
        with self._lock:
            if key in self._cache:
                self._used -= _bytes(self._cache.pop(key))
            self._cache[key] = tile
            self._used += _bytes(tile)
            while self._used > CACHE_BYTES and len(self._cache) > 1:
                self._used -= _bytes(self._cache.popitem(last=False)[1])
            self._stored += 1
        if self._stored % TRIM_AFTER == 0:
            give_back_freed_memory()

    # ---- work behind the answers
    def __enter__(self) -> Self:
        """Mark the begin of a request: the thread behind waits until it is answered."""
        with self._lock:
            self._waiting += 1
            self._idle.clear()
        return self

    def __exit__(self, *problem: object) -> None:
        with self._lock:
            self._waiting -= 1
            if self._waiting == 0:
                self._idle.set()

    def _work(self) -> None:
        """Compute parts, and then overviews, one after another, while no request waits."""
        torch.set_num_threads(1)
        while not self._closed:
            with self._lock:
                part = self._parts.popleft() if self._parts else None
                if part is None:
                    self._wake.clear()  # under the lock, so that a part asked for now still wakes
            if part is None:
                unmeasured = self.unmeasured
                if unmeasured is not None:
                    self._idle.wait()
                    self.overview(*unmeasured)
                elif not self._closed:
                    self._wake.wait()
                continue
            place, head, level, i, j = part
            with self._lock:
                if isinstance(self._cache.get(part), TileData):
                    continue
            tiles = self.head(place, head)
            tile = tiles.tile(level, i, j, pause=self._idle.wait)
            self._keep(part, tile)
            for key, mosaic in self._mosaics(place, head):
                if mosaic.part_level == level and (i, j) in mosaic.missing():
                    mosaic.add((i, j), tile)
                    if mosaic.complete:
                        self._keep(key, mosaic.tile())

    def _mosaics(self, place: int, head: int) -> list[tuple[tuple[Any, ...], _Mosaic]]:
        with self._lock:
            return [
                (key, x)
                for key, x in self._cache.items()
                if isinstance(x, _Mosaic) and key[:2] == (place, head)
            ]

    @property
    def pending(self) -> int:
        """Return the number of parts that are still to be computed."""
        return len(self._parts)

    def close(self) -> None:
        """End the thread that computes coarse levels."""
        with self._lock:  # a request may be starting the thread at this moment
            self._closed = True
            self._parts.clear()
        self._idle.set()
        self._wake.set()
        if self._worker is not None:
            self._worker.join(10)


class _Mosaic:
    """A coarse tile: a preview of sampled rows, in which exact parts replace their blocks."""

    def __init__(self, tiles: HeadTiles, level: int, i: int, j: int) -> None:
        self._tiles, self.level, self.i, self.j = tiles, level, i, j
        self.part_level = min(PART_LEVEL, level)
        self._data = tiles.preview(level, i, j)
        self._mass, self._max = self._data.mass.clone(), self._data.max.clone()
        shape = self._mass.shape
        self._visible = (
            torch.ones(shape) if self._data.visible is None else self._data.visible.clone()
        )
        self._peaks: list[Peak] = []
        n = 1 << (level - self.part_level)
        rows = range(i * n, min((i + 1) * n, -(-tiles.T // (BLOCKS << self.part_level))))
        columns = range(j * n, min((j + 1) * n, -(-tiles.N // (BLOCKS << self.part_level))))
        parts = [(a, b) for a in rows for b in columns]
        self._missing = {
            part: None for part in parts if not tiles.is_empty(tiles.range(self.part_level, *part))
        }
        self._of = max(1, len(self._missing))

    def missing(self) -> list[tuple[int, int]]:
        """Return the parts that are not exact yet, in order."""
        return list(self._missing)

    @property
    def complete(self) -> bool:
        """Return whether every part is exact."""
        return not self._missing

    def add(self, part: tuple[int, int], tile: TileData) -> None:
        """Replace the blocks of a part."""
        depth = self.level - self.part_level
        mass, most, visible = coarser_blocks(self._tiles, tile, self.part_level, part, depth)
        side = BLOCKS >> depth
        a, b = part[0] * side - self.i * BLOCKS, part[1] * side - self.j * BLOCKS
        to = slice(a, a + mass.shape[0]), slice(b, b + mass.shape[1])
        self._mass[to], self._max[to], self._visible[to] = mass, most, visible
        self._peaks = merge_peaks([*self._peaks, *tile.peaks])
        self._missing.pop(part, None)

    def tile(self) -> TileData:
        """Return the tile as far as it is known."""
        share = 1 - len(self._missing) / self._of
        whole = bool((self._visible == 1).all())
        where, size = self._tiles.range(self.level, self.i, self.j), 1 << self.level
        return TileData(
            self._mass.clone(),
            self._max.clone(),
            None if whole else self._visible.clone(),
            self._tiles.keys_of(where, size),
            tuple(self._peaks),
            share,
            0 if self.complete else 1,
        )


def _bytes(x: TileData | _Mosaic) -> int:
    """Return about how many bytes a cached tile takes."""
    if isinstance(x, _Mosaic):
        return 6 * 4 * BLOCKS * BLOCKS
    tensors: list[Tensor | None] = [x.mass, x.max, x.visible, x.keys]
    return sum(t.nbytes for t in tensors if t is not None)
