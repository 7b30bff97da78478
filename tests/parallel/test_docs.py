"""The examples of docs/parallel.md run as files, on four processes, in both languages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("parallel.md", "parallel.zh-CN.md")


def examples(page: str) -> list[str]:
    """The code blocks of a page."""
    text = (DOCS / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_both_languages_have_the_same_examples() -> None:
    first, second = map(examples, PAGES)
    assert len(first) == 2
    assert first == second


def run(code: str, folder: Path) -> str:
    """What a file with this code prints."""
    script = folder / "example.py"
    script.write_text(code)
    return subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.full
def test_attention_over_ranks_runs(tmp_path: Path) -> None:
    printed = run(examples(PAGES[0])[0], tmp_path)
    assert "4,096 tokens on 4 ranks\n  0: 0-1023" in printed
    assert ">  exchange" in printed
    difference = float(printed.rsplit("tensor(", 1)[1].rstrip(")\n"))
    assert difference < 1e-5


@pytest.mark.full
def test_a_model_over_ranks_runs(tmp_path: Path) -> None:
    printed = run(examples(PAGES[0])[1], tmp_path)
    first, second = printed.splitlines()
    assert float(first.rsplit(" ", 1)[1]) < 1e-3
    assert second == "the same next token on every rank: True"
