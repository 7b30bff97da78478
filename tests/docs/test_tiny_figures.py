"""The figures of `tiny` in the pages are those of docs/tiny.json, which is about the `tiny` of the
package. tests/inspect/test_findings.py computes those of docs/research.md.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from tests.docs.tiny_figures import FILE, ROOT, digest, lines

FIGURES: dict[str, Any] = json.loads(FILE.read_text("utf-8"))


def missing(figures: dict[str, Any]) -> Iterator[str]:
    for page, texts in lines(figures).items():
        content = (ROOT / "docs" / page).read_text("utf-8")
        yield from (f"{page}: {text}" for text in texts if text not in content)


def test_the_pages_have_the_measured_figures() -> None:
    assert list(missing(FIGURES)) == []


def test_another_figure_is_found_in_both_languages() -> None:
    changed = copy.deepcopy(FIGURES)
    changed["methods"]["yarn"]["perplexity"]["512"] *= 1.01
    changed["claims"]["longer-ntk"]["values"][0] += 0.01
    assert len(list(missing(changed))) == 6


def test_the_figures_were_measured_with_this_tiny() -> None:
    assert FIGURES["weights"] == digest(), "run python -m tests.docs.tiny_figures again"
