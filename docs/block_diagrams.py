"""Diagrams as SVG: one head, several heads in two forms, a Transformer block, and what one word of
a sentence reads.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len

from regard.language import translate, translate_count
from regard.view import palette

HEAD = (
    ("q · k", "s"),
    ("/ sqrt(d)", "s"),
    ("mask", "s"),
    ("softmax", "s"),
    ("weights times v", "z"),
)
"""The steps of one head from bottom to top, with the role that colours each."""

WIDE, HIGH, STEP, BOX = 720, 500, 62, 168


def svg(heads: int = 3) -> str:
    """Draw one head on the left, and on the right several, with inputs, join and output."""
    rows = HIGH - 96
    parts = [
        *_paper(WIDE, HIGH, translate("Scaled dot-product attention, and several heads of it")),
        _text(116, 28, translate("one head"), "ink"),
        _text(
            470,
            28,
            translate(
                "{heads}, each with its own projections", heads=translate_count(heads, "head")
            ),
            "ink",
        ),
        *_column(32, rows, HEAD, BOX),
        *_inputs(32, rows + 44, BOX),
    ]
    width = (WIDE - 300) // heads - 12
    lefts = [280 + i * (width + 12) for i in range(heads)]
    for left in lefts:
        parts += _column(left, rows, HEAD, width)
        parts += _inputs(left, rows + 44, width)
    middle = (lefts[0] + lefts[-1] + width) / 2
    top = rows - len(HEAD) * STEP
    parts += [_arrow(left + width / 2, top + 26, middle, top - 6) for left in lefts]
    parts += [
        *_box(middle - 110, top - 38, 220, translate("concat, output projection"), "z"),
        _arrow(middle, top - 38, middle, top - 56),
    ]
    return "\n".join([*parts, "</svg>", ""])


def block_svg() -> str:
    """Draw a pre-norm Transformer block: two sublayers, each with a norm and an addition."""
    high, path, side = 452, 130, 220
    parts = [
        *_paper(560, high, translate("A Transformer block")),
        _text(path, high - 14, translate("x, one vector for each token"), "ink"),
        _arrow(path, high - 34, path, 34),
        _text(path, 22, translate("to the next block"), "ink"),
    ]
    sublayers = (
        (translate("attention"), translate("reads other tokens"), "s"),
        (translate("feed-forward"), translate("each token alone"), "z"),
    )
    for i, (name, what, role) in enumerate(sublayers):
        bottom = high - 60 - i * 190
        parts += [
            _arrow(path, bottom, side, bottom),
            *_box(side, bottom - 16, 120, translate("norm"), "q"),
            _arrow(side + 60, bottom - 16, side + 60, bottom - 46),
            *_box(side, bottom - 80, 120, name, role),
            _text(side + 220, bottom - 60, what, "soft"),
            _arrow(side + 60, bottom - 80, side + 60, bottom - 120),
            _arrow(side + 60, bottom - 120, path, bottom - 120),
            _text(path - 56, bottom - 116, translate("+ added"), "ink"),
        ]
    return "\n".join([*parts, "</svg>", ""])


def two_forms_svg() -> str:
    """Draw two ways to write several heads: a list, and one projection that is split."""
    high = 330
    parts = [
        *_paper(
            WIDE, high, translate("A list of heads, and one projection that is split into heads")
        ),
        _text(170, 28, translate("a list of heads"), "ink"),
        _text(550, 28, translate("one projection, split into heads"), "ink"),
    ]
    rows = (high - 72, high - 142, high - 212)
    for i in range(2):  # the list: each head has matrices and a width of its own
        left = 60 + i * 120
        parts += [
            *_box(left, rows[0], 100, translate("W of head {n}", n=i), "q"),
            _arrow(left + 50, rows[0], left + 50, rows[1] + 32),
            *_box(left, rows[1], 100, translate("2 numbers"), "s"),
            _arrow(left + 50, rows[1], 170, rows[2] + 32),
        ]
    parts += [
        *_box(90, rows[2], 160, translate("concat: 4 numbers"), "z"),
        _arrow(170, rows[2], 170, 52),
    ]
    parts += [*_box(450, rows[0], 200, translate("one W for all heads"), "q")]
    for i in range(2):
        left = 450 + i * 110
        parts += [
            _arrow(left + 45, rows[0], left + 45, rows[1] + 32),
            *_box(left, rows[1], 90, translate("1 number"), "s"),
            _arrow(left + 45, rows[1], left + 45, rows[2] + 32),
        ]
    parts += [
        *_box(450, rows[2], 200, translate("concat, output projection"), "z"),
        _arrow(550, rows[2], 550, 52),
        _text(170, high - 14, translate("scale 1/sqrt(2) in each head"), "soft"),
        _text(550, high - 14, translate("2 in total, scale 1 in each head"), "soft"),
    ]
    return "\n".join([*parts, "</svg>", ""])


def compressed_svg() -> str:
    """Draw what a query reads in HCA and in CSA: the last tokens, and entries of closed blocks."""
    high, cell, tokens, window = 316, 30, 11, 4
    title = translate("HCA and CSA: a query reads the last tokens, and one vector for each block")
    parts = [*_paper(WIDE, high, title)]
    panels = (
        (16, 4, 0, (0, 1), translate("HCA: a block is one entry, and all are read")),
        (376, 2, 1, (1, 3), translate("CSA: an entry pools two blocks, and some are read")),
    )
    for left, block, overlap, read, name in panels:
        query = left + (tokens - 0.5) * cell
        parts += [
            _text(left + tokens * cell / 2, 24, name, "ink"),
            *_box(query - cell / 2 + 1, 48, cell - 2, "q", "q"),
            _text(left + tokens * cell / 2, high - 12, translate("tokens"), "soft"),
        ]
        for i in range(tokens // block):
            middle = left + (i + 0.5) * block * cell
            parts += [
                _arrow(left + (t + 0.5) * cell, high - 76, middle, 194)
                for t in range(max(0, i - overlap) * block, (i + 1) * block)
            ]
            parts += _box(middle - cell / 2 + 1, 160, cell - 2, f"e{i}", "z" if i in read else "")
            if i in read:
                parts.append(_arrow(middle, 160, query - cell / 2, 70))
        for t in range(tokens):
            last = t >= tokens - window
            at = left + t * cell
            parts += _box(at + 1, high - 76, cell - 2, str(t), "k" if last else "")
            if last:
                parts.append(_arrow(at + cell / 2, high - 76, query, 82))
    return "\n".join([*parts, "</svg>", ""])


def steps_svg(
    words: Sequence[str],
    asks: str,
    query: Sequence[float],
    tables: Sequence[tuple[str, str, list[list[float]]]],
    output: Sequence[float],
) -> str:
    """Draw one query's way through a head: its numbers, tables with a row for each word, an arrow
    from each table to the next, and the output below the values.

    Args:
        asks: the word that asks.
        tables: (name, role, numbers of each word) in the order of the steps; weights have bars.
    """
    line, cell, gap, left, top = 30, 52, 28, 100, 96
    widths = [cell * len(values[0]) for _, _, values in tables]
    lefts = [left + sum(widths[:n]) + gap * n for n in range(len(tables))]
    bottom = top + line * len(words)
    wide = lefts[-1] + widths[-1] + 40
    title = translate("one head, step by step: what “{word}” reads", word=asks)
    parts = [*_paper(wide, bottom + 72, title), _text(16, 26, title, "title")]
    asked = translate("query of “{word}”: {numbers}", word=asks, numbers=_numbers(query))
    scored = lefts[1] + cell / 2
    parts += [_text(scored, 54, asked, "query"), _arrow(scored, 60, scored, 74)]
    for row, word in enumerate(words):
        tone = "key" if word == asks else "start"
        parts.append(_text(16, top + line * row + 20, word, tone + " start"))
    for n, ((name, role, values), x) in enumerate(zip(tables, lefts, strict=True)):
        parts.append(_text(x + widths[n] / 2, top - 8, name, "ink"))
        place = f'x="{x}" y="{top}" width="{widths[n]}" height="{line * len(words)}"'
        parts.append(f'<rect class="{role}" {place} rx="6"/>')
        if n:
            parts.append(_arrow(x - gap + 3, top + 15, x - 3, top + 15))
        for row, numbers in enumerate(values):
            y = top + line * row
            if n == len(tables) - 2:  # the weights: a bar from 0 to 1
                place = f'x="{x + 2}" y="{y + 24}" height="4" width="{(cell - 4) * numbers[0]:.1f}"'
                parts.append(f'<rect class="bar" {place}/>')
            for column, number in enumerate(numbers):
                parts.append(_text(x + cell * (column + 0.5), y + 20, f"{number:.2f}", "ink"))
    middle = lefts[-1] + widths[-1] / 2
    parts += [
        _arrow(middle, bottom + 3, middle, bottom + 24),
        *_box(middle - 70, bottom + 26, 140, _numbers(output), "z"),
    ]
    said = translate("each value times its weight, added: the context vector")
    parts.append(_text(middle - 84, bottom + 47, said, "soft end"))
    return "\n".join([*parts, "</svg>", ""])


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{x:.4f}" for x in values)


def cells_svg(
    values: Sequence[Sequence[float]], title: str, rows: str, columns: str, scale: str
) -> str:
    """Draw numbers from 0 to 1 as cells whose colour is linear in the number; a dot marks a 0."""
    side, left, top = 24, 60, 76
    wide, high = max(left + side * len(values[0]) + 24, 430), top + side * len(values) + 54
    middle = left + side * len(values[0]) / 2
    parts = [*_paper(wide, high, title), _text(16, 24, title, "ink start")]
    parts += [_text(16, 44, scale, "soft start"), _text(middle, top - 8, columns, "soft")]
    turned = f'transform="rotate(-90 {left - 34} {high / 2})"'
    parts.append(_text(left - 34, high / 2, rows, "soft").replace("<text", f"<text {turned}"))
    for i, row in enumerate(values):
        y = top + side * i
        parts.append(_text(left - 14, y + 17, str(i), "soft"))
        for j, value in enumerate(row):
            x = left + side * j
            place = f'x="{x + 1}" y="{y + 1}" width="{side - 2}" height="{side - 2}"'
            parts.append(f'<rect class="cell" {place} fill-opacity="{value:.3f}"/>')
            if value == 0:
                parts.append(f'<circle class="tip" cx="{x + 12}" cy="{y + 12}" r="1.5"/>')
    below = top + side * len(values) + 18
    parts += [_text(left + side * (j + 0.5), below, str(j), "soft") for j in range(len(values[0]))]
    return "\n".join([*parts, "</svg>", ""])


SIZE, GAP, ARC, ROOM = 16, 12, 16, 150
"""Font size of the words and space between them, width of an arc of weight 1, room for arcs."""


def reading_svg(data: Mapping[str, Any], theme: Mapping[str, str]) -> str:
    """Draw what a query reads: the words of the text, with an arc from the query to each key whose
    width is linear in the weight, the weights below, and the next word at the end.

    Args:
        data: an explanation as a dict, whose text has words and whose model predicts.
        theme: the colours, `palette.LIGHT` or `palette.DARK`.
    """
    words = data["words"]
    shares = [sum(data["weights"][w["start"] : w["stop"]]) for w in words]
    widths = [max(SIZE * 0.58 * cell_len(w["text"]), 24) for w in words]
    centres = [24 + sum(widths[:n]) + GAP * n + widths[n] / 2 for n in range(len(words))]
    query = next(n for n, w in enumerate(words) if w["start"] <= data["query"] < w["stop"])
    following = data["predictions"][0]
    answer, share = following["piece"].strip("·▁"), f"{following['probability']:.0%}"
    box = max(SIZE * 0.58 * cell_len(answer) + 24, 64)
    right = centres[-1] + widths[-1] / 2
    wide, base = right + 36 + box + 20, ROOM + 44
    title = translate(
        "layer {layer}, head {head} of {model}: what “{word}” reads before {answer} is written",
        layer=data["layer"],
        head=data["head"],
        model=data["model"],
        word=words[query]["text"],
        answer=f"“{answer}”",
    )
    parts = list(_paper(wide, base + 58, title, theme))
    parts.append(_text(wide / 2, 26, title, "soft"))
    farthest = max(abs(c - centres[query]) for c in centres)
    strongest = max(shares)
    for n, (c, p) in enumerate(zip(centres, shares, strict=True)):
        if n != query and p >= 0.005:
            high = 24 + (ROOM - 44) * abs(c - centres[query]) / farthest
            parts.append(
                f'<path class="reads" style="stroke-width:{ARC * p:.2f}" d="M{centres[query]:.1f} '
                f"{base - 22:.1f}C{centres[query]:.1f} {base - 22 - 1.33 * high:.1f} {c:.1f} "
                f'{base - 22 - 1.33 * high:.1f} {c:.1f} {base - 22:.1f}"/>'
            )
        tone = "query" if n == query else "key" if p == strongest else "word"
        parts.append(_text(c, base, words[n]["text"], tone))
        if p >= 0.005:
            parts.append(_text(c, base + 24, f"{p:.0%}", "key" if p == strongest else "soft"))
    left = right + 36
    parts += [
        f'<path class="arrow" d="M{right + 8:.1f} {base - 5:.1f}H{left - 12:.1f}"/>',
        f'<path class="tip" d="M{left - 4:.1f} {base - 5:.1f}l-10 -5v10z"/>',
        *_box(left, base - 22, box, answer, "z"),
        _text(left + box / 2, base + 28, share, "soft"),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _paper(
    wide: float, high: float, label: str, theme: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Generate the beginning of a diagram, with its style and its background; without a theme it
    follows that of the reader.
    """
    fixed = ";".join(f"--{name}:{colour}" for name, colour in (theme or {}).items())
    yield (
        f'<svg class="blocks" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" '
        f'width="{wide:g}" height="{high:g}" role="img" aria-label="{html.escape(label)}">'
    )
    yield f"<style>{f':root{{{fixed}}}' if fixed else palette.css()}{_css()}</style>"
    yield f'<rect class="paper" width="{wide:g}" height="{high:g}" rx="8"/>'


