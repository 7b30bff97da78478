"""Cache and decoding against the context, as a chart drawn by matplotlib: the extra `plot`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError, RegardError
from regard.files.write import replacing

KINDS = (".svg", ".png", ".pdf")
COLOURS = ("#1b7f4d", "#b4562b")


def check(path: Path) -> None:
    """See that a chart can be drawn, and where.

    Raises:
        ArgumentError: the name's end is no picture's, or there is no such folder.
        RegardError: there is no matplotlib.
    """
    if path.suffix not in KINDS:
        raise ArgumentError(f"{path} is no picture; its name must end in {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise ArgumentError(f"there is no folder {path.parent}; make it, or choose another")
    if importlib.util.find_spec("matplotlib") is None:
        raise RegardError("--plot needs matplotlib: pip install 'regard[plot]'")


def draw(rows: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, title: str) -> None:
    """Write a chart: what caches hold, and one decoded token, over the contexts of the rows of each
    model.

    The token is in seconds where rows have them, else in FLOPs; open marks are contexts at which
    weights and caches do not fit the machine. The same rows give the same file.

    Args:
        rows: model -> its rows of `regard.cost.sweep.sweep`.
        path: where to; its end says which kind of picture.
        title: above the chart.

    Raises:
        ArgumentError, RegardError: as `check`.
    """
    check(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    timed = all("decode_seconds" in row for found in rows.values() for row in found)
    token = (
        ("decode_seconds", "one token, seconds at best")
        if timed
        else ("decode_flops", "one token, FLOPs")
    )
    panels = (("kv_bytes", "cache, bytes"), token)
    with rc_context({"svg.hashsalt": "regard", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        figure.suptitle(title, fontsize=9)
        for axes, (name, label) in zip(figure.subplots(1, 2), panels, strict=True):
            for (model, found), colour in zip(rows.items(), COLOURS, strict=False):
                contexts = [row["context"] for row in found]
                values = [row[name] for row in found]
                axes.plot(contexts, values, "o-", color=colour, label=model, ms=3)
                beyond = [
                    at
                    for at in zip(contexts, values, found, strict=True)
                    if at[2].get("fits") is False
                ]
                if beyond:
                    where, what, _ = zip(*beyond, strict=True)
                    more = {"label": f"{model}: does not fit", "mfc": "white"}
                    axes.plot(where, what, "o", color=colour, ms=4, zorder=3, **more)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("context, tokens")
            axes.set_ylabel(label)
            axes.legend(fontsize=8)
        metadata = {
            ".svg": {"Date": None},
            ".pdf": {"CreationDate": None},
            ".png": {"Software": None},
        }
        with replacing(path) as place:
            figure.savefig(place, format=path.suffix[1:], metadata=metadata[path.suffix])
