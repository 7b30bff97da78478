"""Text tables with aligned columns, for every command that prints numbers."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence


def format_table(
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    indent: str = "",
    gap: int = 2,
    width: int | None = None,
    names: int = 1,
) -> str:
    """Format rows as aligned lines; numbers are aligned right, and columns of names left."""
    count = max(map(len, rows), default=0)
    widths = [
        max((display_width(row[i]) for row in rows if i < len(row)), default=0)
        for i in range(count)
    ]
    tables, used = [list(range(min(names, count)))], 0
    start = display_width(indent) + sum(widths[:names]) + gap * (names - 1)
    for i in range(names, count):
        used += gap + widths[i]
        if width is not None and start + used > width and len(tables[-1]) > names:
            tables.append(list(range(names)))
            used = gap + widths[i]
        tables[-1].append(i)
    return "\n\n".join(
        "\n".join(
            (
                indent
                + (" " * gap).join(
                    _pad(row[i], widths[i], on_the_left=i in left) for i in columns if i < len(row)
                )
            ).rstrip()
            for row in rows
        )
        for columns in tables
    )


def line_width(least: int = 40) -> int:
    """Return the columns that an output line may have: those of COLUMNS or the terminal, at least
    `least`; 10,000 for a file or a pipe without COLUMNS.
    """
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return max(least, shutil.get_terminal_size().columns)
    return 10_000


def display_width(text: str) -> int:
    """Return how many columns of a terminal a text takes; Chinese characters take two."""
    if text.isascii():
        return len(text)
    import unicodedata  # imported here, since most tables are ASCII

    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def wrap(text: str, width: int, *, indent: str = "", hang: str = "") -> str:
    """Break the lines of a text at a number of columns.

    Lines are broken at spaces, and between Chinese characters, but not before a closing mark. A
    word that is longer than a line is broken after commas and slashes, or stays whole.

    >>> print(wrap("one two three", 8, hang="  "))
    one two
      three
    >>> print(wrap("每个查询读取一个键。", 8))
    每个查询
    读取一个
    键。
    """
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line, used = hang if lines else indent, False
        for piece in _pieces(paragraph, width - display_width(hang)):
            if used and display_width(line + piece.rstrip()) > width:
                lines.append(line.rstrip())
                line, piece = hang, piece.lstrip()
            line, used = line + piece, True
        lines.append(line.rstrip())
    return "\n".join(lines)


def _pieces(text: str, width: int) -> Iterator[str]:
    """Yield what a line may not break: one Chinese character with its marks, or a word; a word
    that is wider than a line is broken after commas and slashes.
    """
    for piece in _PIECES.findall(text):
        yield from re.findall(r"[^,/]*[,/]*\s*", piece) if display_width(piece) > width else [piece]


_WIDE = "\u2e80-\u9fff\uff00-\uffef\u3000-\u303f"  # Chinese characters and their marks
_CLOSING, _OPENING = r"，。；：？！、）」』》】”’\])}.,;:", r"（「『《【“‘\[({"
_PIECES = re.compile(
    rf"[{_OPENING}]*(?:(?![{_OPENING}])[{_WIDE}]|[^\s{_WIDE}]+)[{_CLOSING}]*\s*|\s+|."
)


def pad_cells(text: str, width: int) -> str:
    """Pad a text on the right to a width in terminal cells."""
    return _pad(text, width, on_the_left=True)


def _pad(cell: str, width: int, *, on_the_left: bool) -> str:
    spaces = " " * (width - display_width(cell))
    return cell + spaces if on_the_left else spaces + cell
