"""The data of the interactive page: the places of one or two recordings, thumbnails and metrics
of every head, and the exact tensors of some heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.cost import attention_flops
from regard.cost.softmax import attention_bytes
from regard.errors import ArgumentError
from regard.inspect.metrics.measure import measure
from regard.inspect.model_run import check_index
from regard.inspect.record.recorded_place import Place
from regard.inspect.record.recording import Recording
from regard.inspect.record.row_sums import row_sums
from regard.inspect.record.tiles import PoolAccumulator, Pooled
from regard.inspect.report.page_rules import Arrays, PageRules, split_by_pool
from regard.positions import Rotary
from regard.units import plural

THUMBNAIL_SIDE = 64
"""The largest number of blocks along a side of a thumbnail."""
OCTAVES = 24
"""Number of powers of two that one byte of a thumbnail covers: bytes 1 to 255 stand for weights
from 2^-24 to 1 in equal logarithmic steps, and byte 0 stands for weight 0.
"""

METRICS = {
    "entropy": "share",
    "effective_keys": "count",
    "sink": "share",
    "learned_sink": "share",
    "previous_token": "share",
    "induction": "share",
    "duplicate": "share",
    "distance": "count",
    "local": "share",
    "max_logit": "score",
    "missing": "error",
    "future": "error",
    "empty": "error",
}
"""Metrics that the page shows, and their units."""

EMBEDDING_ORDER = (
    "induction",
    "previous_token",
    "duplicate",
    "-entropy",
    "sink",
    "distance",
    "-sink",
    "-distance",
)
"""Metrics that determine which heads are embedded first: one leading head of each metric in turn.

