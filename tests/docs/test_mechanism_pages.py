"""The pages of mechanisms: their code runs, their pictures show the masks, their tests exist."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest
import torch

from docs import mechanism_pages
from regard.language import LANGUAGES, use_language
from regard.nn.variants import VARIANTS
from regard.span import Span
from tests.docs.test_seeds import is_test


@pytest.mark.full(keep=["gqa", "cross_attention", "delta_net"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_code_of_a_page_runs(name: str) -> None:
    """It compares decoding with one pass itself; a cache that is not filled is noticed."""
    code = VARIANTS[name].code()
    assert len(code.splitlines()) <= 18
    assert max(map(len, code.splitlines())) <= 58
    exec(code, {})
    if VARIANTS[name].causal and VARIANTS[name].family not in ("cross", "additive"):
        with pytest.raises(AssertionError):
            exec(code.replace("None, cache", "None, layer.new_cache()"), {})


@pytest.mark.full(keep=["sliding_window", "bigbird"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_picture_has_no_influence_where_the_mask_has_none(name: str) -> None:
    found = mechanism_pages.influence(name)
    assert found.shape == (mechanism_pages.TOKENS, mechanism_pages.TOKENS)
    assert found.isfinite().all()
    entry = VARIANTS[name]
    if entry.causal and entry.family not in ("cross", "additive"):
        assert not found.triu(1).any()
    if entry.group.name == "masks":
        mask, span = entry.example().mask, Span(0, mechanism_pages.TOKENS)
        assert isinstance(mask.block(span, span), torch.Tensor)
        visible = mask.block(span, span)[0, 0]
        assert torch.equal(found.gt(0), visible)


@pytest.mark.full
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_mechanism_has_a_page_with_its_row(language: str) -> None:
    rows = mechanism_pages.table_rows(language)
    assert sorted(rows) == sorted(VARIANTS)
    with use_language(language):
        for name, entry in VARIANTS.items():
            text = mechanism_pages.page(entry, rows[name])
            assert "".join(entry.equation.split()) in "".join(text.split())
            assert entry.code() in text
            assert text.count("\n## ") == 6
            links = re.findall(r"\]\((\w+)\.md\)", text)
            assert links == [one.name for one in entry.relatives()]
    assert ("谁在用" in text) == (language == "zh")


@pytest.mark.full
def test_the_tests_of_a_page_exist() -> None:
    named = {test for name in VARIANTS for test in mechanism_pages.tests_of(name)}
    assert len(named) > 80
    assert [x for x in named if "::" in x and not is_test(x)] == []
    assert [name for name in VARIANTS if not mechanism_pages.tests_of(name)] == []


def test_names_in_the_first_column_become_links() -> None:
    text = mechanism_pages.link_names("| `gqa` | a |\n| `no_such` | `mha` |")
    assert text == "| [`gqa`](mechanisms/gqa.md) | a |\n| `no_such` | `mha` |"


def test_a_picture_is_linear_and_marks_zeros() -> None:
    text = mechanism_pages.picture(VARIANTS["sliding_window"])
    cells = ET.fromstring(text).findall(".//{*}rect[@class='cell']")
    assert len(cells) == mechanism_pages.TOKENS**2
    found = mechanism_pages.influence("sliding_window").flatten().tolist()
    shown = [float(cell.attrib["fill-opacity"]) for cell in cells]
    assert shown == pytest.approx(found, abs=6e-4)
    assert text.count("<circle") == found.count(0.0)
