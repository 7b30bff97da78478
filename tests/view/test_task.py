"""The page of a task, and its lines for a terminal: what is shown is what was given."""

from __future__ import annotations

import numpy as np

from regard.view.task_page import (
    AlignedExample,
    TaskPage,
    WrongAnswer,
    accuracy_lines,
    alignment_lines,
)
from tests.view.test_charts import accuracy

HOSTILE = '</svg><script>alert(1)</script>&"\u202e\x1b'


def test_the_terminal_shows_the_weights() -> None:
    weights = np.array([[0.0, 1.0], [0.5, 0.5]])
    said = [line.plain for line in alignment_lines(weights, ["一", "二"], ["one", "two"])]
    assert said[-2].endswith("│  ██│")
    assert said[-1].endswith("│▓▓▓▓│")
    assert max(len(line) for line in said) <= 100
    wide = list(alignment_lines(np.eye(50)[:3], list("abc"), [f"w{i}" for i in range(50)]))
    assert wide[-1].plain.endswith("…")
    assert sum("49" in line.plain for line in wide) >= 1


def test_bars_are_as_long_as_the_share() -> None:
    lines = [line.plain for line in accuracy_lines(accuracy(), 16, 10)]
    assert [line.count("█") for line in lines] == [0, 10, 5, 0, 0]
    assert "longer than in training" in lines[3]


def test_words_are_only_ever_text() -> None:
    one = AlignedExample((HOSTILE,), (HOSTILE,), ("x",), np.full((1, 1), 1.0), HOSTILE)
    facts, wrong = {HOSTILE: HOSTILE}, [WrongAnswer(HOSTILE, "", HOSTILE)]
    text = TaskPage(HOSTILE, HOSTILE, facts, [accuracy(HOSTILE)], 16, [one], wrong).html()
    assert "<script" not in text
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert "(nothing)" in text
    assert not one.right
    assert "<span class='bad'>wrong</span>; " in text
    assert "correct: x" in text
    assert text.count("<svg") == 2


def test_a_page_of_nothing() -> None:
    page = TaskPage("a", "b", {}, (), 1).html()
    assert "<section>" not in page
    assert page.startswith("<!doctype html>")