def _column(
    left: float, bottom: float, steps: Sequence[tuple[str, str]], width: float
) -> Iterator[str]:
    """Generate the steps of a head, one above the other; v bypasses the scores on the right."""
    narrow = 2 * width / 3
    for i, (name, role) in enumerate(steps):
        y = bottom - (i + 1) * STEP + 26
        box = width if i == len(steps) - 1 else narrow
        yield from _box(left, y, box, translate(name), role)
        if i:
            yield _arrow(left + narrow / 2, y + STEP, left + narrow / 2, y + 32)
    yield _arrow(left + 5 * width / 6, bottom + 44, left + 5 * width / 6, y + 32)


def _inputs(left: float, y: float, width: float) -> Iterator[str]:
    """Generate the three projections of x below a head."""
    third = width / 3
    for i, name in enumerate("qkv"):
        yield from _box(left + i * third + 2, y, third - 4, name, name)
        if name != "v":
            yield _arrow(left + (i + 0.5) * third, y, left + (i + 0.5) * third, y - 48)
    # a narrow head has no room for the long name
    name = translate("three projections of x" if width >= BOX else "projections of x")
    yield _text(left + width / 2, y + 48, name, "soft")


def _box(left: float, top: float, width: float, name: str, role: str) -> Iterator[str]:
    yield (
        f'<rect class="{role}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="32" '
        'rx="6"/>'
    )
    yield _text(left + width / 2, top + 21, name, "ink")


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    length = math.hypot(to_x - x, to_y - y)
    along, across = ((to_x - x) / length * 8, (to_y - y) / length * 8), 0.5
    corners = [
        f"{to_x - along[0] + sign * across * along[1]:.1f} "
        f"{to_y - along[1] - sign * across * along[0]:.1f}"
        for sign in (1, -1)
    ]
    return (
        f'<path class="arrow" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>'
        f'<path class="tip" d="M{to_x:.1f} {to_y:.1f}L{corners[0]}L{corners[1]}Z"/>'
    )


