"""The pages of the site about single mechanisms, made from their entries when the site is built.

Each page has the tables that `regard describe NAME` prints, code that runs, a picture that is
computed from the small example, the row of docs/mechanisms.md, tests, relatives and papers.
"""

from __future__ import annotations

import ast
import functools
import html
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from docs import block_diagrams
from regard.cli.describe import build_without_memory, describe_layer, fact_tables
from regard.language import add_texts, translate, use_language
from regard.nn.variants.registry import VARIANTS, Variant, in_teaching_order
from regard.process_state import seeded
from regard.text_table import wrap

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "mechanisms"
TABLES = ("docs/mechanisms.md", "docs/mechanisms.zh-CN.md")
LINKED = (*TABLES, "docs/catalogue.md", "docs/catalogue.zh-CN.md")
"""The pages of which the first column of tables leads to the pages of mechanisms."""

add_texts(Path(__file__).with_name("strings"))

DIM, HEADS, CONTEXT = 4096, 32, 4096
"""The sizes of the layer whose cost a page shows: those of `regard describe`."""
TOKENS = 12
"""Tokens of the picture."""
ROW = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)


def link_names(text: str) -> str:
    """Return a page whose tables begin with names of mechanisms, with links to their pages.

    >>> link_names("| `gqa` | softmax |").startswith("| [`gqa`](mechanisms/gqa.md) |")
    True
    """

    def linked(match: re.Match[str]) -> str:
        name = match[1]
        return f"| [`{name}`]({FOLDER}/{name}.md) |" if name in VARIANTS else match[0]

    return ROW.sub(linked, text)


def pages(language: str) -> Iterator[tuple[str, str]]:
    """Yield the files of one language with their texts: a page and a picture of each mechanism."""
    with use_language(language):
        rows = table_rows(language)
        for entry in in_teaching_order():
            yield f"{FOLDER}/{entry.name}.md", page(entry, rows.get(entry.name, {}))
            yield f"{FOLDER}/{entry.name}.svg", picture(entry)


def page(entry: Variant, row: Mapping[str, str]) -> str:
    """Return the page of a mechanism in the current language, with its row of the large table."""
    options = dict(entry.published_options)
    layer = build_without_memory(entry, DIM, HEADS, options)
    tables = fact_tables(entry, DIM, HEADS, options, describe_layer(layer, CONTEXT))
    where, usage, choices, *costs = tables
    english = where == "where"
    up, name = ("zh", "简体中文") if english else ("..", "English")
    other = f"[{name}](../{up}/{FOLDER}/{entry.name}/)"  # from the folder of this file
    parts = [
        f"# {entry.name}",
        translate(entry.summary),
        f"[← {translate('all mechanisms in one table')}](../mechanisms.md) · {other}",
        f"## {translate('Formula')}",
        f"```text\n{wrap(entry.equation, 76, hang='    ')}\n```",
        _table(tables[where]),
        f"## {translate('Picture')}",
        f"![{_caption(entry)}]({entry.name}.svg)",
        translate("The picture is measured in the small example below, not in a trained model."),
    ]
    if entry.name in ("mha", "gqa", "mqa", "mla"):
        images = "../images/heads.svg" if english else "../images/zh/heads.svg"
        parts.append(f"![{translate('what a cache holds for each token of one layer')}]({images})")
    parts += [f"## {translate('Cost')}"]
    for title in costs:
        parts += [title, _table(tables[title])]
    if row:
        parts += [translate("In the table of all mechanisms:"), _table(row)]
    parts += [f"## {usage[0].upper()}{usage[1:]}", _table(tables[usage], link_relatives=True)]
    parts += [f"## {translate('Code')}", f"```python\n{entry.code()}\n```"]
    if tables[choices]:
        parts += [translate("The options of the constructor:"), _table(tables[choices])]
    parts += [f"## {translate('Tests and source')}", *_evidence(entry)]
    return "\n\n".join(parts) + "\n"


def _table(rows: Mapping[str, str], *, link_relatives: bool = False) -> str:
    """Return a table of two columns without a head."""
    lines = ["| | |", "|---|---|"]
    for name, text in rows.items():
        if link_relatives and name == translate("relatives"):
            text = ", ".join(f"[`{one}`]({one}.md)" for one in text.split(", "))
        escaped = text.replace("|", "\\|") if link_relatives else _plain(text)
        lines.append(f"| {_plain(name)} | {escaped} |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Return a text whose characters have no meaning in Markdown, apart from code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([|*_\[\]$])", r"\\\1", html.escape(part, False))
        for part in parts
    )


