"""The parts of docs/mechanisms.md and its Chinese translation that are written from the kept
measurements, the counted costs and the words of the catalogue.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from regard.language import catalogue
from regard.nn.variants import VARIANTS
from tests.compare.catalogue_table import behaviour
from tests.compare.catalogue_table.kept import DOCS, QUALITY, read
from tests.compare.catalogue_table.quality import MOST_USED, STEPS
from tests.compare.catalogue_table.rows import cost_rows, quality_results, speeds

PAGES = {"en": DOCS / "mechanisms.md", "zh": DOCS / "mechanisms.zh-CN.md"}
NONE = "–"
HEADS = (
    ("mechanism", "机制"),
    ("kind", "种类"),
    ("result", "结果"),
    ("beyond training length", "超出训练长度"),
    ("cache per token, KiB", "每词元缓存，KiB"),
    ("state, MiB", "状态，MiB"),
    ("all caches, MiB", "全部缓存，MiB"),
    ("prompt, TFLOP", "提示，TFLOP"),
    ("token, GFLOP", "词元，GFLOP"),
    ("prompt, ms", "提示，毫秒"),
    ("token, ms", "词元，毫秒"),
    ("who ships it", "谁在使用"),
)
QUALITY_HEADS = (
    ("mechanism", "机制"),
    ("mqar, % right", "mqar，正确率 %"),
    ("passkey, % right", "passkey，正确率 %"),
    ("text, bits per byte", "文本，每字节比特"),
)


def number(x: float | None, unit: float) -> str:
    """A number in a unit with three digits, which a reader can sort; a dash for nothing."""
    return NONE if x is None else plain(x / unit)


def plain(x: float) -> str:
    """Three digits, or all digits of the whole number; without an exponent.

    >>> [plain(x) for x in (0.0, 0.01234, 8.0, 131.27, 16384.0)]
    ['0', '0.0123', '8', '131', '16384']
    """
    return f"{x:.0f}" if x >= 100 else f"{float(f'{x:.3g}'):g}"


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
        self.code = code
        self._chinese: Mapping[str, str] = catalogue("regard", "zh")

    def of(self, english: str, chinese: str) -> str:
        """The text of this language."""
        return english if self.code == "en" else chinese

    def printed(self, english: str) -> str:
        """A text that commands print."""
        return english if self.code == "en" else self._chinese[english]


def kind(language: Language, name: str) -> str:
    """The family of a mechanism."""
    family = VARIANTS[name].family
    return family if language.code == "en" else language.printed(f"{family} attention")


def mechanism_table(language: Language) -> str:
    """One row for each mechanism."""
    return table(
        [language.of(*head) for head in HEADS],
        [
            [
                f"`{row.name}`",
                kind(language, row.name),
                behaviour.result_of(row.name).words[language.code],
                behaviour.beyond_training(row.name).words[language.code],
                number(row.token_bytes, 2**10),
                number(row.state_bytes, 2**20),
                number(row.cache_bytes, 2**20),
                number(row.prompt_flops, 1e12),
                number(row.token_flops, 1e9),
                number(row.prompt_seconds, 1e-3),
                number(row.token_seconds, 1e-3),
                language.printed(VARIANTS[row.name].users),
            ]
            for row in cost_rows()
        ],
    )


def meanings(language: Language, groups: Sequence[behaviour.Behaviour]) -> str:
    """What the words of a column mean."""
    head = language.of("| words | meaning |", "| 用语 | 含义 |")
    rows = [f"| {x.words[language.code]} | {x.meaning[language.code]} |" for x in groups]
    return "\n".join([head, "|---|---|", *rows])


def quality_table(language: Language) -> str:
    """The results of training: the mean over seeds, and each of them."""
    results = quality_results()

    def shown(task: str, name: str) -> str:
        scale, digits = (1.0, 3) if task == "text" else (100.0, 1)
        values = [f"{scale * x:.{digits}f}" for x in results[task, name]]
        mean = statistics.fmean(scale * x for x in results[task, name])
        return f"{mean:.{digits}f} ({', '.join(values)})"

    heads = [language.of(*head) for head in QUALITY_HEADS]
    return table(heads, [[f"`{n}`", *(shown(t, n) for t in STEPS)] for n in MOST_USED])


def speed_facts(language: Language) -> str:
    """When and where speeds were measured."""
    settings, _ = speeds()
    return language.of(
        "Speeds: {date}, {processor}, {cores} cores, one thread, Python {python}, torch {torch}.",
        "速度：{date}，{processor}，{cores} 核，单线程，Python {python}，torch {torch}。",
    ).format(**settings)


def seeds(language: Language) -> str:
    """With how many seeds models were trained, how much these differ, and when and where."""
    said = []
    for task in STEPS:
        runs = [values for (name, _), values in quality_results().items() if name == task]
        is_text = task == "text"
        scale, unit = (1.0, "bits per byte") if is_text else (100.0, "points")
        chinese_unit = "比特每字节" if is_text else "个百分点"
        distance = scale * max(max(values) - min(values) for values in runs)
        if len(runs[0]) == 1:
            said.append(language.of(f"{task}: one seed", f"{task}：1 个种子"))
        else:
            n = len(runs[0])
            said.append(
                language.of(
                    f"{task}: {n} seeds, with up to {distance:.3g} {unit} between those of one "
                    "mechanism",
                    f"{task}：{n} 个种子，同一机制的种子之间最多相差 {distance:.3g} {chinese_unit}",
                )
            )
    where = language.of(
        "Trained on {date}, {processor}, one thread, Python {python}, torch {torch}.",
        "训练于 {date}，{processor}，单线程，Python {python}，torch {torch}。",
    ).format(**read(QUALITY)[0])
    return language.of("; ", "；").join(said) + language.of(". ", "。") + where


BLOCKS = {
    "mechanisms": mechanism_table,
    "speed": speed_facts,
    "results": lambda language: meanings(language, behaviour.RESULTS),
    "beyond": lambda language: meanings(language, behaviour.BEYOND),
    "quality": quality_table,
    "seeds": seeds,
}
"""The parts of the page that the program writes, by name."""


def page(code: str) -> str:
    """The page of a language, with its parts written anew."""
    text, language = PAGES[code].read_text("utf-8"), Language(code)
    for name, make in BLOCKS.items():
        begin = f"<!-- {name}, made by python -m tests.compare.catalogue_table page -->"
        head, _, rest = text.partition(f"{begin}\n")
        _, end, tail = rest.partition("<!-- end -->")
        assert end, f"{PAGES[code]} has no part {name}"
        text = f"{head}{begin}\n\n{make(language)}\n\n{end}{tail}"
    return text


def write() -> None:
    """Write the page in both languages."""
    for code, path in PAGES.items():
        path.write_text(page(code), "utf-8")
