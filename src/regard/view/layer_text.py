"""The stages of a layer as text for a terminal, and as sections of an HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.language import translate
from regard.text_table import format_table as table_of
from regard.text_table import line_width, wrap
from regard.view.html_page import Section

HEADS = ("", "stage", "shape", "mean", "std", "ms")
MAX_TOKENS = 16
"""The largest number of tokens for which a page shows the matrices of every head."""
MAX_NUMBERS = 2048
"""Of tensors with more numbers, only the corners are printed."""
MAX_SCREEN_NUMBERS = 36
"""Of matrices with more numbers, a screen shows the corners only."""
TITLES = {
    "scores": "Scores of every head, scaled, before the mask",
    "masked": "Scores after the mask",
    "weights": "Weights after softmax, in evaluation mode: every row sums to 1",
    "out": "Output of attention: heads joined and projected, no residual added",
    "block": "Output of the block: LayerNorm(x + out)",
}
HEAD_TITLES = {
    "scores": "Scores of head {head} in the first sequence, scaled, before the mask",
    "masked": "Its scores after the mask",
    "weights": "Its weights after softmax: every row sums to 1",
}


def rows(layers: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row of text per stage and layer: shape, mean, deviation and milliseconds."""
    return [
        [
            layer["name"],
            one["name"],
            " x ".join(map(str, one["shape"])),
            f"{one['mean']:.4f}",
            f"{one['std']:.4f}",
            "" if one["seconds"] is None else f"{1e3 * one['seconds']:.3f}",
        ]
        for layer in layers
        for one in layer["stages"]
    ]


def table(layers: Sequence[Mapping[str, object]]) -> str:
    """Return the rows of `rows` as an aligned table."""
    heads = [translate(head) for head in HEADS]
    return table_of([heads, *rows(layers)], left=(0, 1), width=line_width(), names=2)


def screen(layer: Mapping[str, Any], head: int) -> str:
    """Return what one head computes for the first sequence: shapes, mask, scores, masked scores and
    weights.
    """
    stages = {stage["name"]: stage for stage in layer["stages"]}
    lines = _start(layer, stages, MAX_SCREEN_NUMBERS)
    for name, title in HEAD_TITLES.items():
        values = _array(stages[name]["values"])[0, head]
        heading = _with_shape(translate(title, head=head), values.shape)
        lines += ["", heading, _matrix(values, MAX_SCREEN_NUMBERS)]
    return _wrapped(lines)


def text(layer: Mapping[str, Any]) -> str:
    """Return one layer in full: shapes, mask, scores, masked scores, weights and outputs."""
    stages = {stage["name"]: stage for stage in layer["stages"]}
    lines = _start(layer, stages, MAX_NUMBERS)
    for name, title in TITLES.items():
        heading = _with_shape(translate(title), _shape(stages[name]))
        lines += ["", heading, _matrix(_array(stages[name]["values"]), MAX_NUMBERS)]
    return _wrapped(lines)


def _start(
    layer: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]], most: int
) -> list[str]:
    """Return the shapes and the mask of a layer."""
    return [
        translate(
            "Input x: {x}; q {q}, k {k}, v {v}",
            x=tuple(layer["input"]),
            q=_shape(stages["q"]),
            k=_shape(stages["k"]),
            v=_shape(stages["v"]),
        ),
        translate("Output: {shape}", shape=_shape(stages["out"])),
        "",
        translate(
            "Mask ({mask}; 1 = may attend: the query of the row sees the key of the column)",
            mask=layer["mask"],
        ),
        _matrix(np.array(layer["allowed"]), most),
    ]


def _wrapped(lines: Sequence[str]) -> str:
    """Return lines within the terminal; a matrix keeps its own."""
    width = line_width()
    return "\n".join(line if "\n" in line else wrap(line, width, hang="  ") for line in lines)


def sections(layers: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Return the stages of all layers as one table, and the matrices of the first layer."""
    heads = [translate(head) for head in HEADS]
    result = [Section(translate("Stages"), heads=heads, rows=rows(layers))]
    layer = layers[0]
    query, key = translate("query"), translate("key")
    keys = [f"{key} {j}" for j in range(layer["input"][1])]
    if len(keys) > MAX_TOKENS:
        return result
    allowed = [[f"{query} {i}", *map(str, row)] for i, row in enumerate(layer["allowed"])]
    result.append(
        Section(
            translate("Mask: {mask}", mask=layer["mask"]),
            texts={"1": translate("may attend")},
            heads=("", *keys),
            rows=allowed,
        )
    )
    stages = {stage["name"]: stage for stage in layer["stages"]}
    for name in ("scores", "masked", "weights"):
        cells = [
            [str(b), str(h), str(i), *("-inf" if x is None else f"{x:.4f}" for x in row)]
            for b, heads in enumerate(stages[name]["values"])
            for h, head in enumerate(heads)
            for i, row in enumerate(head)
        ]
        result.append(
            Section(
                translate("{title}: {name}", title=translate(TITLES[name]), name=layer["name"]),
                heads=(translate("sequence"), translate("attention head"), query, *keys),
                rows=cells,
            )
        )
    return result


def _with_shape(title: str, shape: object) -> str:
    """Return the heading of a tensor: what it is, and its shape."""
    return translate("{title}, {shape}", title=title, shape=shape)


def _shape(stage: Mapping[str, Any]) -> str:
    return str(tuple(stage["shape"]))


def _array(values: object) -> NDArray[np.float64]:
    """Convert nested lists to an array; None, a masked score, becomes minus infinity."""
    nested = np.array(values, dtype=object)
    return np.where(nested == None, -np.inf, nested).astype(float)  # noqa: E711


def _matrix(x: NDArray[np.float64], most: int) -> str:
    """Return a tensor as numpy prints it; only its corners, if it has more than `most` numbers."""
    return np.array2string(
        x,
        precision=4,
        suppress_small=True,
        threshold=most,
        max_line_width=min(120, line_width()),
    )
