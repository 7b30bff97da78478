"""Each writer is killed ten times, and meets each other fault three times; more with
REGARD_FAULTS, as every night.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = int(os.environ.get("REGARD_FAULTS", "10"))


@pytest.mark.full
def test_what_is_killed_interrupted_or_out_of_disk_leaves_the_old_or_the_new(root: Path) -> None:
    """In a process of its own, which forks the writers."""
    command = [sys.executable, "-m", "tests.faults", "--cases", str(CASES), "--seed", "0"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("0 wrong")


TORN = """
from pathlib import Path
from tests.faults import __main__ as faults, writers
def torn():
    Path("page.html").write_text("half of a page")
    Path("page.html").write_text("new</html>")
found = writers.WRITERS["page"].found
writers.WRITERS.clear()
writers.WRITERS["page"] = writers.Writer(lambda: Path("page.html").write_text("old"), torn, found)
faults.main()
"""


def test_control_a_file_that_is_written_in_place_is_found_torn(root: Path) -> None:
    command = [sys.executable, "-c", TORN, "--cases", "12"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "what stands there is torn" in done.stdout


def test_durations_come_from_clocks_that_do_not_jump(root: Path) -> None:
    """`time.time` and dates without a zone follow every change of the machine's clock."""
    jumping = [
        f"{path.name}:{node.lineno}"
        for path in (root / "src/regard").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.utcnow")
    ]
    assert not jumping