A minus sign means that the heads with the smallest values lead.
"""


MAX_FACT = 160
"""The largest number of characters of a fact at the top of the page."""
PAGE_OVERHEAD = 450_000
"""Approximate bytes of the page without its arrays."""
ENCODED_RATIO = 1.15
"""Estimated bytes of the page per byte of a float array: gzip leaves 85 %, and base64 adds a third.
"""
AUDITED_SCORES = 1 << 15
"""Number of scores of each place that the page's audit checks. Rows are sampled to this number, and
the page states how many were checked.
"""
PAGE_BUDGET = 8_000_000
"""Default limit of the size of the page in bytes; heads are embedded exactly until it is nearly
reached.
"""


class PlaceOverview(NamedTuple):
    """Thumbnails and metrics of all recorded heads of a place."""

    blocks: Pooled
    metrics: dict[str, list[float | None]]


def place_overview(place: Place, ids: Tensor | None = None, row: int = 0) -> PlaceOverview:
    """Compute thumbnails of at most 64 x 64 blocks, and the metrics, for one row of the batch.

    Tiles are computed in fp32, whose error no byte shows, unless the queries are fp64.
    """
    tall, wide = (max(1, -(-length // THUMBNAIL_SIDE)) for length in (place.T, place.N))
    pool = PoolAccumulator(place, (tall, wide), batch=row)
    dtype = torch.float64 if place.steps[0].q.dtype == torch.float64 else torch.float32
    measures = measure(place, ids, batch=row, size=pool.tile_size, dtype=dtype, also=(pool,))
    measured = measures.values
    metrics = {
        name: [x if math.isfinite(x) else None for x in measured[name].tolist()]
        for name in METRICS
        if name in measured
    }
    return PlaceOverview(pool.blocks(), metrics)


def as_bytes(x: Float[Tensor, "*n"]) -> NDArray[np.uint8]:
    """Encode weights as 1 + 254 (1 + log2(x) / 24), at least 1 above 0; NaN is 255."""
    level = (1 + 254 * (1 + x.double().clamp(min=2.0**-OCTAVES).log2() / OCTAVES)).round()
    level = torch.where(x.isnan(), 255.0, level.clamp(1, 255))
    return torch.where(x == 0, 0.0, level).to(torch.uint8).numpy()


def source_facts(recording: Recording) -> dict[str, object]:
    """Return the facts about a run that the page lists at its top: title, model and metadata."""
    places = list(recording.places.values())
    kernels = sorted({step.kernel for place in places for step in place.steps})
    metadata = {name: _shortened(str(value)) for name, value in recording.metadata.items()}
    metadata |= {"kernel": ", ".join(kernels), "dtype": str(places[0].pools[0].k.dtype)[6:]}
    metadata |= {"places": str(len(places)), "tokens": str(max(place.N for place in places))}
    if recording.unrecorded:
        names = dict.fromkeys(call.place for call in recording.unrecorded)
        metadata["not recorded"] = ", ".join(names)
    # a character of several tokens stands once in the title
    text = re.sub(r"‹1/\d+›|(‹U\+\w+›|.)‹[2-9]/\d+›", "", "".join(recording.pieces))
    text = text.replace("·", " ").strip()
    return {"title": text[:80], "model": metadata.get("model", ""), "metadata": metadata}


def _shortened(value: str) -> str:
    """Return at most `MAX_FACT` characters of a fact, and how many are left out."""
    if len(value) <= MAX_FACT:
        return value
    return f"{value[:MAX_FACT]} … ({plural(len(value) - MAX_FACT, 'more character')})"


def label(name: str) -> str:
    """Return a short name of a place: the number of its layer, if that is all its name contains.

    >>> label("layers.3"), label("decoder.layers.0.cross"), label("")
    ('3', 'decoder.layers.0.cross', 'attend')
    """
    last = name.rpartition(".")[2]
    return last if name.count(".") == 1 and last.isdecimal() else name or "attend"


def place_facts(place: Place, recording: Recording, texts: list[list[str]]) -> dict[str, Any]:
    """Return the name, the sizes and the texts of a place; equal texts are stored once."""
    rows, columns = replace(recording, places={place.name: place}).labels(place.name)

    def text(pieces: tuple[str, ...]) -> int:
        if list(pieces) not in texts:
            texts.append(list(pieces))
        return texts.index(list(pieces))

    return {
        "name": place.name,
        "label": label(place.name),
        "H": place.H,
        "G": place.G,
        "heads": list(place.heads),
        "T": place.T,
        "N": place.N,
        "D": place.pools[0].k.shape[-1],
        "q_text": text(rows),
        "q_first": 0,
        "k_text": text(columns),
    }


def cost_facts(place: Place, pairs: int) -> dict[str, object]:
    """Count FLOPs, bytes, and cache bytes of one batch row of a place.

    Caches are given for MHA, for the model's own GQA, and for MQA.
    """
    pool = place.pools[0]
    D, size = pool.k.shape[3], pool.k.element_size()
    E = D if pool.v is None else pool.v.shape[3]
    kinds = {"MHA": place.H, "GQA": place.G, "MQA": 1}
    return {
        "flops": attention_flops(pairs, D, E),
        "bytes": attention_bytes(
            B=1, H=len(place.heads), G=place.G, T=place.T, S=place.N, D=D, E=E, itemsize=size
        ),
        "kv_bytes": {
            name: n * place.N * (D + E) * size
            for name, n in kinds.items()
            if name != "GQA" or 1 < n < place.H
        },
    }


def rotary_facts(model: object, place: str) -> dict[str, object] | None:
    """Return the layout, frequencies and factor of the rotary embedding of a place, or None.

    The page undoes the rotation of q and k with them. That needs a last step with fixed frequencies
    on the first dims of a head, which MLA, for example, does not have.
    """
    modules = dict(model.decoder.named_modules()) if hasattr(model, "decoder") else {}
    layer = modules.get(place)
    named = [] if layer is None else list(layer.named_modules())
    lists = [x for name, x in named if name.endswith("steps") and isinstance(x, nn.ModuleList)]
    last = [steps[-1] for steps in lists if len(steps)]
    first = last[0] if last else None
    if not isinstance(first, Rotary) or first.follows_length:
        return None
    if not all(isinstance(x, Rotary) and torch.equal(x.inv_freq, first.inv_freq) for x in last):
        return None
    return {
        "layout": first.layout,
        "inv_freq": first.inv_freq.tolist(),
        "factor": float(first.rotary_factor),
        "dims": 2 * first.inv_freq.numel(),
    }


def to_lossless_array(x: Tensor) -> NDArray[np.generic]:
    """Convert a tensor to an array without loss: bfloat16 as its upper 16 bits, fp16 as float32.

    >>> to_lossless_array(torch.tensor([1.0], dtype=torch.bfloat16)).tolist() == [0x3F80]
    True
    """
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy()
    return x.numpy() if x.dtype == torch.float64 else x.float().numpy()


def compressed_size(x: NDArray[np.generic]) -> float:
    """Estimate the compressed bytes of an array: floats do not compress well."""
    return x.nbytes * (0.25 if x.dtype == np.uint8 else 1.0)


class PageData:
    """Collects the page's data: `add`, `embed`, then read `meta` and `arrays`."""

    def __init__(self, row: int) -> None:
        self.row, self.arrays = row, Arrays()
        self.places: list[Place] = []
        self.overviews: list[PlaceOverview] = []
        self.place_data: list[dict[str, Any]] = []
        self.rules: list[PageRules] = []
        self.texts: list[list[str]] = []
        self.sources: list[dict[str, Any]] = []

    def add(self, recording: Recording, source: int, model: object) -> None:
        """Add the places of a recording, with the facts about every head."""
        if not recording.places:
            raise ArgumentError("the recording contains no attention call; record one first")
        for name, whole in recording.places.items():
            whole.check_batch(self.row)
            if rules := sorted({str(step.score) for step in whole.steps if step.score}):
                raise ArgumentError(
                    f"{name} has the score rule {', '.join(rules)}: a page computes its cells from "
                    f"q and k without score rules; leave {name} out (places=...), or read "
                    "recording.weights"
                )
            if changed := sorted({x for step in whole.steps for x in step.edited}):
                raise ArgumentError(
                    f"{' and '.join(changed)} of {name} were edited while it was recorded: a page "
                    "computes its cells from q and k, and would show the values before the edit; "
                    f"record without that edit, leave {name} out (places=...), or read "
                    "recording.weights"
                )
            sums = row_sums(whole, cells=AUDITED_SCORES)
            audit = {**asdict(sums), "sound": sums.sound}
            for place in split_by_pool(whole):
                self._place(place, recording)
                self.place_data[-1] |= {
                    "source": source,
                    "audit": audit,
                    "rotary": rotary_facts(model, place.name),
                }
        self.sources.append(source_facts(recording))

    def _place(self, place: Place, recording: Recording) -> None:
        """Add a place: its rules, positions, thumbnails and metrics."""
        number = len(self.places)
        rules = PageRules(place, self.row, self.arrays)
        facts, ids = place_facts(place, recording, self.texts), recording.ids
        columns = tuple(self.texts[facts["k_text"]])
        same = ids is not None and ids.shape[1] == place.N and columns == recording.pieces
        overview = place_overview(
            place, ids[self.row] if same and ids is not None else None, self.row
        )
        self.places.append(place)
        self.rules.append(rules)
        self.overviews.append(overview)
        self.arrays[f"p{number}.mass"] = as_bytes(overview.blocks.mass)
        self.arrays[f"p{number}.max"] = as_bytes(overview.blocks.max)
        self._positions(number, place)
        if len(rules.groups) > 1:
            self.arrays[f"p{number}.rule"] = rules.rule_of_row
        pool = place.pools[0]
        self.place_data.append(
            facts
            | {
                "E": 0 if pool.v is None else pool.v.shape[-1],
                "dtype": str(pool.k.dtype).removeprefix("torch."),
                "key_kind": place.key_kind,
                "present": rules.keys_present(),
                "visible": rules.keep("visible", _once_if_shared(overview.blocks.visible)),
                "steps": [step.T for step in place.steps],
                "cost": cost_facts(place, int(overview.blocks.visible.sum())),
            }
        )

    def _positions(self, number: int, place: Place) -> None:
        """Store the positions of rows and columns that are not 0, 1, 2, ..."""
        q, k = place.row_positions[self.row].long(), place.column_positions[self.row]
        for name, x in (("q_positions", q), ("k_positions", k)):
            if not torch.equal(x, torch.arange(len(x))):
                self.arrays[f"p{number}.{name}"] = x.numpy().astype(np.int32)

    def start(self, choice: Any) -> tuple[int, int]:
        """Return the index of the place and the head at which the page opens."""
        if choice is None:
            return next(iter(self._ranked()))
        layer, head = choice if isinstance(choice, tuple) else (choice.layer, choice.head)
        if not isinstance(layer, int):
            names = [plain["name"] for plain in self.place_data]
            if layer not in names:
                raise ArgumentError(f"{layer!r} was not recorded; recorded: {', '.join(names)}")
            layer = names.index(layer)
        layer = check_index("layer", layer, len(self.places), "layer", "layers")
        head = check_index("head", head, self.places[layer].H, "head", "heads")
        self.places[layer].head_index(head)
        return layer, head

    def cell(self, place: int, head: int, query: int, key: int | None) -> dict[str, int]:
        """Return the cell at which the page opens: the strongest key, unless one is given."""
        where = self.places[place]
        i = check_index("query", query, where.T, "query", "queries")
        if key is not None:
            return {"i": i, "j": check_index("key", key, where.N, "key", "keys")}
        block = where.block(slice(i, i + 1), slice(0, where.N), slice(head, head + 1))
        return {"i": i, "j": int(block.weights[self.row, 0, 0].argmax())}

    def _ranked(self) -> Iterator[tuple[int, int]]:
        """Generate heads to embed: the leaders of each metric in turn, then the others."""
        every = [(p, h) for p, place in enumerate(self.places) for h in place.heads]
        orders = [self._leaders(name, every) for name in EMBEDDING_ORDER]
        done = set()
        for turn in zip_longest(*orders, every):
            for place_and_head in turn:
                if place_and_head is not None and place_and_head not in done:
                    done.add(place_and_head)
                    yield place_and_head

    def _leaders(self, name: str, every: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the heads in the order of a metric; heads without it are left out."""
        smallest_first, metric = name.startswith("-"), name.removeprefix("-")
        known = {(p, h): x for p, h in every if (x := self._metric(metric, p, h)) is not None}
        return sorted(known, key=lambda head: known[head], reverse=not smallest_first)

    def embed(self, place: int, head: int, budget: int) -> None:
        """Embed exact tensors while the budget allows; q, k and lse of the first head always."""
        bytes_left = (budget - PAGE_OVERHEAD) / ENCODED_RATIO - sum(
            compressed_size(x) for x in self.arrays.values()
        )
        order = [(place, head)]
        if len(self.sources) > 1:  # also the same head of the other recording
            other = next(
                (
                    n
                    for n, x in enumerate(self.place_data)
                    if x["source"] == 1 and x["name"] == self.place_data[place]["name"]
                ),
                None,
            )
            if other is not None and head in self.places[other].heads:
                order.append((other, head))
        heads: dict[int, list[int]] = {}
        for p, h in dict.fromkeys((*order, *self._ranked())):
            new_arrays = {k: x for k, x in self._exact(p, h).items() if k not in self.arrays}
            size = sum(x.nbytes for x in new_arrays.values())
            while size > bytes_left and (p, h) in order and _is_spare(name := list(new_arrays)[-1]):
                size -= new_arrays.pop(name).nbytes
            if size > bytes_left and (p, h) not in order:
                continue
            bytes_left -= size
            self.arrays.update(new_arrays)
            heads.setdefault(p, []).append(h)
        for p, rules in enumerate(self.rules):
            self.place_data[p]["rules"] = rules.rule_data(heads.get(p, []))

    def _exact(self, p: int, h: int) -> Arrays:
        """Return q, k, v, lse and out of one head."""
        place, row = self.places[p], self.row
        g, head_index, pool = h // (place.H // place.G), place.head_index(h), place.pools[0]
        group_index = pool.group_index(h, place.H)
        parts = {
            f"q{h}": torch.cat([step.q[row, head_index] for step in place.steps]),
            f"lse{h}": torch.cat([step.lse[row, head_index] for step in place.steps]),
            f"k{g}": pool.k[row, group_index],
        }
        if pool.v is not None:
            parts[f"v{g}"] = pool.v[row, group_index]
        outs = [step.out for step in place.steps]
        if all(out is not None for out in outs):
            parts[f"out{h}"] = torch.cat([out[row, head_index] for out in outs if out is not None])
        return {f"p{p}.{name}": to_lossless_array(x) for name, x in parts.items()}

    def _head_values(self, name: str, p: int) -> list[float | None]:
        """Return a metric of every recorded head of a place; None where a head does not have it."""
        return self.overviews[p].metrics.get(name, [None] * len(self.places[p].heads))

    def _metric(self, name: str, p: int, h: int) -> float | None:
        return self._head_values(name, p)[self.places[p].head_index(h)]

    def meta(self, title: str | None) -> dict[str, object]:
        """Return the data of the page that are not arrays, for JSON."""
        return {
            "title": title
            or " | ".join(filter(None, (x["title"] for x in self.sources)))
            or "recording",
            "sources": self.sources,
            "texts": self.texts,
            "places": self.place_data,
            "thumbs": {"octaves": OCTAVES},
            "metrics": {
                name: {
                    "unit": unit,
                    "of": [self._head_values(name, p) for p in range(len(self.places))],
                }
                for name, unit in METRICS.items()
                if any(x for p in range(len(self.places)) for x in self._head_values(name, p))
                or unit == "error"
            },
        }


def _is_spare(name: str) -> bool:
    """Return whether an array is a head's v or out, which its pattern does not need."""
    return name.partition(".")[2].startswith(("v", "out"))


def _once_if_shared(x: Tensor) -> NDArray[np.int32]:
    """Return the numbers of all heads `[h, ...]`, or of one head if they are all equal."""
    x = x[:1] if bool((x == x[:1]).all()) else x
    return x.numpy().astype(np.int32)


def report(
    recording: Recording,
    b: Recording | None = None,
    *,
    model: object = None,
    choice: object = None,
    query: int = -1,
    key: int | None = None,
    title: str | None = None,
    row: int = 0,
    budget: int = PAGE_BUDGET,
    explanation: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Convert one or two recordings to the data that `regard.view.page.report_page` draws.

    Args:
        b: a second recording to compare with: of another prompt, model or kernel.
        model: the recorded model, for facts that a recording lacks, such as rotary frequencies.
        choice: an object with `layer` and `head`, or that pair: the head at which the page opens,
            and which is embedded first.
        query: row at which the page opens.
        key: column at which it opens; the strongest key by default.
        title: title of the page; the text by default.
        budget: bytes of the page; heads for which there is no space are thumbnails only, and the
            page says so.
        explanation: JSON data of an explanation of the chosen query, to be embedded.

    Returns:
        {"meta": plain data, "arrays": {name: numpy array}}.

    Raises:
        ArgumentError: nothing was recorded, or `row`, `choice`, `query` or `key` is out of range.

    >>> import regard
    >>> from regard.inspect.record.record_model import record
    >>> data = report(record(regard.load("tiny"), "to be or not to be"))
    >>> len(data["meta"]["places"]), data["meta"]["places"][0]["H"]
    (4, 8)
    """
    recordings = [recording] if b is None else [recording, b]
    page = PageData(row)
    for number, each in enumerate(recordings):
        page.add(each, number, model if number == 0 else None)
    place, head = page.start(choice)
    page.embed(place, head, budget)
    meta = page.meta(title)
    meta["start"] = {"place": place, "head": head, **page.cell(place, head, query, key)}
    meta["explanation"] = explanation
    return {"meta": meta, "arrays": page.arrays}
