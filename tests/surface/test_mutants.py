"""The mutants fit today's code, and their runner says what became of one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import read_mutants
from tests.mutants.__main__ import main
from tests.mutants.runs import EQUIVALENT, KILLED, KILLED_BY_FULL, NOT_APPLIED, NOT_RUN, SURVIVED

TESTS = """
import pytest
from regard.small import double

def test_double():
    assert double(3) == 6

def test_zero():
    assert double(0) == 0

@pytest.mark.full
def test_slow():
    assert double(1) == 2
"""
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--full", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "full: waits")

def pytest_collection_modifyitems(config, items):
    if not config.option.full:
        items[:] = [x for x in items if x.get_closest_marker("full") is None]
"""
TREE = {
    "src/regard/__init__.py": "",
    "src/regard/small.py": "def double(x):\n    return 2 * x\n\n\ndef one():\n    return 1\n",
    "tests/__init__.py": "",
    "tests/conftest.py": CONFTEST,
    "tests/test_small.py": TESTS,
}
DOUBLED = {
    "file": "src/regard/small.py",
    "old": "2 * x",
    "new": "3 * x",
    "tests": ["tests/test_small.py"],
}
PLANTED: dict[str, dict[str, Any]] = {
    "killed": {},
    "survives": {"tests": ["tests/test_small.py::test_zero"]},
    "slow": {"tests": ["tests/test_small.py::test_zero", "tests/test_small.py::test_slow"]},
    "endless": {"new": "[0 for _ in iter(int, 1)]"},
    "same": {"new": "x * 2", "equivalent": "2 x is x 2"},
    "twice": {"old": "return"},
    "moved": {"file": "src/large.py"},
    "deleted": {"tests": ["tests/test_large.py"]},
    "unnamed": {"tests": ["tests/test_small.py::test_large"]},
}


BECAME = {
    "killed": (KILLED, "tests/test_small.py::test_double"),
    "survives": (SURVIVED, ""),
    "slow": (KILLED_BY_FULL, "tests/test_small.py::test_slow"),
    "endless": (KILLED, "not finished after 20 s"),
    "same": (EQUIVALENT, "2 x is x 2"),
    "twice": (NOT_APPLIED, "its old text occurs 2 times in src/regard/small.py"),
    "moved": (NOT_APPLIED, "there is no file src/large.py"),
    "deleted": (NOT_APPLIED, "there is no test tests/test_large.py"),
    "unnamed": (NOT_RUN, ""),
}


@pytest.mark.full
def test_what_becomes_of_a_mutant(tmp_path: Path) -> None:
    tree = tmp_path
    shutil.copytree(
        Path(__file__).parents[1] / "mutants",
        tree / "tests/mutants",
        ignore=shutil.ignore_patterns("*.toml"),
    )
    tables = {name: DOUBLED | fields for name, fields in PLANTED.items()}
    lines = [
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(x)}\n" for key, x in fields.items())
        for name, fields in tables.items()
    ]
    for name, text in (TREE | {"tests/mutants/a.toml": "\n".join(lines)}).items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, "utf-8")
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    command = [sys.executable, "-m", "tests.mutants", "--limit", "20", "--trust", "--full"]
    done = subprocess.run([*command, "--json", "results"], cwd=tree, check=False)
    assert done.returncode == 1
    assert (tree / "src/regard/small.py").read_text("utf-8") == TREE["src/regard/small.py"]
    done = subprocess.run(
        [*command, "--changed", "--json", "results"], cwd=tree, capture_output=True, check=False
    )
    assert b"a.killed" not in done.stdout
    assert b"a.twice" in done.stdout
    stored = json.loads((tree / "results").read_text("utf-8"))
    rows = stored["rows"]
    found = {name.removeprefix("a."): (x["status"], x["why"]) for name, x in rows.items()}
    assert found == BECAME
    assert (stored["mutants"], stored[KILLED], stored[SURVIVED]) == (len(BECAME), 2, 1)


def test_every_mutant_can_be_applied(root: Path) -> None:
    mutants = read_mutants()
    assert {x.name: why for x in mutants if (why := x.why_not(root))} == {}
    assert all(x.old != x.new and x.tests for x in mutants)
    assert sum(not x.equivalent for x in mutants) >= 150


def test_the_command_lists_what_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    mutant = read_mutants()[0]
    stored = tmp_path / "results.json"
    verdict = {"status": KILLED, "why": "", "seconds": 1.0, "digest": mutant.digest(root)}
    asked = [mutant.name, "--list", "--changed", "--json", str(stored)]
    assert main(asked) == 0
    assert capsys.readouterr().out == f"{mutant.name}  {mutant.file}\n"
    stored.write_text(json.dumps({"rows": {mutant.name: verdict}}), "utf-8")
    assert main(asked) == 0
    assert capsys.readouterr().out == ""
    assert main(["--list", "--package", mutant.package]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1
    assert all(line.startswith(f"{mutant.package}.") for line in lines)
