"""docs/catalogue.md lists every mechanism of the catalogue, in both languages, and names only what
exists.
"""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path

import pytest

import regard
import regard.models.assembly.shared_memory as sharing
from regard.language import catalogue
from regard.nn.variants import VARIANTS

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"`([a-z_][a-z0-9_]*)`")


def page(language: str) -> str:
    name = "catalogue.md" if language == "en" else "catalogue.zh-CN.md"
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_first_table_is_the_catalogue(language: str) -> None:
    """Each row is what the package says of a mechanism now."""
    chinese = catalogue("regard", "zh")
    built = page(language).split("\n## ")[1]
    rows = [row for row in built.splitlines() if row.startswith("| `")]
    wanted = []
    for name, entry in VARIANTS.items():
        summary = entry.summary if language == "en" else chinese[entry.summary]
        wanted.append(f"| `{name}` | {entry.family} | {summary} |")
    assert rows == wanted


@pytest.mark.parametrize(("language", "built"), [("en", "built"), ("zh", "已")])
def test_what_a_row_calls_built_exists(language: str, built: str) -> None:
    known = {*VARIANTS, *vars(regard.linear), *vars(sharing)}
    known |= {option for entry in VARIANTS.values() for option in signature(entry.build).parameters}
    rows = [row for row in page(language).split("\n## ")[2].splitlines() if row.startswith("| ")]
    assert len(rows) > 100
    states = [row.split("|")[2].strip() for row in rows]
    named = [name for state in states if state.startswith(built) for name in NAME.findall(state)]
    assert len(named) > 50
    assert [name for name in named if name not in known] == []


def test_both_languages_have_the_same_rows() -> None:
    tables = [
        re.findall(r"^### |^\| `?", page(language), re.MULTILINE) for language in ("en", "zh")
    ]
    assert tables[0] == tables[1]
