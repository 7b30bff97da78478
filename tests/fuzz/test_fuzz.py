"""A hundred damaged files a time: each is refused with the package's own error or loads, in bounded
time and memory.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz import box, mutations

CASES = int(os.environ.get("REGARD_FUZZ", "105"))


@pytest.mark.full
def test_damaged_files_are_refused_or_load(root: Path) -> None:
    """In a process of its own, without the checked annotations, whose errors are not the
    package's.
    """
    command = [sys.executable, "-m", "tests.fuzz", "--cases", str(CASES), "--seed", "0"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{CASES} cases" in done.stdout


def _wait_for_a_pipe() -> None:
    reader, _ = os.pipe()
    os.read(reader, 1)


@pytest.mark.full(keep=2)
@pytest.mark.parametrize(
    "work, kind",
    [
        (lambda: None, "loaded"),
        (lambda: {}["x"], "foreign"),
        (lambda: bytearray(2 << 30), "memory"),
        (lambda: os.abort(), "crash"),
        (_wait_for_a_pipe, "hang"),
    ],
)
def test_the_box_tells_what_happened(work: object, kind: str) -> None:
    assert box.run(work, idle_seconds=1).kind == kind  # type: ignore[arg-type]


def test_raw_messages_are_found() -> None:
    from regard.errors import FileError

    def refuse(said: str) -> None:
        raise FileError(said)

    found = [
        box.run(lambda x=x: refuse(x)).kind for x in ("plain", "a\x1b[2J", "\u202e", "x" * 5000)
    ]  # type: ignore[misc]
    assert found == ["refused", "raw", "raw", "raw"]


def test_mutations_are_seeded_and_change_something(tmp_path: Path) -> None:
    content = b'{"a": 1, "b": [2, {"c": "x"}], "d": null}'
    made = [mutations.in_json(content, random.Random(i)) for i in range(200)]
    assert made == [mutations.in_json(content, random.Random(i)) for i in range(200)]
    assert Counter(made).most_common(1)[0][1] < 20
    assert sum(x != content for x in made) > 190
