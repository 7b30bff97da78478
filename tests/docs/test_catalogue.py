"""docs/catalogue.md lists every mechanism of the catalogue, in both languages, and names only what
exists.
"""

from __future__ import annotations

import re
from inspect import signature

import pytest

import regard
import regard.models.assembly.shared_memory as sharing
from regard.nn.variants import VARIANTS
from tests.docs.catalogue_table import PAGES, built, split

NAME = re.compile(r"`([a-z_][a-z0-9_]*)`")


def page(language: str) -> str:
    return PAGES[language].read_text(encoding="utf-8")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_first_section_is_the_catalogue(language: str) -> None:
    """Each row is what the package says of a mechanism now, in the order of `regard describe`;
    `python -m tests.docs.catalogue_table` writes the section.
    """
    assert split(language)[1] == built(language)
    names = re.findall(r"^\| `(\w+)` \|", built(language), re.MULTILINE)
    assert sorted(names) == sorted(VARIANTS)


@pytest.mark.parametrize(("language", "state"), [("en", "built"), ("zh", "已")])
def test_what_a_row_calls_built_exists(language: str, state: str) -> None:
    known = {*VARIANTS, *vars(regard.linear), *vars(sharing)}
    known |= {option for entry in VARIANTS.values() for option in signature(entry.build).parameters}
    rows = [row for row in page(language).split("\n## ")[2].splitlines() if row.startswith("| ")]
    assert len(rows) > 100
    states = [row.split("|")[2].strip() for row in rows]
    named = [name for x in states if x.startswith(state) for name in NAME.findall(x)]
    assert len(named) > 50
    assert [name for name in named if name not in known] == []


def test_every_row_of_the_literature_says_built_or_why_not() -> None:
    states = {"en": r"(recurrence )?built as |not (built|a mechanism)", "zh": r".*(已|未|不是)"}
    reasons = {"en": r", because |of its own: ", "zh": "因为|："}
    for language, state in states.items():
        rows = [x.strip("| ").split(" | ", 1) for x in tables(language)]
        assert len(rows) >= 117, "no row may be lost"
        assert [name for name, said in rows if not re.match(state, said)] == []
        left_out = [said for _, said in rows if re.match("not |未|不", said)]
        assert [said for said in left_out if not re.search(reasons[language], said)] == []


def tables(language: str) -> list[str]:
    """The rows of the second section, without heads."""
    rows = page(language).split("\n## ")[2].splitlines()
    return [x for x in rows if x.startswith("| ") and not re.match(r"\| (mechanism|机制) ", x)]


def test_both_languages_have_the_same_rows() -> None:
    tables = [
        re.findall(r"^### |^\| `?", page(language), re.MULTILINE) for language in ("en", "zh")
    ]
    assert tables[0] == tables[1]
