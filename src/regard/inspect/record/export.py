"""Recordings in the formats of other tools: numpy, CSV, bertviz, CircuitsVis, and pictures; and as
the interactive page of a notebook.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.did_you_mean import suggest
from regard.errors import ArgumentError, FileError
from regard.files.atomic_write import write_user_file
from regard.inspect.record.recording import Recording
from regard.inspect.report.page_data import report
from regard.language import language_of_locale
from regard.units import plural
from regard.view.notebook_page import HEIGHT, PagePlace, frame, has_widgets
from regard.view.notebook_page import widget as page_widget
from regard.view.page import report_page

FORMATS = ("numpy", "bertviz", "circuitsvis")
"""The formats in memory."""
ENDINGS = (".npz", ".csv", ".png", ".svg", ".pdf")
"""The endings of files that are written."""
MAX_WEIGHTS = 1 << 26
"""The largest number of weights that are exported at once: 512 MiB in fp64."""
MAX_PAGE_WEIGHTS = 1 << 22
"""The largest number of weights of a recording that a notebook shows as a page."""


def export(
    recording: Recording, what: str | Path, *, layer: int | str = 0, head: int = 0, batch: int = 0
) -> Any:
    """Export the patterns of a recording.

    - "numpy": the weights `[h, T, N]` of every place, by name; a file that ends in .npz has the
      same arrays;
    - "bertviz": the arguments of `bertviz.head_view` and `bertviz.model_view`, also of an
      encoder-decoder;
    - "circuitsvis": the arguments of `circuitsvis.attention.attention_heads`, for one layer;
    - a file that ends in .csv: one line per weight that is not masked;
    - a file that ends in .png, .svg or .pdf: the pattern of one head.

    Args:
        what: "numpy", "bertviz", "circuitsvis", or the name of a file.
        layer: name or index of the place, for "circuitsvis" and pictures.
        head: query head, for pictures.

    Returns:
        The data, or the path of the file.

    Raises:
        ArgumentError: there are too many weights to write them all, or the tool cannot show this
            kind of attention.
        FileError: the format is unknown, or the file cannot be written.

    >>> import regard
    >>> recording = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> export(recording, "numpy")["layers.0"].shape
    (8, 6, 6)
    """
    path = Path(what)
    if what == "numpy":
        return dense_patterns(recording, batch)
    if what == "bertviz":
        return _bertviz(recording, batch)
    if what == "circuitsvis":
        return _circuitsvis(recording, layer, batch)
    kind = path.suffix.lower()
    if kind not in ENDINGS:
        known = (*FORMATS, *(f"a file that ends in {each}" for each in ENDINGS))
        raise FileError(
            f"{what} is no format; it must be {', '.join(known)}{suggest(str(what), FORMATS)}"
        )
    if kind == ".npz":
        arrays: dict[str, Any] = {**dense_patterns(recording, batch)}
        with write_user_file(path) as place, place.open("wb") as stream:
            np.savez(stream, **arrays)
    elif kind == ".csv":
        _write_csv(recording, path, batch)
    else:
        _draw(recording, path, layer, head, batch)
    return path


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

    kinds: dict[str, list[str]] = {}
    for name in recording.places:
        kind = "encoder" if name.startswith("encoder.") else "decoder"
        kinds.setdefault("cross" if ".cross" in name else kind, []).append(name)
    is_pair = len(kinds) > 1
    tokens: dict[str, list[str]] = {}
    for kind, names in kinds.items():
        sizes = {(recording[name].T, recording[name].N) for name in names}
        if len(sizes) != 1 or (kind != "cross" and any(t != n for t, n in sizes)):
            raise ArgumentError(
                f"bertviz draws layers of self-attention over the same tokens, with the "
                f"cross-attention of an encoder-decoder, and the places have the sizes "
                f"{sorted(sizes)}; record one pass, and select places"
            )
        rows, columns = _tokens(recording, names[0])
        tokens |= {"decoder": rows} if kind != "encoder" else {}
        tokens |= {"encoder": columns} if kind != "decoder" else {}
    patterns = dense_patterns(recording, batch)
    drawn = {
        kind: [torch.from_numpy(patterns[name]).float()[None] for name in names]
        for kind, names in kinds.items()
    }
    if not is_pair and "cross" not in kinds:
        (attention,), (own,) = drawn.values(), tokens.values()
        return {"attention": attention, "tokens": own}
    return {
        **{f"{kind}_attention": x for kind, x in drawn.items()},
        **{f"{kind}_tokens": x for kind, x in tokens.items()},
    }


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
            "regard.inspect.report, or pool_pattern(...), shows more"
        )
    title = f"{place.name}, head {head}: rows are queries, columns are keys"
    rows, columns = _tokens(recording, layer)
    if max(weights.shape) <= 48:
        write(AlignmentMap(weights, rows, columns, title), path)
    else:
        write(HeadWeights(weights.tolist(), title), path)


def widget(recording: Recording, *, height: int = HEIGHT) -> Any:
    """Return the interactive page of a recording as a widget for a notebook, which other cells can
    move.

    Args:
        height: height of the widget, in pixels.

    Returns:
        An `anywidget.AnyWidget`; its method `show(layer, head, query, key, view)` opens a view
        ("atlas", "map", "row", "cell", ...) of a head.

    Raises:
        ArgumentError: the package anywidget is not installed (the extra `notebook`).
    """
    data = report(recording)
    places = [
        PagePlace(place["name"], tuple(place["heads"]), place["T"], place["N"])
        for place in data["meta"]["places"]
    ]
    return page_widget(report_page(data, language_of_locale()), places, height)


def notebook_bundle(recording: Recording) -> Mapping[str, Any]:
    """Return what a notebook shows of a recording; see `Recording._repr_mimebundle_`."""
    text = {"text/plain": f"Recording of {', '.join(recording.places)}"}
    weights = sum(x.T * x.N * len(x.heads) for x in recording.places.values())
    if weights > MAX_PAGE_WEIGHTS:
        return {**text, "text/html": recording._repr_html_()}
    if not has_widgets():
        return {**text, "text/html": frame(report_page(report(recording), language_of_locale()))}
    shown: Mapping[str, Any] = widget(recording)._repr_mimebundle_()[0]
    return {**shown, **text}