def _caption(entry: Variant) -> str:
    """Return what the picture of a mechanism shows."""
    if entry.family in ("cross", "additive"):
        return translate("how strongly each token of the second sequence changes each output")
    return translate("how strongly each token changes each output")


def _evidence(entry: Variant) -> Iterator[str]:
    """Yield the lines about tests, commands and papers."""
    yield "\n".join(f"- `{test}`" for test in tests_of(entry.name))
    yield f"```sh\nregard describe {entry.name}\n```"
    papers = ", ".join(f"[{x}](https://arxiv.org/abs/{x})" for x in entry.papers())
    yield _plain(translate("Source: {source}", source=entry.source)) + (
        f" ({papers})" if papers else ""
    )


CONTRACT = "tests/nn/test_catalogue.py::test_any_chunks_with_a_cache_are_one_pass_or_refused"
NAMED = re.compile(r"(?<![\w.])(\w+)\(|\bvariants\.(\w+)|\"(\w+)\"")


@functools.cache
def _tests() -> tuple[dict[str, Counter[str]], dict[str, list[str]]]:
    """Return how often each test names each mechanism, and the files with its name, by name."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    files: dict[str, list[str]] = defaultdict(list)
    for folder in ("nn", "ops", "scores", "masks", "laws", "oracles", "models"):
        for path in sorted((ROOT / "tests" / folder).rglob("test_*.py")):
            text, name = path.read_text("utf-8"), path.relative_to(ROOT).as_posix()
            lines = text.splitlines()
            for word in VARIANTS.keys() & set(re.findall(r"\w+", text)):
                files[word].append(name)
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                    source = "\n".join(lines[first - 1 : node.end_lineno])
                    for word in map("".join, NAMED.findall(source)):
                        counts[word][f"{name}::{node.name}"] += 1
    return counts, files


def tests_of(name: str) -> list[str]:
    """Return at most three tests that name a mechanism, or files that do, and the contract of all.

    >>> tests_of("mqa")[-1] == CONTRACT
    True
    """
    counts, files = _tests()
    most = [test for test, _ in counts[name].most_common(4) if test != CONTRACT][:3]
    found = most or files[name][:3]
    return found if VARIANTS[name].family in ("cross", "additive") else [*found, CONTRACT]


def table_rows(language: str) -> dict[str, dict[str, str]]:
    """Return the row of each mechanism in docs/mechanisms.md: the text of a cell by its column."""
    path = ROOT / TABLES[language != "en"]
    lines = path.read_text("utf-8").splitlines()
    rows: dict[str, dict[str, str]] = {}
    heads: list[str] = []
    for line, following in pairwise(lines):
        if following.startswith("| --- |"):
            heads = [cell.strip() for cell in line.strip("| ").split("|")]
        elif (match := ROW.match(line)) and match[1] not in rows:
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            rows[match[1]] = dict(zip(heads[1:], cells[1:], strict=True))
    return rows


@functools.cache
def influence(name: str) -> Tensor:
    """Return how much each token changes each output of the small example, [T, S].

    Row i is |d (u . out_i) / d x_j| for a fixed vector u with random numbers, divided by its
    largest entry; x_j is a token of the second sequence where the mechanism has one.
    """
    entry = VARIANTS[name]
    with seeded(0):
        layer = entry.example().double().eval()
        x, memory = torch.randn(2, 1, TOKENS, 32, dtype=torch.float64)
        u = torch.randn(32, dtype=torch.float64)
    two = entry.family in ("cross", "additive")
    read = (memory if two else x).requires_grad_()
    out = layer(x, memory=memory) if two else layer(x)
    rows = []
    for value in out[0] @ u:
        (gradient,) = torch.autograd.grad(value, read, retain_graph=True)
        rows.append(gradient[0].norm(dim=-1))
    found = torch.stack(rows)
    return found / found.amax(-1, keepdim=True).clamp(min=1e-300)


def picture(entry: Variant) -> str:
    """Return the influences of a mechanism as SVG in linear colours; a dot marks what is 0."""
    return block_diagrams.cells_svg(
        influence(entry.name).tolist(),
        f"{entry.name}: {_caption(entry)}",
        translate("output of token"),
        translate("input token"),
        translate("0 to 1, linear; a dot: no influence"),
    )
