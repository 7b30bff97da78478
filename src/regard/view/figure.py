"""A figure of an explanation, with matplotlib: the head's pattern and the query's row, their recipe
as the caption.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import FileError
from regard.files.write import replacing
from regard.foreign import inert
from regard.view import palette
from regard.view.text import cell

FORMATS = (".png", ".svg")


def check_format(path: Path) -> None:
    """Refuse a file that is neither PNG nor SVG, or where there is no matplotlib.

    Raises:
        FileError: says which formats there are, or how to get matplotlib.

    >>> check_format(Path("pattern.jpg"))
    Traceback (most recent call last):
    regard.errors.FileError: pattern.jpg: a figure is .png or .svg; give it one of these endings
    """
    if path.suffix.lower() not in FORMATS:
        raise FileError(f"{path}: a figure is {' or '.join(FORMATS)}; give it one of these endings")
    if find_spec("matplotlib") is None:
        raise FileError(
            f"{path}: figures need matplotlib, which is not installed: pip install 'regard[plot]'"
        )


def recipe(data: Mapping[str, Any]) -> str:
    """What the figure shows and how it was reduced, in words: whoever has them can draw it again.

    Args:
        data: `Explanation.as_dict()`.
    """
    n, T, S = data["pool"], data["sizes"]["T"], data["sizes"]["S"]
    reduction = "every weight" if n == 1 else f"each cell the largest weight of {n} x {n}"
    return inert(
        f"{data['model']}, {data['place']}, head {data['head']}, query {data['query']} "
        f"{data['query_piece']}, "
        f"key {data['key']} {data['pieces'][data['key']]}; rows are queries ({T}), columns are "
        f"keys ({S}); {reduction}; "
        f"colour linear from 0 to 1, hatched where masked; scale {data['scale']:.6g}; kernel "
        f"{data['kernel']}, "
        f"{data['dtype']}; check {data['check']:.1e}"
    )


def draw(data: Mapping[str, Any], path: Path) -> int:
    """Draw to a .png or .svg; gives the bytes written.

    Args:
        data: `Explanation.as_dict()`.
        path: the file.

    Raises:
        FileError: as `check_format`; or the file cannot be written.
    """
    check_format(path)
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.2), layout="constrained")
    stops = [tuple(x / 255 for x in rgb) for rgb in palette.WEIGHTS["light"]]
    colours = LinearSegmentedColormap.from_list("weights", stops)
    whole = bool(data["patterns"])
    axes = figure.subplots(
        2 if whole else 1, 1, height_ratios=(3, 1) if whole else None, squeeze=False
    )[:, 0]
    if whole:
        _pattern(axes[0], data, colours, figure)
    _row(axes[-1], data)
    figure.supxlabel(textwrap.fill(recipe(data), 120), fontsize=7)
    with replacing(path) as place:
        figure.savefig(place, dpi=150)
    return path.stat().st_size


def heat(weights: Sequence[Sequence[float]], title: str, path: Path) -> int:
    """Draw the weights of one head, rows queries and columns keys, with a title and a colour bar;
    gives the bytes written.

    Args:
        weights: [T, S], each from 0 to 1.
        title: what they are.
        path: a .png or .svg.

    Raises:
        FileError: as `draw`.
    """
    check_format(path)
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    stops = [tuple(x / 255 for x in rgb) for rgb in palette.WEIGHTS["light"]]
    colours = LinearSegmentedColormap.from_list("weights", stops)
    figure = Figure(figsize=(5, 4.4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(np.array(weights), cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="weight")
    axes.set_title(inert(title), fontsize=10)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    if len(weights) <= 16:
        for i, row in enumerate(weights):
            axes.set_yticks(range(len(weights)))
            axes.set_xticks(range(len(row)))
            for j, x in enumerate(row):
                axes.text(
                    j,
                    i,
                    f"{x:.2f}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if x > 0.6 else "black",
                )
    with replacing(path) as place:
        figure.savefig(place, dpi=150)
    return path.stat().st_size


def _pattern(axes: Any, data: Mapping[str, Any], colours: Any, figure: Any) -> None:
    """The pattern of the head; masked cells are hatched."""
    cells = np.array(data["patterns"][data["head"]], float)  # None becomes nan
    axes.set_facecolor("#e8e8e8")
    axes.patch.set_hatch("///")
    axes.patch.set_edgecolor("#b5b5b5")
    image = axes.imshow(
        np.ma.masked_invalid(cells),
        cmap=colours,
        vmin=0,
        vmax=1,
        interpolation="nearest",
        aspect="auto",
    )
    figure.colorbar(image, ax=axes, label="weight")
    n = data["pool"]
    axes.set_title(f"{cell(data['place'], 40).rstrip()}, head {data['head']}", fontsize=10)
    axes.set_xlabel(f"key{'' if n == 1 else f' / {n}'}", fontsize=8)
    axes.set_ylabel(f"query{'' if n == 1 else f' / {n}'}", fontsize=8)
    for names, name in ((data["pieces"], "x"), (data["row_pieces"], "y")):
        if n == 1 and len(names) <= 40:
            turned = {"rotation": 90} if name == "x" else {}
            getattr(axes, f"set_{name}ticks")(
                range(len(names)), [_label(piece) for piece in names], fontsize=6, **turned
            )


def _row(axes: Any, data: Mapping[str, Any]) -> None:
    """The weights of the query; the key stands out."""
    weights = np.array([np.nan if p is None else p for p in data["weights"]])
    colours = [
        palette.LIGHT["k"] if j == data["key"] else palette.LIGHT["s"] for j in range(len(weights))
    ]
    axes.bar(range(len(weights)), weights, color=colours)
    axes.set_ylabel("weight" if data["kind"] != "linear" else "a_ij", fontsize=8)
    axes.set_title(f"query {data['query']} {_label(data['query_piece'])}", fontsize=9)
    if len(weights) <= 40:
        axes.set_xticks(
            range(len(weights)), [_label(p) for p in data["pieces"]], rotation=90, fontsize=6
        )


def _label(piece: str) -> str:
    """A token that matplotlib does not read as mathematics."""
    return cell(piece, 14).rstrip().replace("$", r"\$")
