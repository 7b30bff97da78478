"""The questions of docs/which-attention: each command prints the figures of its answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from regard.cli.app import run

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| \[(.+?)\]\((https://\S+)\) \| `regard (.+?)` \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall((DOCS / "which-attention.md").read_text("utf-8"))


def test_there_are_fifteen_questions() -> None:
    assert len(ROWS) == 15
    assert len({question for question, *_ in ROWS}) == 15


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_command_prints_the_answer(
    row: tuple[str, str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, command, answer = row
    assert run(command.split()) == 0
    page = " ".join(capsys.readouterr().out.split())
    figures = re.findall(r"\*\*(.+?)\*\*", answer)
    assert figures
    missing = [x for x in figures if not re.search(rf"(?<![\d.,]){re.escape(x)}(?![\d])", page)]
    assert missing == []


def test_the_chinese_page_has_the_same_commands_and_figures() -> None:
    chinese = ROW.findall((DOCS / "which-attention.zh-CN.md").read_text("utf-8"))
    assert [row[1:3] for row in chinese] == [row[1:3] for row in ROWS]
    for (*_, ours), (*_, theirs) in zip(ROWS, chinese, strict=True):
        assert re.findall(r"\*\*(.+?)\*\*", ours) == re.findall(r"\*\*(.+?)\*\*", theirs)