def _text(x: float, y: float, text: str, tone: str) -> str:
    return (
        f'<text class="{tone}" x="{x:.1f}" y="{y:.1f}" '
        f'text-anchor="middle">{html.escape(text)}</text>'
    )


def _css() -> str:
    roles = "".join(f".blocks rect.{r}{{stroke:var(--{r})}}" for r in "qkvsz")
    return (
        ".blocks text.start,.blocks text.title{text-anchor:start}.blocks text.end{text-anchor:end}"
        ".blocks rect.bar{fill:var(--s);stroke:none}.blocks text.title{font-weight:600}"
        ".blocks rect.cell{fill:var(--s);stroke:none}"
        ".blocks text{font:14px system-ui,'Noto Sans',sans-serif;fill:var(--ink)}.blocks "
        "text.soft{fill:var(--soft)}"
        ".blocks rect{fill:var(--hint);stroke-width:1.5}.blocks "
        "rect.paper{fill:var(--card);stroke:none}"
        f".blocks .word,.blocks .query,.blocks .key{{font-size:{SIZE}px}}"
        ".blocks text.query,.blocks text.key{font-weight:600}.blocks text.query{fill:var(--q)}"
        ".blocks text.key{fill:var(--k)}.blocks .reads{fill:none;stroke:var(--s);opacity:.8}"
        f".blocks .arrow{{stroke:var(--soft);stroke-width:1.5;fill:none}}.blocks "
        f".tip{{fill:var(--soft)}}{roles}\n"
    )
