"""The data of a page as it grows: places of one or two recordings, thumbnails of all heads, some
heads exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.errors import ArgumentError
from regard.inspect import page_facts
from regard.inspect.page_heads import LEADERS, METRICS, OCTAVES, Glance, as_bytes, glance
from regard.inspect.page_rules import Arrays, Rules, parted, sides
from regard.inspect.place import Place
from regard.inspect.recording import Recording
from regard.inspect.row_sums import row_sums

OVERHEAD = 450_000
"""Bytes of the page besides its arrays, roughly."""
PACKED = 1.25
"""Bytes of the page for each byte of an array of numbers that hardly compress: gzip, then
base64.
"""
AUDITED = 1 << 15
"""Scores of each place that the page's audit looks at: sampled rows, and it says how many."""


class PageData:
    """The page's data as it grows."""

    def __init__(self, row: int) -> None:
        self.row, self.arrays = row, Arrays()
        self.places: list[Place] = []
        self.glances: list[Glance] = []
        self.plain: list[dict[str, Any]] = []
        self.rules: list[Rules] = []
        self.texts: list[list[str]] = []
        self.sources: list[dict[str, Any]] = []

    def add(self, recording: Recording, source: int, model: Any) -> None:
        """A recording's places: what is known of every head."""
        if not recording.places:
            raise ArgumentError("the recording holds no place; record a call of attention first")
        for name, whole in recording.places.items():
            if not 0 <= self.row < whole.B:
                raise ArgumentError(
                    f"row is {self.row}; {name} holds a batch of {whole.B}: 0 to {whole.B - 1}"
                )
            if changed := sorted({x for step in whole.steps for x in step.edited}):
                raise ArgumentError(
                    f"{' and '.join(changed)} of {name} were edited while it was recorded: a page "
                    "computes its cells from q "
                    f"and k, and would show others; record without that edit, leave {name} out "
                    "(places=...), or read "
                    "recording.weights"
                )
            found = row_sums(whole, cells=AUDITED)
            audit = {**asdict(found), "sound": found.sound}
            for place in parted(whole):
                self._place(place, recording)
                self.plain[-1] |= {
                    "source": source,
                    "audit": audit,
                    "rotary": page_facts.rotary(model, place.name),
                }
        self.sources.append(page_facts.source(recording))

    def _place(self, place: Place, recording: Recording) -> None:
        """A place: its rules, positions, thumbnails and numbers."""
        number = len(self.places)
        rules = Rules(place, self.row, self.arrays)
        texts = replace(recording, places={place.name: place}).labels(place.name)
        ids = recording.ids
        same = ids is not None and ids.shape[1] == place.N and texts[1] == recording.pieces
        seen = glance(place, ids[self.row] if same and ids is not None else None, self.row)
        self.places.append(place)
        self.rules.append(rules)
        self.glances.append(seen)
        self.arrays[f"p{number}.mass"] = as_bytes(seen.blocks.mass)
        self.arrays[f"p{number}.max"] = as_bytes(seen.blocks.max)
        self._positions(number, place)
        if len(rules.groups) > 1:
            self.arrays[f"p{number}.rule"] = rules.of
        pool = place.pools[0]
        self.plain.append(
            {
                "name": place.name,
                "label": page_facts.label(place.name),
                "H": place.H,
                "G": place.G,
                "heads": list(place.heads),
                "T": place.T,
                "N": place.N,
                "D": pool.k.shape[-1],
                "E": 0 if pool.v is None else pool.v.shape[-1],
                "q_text": self._text(texts[0]),
                "q_first": 0,
                "k_text": self._text(texts[1]),
                "dtype": str(pool.k.dtype).removeprefix("torch."),
                "keys": place.held,
                "held": rules.held(),
                "visible": rules.keep("visible", _shared(seen.blocks.visible)),
                "steps": [step.T for step in place.steps],
                "cost": page_facts.cost(place, int(seen.blocks.visible.sum())),
            }
        )

    def _text(self, pieces: tuple[str, ...]) -> int:
        """The number of a list of tokens."""
        if list(pieces) not in self.texts:
            self.texts.append(list(pieces))
        return self.texts.index(list(pieces))

    def _positions(self, number: int, place: Place) -> None:
        """Positions of rows and columns, where they are not 0, 1, 2, ..."""
        q, k = torch.zeros(place.T, dtype=torch.int64), torch.full((place.N,), -1)
        first = 0
        for step in place.steps:
            q[first : first + step.T], at = sides(step, self.row)
            k[step.columns[at >= 0]] = at[at >= 0]
            first += step.T
        for name, x in (("q_positions", q), ("k_positions", k)):
            if not torch.equal(x, torch.arange(len(x))):
                self.arrays[f"p{number}.{name}"] = x.numpy().astype(np.int32)

    def start(self, choice: Any) -> tuple[int, int]:
        """The number of the place and the head where the page opens."""
        if choice is None:
            return next(iter(self._ranked()))
        layer, head = choice if isinstance(choice, tuple) else (choice.layer, choice.head)
        if not isinstance(layer, int):
            names = [plain["name"] for plain in self.plain]
            if layer not in names:
                raise ArgumentError(f"{layer!r} was not recorded; recorded: {', '.join(names)}")
            layer = names.index(layer)
        layer = _inside("layer", layer, len(self.places))
        head = _inside("head", head, self.places[layer].H)
        self.places[layer].at(head)
        return layer, head

    def cell(self, place: int, head: int, query: int, key: int | None) -> dict[str, int]:
        """The cell where the page opens: the query's strongest key, unless one is asked for."""
        where = self.places[place]
        i = _inside("query", query, where.T)
        if key is not None:
            return {"i": i, "j": _inside("key", key, where.N)}
        block = where.block(slice(i, i + 1), slice(0, where.N), slice(head, head + 1))
        return {"i": i, "j": int(block.weights[self.row, 0, 0].argmax())}

    def _ranked(self) -> Iterator[tuple[int, int]]:
        """Heads in the order in which they deserve room: the leaders of each metric in turn, then
        their followers.
        """
        every = [(p, h) for p, place in enumerate(self.places) for h in place.heads]
        orders = [self._leaders(name, every) for name in LEADERS]
        seen = set()
        for turn in zip_longest(*orders, every):
            for at in turn:
                if at is not None and at not in seen:
                    seen.add(at)
                    yield at

    def _leaders(self, name: str, every: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Heads from the one that has most of a metric, or least, down; without those that it says
        nothing of.
        """
        least, metric = name.startswith("-"), name.removeprefix("-")
        known = {(p, h): x for p, h in every if (x := self._metric(metric, p, h)) is not None}
        return sorted(known, key=lambda at: known[at] if least else -known[at])

    def embed(self, place: int, head: int, budget: int) -> None:
        """Embed heads exactly while there is room; the first whatever its size."""
        room = (budget - OVERHEAD) / PACKED - sum(
            page_facts.packed(x) for x in self.arrays.values()
        )
        order = [(place, head)]
        if len(self.sources) > 1:  # the same head of the other recording, to compare
            other = next(
                (
                    n
                    for n, x in enumerate(self.plain)
                    if x["source"] == 1 and x["name"] == self.plain[place]["name"]
                ),
                None,
            )
            if other is not None and head in self.places[other].heads:
                order.append((other, head))
        heads: dict[int, list[int]] = {}
        for p, h in dict.fromkeys((*order, *self._ranked())):
            fresh = {k: x for k, x in self._exact(p, h).items() if k not in self.arrays}
            size = sum(x.nbytes for x in fresh.values())
            if size > room and (p, h) not in order:
                continue
            room -= size
            self.arrays.update(fresh)
            heads.setdefault(p, []).append(h)
        for p, rules in enumerate(self.rules):
            self.plain[p]["rules"] = rules.plain(heads.get(p, []))

    def _exact(self, p: int, h: int) -> Arrays:
        """Everything that one head's pattern and output follow from."""
        place, row = self.places[p], self.row
        g, at, pool = h // (place.H // place.G), place.at(h), place.pools[0]
        mine = pool.at(h, place.H)
        parts = {
            f"q{h}": torch.cat([step.q[row, at] for step in place.steps]),
            f"lse{h}": torch.cat([step.lse[row, at] for step in place.steps]),
            f"k{g}": pool.k[row, mine],
        }
        if pool.v is not None:
            parts[f"v{g}"] = pool.v[row, mine]
        outs = [step.out for step in place.steps]
        if all(out is not None for out in outs):
            parts[f"out{h}"] = torch.cat([out[row, at] for out in outs if out is not None])
        return {f"p{p}.{name}": page_facts.stored(x) for name, x in parts.items()}

    def _of(self, name: str, p: int) -> list[float | None]:
        """A metric of a place's heads; None where it has none."""
        return self.glances[p].metrics.get(name, [None] * len(self.places[p].heads))

    def _metric(self, name: str, p: int, h: int) -> float | None:
        return self._of(name, p)[self.places[p].at(h)]

    def meta(self, title: str | None) -> dict[str, Any]:
        """Everything but the arrays."""
        return {
            "title": title
            or " | ".join(filter(None, (x["title"] for x in self.sources)))
            or "recording",
            "sources": self.sources,
            "texts": self.texts,
            "places": self.plain,
            "thumbs": {"octaves": OCTAVES},
            "metrics": {
                name: {"unit": unit, "of": [self._of(name, p) for p in range(len(self.places))]}
                for name, unit in METRICS.items()
                if any(x for p in range(len(self.places)) for x in self._of(name, p))
                or unit == "error"
            },
        }


def _shared(x: Tensor) -> NDArray[np.int32]:
    """Numbers of heads [h,...], once where all heads have the same."""
    x = x[:1] if bool((x == x[:1]).all()) else x
    return x.numpy().astype(np.int32)


def _inside(name: str, index: int, count: int) -> int:
    """An index counted from the front."""
    if not -count <= index < count:
        raise ArgumentError(f"{name} is {index}; it must be {-count} to {count - 1}")
    return index % count
