"""Attention as people write it: each fault under its name alone, and no right implementation
flagged or left open.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from regard.inspect import audit
from tests.audit.corpus.table import RIGHT, WRONG, Entry
from tests.audit.corpus.write import DOCUMENT, between, rows

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
    if entry.style == "transformers" and not HAVE_TRANSFORMERS:
        pytest.skip("transformers is not installed")
    found = audit(entry.target, **entry.given)
    assert found.exit_code == 0, str(found)


def test_the_corpus_is_as_large_as_it_says() -> None:
    assert len(WRONG) >= 50
    assert len(RIGHT) >= 20


def test_the_table_of_the_documentation_is_that_of_the_corpus() -> None:
    """Each entry is audited above; `python -m tests.audit.corpus.write` writes the
    table.
    """
    assert between((Path(__file__).parents[2] / DOCUMENT).read_text()) == rows()
