"""A mask as lines of a terminal: rows are queries, columns are keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, Int8
from rich.style import Style
from rich.text import Text

from regard.language import translate, translate_count
from regard.text_table import wrap
from regard.view.palette import TERMINAL

WIDTH = 80
MAX_WIDE_COLUMNS = 32
"""Up to this many columns are drawn with two characters each.

More columns get one character each, up to `MAX_COLUMNS`; beyond that they are pooled.
"""
MAX_COLUMNS = 56
"""Up to this many columns are drawn one by one; more are pooled."""
BESIDE = 16
"""Columns of a line beside its cells: the position of the query, the edges and the count."""
MAX_ROWS = 64
"""Up to this many rows are drawn one by one; more are pooled."""

UNICODE = {
    "empty": "·",
    "partial": "▒",
    "full": "█",
    "own": "▓",
    "edge": "│",
    "to": "–",
    "more": "…",
}
ASCII = {
    "empty": ".",
    "partial": "+",
    "full": "#",
    "own": "@",
    "edge": "|",
    "to": "-",
    "more": "..",
}


@dataclass(frozen=True)
class Grid:
    """The content of a drawing.

    Args:
        states: 0 = no key is visible, 1 = some are, 2 = all are, `[rows, columns]`.
        counts: number of keys that each query may attend to, `[T]`.
        q_start: position of the first query.
        k_start: position of the first key.
        cell: number of queries, and of keys, that one cell of the drawing covers.
    """

    states: Int8[np.ndarray, "rows columns"]
    counts: Int[np.ndarray, " T"]
    q_start: int = 0
    k_start: int = 0
    cell: tuple[int, int] = (1, 1)

    @property
    def pooled(self) -> bool:
        """Return whether a cell stands for more than one query-key pair."""
        return self.cell != (1, 1)


def pool(T: int, S: int, width: int = WIDTH) -> tuple[int, int]:
    """Return the queries and keys per cell, a power of two, that fit the terminal."""

    def factor(n: int, most: int) -> int:
        pooled = min(MAX_WIDE_COLUMNS, most)
        return 1 if n <= most else 1 << (-(-n // pooled) - 1).bit_length()

    return factor(T, MAX_ROWS), factor(S, min(MAX_COLUMNS, width - BESIDE))


def draw(grid: Grid, *, ascii_only: bool = False, width: int = WIDTH) -> Iterator[Text]:
    """Generate a grid: a legend, a ruler of keys, and the keys of each query."""
    symbols = ASCII if ascii_only else UNICODE
    columns = grid.states.shape[1]
    wide = 2 if columns <= MAX_WIDE_COLUMNS and 2 * columns + BESIDE <= width else 1
    yield Text(wrap(_legend(grid, symbols, wide), width, indent="  ", hang="  "), "dim")
    yield Text(f"         {_ruler(grid, wide)}".rstrip(), style("k"))
    for i in range(grid.states.shape[0]):
        label = f"  {grid.q_start + i * grid.cell[0]:>5} "
        line = Text.assemble((label, style("q")), (symbols["edge"], "dim"))
        line.append_text(_cells(grid, i, wide, symbols))
        line.append(symbols["edge"], "dim")
        _append_count(line, grid, i, symbols, width)
        yield line


def draw_tiles(
    states: Int8[np.ndarray, "nQ nK"],
    size: tuple[int, int],
    *,
    ascii_only: bool = False,
    width: int = WIDTH,
) -> Iterator[Text]:
    """Generate the lines of a map of tiles, at most 32 a side."""
    symbols = ASCII if ascii_only else UNICODE
    shown = states[:MAX_WIDE_COLUMNS, :MAX_WIDE_COLUMNS]
    cut = ""
    if shown.shape != states.shape:
        cut = translate("; the first {n} a side", n=MAX_WIDE_COLUMNS)
    wide = 2 if 2 * shown.shape[1] + BESIDE <= width else 1
    legend = translate(
        "tiles of {queries} x {keys}: {full} full, {partial} partial, {empty} empty",
        queries=translate_count(size[0], "query"),
        keys=translate_count(size[1], "key"),
        full=symbols["full"] * wide,
        partial=symbols["partial"] * wide,
        empty=symbols["empty"],
    )
    yield Text(wrap(legend + cut, width, indent="  ", hang="  "), "dim")
    for row in shown:
        line = Text.assemble(" " * 8, (symbols["edge"], "dim"))
        for state in row:
            line.append(*_symbol_and_style(int(state), wide, symbols))
        line.append(symbols["edge"], "dim")
        yield line


def runs(row: Sequence[bool] | Bool[np.ndarray, " n"], start: int = 0, to: str = "-") -> list[str]:
    """Return the runs of true entries as text, counted from `start`."""
    steps = np.diff(np.concatenate([[0], np.asarray(row, np.int8), [0]]))
    limits = zip((steps == 1).nonzero()[0], (steps == -1).nonzero()[0] - 1, strict=True)
    return [f"{start + a}" if a == b else f"{start + a}{to}{start + b}" for a, b in limits]


def style(role: str) -> Style:
    """Return the style of a role: "q", "k" or "s"."""
    return Style(color=TERMINAL[role])


def _legend(grid: Grid, symbols: dict[str, str], wide: int) -> str:
    full, own, partial = (symbols[name] * wide for name in ("full", "own", "partial"))
    if not grid.pooled:
        return translate(
            "rows are queries, columns are keys: {full} visible, {own} its own, {empty} masked",
            full=full,
            own=own,
            empty=symbols["empty"],
        )
    return translate(
        "each cell {queries} x {keys}: {full} all, {partial} some, {empty} none; right: max keys",
        queries=translate_count(grid.cell[0], "query"),
        keys=translate_count(grid.cell[1], "key"),
        full=full,
        partial=partial,
        empty=symbols["empty"],
    )


def _ruler(grid: Grid, wide: int) -> str:
    """Return the positions of keys above their columns, every 8 characters."""
    labels = [
        str(grid.k_start + j * grid.cell[1]) for j in range(0, grid.states.shape[1], 8 // wide)
    ]
    return "".join(label.ljust(8) if len(label) < 8 else label[:7] + " " for label in labels)


def _cells(grid: Grid, i: int, wide: int, symbols: dict[str, str]) -> Text:
    line = Text()
    own = grid.q_start + i - grid.k_start
    for j, state in enumerate(grid.states[i]):
        if state == 2 and j == own and not grid.pooled:
            line.append(symbols["own"] * wide, style("q"))
        else:
            line.append(*_symbol_and_style(int(state), wide, symbols))
    return line


def _symbol_and_style(state: int, wide: int, symbols: dict[str, str]) -> tuple[str, Style | str]:
    """Return the characters of a cell in a state (0, 1 or 2), and their style."""
    if state == 0:
        return symbols["empty"].rjust(wide), "dim"
    return symbols["full" if state == 2 else "partial"] * wide, style("s")


def _append_count(line: Text, grid: Grid, i: int, symbols: dict[str, str], width: int) -> None:
    """Append how many keys the query sees, and which, as far as they fit."""
    counts = grid.counts[i * grid.cell[0] : (i + 1) * grid.cell[0]]
    line.append(f"{counts.max():>6}" if grid.pooled else f"{counts.max():>5}", "bold")
    if grid.pooled:
        return
    room = width - len(line.plain) - 2
    key_runs = runs(grid.states[i] == 2, grid.k_start, symbols["to"])
    text = ", ".join(key_runs)
    while len(text) > room and key_runs:
        key_runs.pop()
        text = ", ".join([*key_runs, symbols["more"]])
    line.append(f"  {text}" if text and len(text) <= room else "", "dim")
