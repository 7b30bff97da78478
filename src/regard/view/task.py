"""The page of a task that was trained: how often it is right, where it looks, what it gets wrong.
One file, no script.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from regard.foreign import inert
from regard.view import alignment, chart, palette
from regard.view.chart import Series
from regard.view.html import content_hash


@dataclass(frozen=True)
class Aligned:
    """One example with its alignment: where it was looked, and what should have been said.

    >>> Aligned(("a",), ("b",), ("b",), np.ones((1, 1)), "decoder").right
    True
    """

    source: tuple[str, ...]
    said: tuple[str, ...]
    wanted: tuple[str, ...]
    weights: Float[np.ndarray, "T S"]
    place: str

    @property
    def right(self) -> bool:
        """Whether that was said which should have been."""
        return self.said == self.wanted


@dataclass(frozen=True)
class Told:
    """What was read, what was said, and what should have been: as texts.

    >>> Told("one", "二", "一").said
    '二'
    """

    source: str
    said: str
    wanted: str


@dataclass(frozen=True)
class TaskPage:
    """What the page shows.

    facts: name -> value, beside the title. trained: tokens of the longest source in training.

    >>> page = TaskPage("translate", "Numbers.", {"model": "lstm"}, (), 32)
    >>> "<h1>translate</h1>" in page.html()
    True
    """

    title: str
    sentence: str
    facts: Mapping[str, str]
    series: Sequence[Series]
    trained: int
    aligned: Sequence[Aligned] = field(default=())
    wrong: Sequence[Told] = field(default=())

    def html(self) -> str:
        """The whole page; words are untrusted and reach it escaped, and a content policy lets no
        script run.
        """
        style = palette.css() + _STYLE + chart.css() + alignment.css()
        policy = (
            f"default-src 'none'; style-src '{content_hash(style)}'; base-uri 'none'; "
            "form-action 'none'"
        )
        facts = "".join(f"<li>{_safe(k)} <b>{_safe(v)}</b></li>" for k, v in self.facts.items())
        body = "\n".join(
            [
                (
                    f"<h1>{_safe(self.title)}</h1><p>{_safe(self.sentence)}</p><ul "
                    f"class='facts'>{facts}</ul>"
                ),
                *self._accuracy(),
                *self._alignments(),
                *self._mistakes(),
            ]
        )
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{_safe(self.title)}</title>\n<style>{style}</style>\n</head>\n"
            f"<body><main>\n{body}\n</main></body>\n</html>\n"
        )

    def _accuracy(self) -> Iterator[str]:
        if not self.series:
            return
        drawn = chart.svg(self.series, self.trained, "right, every word of it", alone=False)
        yield (
            "<section><h2>Right, by the length of the source</h2><p class='soft'>An answer is "
            "right when every word of it "
            "is. The bars through the marks are 95 % intervals. No source was trained on; shaded "
            "are those longer than "
            f"any that was.</p><div class='wide'>{drawn}</div></section>"
        )

    def _alignments(self) -> Iterator[str]:
        if not self.aligned:
            return
        yield (
            "<section><h2>Where it looks</h2><p class='soft'>Rows are the words that were said, "
            "columns the words of the "
            "source; the colour of a cell is its weight. Nobody taught the model which word "
            "belongs to which.</p>"
        )
        yield "<div class='figures'>"
        for one in self.aligned:
            drawn = alignment.svg(one.weights, one.said, one.source, alone=False)
            verdict = (
                "<span class='good'>right</span>" if one.right else "<span class='bad'>wrong</span>"
            )
            wanted = "" if one.right else f"; it should have been {_safe(''.join(one.wanted))}"
            yield (
                f"<figure><figcaption>{_safe(one.place)}: {verdict}{wanted}</figcaption>"
                f"<div class='wide'>{drawn}</div></figure>"
            )
        yield "</div></section>"

    def _mistakes(self) -> Iterator[str]:
        if not self.wrong:
            return
        rows = "".join(
            f"<tr><td>{_safe(told.source)}</td><td "
            f"class='bad'>{_safe(told.said) or '(nothing)'}</td>"
            f"<td class='good'>{_safe(told.wanted)}</td></tr>"
            for told in self.wrong
        )
        yield (
            "<section><h2>What it gets wrong</h2><div "
            "class='wide'><table><thead><tr><th>source</th><th>said</th>"
            f"<th>right</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
        )


_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 80px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:18px;margin:0}p{margin:6px 0;max-width:90ch}
.soft{color:var(--soft);font-size:14px}.wide{overflow-x:auto}
.facts{display:flex;flex-wrap:wrap;gap:6px 8px;margin:12px 0;padding:0;list-style:none}
.facts li{background:var(--card);border:1px solid var(--line);border-radius:999px;padding:2px 12px;font-size:14px}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px 20px;margin-top:16px}
.figures{display:flex;flex-wrap:wrap;gap:8px 32px;align-items:start}svg.chart{display:block;width:100%;max-width:880px;height:auto}
figure{margin:20px 0 0;max-width:100%}figcaption{font-size:14px;color:var(--soft)}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}
table{border-collapse:collapse;font-size:14px;margin-top:8px}th,td{padding:5px 12px 5px 0;text-align:left;vertical-align:top;
border-top:1px solid var(--line);overflow-wrap:anywhere}th{color:var(--soft);font-weight:600;border:0}
"""


def _safe(text: str) -> str:
    return html.escape(inert(text))
