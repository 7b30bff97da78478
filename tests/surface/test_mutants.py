"""The mutants fit today's code, and their runner says what became of one."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants import Mutant, read_mutants
from tests.mutants.__main__ import main
from tests.mutants.runs import (
    EQUIVALENT,
    KILLED,
    KILLED_BY_FULL,
    NOT_APPLIED,
    NOT_RUN,
    SURVIVED,
    MutantRuns,
)

CODE = "def double(x):\n    return 2 * x\n\n\ndef hidden():\n    return 1\n"
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
DOUBLED = Mutant("a.doubled", "small.py", "2 * x", "3 * x", ("tests/test_small.py",))


@pytest.fixture
def runs(root: Path, tmp_path: Path) -> MutantRuns:
    tree = tmp_path / "tree"
    files = {
        "src/regard/__init__.py": "",
        "src/regard/small.py": CODE,
        "tests/__init__.py": "",
        "tests/conftest.py": CONFTEST,
        "tests/test_small.py": TESTS,
    }
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, "utf-8")
    shutil.copytree(root / "tests/mutants", tree / "tests/mutants")
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    return MutantRuns(tree, tmp_path / "copy", 60)


def test_every_mutant_can_be_applied(root: Path) -> None:
    mutants = read_mutants()
    assert {x.name: why for x in mutants if (why := x.why_not(root))} == {}
    assert all(x.old != x.new for x in mutants)
    assert sum(not x.equivalent for x in mutants) >= 150


def test_a_mutant_is_killed_or_survives(runs: MutantRuns) -> None:
    zero, slow = (("tests/test_small.py::" + name,) for name in ("test_zero", "test_slow"))
    verdict = runs.judge(DOUBLED, full=False)
    assert (verdict.status, verdict.why) == (KILLED, "tests/test_small.py::test_double")
    assert runs.judge(replace(DOUBLED, tests=zero), full=True).status == SURVIVED
    assert runs.judge(replace(DOUBLED, tests=slow), full=False).status == NOT_RUN
    assert runs.judge(replace(DOUBLED, tests=zero + slow), full=False).status == SURVIVED
    assert runs.judge(replace(DOUBLED, tests=zero + slow), full=True).status == KILLED_BY_FULL
    assert runs.failing_tests([DOUBLED]) == ""  # the copy is as it was
    assert DOUBLED.source(runs.root).read_text("utf-8") == CODE


def test_what_cannot_run_is_not_killed(runs: MutantRuns) -> None:
    twice = replace(DOUBLED, old="return")
    assert runs.judge(twice, full=False).why == "its old text occurs 2 times in small.py"
    for fault in (twice, replace(DOUBLED, file="no.py"), replace(DOUBLED, tests=("tests/no.py",))):
        assert runs.judge(fault, full=False).status == NOT_APPLIED
    same = runs.judge(replace(DOUBLED, new="x * 2", equivalent="2 x is x 2"), full=False)
    assert (same.status, same.why) == (EQUIVALENT, "2 x is x 2")


def test_an_endless_mutant_is_stopped(runs: MutantRuns) -> None:
    endless = replace(DOUBLED, new="[0 for _ in iter(int, 1)]")
    runs.limit = 3
    verdict = runs.judge(endless, full=False)
    assert (verdict.status, verdict.why) == (KILLED, "not finished after 3 s")


def test_the_command_lists_what_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    mutant = read_mutants()[0]
    results = tmp_path / "results.json"
    verdict = {"status": KILLED, "why": "", "seconds": 1.0, "digest": mutant.digest(root)}
    asked = [mutant.name, "--list", "--changed", "--json", str(results)]
    assert main(asked) == 0
    assert capsys.readouterr().out == f"{mutant.name}  {mutant.file}\n"
    results.write_text(json.dumps({mutant.name: verdict}), "utf-8")
    assert main(asked) == 0
    assert capsys.readouterr().out == ""
    assert main(["--list", "--package", mutant.package]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1
    assert all(line.startswith(f"{mutant.package}.") for line in lines)
