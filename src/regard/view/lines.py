"""Lines of a terminal page: headings, equations, strips of numbers, and patterns (rows are queries, columns are keys)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from rich.style import Style
from rich.text import Text

from regard.foreign import inert
from regard.view import glyphs
from regard.view.glyphs import number
from regard.view.palette import TERMINAL

Data: TypeAlias = Mapping[str, Any]
Lines: TypeAlias = Iterator[Text]

WIDTH = 80
INDENT = "  "
STRIP = 64  # characters of a strip
LARGE = 32  # cells along a side of the large pattern
SMALL = 8  # and of a small one
ABREAST = 4  # small ones side by side


def style(role: str, *, bold: bool = False) -> Style:
    """The style of a role: "q", "k", "v", "s", "z", or "" for none."""
    return Style(color=TERMINAL.get(role), bold=bold or None)


def heading(title: str) -> Text:
    """A line across the page that starts a section."""
    return Text.assemble(
        ("━━ ", "dim"), (title, "bold"), (f" {'━' * (WIDTH - len(title) - 4)}", "dim")
    )


def equation(text: str) -> Text:
    """An equation, its letters in the colours of their roles."""
    line = Text(f"{INDENT}{glyphs.subscripts(text)}", "italic")
    for role, letters in (("q", "qQ"), ("k", "kK"), ("v", "vV"), ("s", "sp"), ("z", "z")):
        line.highlight_regex(rf"(?<!\w)[{letters}](?=[ᵢⱼ_ ])", style(role))
    return line


def wrapped(text: str) -> Lines:
    """Prose, in lines that fit."""
    for line in textwrap.wrap(inert(text), WIDTH - len(INDENT)):
        yield Text(INDENT + line, "dim")


def legend(what: str) -> Text:
    """What the shades mean."""
    low = " ".join(
        f"{shade} {step:g}+" for shade, step in zip(glyphs.SHADES[1:], glyphs.STEPS, strict=True)
    )
    return Text(
        f"{INDENT}{what} blank below {glyphs.STEPS[0]:g}, {low}, {glyphs.MASKED} masked", "dim"
    )


def strip(title: str, values: Sequence[float], role: str, top: float | None = None) -> Lines:
    """A vector: its extremes and norm, and a bar per dim, up for positive and down for negative.

    `top` is the size of a full bar; by default that of the largest value.
    """
    n, shown = glyphs.fold(values, STRIP)
    wide = max(1, STRIP // len(shown))
    full = max(map(abs, values), default=0.0) if top is None else top
    numbers = f"min {number(min(values))}  max {number(max(values))}  norm {number(norm(values))}"
    space = WIDTH - len(INDENT) - len(numbers) - 2
    yield Text.assemble(INDENT, (glyphs.cell(title, space), style(role)), "  ", (numbers, "dim"))
    up, down = glyphs.columns([value for value in shown for _ in range(wide)], full)
    end = f" ±{number(full)}"
    yield Text.assemble(INDENT, (up, style(role)), (end, "dim"))
    folded = f" {n} dims each" if n > 1 else ""
    yield Text.assemble(INDENT, (down, style(role)), (folded, "dim"))


def norm(values: Sequence[float]) -> float:
    """The Euclidean length."""
    return float(np.linalg.norm(np.asarray(values, float)))


def large_pattern(data: Data) -> Lines:
    """The pattern of the head, at most 32 cells a side: two characters a cell, a name before each row."""
    n, cells = data["pool"], data["patterns"][data["head"]]
    yield Text.assemble(
        f"{INDENT}rows are queries, columns are keys 0 .. {len(data['pieces']) - 1}",
        f"; cells: largest weight of {n} x {n}" if n > 1 else "",
    )
    wide = len(cells[0])
    ruler = "".join(f"{column * n:<10}" for column in range(0, wide, 5))
    yield Text(f"{' ' * 14}{ruler[: 2 * wide].rstrip()}", "dim")
    for row, values in enumerate(cells):
        i = row * n
        here = i <= data["query"] < i + n
        name = glyphs.cell(data["row_pieces"][i], 7)
        yield Text.assemble(
            ("▶" if here else " ", style("q")), (f"{i:>3} ", "dim"),
            (name, style("q", bold=True) if here else ""), (" │", "dim"),
            _cells(values), ("│", "dim"),
        )  # fmt: skip


def small_patterns(data: Data) -> Lines:
    """The pattern of every head of the layer, small: the heads differ at a glance."""
    patterns = [_smaller(cells) for cells in data["patterns"]]
    heads = [
        h for h, cells in enumerate(patterns) if any(p is not None for row in cells for p in row)
    ]
    if heads == [data["head"]] and len(patterns) > 1:
        yield Text(f"{INDENT}the other heads are not drawn: the text is long", "dim")
        return
    longest = max(len(data["patterns"][0]), len(data["patterns"][0][0]))
    side = data["pool"] * max(1, -(-longest // SMALL))
    pooled = f"; each cell is the largest weight of {side} x {side}" if side > 1 else ""
    yield Text(f"{INDENT}every head of the layer{pooled}")
    for first in range(0, len(patterns), ABREAST):
        group = list(enumerate(patterns))[first : first + ABREAST]
        titles = Text(INDENT)
        for h, _ in group:
            here = h == data["head"]
            titles.append(
                f"{'▶' if here else ' '}head {h}".ljust(2 * SMALL + 3), "bold" if here else "dim"
            )
        yield titles
        for row in range(len(patterns[0])):
            line = Text(INDENT)
            for _, cells in group:
                line.append_text(Text.assemble(("│", "dim"), _cells(cells[row]), ("│", "dim")))
                line.append(" " * (2 * (SMALL - len(cells[row])) + 1))
            line.rstrip()
            yield line


def _cells(values: Sequence[float | None]) -> Text:
    """Two characters a cell."""
    line = Text()
    for p in values:
        glyph = glyphs.shade(p)
        line.append(" " + glyph if p is None else glyph * 2, "dim" if p is None else style("s"))
    return line


def _smaller(cells: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """At most 8 cells a side: the largest of each square, None where all are masked."""
    t, s = len(cells), len(cells[0]) if cells else 0
    n = max(1, -(-max(t, s) // SMALL))

    def largest(rows: range, columns: range) -> float | None:
        found = [cells[i][j] for i in rows for j in columns]
        return max((p for p in found if p is not None), default=None)

    across = [range(j, min(j + n, s)) for j in range(0, s, n)]
    down = [range(i, min(i + n, t)) for i in range(0, t, n)]
    return [[largest(rows, columns) for columns in across] for rows in down]
