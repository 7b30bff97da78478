"""The hint at the name that was meant: one sentence everywhere, and nothing where nothing is
near.
"""

from __future__ import annotations

import re
from pathlib import Path

import regard
from regard.did_you_mean import close_matches, suggest

KNOWN = ["window", "windows", "groups", "causal"]


def test_the_nearest_name_is_offered() -> None:
    assert suggest("widow", KNOWN) == "; did you mean 'window'?"
    assert suggest("windo", KNOWN, most=2) == "; did you mean 'window' or 'windows'?"
    assert close_matches("cuasal", KNOWN) == ["causal"]


def test_where_nothing_is_near_the_sentence_ends_as_it_was_told() -> None:
    assert suggest("x", KNOWN) == ""
    assert suggest("x", KNOWN, otherwise=".") == "."
    assert suggest("x", []) == ""
    assert suggest("windo", KNOWN, cutoff=0.99) == ""


def test_any_value_can_be_meant_and_none_is_obeyed() -> None:
    assert suggest(12, ["12", "13"]) == "; did you mean '12'?"
    assert suggest(None, KNOWN) == ""
    assert "\x1b" not in suggest("a\x1b[2J", ["a\x1b[2Jb"])
    assert suggest("window" * 100_000, KNOWN) == "", "it is cut, and compared in no time"


def test_no_other_module_looks_for_near_names() -> None:
    source = Path(regard.__file__).parent
    users = [
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(r"get_close_matches|^\s*import difflib", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert users == ["did_you_mean.py"]
