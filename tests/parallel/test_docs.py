"""The example of docs/parallel.md runs as a file, on four processes, in both languages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("parallel.md", "parallel.zh-CN.md")


def example(page: str) -> str:
    found = re.findall(
        r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(found) == 1
    return found[0]


def test_both_languages_have_the_same_example() -> None:
    first, second = map(example, PAGES)
    assert first == second


@pytest.mark.full
def test_the_example_runs(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(example(PAGES[0]))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert "4,096 tokens on 4 ranks\n  0: 0-1023" in done.stdout
    assert ">  exchange" in done.stdout
    difference = float(done.stdout.rsplit("tensor(", 1)[1].rstrip(")\n"))
    assert difference < 1e-5
