"""Parts of terminal pages: headings, equations, numbers, and translated sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from regard.language import PLACEHOLDER, catalogue, check_language, translate
from regard.untrusted_text import escape_controls
from regard.view.palette import TERMINAL

BARS_UP = " ▁▂▃▄▅▆▇█"
BARS_DOWN = " ▔▀█"
BARS_ACROSS = " ▏▎▍▌▋▊▉█"
SHADES = " ░▒▓█"
SHADE_STEPS = (0.02, 0.1, 0.3, 0.6)
"""Weights at which the next darker shade begins."""
MASKED = "╱"


def shade(weight: float | None) -> str:
    """Return a character as dark as the weight; a hatch where the cell is masked (None).

    >>> [shade(p) for p in (None, 0.0, 0.05, 0.2, 0.5, 1.0)]
    ['╱', ' ', '░', '▒', '▓', '█']
    """
    return MASKED if weight is None else SHADES[sum(weight >= step for step in SHADE_STEPS)]


def bar(share: float, width: int) -> str:
    """Return a bar of `share` of the width, in eighths of a character, padded to the width.

    >>> bar(0.5, 4), bar(1 / 32, 4)
    ('██  ', '▏   ')
    """
    eighths = 0 if math.isnan(share) else round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (BARS_ACROSS[rest] if rest else "")).ljust(width)


def columns(values: Sequence[float], top: float) -> tuple[str, str]:
    """Return two rows of characters: positive values above the middle, negative ones below."""
    shares = [v / top if top else 0.0 for v in values]
    up = "".join(BARS_UP[math.ceil(min(max(x, 0.0), 1.0) * 8 - 1e-9)] for x in shares)
    down = "".join(BARS_DOWN[math.ceil(min(max(-x, 0.0), 1.0) * 3 - 1e-9)] for x in shares)
    return up, down


def fold(values: Sequence[float], most: int) -> tuple[int, list[float]]:
    """Return (n, values): at most `most` values, each the largest in size of n neighbours."""
    n = max(1, -(-len(values) // most))
    groups = (np.asarray(values[i : i + n]) for i in range(0, len(values), n))
    return n, [float(group[np.abs(group).argmax()]) for group in groups]


def number(x: float | None, width: int = 0) -> str:
    """Format a number with 4 significant digits; None is a masked score, minus infinity."""
    if x is None or x == -math.inf:
        return "-∞".rjust(width)
    size = abs(x)
    if size >= 1e6 or (0 < size < 1e-3):
        return f"{x:.2e}".rjust(width)
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3
    return f"{x:.{digits}f}".rjust(width)


def score(x: float | None) -> str:
    """Format a score with as many decimals as exp needs for a weight of four decimals.

    >>> score(10.0111149), score(None)
    ('10.01111', '-∞')
    """
    return number(x) if x is None or abs(x) >= 1e6 else f"{x:.5f}"


def weight(p: float, width: int = 0) -> str:
    """Format a weight with 4 decimals; a smaller one that is not 0 is marked."""
    return ("<.0001" if 0 < p < 5e-5 else f"{p:.4f}").rjust(width)


def cell(text: str, width: int) -> str:
    """Cut or pad a text to a width in terminal cells; a cut text ends in an ellipsis.

    >>> cell("abcdef", 4), cell("a", 3)
    ('abc…', 'a  ')
    """
    text = escape_controls(text)
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, width - 1) + "…"


def right(text: str, width: int) -> str:
    """Pad a text on the left to a width in terminal cells."""
    return " " * (width - cell_len(text)) + text


def subscripts(equation: str) -> str:
    """Return an equation with `_i`, `_j` and `_ij` as Unicode subscripts.

    >>> subscripts("s_ij = q_i k_j")
    'sᵢⱼ = qᵢ kⱼ'
    """
    return re.sub(r"_(ij|i|j)\b", lambda m: m[1].replace("i", "ᵢ").replace("j", "ⱼ"), equation)


Data: TypeAlias = Mapping[str, Any]
Lines: TypeAlias = Iterator[Text]


def is_of_recording(data: Data) -> bool:
    """Return whether an explanation is of a recorded place, whose projections are not known; any
    module can have such places, and they need not be layers.
    """
    return not data["out"]


WIDTH = 80
INDENT = "  "
STRIP_WIDTH = 64  # width in characters of the bars of a vector
MAX_SMALL_CELLS = 8  # cells along a side of a small pattern
PATTERNS_PER_LINE = 4  # small patterns side by side


def style(role: str, *, bold: bool = False) -> Style:
    """Return the style of a role: "q", "k", "v", "s", "z", or "" for none."""
    return Style(color=TERMINAL.get(role), bold=bold or None)


def heading(title: str) -> Text:
    """Return a line across the page that starts a section."""
    return Text.assemble(
        ("━━ ", "dim"), (title, "bold"), (f" {'━' * (WIDTH - cell_len(title) - 4)}", "dim")
    )


def equation(text: str) -> Text:
    """Return an equation with its letters in the colours of their roles."""
    line = Text(f"{INDENT}{subscripts(text)}", "italic")
    for role, letters in (("q", "qQ"), ("k", "kK"), ("v", "vV"), ("s", "sp"), ("z", "z")):
        line.highlight_regex(rf"(?<!\w)[{letters}](?=[ᵢⱼ_ ])", style(role))
    return line


_WIDE = "\u2e80-\u303f\u3400-\u9fff\uff00-\uffef"
_CLOSING = "\u3001\u3002\uff01\uff09\uff0c\uff1a\uff1b\uff1f\u300b"
_UNIT = re.compile(f" |[\uff08\u300a]*(?:[{_WIDE}]|[^ {_WIDE}]+)[{_CLOSING}]*")
"""What a line is not broken within: a word or a Chinese character, with the marks around it."""


def wrap_cells(text: str, width: int) -> list[str]:
    """Break a text at spaces and between Chinese characters, by its width in cells."""
    lines = [""]
    for unit in _UNIT.findall(text):
        while cell_len(lines[-1]) + cell_len(unit) > width:
            if not lines[-1]:  # a word that is wider than a line
                lines[-1] = set_cell_size(unit, width).rstrip(" ")
                unit = unit[len(lines[-1]) :]
            lines.append("")
        if unit != " " or lines[-1]:
            lines[-1] += unit
    return [line for line in map(str.rstrip, lines) if line]


def wrapped(text: str, width: int = WIDTH) -> Lines:
    """Generate lines of prose that fit the page."""
    for line in wrap_cells(escape_controls(text), width - len(INDENT)):
        yield Text(INDENT + line, "dim")


def prose(text: str, /, **values: object) -> Lines:
    """Generate a text in the reader's language, in lines that fit the page."""
    return wrapped(translate(text, **values))


