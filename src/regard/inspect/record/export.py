"""Recordings in the formats of other tools: numpy, CSV, bertviz, CircuitsVis, and pictures."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from regard.did_you_mean import suggest
from regard.errors import ArgumentError, FileError
from regard.files.atomic_write import write_user_file
from regard.units import plural

if TYPE_CHECKING:
    from regard.inspect.record.recording import Recording

FORMATS = ("numpy", "bertviz", "circuitsvis")
"""The formats in memory."""
ENDINGS = (".npz", ".csv", ".png", ".svg", ".pdf")
"""The endings of files that are written."""
MAX_WEIGHTS = 1 << 26
"""The largest number of weights that are exported at once: 512 MiB in fp64."""


def export(
    recording: Recording, what: str | Path, *, layer: int | str = 0, head: int = 0, batch: int = 0
) -> Any:
    """Convert a recording; see `Recording.to`."""
    path = Path(what)
    if isinstance(what, str) and what in FORMATS:
        if what == "numpy":
            return dense_patterns(recording, batch)
        return (
            _bertviz(recording, batch)
            if what == "bertviz"
            else _circuitsvis(recording, layer, batch)
        )
    kind = path.suffix.lower()
    if kind not in ENDINGS:
        known = (*FORMATS, *(f"a file that ends in {each}" for each in ENDINGS))
        raise FileError(
            f"{what} is no format; it must be {', '.join(known)}{suggest(str(what), FORMATS)}"
        )
    if kind == ".npz":
        with write_user_file(path) as place, place.open("wb") as stream:
            np.savez(stream, **_arrays(dense_patterns(recording, batch)))
    elif kind == ".csv":
        _write_csv(recording, path, batch)
    else:
        _draw(recording, path, layer, head, batch)
    return path


def _arrays(patterns: dict[str, NDArray[np.float64]]) -> dict[str, Any]:
    return dict(patterns)


def dense_patterns(recording: Recording, batch: int = 0) -> dict[str, NDArray[np.float64]]:
    """Return the whole pattern of every recorded head, `[h, T, N]`, by place, in fp64."""
    count = sum(len(place.heads) * place.T * place.N for place in recording.places.values())
    if count > MAX_WEIGHTS:
        raise ArgumentError(
            f"the recording has {plural(count, 'weight')}, and at most {MAX_WEIGHTS:,} are "
            "exported at once; record fewer places, heads or rows, or use weights(...)"
        )
    return {
        name: np.stack([recording.weights(name, h, batch=batch).numpy() for h in place.heads])
        for name, place in recording.places.items()
    }


def _tokens(recording: Recording, name: int | str) -> tuple[list[str], list[str]]:
    """Return a text for each row and each column of a place."""
    place = recording[name]
    rows, columns = recording.labels(place.name)
    return (
        list(rows) or list(map(str, range(place.T))),
        list(columns) or list(map(str, range(place.N))),
    )


def _bertviz(recording: Recording, batch: int) -> dict[str, Any]:
    """Return the arguments of `bertviz.head_view` and `bertviz.model_view`."""
    import torch

    sizes = {(place.T, place.N) for place in recording.places.values()}
    if len(sizes) != 1 or any(t != n for t, n in sizes):
        raise ArgumentError(
            f"bertviz draws layers of self-attention over the same tokens, and the places have the "
            f"sizes {sorted(sizes)}; record one pass, and select places"
        )
    patterns = dense_patterns(recording, batch)
    attention = [torch.from_numpy(x).float()[None] for x in patterns.values()]
    return {"attention": attention, "tokens": _tokens(recording, 0)[0]}


def _circuitsvis(recording: Recording, layer: int | str, batch: int) -> dict[str, Any]:
    """Return the arguments of `circuitsvis.attention.attention_heads` for one layer."""
    place = recording[layer]
    if place.T != place.N:
        raise ArgumentError(
            f"CircuitsVis draws self-attention, and {place.name} has "
            f"{plural(place.T, 'query', 'queries')} and {plural(place.N, 'key')}"
        )
    patterns = np.stack(
        [recording.weights(place.name, h, batch=batch).numpy() for h in place.heads]
    )
    return {
        "attention": patterns.astype(np.float32),
        "tokens": _tokens(recording, layer)[0],
        "attention_head_names": [f"{place.name} head {h}" for h in place.heads],
    }


def _write_csv(recording: Recording, path: Path, batch: int) -> None:
    """Write one line per weight that is not masked."""
    patterns = dense_patterns(recording, batch)
    with write_user_file(path) as target, target.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["place", "head", "query", "query_token", "key", "key_token", "weight"])
        for name, weights in patterns.items():
            rows, columns = _tokens(recording, name)
            for h, head in enumerate(recording[name].heads):
                visible = ~recording.scores(name, head, batch=batch).isneginf().numpy()
                for i, j in zip(*np.nonzero(visible), strict=True):
                    weight = float(weights[h, i, j])
                    writer.writerow([name, head, i, rows[i], j, columns[j], f"{weight:.9g}"])


def _draw(recording: Recording, path: Path, layer: int | str, head: int, batch: int) -> None:
    """Draw the pattern of one head."""
    from regard.view.charts import write
    from regard.view.heatmaps import AlignmentMap, HeadWeights

    place = recording[layer]
    weights = recording.weights(layer, head, batch=batch).numpy()
    if max(weights.shape) > 512:
        raise ArgumentError(
            f"{place.name} is {place.T} x {place.N}; a picture shows 512 x 512 at most: "
            "regard.inspect.report, or pooled(...), shows more"
        )
    title = f"{place.name}, head {head}: rows are queries, columns are keys"
    rows, columns = _tokens(recording, layer)
    if max(weights.shape) <= 48:
        write(AlignmentMap(weights, rows, columns, title), path)
    else:
        write(HeadWeights(weights.tolist(), title), path)
