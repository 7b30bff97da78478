"""Static HTML pages: one file each, without scripts and without external resources.

A page has a title, facts, the command that reproduces it, and sections. A section has sentences,
tables and charts. All text is escaped. The page of a recording, which has scripts, is made by
`regard.view.page`.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

from regard.files.atomic_write import write_user_file
from regard.language import language, translate
from regard.untrusted_text import escape_controls
from regard.view import charts, palette, plotting
from regard.view.charts import Chart

Rows = Sequence[Sequence[str]]


def write(path: Path, text: str) -> int:
    """Write a file completely or not at all: write it beside the target, then rename it."""
    content = text.encode("utf-8")
    with write_user_file(path) as place:
        place.write_bytes(content)
    return len(content)


def content_hash(text: str) -> str:
    """Return the hash that allows an inline script or style in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()


def safe(text: str) -> str:
    """Escape text of any origin for a page, including control characters and characters that hide
    text.

    >>> safe("<b>")
    '&lt;b&gt;'
    """
    return html.escape(escape_controls(text))


@dataclass(frozen=True)
class CaptionedChart:
    """A chart with a caption above it: a success (True), a failure (False), or neither."""

    chart: Chart
    caption: str = ""
    good: bool | None = None

    def html(self) -> str:
        """Return the figure as HTML; its verdict precedes the caption, in words and in colour."""
        verdict = {
            True: f"<span class='good'>{safe(translate('right'))}</span>; ",
            False: f"<span class='bad'>{safe(translate('wrong'))}</span>; ",
            None: "",
        }[self.good]
        words = f"<figcaption>{verdict}{safe(self.caption)}</figcaption>" if self.caption else ""
        return (
            f"<figure>{words}<div class='wide'>{charts.svg(self.chart, alone=False)}</div></figure>"
        )


@dataclass(frozen=True)
class Section:
    """One section of a page.

    Args:
        badge: a word beside the heading, such as a verdict; "" for none.
        good: colour of the badge: True for a success, False for a failure, None for neither.
        texts: label to sentence; each label is written in bold before its sentence.
        heads: column headings of a table.
        pictures: charts below the tables; a chart without any point is left out.
        more: rows of a second table; the first row has its headings.
        caption: a sentence below the heading.
        figures: charts with captions, side by side where they fit.
        numbers: whether the cells of the table are numbers, which are aligned right.
        tones: index of a column of the table to "good" or "bad", the colour of its cells.
    """

    title: str
    badge: str = ""
    good: bool | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    heads: Sequence[str] = ()
    rows: Rows = ()
    pictures: Sequence[Chart] = ()
    more: Rows = ()
    caption: str = ""
    figures: Sequence[CaptionedChart] = ()
    numbers: bool = False
    tones: Mapping[int, str] = field(default_factory=dict)

    def html(self) -> str:
        """Return the section as HTML; all text is escaped."""
        tone = {True: "good", False: "bad", None: "soft"}[self.good]
        badge = f" <span class='badge {tone}'>{safe(self.badge)}</span>" if self.badge else ""
        caption = f"<p class='soft'>{safe(self.caption)}</p>" if self.caption else ""
        texts = "".join(f"<p><b>{safe(k)}</b> {safe(v)}</p>" for k, v in self.texts.items())
        tables = self._table(self.heads, self.rows)
        tables += self._table(self.more[0], self.more[1:]) if self.more else ""
        drawn = "".join(
            f"<div class='wide'>{charts.svg(one, alone=False)}</div>"
            for one in self.pictures
            if getattr(one, "drawable", True)
        )
        figures = "".join(one.html() for one in self.figures)
        beside = f"<div class='figures'>{figures}</div>" if figures else ""
        return (
            f"<section><h2>{safe(self.title)}{badge}</h2>{caption}{texts}{tables}{drawn}{beside}"
            "</section>"
        )

    def _table(self, heads: Sequence[str], rows: Rows) -> str:
        if not rows:
            return ""
        head = "".join(f"<th>{safe(cell)}</th>" for cell in heads)
        body = "".join(f"<tr>{''.join(map(self._cell, range(len(row)), row))}</tr>" for row in rows)
        kind = " class='numbers'" if self.numbers else ""
        return (
            f"<div class='wide'><table{kind}><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
        )

    def _cell(self, column: int, text: str) -> str:
        tone = f" class='{self.tones[column]}'" if column in self.tones else ""
        return f"<td{tone}>{safe(text)}</td>"


def page(
    title: str,
    sentence: str,
    facts: Mapping[str, str],
    command: str,
    sections: Sequence[Section],
    notes: Sequence[str] = (),
) -> str:
    """Return a whole page; its content security policy forbids scripts and external resources."""
    style = palette.css() + _own_style() + plotting.css()
    policy = (
        f"default-src 'none'; style-src '{content_hash(style)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    fact_items = "".join(f"<li>{safe(k)} <b>{safe(v)}</b></li>" for k, v in facts.items())
    listed = "".join(f"<li>{safe(note)}</li>" for note in notes)
    body = "\n".join(
        [
            f"<h1>{safe(title)}</h1><p>{safe(sentence)}</p><ul class='facts'>{fact_items}</ul>",
            f"<pre>{safe(command)}</pre>" if command else "",
            f"<ul class='notes'>{listed}</ul>" if listed else "",
            *(section.html() for section in sections),
        ]
    )
    return (
        f'<!doctype html>\n<html lang="{language()}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(title)}</title>\n<style>{style}</style>\n</head>\n"
        f"<body><main>\n{body}\n</main></body>\n</html>\n"
    )


@cache
def _own_style() -> str:
    return resources.files("regard.view").joinpath("page.css").read_text("utf-8")