def indented(text: str, style: str = "", /, **values: object) -> Text:
    """Return a text in the reader's language as one line of the page."""
    return Text(INDENT + translate(text, **values), style)


def legend(what: str) -> Text:
    """Return the legend of the shades, in one line."""
    shades = " ".join(
        f"{shade} {step:g}+" for shade, step in zip(SHADES[1:], SHADE_STEPS, strict=True)
    )
    text = translate(
        "{what} blank below {least}, {shades}, {hatch} masked",
        what=what,
        least=f"{SHADE_STEPS[0]:g}",
        shades=shades,
        hatch=MASKED,
    )
    return Text(INDENT + text, "dim")


def strip(title: str, values: Sequence[float], role: str, top: float | None = None) -> Lines:
    """Generate a vector's minimum, maximum and norm, and a bar per dim, up or down."""
    n, shown = fold(values, STRIP_WIDTH)
    wide = max(1, STRIP_WIDTH // len(shown))
    full = max(map(abs, values), default=0.0) if top is None else top
    numbers = translate(
        "min {min}  max {max}  norm {norm}",
        min=number(min(values)),
        max=number(max(values)),
        norm=number(norm(values)),
    )
    space = WIDTH - len(INDENT) - cell_len(numbers) - 2
    yield Text.assemble(INDENT, (cell(title, space), style(role)), "  ", (numbers, "dim"))
    up, down = columns([value for value in shown for _ in range(wide)], full)
    end = f" ±{number(full)}"
    yield Text.assemble(INDENT, (up, style(role)), (end, "dim"))
    folded = " " + translate("{n} dims each", n=n) if n > 1 else ""
    yield Text.assemble(INDENT, (down, style(role)), (folded, "dim"))


def norm(values: Sequence[float]) -> float:
    """Return the Euclidean norm of a vector."""
    return float(np.linalg.norm(np.asarray(values, float)))


def large_pattern(data: Data) -> Lines:
    """Generate a pattern of at most 32 x 32 cells of two characters, with row names."""
    n, cells = data["pool"], data["patterns"][data["head"]]
    text = translate("rows are queries, columns are keys 0 .. {last}", last=len(data["pieces"]) - 1)
    if n > 1:
        text += translate("; cells: largest weight of {n} x {n}", n=n)
    yield Text(INDENT + text)
    wide = len(cells[0])
    ruler = "".join(f"{column * n:<10}" for column in range(0, wide, 5))
    yield Text(f"{' ' * 14}{ruler[: 2 * wide].rstrip()}", "dim")
    for row, values in enumerate(cells):
        i = row * n
        here = i <= data["query"] < i + n
        name = cell(data["row_pieces"][i], 7)
        yield Text.assemble(
            ("▶" if here else " ", style("q")),
            (f"{i:>3} ", "dim"),
            (name, style("q", bold=True) if here else ""),
            (" │", "dim"),
            _cells(values),
            ("│", "dim"),
        )


def small_patterns(data: Data) -> Lines:
    """Generate small patterns of all heads of the layer, side by side."""
    patterns = [_smaller(cells) for cells in data["patterns"]]
    heads = [
        h for h, cells in enumerate(patterns) if any(p is not None for row in cells for p in row)
    ]
    if heads == [data["head"]] and len(patterns) > 1:
        yield indented("the other heads are not drawn: the text is long", "dim")
        return
    longest = max(len(data["patterns"][0]), len(data["patterns"][0][0]))
    side = data["pool"] * max(1, -(-longest // MAX_SMALL_CELLS))
    text = translate("every head of the layer")
    if side > 1:
        text += translate("; each cell is the largest weight of {n} x {n}", n=side)
    yield Text(INDENT + text)
    for first in range(0, len(patterns), PATTERNS_PER_LINE):
        group = list(enumerate(patterns))[first : first + PATTERNS_PER_LINE]
        titles = Text(INDENT)
        for h, _ in group:
            here = h == data["head"]
            name = f"{'▶' if here else ' '}{translate('head {n}', n=h)}"
            titles.append(cell(name, 2 * MAX_SMALL_CELLS + 3), "bold" if here else "dim")
        yield titles
        for row in range(len(patterns[0])):
            line = Text(INDENT)
            for _, cells in group:
                line.append_text(Text.assemble(("│", "dim"), _cells(cells[row]), ("│", "dim")))
                line.append(" " * (2 * (MAX_SMALL_CELLS - len(cells[row])) + 1))
            line.rstrip()
            yield line


def _cells(values: Sequence[float | None]) -> Text:
    """Return a row of cells, two characters each."""
    line = Text()
    for p in values:
        glyph = shade(p)
        line.append(" " + glyph if p is None else glyph * 2, "dim" if p is None else style("s"))
    return line


def _smaller(cells: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Pool to at most 8 cells a side: the largest of each square, None where all are masked."""
    t, s = len(cells), len(cells[0]) if cells else 0
    n = max(1, -(-max(t, s) // MAX_SMALL_CELLS))

    def largest(rows: range, columns: range) -> float | None:
        values = [cells[i][j] for i in rows for j in columns]
        return max((p for p in values if p is not None), default=None)

    across = [range(j, min(j + n, s)) for j in range(0, s, n)]
    down = [range(i, min(i + n, t)) for i in range(0, t, n)]
    return [[largest(rows, columns) for columns in across] for rows in down]


PACKAGE = "regard.view"
"""The package whose catalogues (strings/<lang>.json) have the sentences."""


class Sentences:
    """The sentences in one language."""

    def __init__(self, lang: str) -> None:
        self.lang = check_language(lang)
        self._sentences: Mapping[str, str] = catalogue(PACKAGE, lang)

    def __call__(self, key: str, /, **values: str) -> str:
        """Return a sentence with its placeholders filled in."""
        return PLACEHOLDER.sub(lambda match: values[match[1]], self._sentences[key])

    def styled(self, key: str, /, **values: str | Text) -> Text:
        """Return a sentence as styled text; values may bring their own style."""
        text = Text()
        # a split by a pattern with one group has its placeholders at the odd places
        for n, part in enumerate(PLACEHOLDER.split(self._sentences[key])):
            text.append(values[part] if n % 2 else part)
        return text

    def named(self, group: str, name: str) -> str:
        """Return the sentence of a name within a group; the name itself if it has none."""
        return self._sentences.get(f"{group}.{name}", name)

    def count(self, noun: str, n: int) -> str:
        """Return a count with its noun."""
        one, _, many = self._sentences[f"count.{noun}"].partition("|")
        return (many if many and n != 1 else one).replace("{n}", f"{n:,}")

    def translated(self, group: str, english: str) -> str:
        """Return a text that other parts of the package made in English.

        >>> Sentences("zh").translated("why", "outside window 4")
        '在 window 4 之外'
        """
        for key, sentence in catalogue(PACKAGE, "en").items():
            if key.startswith(f"{group}.") and (values := _values(sentence, english)) is not None:
                if key == "why.and":
                    values = {name: self.translated(group, x) for name, x in values.items()}
                return self(key, **values)
        return english


def _values(sentence: str, text: str) -> dict[str, str] | None:
    """Return the values of the placeholders with which a sentence is the text; None if none are.

    >>> _values("a {x} c", "a b c"), _values("a {x}", "b")
    ({'x': 'b'}, None)
    """
    parts = PLACEHOLDER.split(sentence)
    pattern = "".join(f"(?P<{x}>.+)" if n % 2 else re.escape(x) for n, x in enumerate(parts))
    match = re.fullmatch(pattern, text)
    return None if match is None else match.groupdict()
