"""Attention as people write it: each fault under its name alone, and no right implementation
flagged or left open.
"""

from __future__ import annotations

import importlib.util

import pytest

from regard.inspect import audit
from tests.audit.corpus.table import PAGE, RIGHT, WRONG, Entry, published
from tests.audit.corpus.variants import CORRECT, FAULTY, GIVEN, Variant

HAVE_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


def label(entry: Entry) -> str:
    return entry.target.__name__


@pytest.mark.full(keep=6)
@pytest.mark.parametrize("entry", WRONG, ids=label)
def test_the_fault_has_its_name(entry: Entry) -> None:
    found = audit(entry.target, **entry.given)
    assert found.names == (entry.fault,), str(found)
    assert found.exit_code == 1


@pytest.mark.full(keep=7)
@pytest.mark.parametrize("entry", RIGHT, ids=label)
def test_right_code_passes_every_check_that_applies(entry: Entry) -> None:
    if entry.target.__name__.startswith("transformers_") and not HAVE_TRANSFORMERS:
        pytest.skip("transformers is not installed")
    found = audit(entry.target, **entry.given)
    assert found.exit_code == 0, str(found)


def test_the_corpus_is_as_large_as_it_says() -> None:
    assert len(WRONG) >= 50
    assert len(RIGHT) >= 20


def test_the_tables_of_the_documentation_are_those_of_the_corpus() -> None:
    wrong = [row[2] for row in published() if len(row) == 3]
    assert wrong == [f"`{entry.fault}`" for entry in WRONG]
    assert len(published()) == len(WRONG) + len(RIGHT)
    text = PAGE.read_text("utf-8")
    assert f"\n{len(WRONG)} faulty implementations" in text
    assert f"\n{len(RIGHT)} right ones" in text


MISSED = {
    "WhisperAttention: v = v.view(v.shape[0], self.n_head, v.shape[1], -1": "mask-added",
    "SlidingAttention: cos, sin = angles.cos().to(x), angles.roll(1, -1).": "",
}
"""Variants whose fault gets another name, or none: heads that are split wrongly for values alone
look like a mask that hides nothing; and a rotation by two different angles, in code that takes no
positions, is taken for a correct choice of its own.
"""


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("variant", FAULTY, ids=lambda variant: variant.label)
def test_a_fault_in_another_style_has_its_name(variant: Variant) -> None:
    found = audit(variant.target(), **GIVEN[variant.style])
    wanted = MISSED.get(variant.label, variant.fault)
    assert found.names[:1] == ((wanted,) if wanted else ()), str(found)
    assert len(found.names) <= 1 or variant.label in MISSED, str(found)


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("variant", CORRECT, ids=lambda variant: variant.label)
def test_other_styles_are_not_accused(variant: Variant) -> None:
    found = audit(variant.target(), **GIVEN[variant.style])
    assert found.exit_code == 0, str(found)


def test_the_variants_are_as_many_as_the_documentation_says() -> None:
    assert len(FAULTY) >= 40
    assert len(CORRECT) >= 25
    assert len(MISSED) <= 0.05 * len(FAULTY)
