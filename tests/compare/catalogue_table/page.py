"""The page docs/mechanisms.md and its Chinese translation, written from the kept measurements, the
counted costs and the words of the catalogue.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from regard.language import catalogue
from regard.nn.variants import VARIANTS
from regard.nn.variants.usage import USAGE
from tests.compare.catalogue_table import behaviour, page_texts
from tests.compare.catalogue_table.kept import DOCS, QUALITY, read
from tests.compare.catalogue_table.quality import MOST_USED, STEPS
from tests.compare.catalogue_table.rows import Row, cost_rows, quality_results, speeds

PAGES = {"en": DOCS / "mechanisms.md", "zh": DOCS / "mechanisms.zh-CN.md"}
NONE = "–"


def number(x: float | None, unit: float) -> str:
    """A number in a unit with three digits, which a reader can sort; a dash for nothing."""
    return NONE if x is None else plain(x / unit)


def plain(x: float) -> str:
    """Three digits without an exponent.

    >>> [plain(x) for x in (0.0, 0.01234, 8.0, 131.27, 16384.0)]
    ['0', '0.0123', '8', '131', '16400']
    """
    if not x:
        return "0"
    rounded = float(f"{x:.3g}")
    return f"{rounded:.0f}" if rounded >= 100 else f"{rounded:g}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns a browser can sort on the site."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        ['<div class="sortable" markdown>', ""]
        + [f"| {' | '.join(line)} |" for line in lines]
        + ["", "</div>"]
    )


class Language:
    """The words of one language."""

    def __init__(self, code: str) -> None:
        self.code, self.index = code, ("en", "zh").index(code)
        self._chinese: Mapping[str, str] = catalogue("regard", "zh")

    def of(self, both: tuple[str, str]) -> str:
        """The text of this language."""
        return both[self.index]

    def printed(self, english: str) -> str:
        """A text that commands print."""
        return english if self.code == "en" else self._chinese[english]


def kind(language: Language, name: str) -> str:
    """The family of a mechanism."""
    family = VARIANTS[name].family
    return family if language.code == "en" else language.printed(f"{family} attention")


def mechanism_table(language: Language, rows: Sequence[Row]) -> str:
    """One row for each mechanism."""
    return table(
        [language.of(head) for head in page_texts.HEADS],
        [
            [
                f"`{row.name}`",
                kind(language, row.name),
                language.of(behaviour.result_of(row.name).words),
                language.of(behaviour.beyond_training(row.name).words),
                number(row.token_bytes, 2**10),
                number(row.state_bytes, 2**20),
                number(row.cache_bytes, 2**20),
                number(row.prompt_flops, 1e12),
                number(row.token_flops, 1e9),
                number(row.prompt_seconds, 1e-3),
                number(row.token_seconds, 1e-3),
                language.printed(USAGE[row.name].models),
            ]
            for row in rows
        ],
    )


def meanings(language: Language, groups: Sequence[behaviour.Behaviour]) -> str:
    """What the words of a column mean."""
    heads = [language.of(text) for text in (("words", "用语"), ("meaning", "含义"))]
    rows = [f"| {language.of(x.words)} | {language.of(x.meaning)} |" for x in groups]
    return "\n".join([f"| {heads[0]} | {heads[1]} |", "|---|---|", *rows])


def quality_table(language: Language) -> str:
    """The results of training: the mean over seeds, and each of them."""
    _, results = quality_results()

    def shown(task: str, name: str) -> str:
        scale, digits = (1.0, 3) if task == "text" else (100.0, 1)
        values = [f"{scale * x:.{digits}f}" for x in results[task, name]]
        mean = statistics.fmean(scale * x for x in results[task, name])
        return f"{mean:.{digits}f} ({', '.join(values)})"

    heads = [language.of(head) for head in page_texts.QUALITY_HEADS]
    return table(heads, [[f"`{n}`", *(shown(t, n) for t in STEPS)] for n in MOST_USED])


def spread(task: str) -> str:
    """The largest distance between two seeds of one mechanism."""
    _, results = quality_results()
    distance = max(max(x) - min(x) for (t, _), x in results.items() if t == task)
    return f"{distance:.2f}" if task == "text" else f"{100 * distance:.0f}"


def page(language: Language) -> str:
    """The whole page."""
    settings, _ = speeds()
    trained, (seeds, _) = read(QUALITY)[0], quality_results()
    facts = {
        "count": len(VARIANTS),
        "seeds": seeds,
        **{f"{task}_spread": spread(task) for task in STEPS},
        "speed_date": settings["date"],
        "quality_date": trained["date"],
        **{name: trained[name] for name in ("processor", "cores", "torch", "python")},
        **{name: settings[name] for name in ("dim", "heads", "groups", "tokens", "rounds")},
    }
    parts = {
        "mechanisms": mechanism_table(language, list(cost_rows())),
        "results": meanings(language, behaviour.RESULTS),
        "beyond": meanings(language, behaviour.BEYOND),
        "quality": quality_table(language),
    }
    return language.of(page_texts.PAGE).format(**facts, **parts)


def write() -> None:
    """Write the page in both languages."""
    for code, path in PAGES.items():
        path.write_text(page(Language(code)), "utf-8")
