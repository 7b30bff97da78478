"""The page of a comparison: what mechanisms cost, how well they learn, and which no other beats.
One file, no script.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from regard.foreign import inert
from regard.view import chart, curves, palette, scatter
from regard.view.html import content_hash


@dataclass(frozen=True)
class Chart:
    """A scatter of mechanisms, and the sentence below it.

    >>> Chart((), scatter.Axis("cache", "bytes"), scatter.Axis("loss", "bits"), "text", "").svg()
    ''
    """

    marks: Sequence[scatter.Mark]
    x: scatter.Axis
    y: scatter.Axis
    title: str
    caption: str

    def svg(self, *, alone: bool = False) -> str:
        """The drawing."""
        return scatter.svg(self.marks, self.x, self.y, self.title, alone=alone)


@dataclass(frozen=True)
class Grid:
    """A table: the first column names the rows, numbers stand on the right.

    >>> Grid("Costs", "", ("", "bytes"), (("mqa", "64"),)).title
    'Costs'
    """

    title: str
    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class ComparedPage:
    """What the page shows.

    facts: name -> value, beside the title. command: makes the page again. notes: what a reader must
        know. charts: quality against cost. costs: costs against one another. pictures: costs over
        the context.

    >>> page = ComparedPage("Mechanisms", "Side by side.", {"seeds": "0"}, "regard compare", (), ())
    >>> "<h1>Mechanisms</h1>" in page.html(), "regard compare" in page.html()
    (True, True)
    """

    title: str
    sentence: str
    facts: Mapping[str, str]
    command: str
    charts: Sequence[Chart]
    grids: Sequence[Grid]
    notes: Sequence[str] = field(default=())
    costs: Sequence[Chart] = field(default=())
    pictures: Sequence[curves.Picture] = field(default=())

    def html(self) -> str:
        """The whole page; texts reach it escaped, and a content policy lets no script run and loads
        nothing.
        """
        style = palette.css() + _STYLE + scatter.css() + chart.css()
        policy = (
            f"default-src 'none'; style-src '{content_hash(style)}'; base-uri 'none'; "
            "form-action 'none'"
        )
        facts = "".join(f"<li>{_safe(k)} <b>{_safe(v)}</b></li>" for k, v in self.facts.items())
        notes = "".join(f"<li>{_safe(note)}</li>" for note in self.notes)
        body = "\n".join(
            [
                (
                    f"<h1>{_safe(self.title)}</h1><p>{_safe(self.sentence)}</p><ul "
                    f"class='facts'>{facts}</ul>"
                ),
                f"<pre>{_safe(self.command)}</pre>",
                f"<ul class='notes'>{notes}</ul>" if notes else "",
                _charts(
                    "Quality against cost",
                    f"{_FRONT} Bars through marks span the seeds.",
                    self.charts,
                ),
                _charts("Costs against one another", _FRONT, self.costs),
                self._pictures(),
                *map(_grid, self.grids),
            ]
        )
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{_safe(self.title)}</title>\n<style>{style}</style>\n</head>\n"
            f"<body><main>\n{body}\n</main></body>\n</html>\n"
        )

    def _pictures(self) -> str:
        figures = "".join(
            f"<figure>{curves.svg(each, alone=False)}</figure>" for each in self.pictures
        )
        if not figures:
            return ""
        return (
            "<section><h2>Costs over the context</h2><p class='soft'>Both axes are logarithmic; "
            "marks are medians.</p>"
            f"<div class='figures'>{figures}</div></section>"
        )


_FRONT = "Full marks are beaten by no other mechanism in both (Pareto); the dashed line joins them."


def _charts(title: str, sentence: str, charts: Sequence[Chart]) -> str:
    """A section of scatters; nothing where none has a mark."""
    figures = "".join(
        f"<figure>{chart.svg()}<figcaption>{_safe(chart.caption)}</figcaption></figure>"
        for chart in charts
        if chart.marks
    )
    if not figures:
        return ""
    return (
        f"<section><h2>{_safe(title)}</h2><p class='soft'>{_safe(sentence)}</p>"
        f"<div class='figures'>{figures}</div></section>"
    )


_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 80px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:18px;margin:0}p{margin:6px 0;max-width:90ch}
.soft,.notes{color:var(--soft);font-size:14px}.wide{overflow-x:auto}
pre{background:var(--hint);border-radius:8px;padding:10px 14px;font-size:13px;white-space:pre-wrap;overflow-wrap:anywhere}
.facts{display:flex;flex-wrap:wrap;gap:6px 8px;margin:12px 0;padding:0;list-style:none}
.facts li{background:var(--card);border:1px solid var(--line);border-radius:999px;padding:2px 12px;font-size:14px}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px 20px;margin-top:16px}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px 24px}
svg.chart,svg.scatter{display:block;width:100%;height:auto}figure{margin:12px 0 0}figcaption{font-size:13px;color:var(--soft)}
table{border-collapse:collapse;font-size:14px;margin-top:8px;font-variant-numeric:tabular-nums}
th,td{padding:5px 14px 5px 0;text-align:right;white-space:nowrap;border-top:1px solid var(--line)}
th{color:var(--soft);font-weight:600;border:0}th:first-child,td:first-child{text-align:left}td:first-child{font-weight:600}
"""


def _grid(grid: Grid) -> str:
    head = "".join(f"<th>{_safe(name)}</th>" for name in grid.heads)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_safe(cell)}</td>' for cell in row)}</tr>" for row in grid.rows
    )
    return (
        f"<section><h2>{_safe(grid.title)}</h2><p class='soft'>{_safe(grid.caption)}</p><div "
        "class='wide'><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _safe(text: str) -> str:
    return html.escape(inert(text))
