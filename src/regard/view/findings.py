"""A page of findings: sections with a verdict, sentences, a table of numbers and pictures. One
file, no script.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from regard.foreign import inert
from regard.view import chart, curves, palette
from regard.view.curves import Picture
from regard.view.html import content_hash


@dataclass(frozen=True)
class Section:
    """One finding.

    Attributes:
        title: its heading.
        badge: a word beside it, such as a verdict; "" is none.
        good: how the badge is coloured: True, False, or None for neither.
        texts: a word in front of each sentence -> the sentence.
        heads, rows: a table; cells are texts.
        pictures: drawn below it.
        more: a second table behind the first, its heads in the first row.

    >>> Section("scale", "holds", True, {"says": "It saturates."}).badge
    'holds'
    """

    title: str
    badge: str = ""
    good: bool | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    pictures: Sequence[Picture] = ()
    more: Sequence[Sequence[str]] = ()

    def html(self) -> str:
        """The section; every text reaches it escaped."""
        tone = {True: "good", False: "bad", None: "soft"}[self.good]
        badge = f" <span class='badge {tone}'>{_safe(self.badge)}</span>" if self.badge else ""
        texts = "".join(f"<p><b>{_safe(k)}</b> {_safe(v)}</p>" for k, v in self.texts.items())
        tables = _table(self.heads, self.rows) + (
            _table(self.more[0], self.more[1:]) if self.more else ""
        )
        drawn = "".join(
            f"<div class='wide'>{curves.svg(p, alone=False)}</div>"
            for p in self.pictures
            if p.drawable
        )
        return f"<section><h2>{_safe(self.title)}{badge}</h2>{texts}{tables}{drawn}</section>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{_safe(cell)}</th>" for cell in heads)
    body = "".join(f"<tr>{''.join(f'<td>{_safe(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        "<div "
        f"class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def page(
    title: str, sentence: str, facts: Mapping[str, str], command: str, sections: Sequence[Section]
) -> str:
    """The whole page: a content policy lets no script run and loads nothing.

    Args:
        title, sentence: at the top.
        facts: name -> value, such as the machine and the seeds.
        command: makes the page again.
        sections: the findings.

    >>> "<h1>Claims</h1>" in page("Claims", "", {}, "regard compare --claim all", [Section("scale")])
    True
    """
    style = palette.css() + _STYLE + chart.css()
    policy = (
        f"default-src 'none'; style-src '{content_hash(style)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    told = "".join(f"<li>{_safe(k)} <b>{_safe(v)}</b></li>" for k, v in facts.items())
    body = "\n".join(
        [
            (
                f"<h1>{_safe(title)}</h1><p>{_safe(sentence)}</p><ul "
                f"class='facts'>{told}</ul><pre>{_safe(command)}</pre>"
            ),
            *(section.html() for section in sections),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_safe(title)}</title>\n<style>{style}</style>\n</head>\n<body><main>\n{body}\n</main></body>\n</html>\n"
    )


_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 80px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:18px;margin:0 0 6px}p{margin:4px 0;max-width:96ch}p b{color:var(--soft);font-weight:600}
.wide{overflow-x:auto}.good{color:var(--good)}.bad{color:var(--bad)}.soft{color:var(--soft)}
.badge{border:1px solid currentColor;border-radius:999px;padding:1px 10px;font-size:14px;margin-left:6px;font-weight:600}
pre{background:var(--hint);border-radius:8px;padding:10px 14px;font-size:13px;white-space:pre-wrap;overflow-wrap:anywhere}
.facts{display:flex;flex-wrap:wrap;gap:6px 8px;margin:12px 0;padding:0;list-style:none}
.facts li{background:var(--card);border:1px solid var(--line);border-radius:999px;padding:2px 12px;font-size:14px}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px 20px;margin-top:16px}
svg.chart{display:block;width:100%;max-width:880px;height:auto;margin-top:10px}
table{border-collapse:collapse;font-size:14px;margin-top:8px;font-variant-numeric:tabular-nums}
th,td{padding:4px 14px 4px 0;text-align:left;border-top:1px solid var(--line)}th{color:var(--soft);font-weight:600;border:0}
"""


def _safe(text: str) -> str:
    return html.escape(inert(text))
