"""Which tests the quick run (`pytest`) takes, which wait for the full one (`pytest --full`), and
which for the one that takes hours (`pytest --nightly`).

A test marked `@pytest.mark.full` is left out of the quick run, and one marked
`@pytest.mark.nightly` out of both, unless the mark says which cases of it stay. Where only `full`
is marked, the full run takes at most FULL_CASES of the cases: those with each value of each
parameter if they are not more, or others at equal distances.

    full(keep=3)                 3 cases at equal distances; where these begin differs from test to
                                 test, so that tests over the same cases keep different ones
    full(keep="each")            as few cases as it takes for each value of each parameter to occur
    full(keep=["llama", "t5-x"]) the cases whose ids, "-" between their words, have one of these
                                 words or runs of words
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import pytest

FULL_CASES = 6
"""How many cases of a test wait for the full run at most; the others wait for the nightly one."""

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests that were collected, those that the quick run leaves out among them."""


def quick(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests of the quick run, in their order."""
    return without("full", without("nightly", items, but="full"))


def full(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests of the full run, in their order: those of the quick run are among them."""
    items = list(items)
    chosen = {*quick(items)}
    for cases in by_test(without("nightly", items)):
        only_full = cases[0].get_closest_marker("nightly") is None
        chosen.update(few(cases, FULL_CASES) if only_full else cases)
    return [item for item in items if item in chosen]


def without(mark: str, items: Iterable[pytest.Item], but: str = "") -> list[pytest.Item]:
    """The tests that are left where those with a mark wait for a longer run, but for those with
    another mark.
    """
    items = list(items)
    chosen: set[pytest.Item] = set()
    for cases in by_test(items):
        stay = but and cases[0].get_closest_marker(but)
        chosen.update(cases if stay else kept(mark, cases))
    return [item for item in items if item in chosen]


def by_test(items: Iterable[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """The cases of each test."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests.values()


def kept(name: str, cases: list[pytest.Item]) -> list[pytest.Item]:
    """Those of one test's cases that stay where those with a mark wait."""
    marks = {item: item.get_closest_marker(name) for item in cases}
    left = [item for item, mark in marks.items() if mark is None]
    if left:  # none is marked, or single cases are
        return left
    mark = marks[cases[0]]
    assert mark is not None
    if mark.args or {*mark.kwargs} - {"keep"}:
        raise pytest.UsageError(
            f"{cases[0].nodeid}: {name} takes keep=, not {mark.args or {*mark.kwargs}}"
        )
    keep = mark.kwargs.get("keep", 0)
    if keep == "each":
        return each(cases)
    if isinstance(keep, str):
        raise pytest.UsageError(f"{cases[0].nodeid}: keep is {keep!r}, not 'each' or a list")
    if not isinstance(keep, int):
        return [item for item in cases if any(has_words(item, x) for x in keep)]
    return evenly(cases, keep)


def evenly(cases: list[pytest.Item], n: int) -> list[pytest.Item]:
    """So many of a test's cases, at equal distances, or all if there are not more."""
    if n == 0 or n >= len(cases):
        return cases if n else []
    first = phase(cases) % (len(cases) // n)
    return [cases[first + i * len(cases) // n] for i in range(n)]


def few(cases: list[pytest.Item], n: int) -> list[pytest.Item]:
    """At most so many cases: those in which each value of each parameter occurs, if so few have
    all of them.
    """
    if n >= len(cases):
        return cases
    covering = each(cases, n + 1)
    return covering if len(covering) <= n else evenly(cases, n)


def each(cases: list[pytest.Item], most: int | None = None) -> list[pytest.Item]:
    """Few cases in which each value of each parameter occurs: always the one that brings most new
    values, and of several such ones the first behind the last one taken.

    Args:
        most: how many cases are taken at most.
    """
    n, at = len(cases), phase(cases) % len(cases)
    brought = [values(case) for case in cases]
    missing = set().union(*brought)
    taken: set[int] = set()
    while missing and len(taken) != most:
        order = [(at + i) % n for i in range(n)]
        at = max(order, key=lambda i: len(brought[i] & missing))
        taken.add(at)
        missing -= brought[at]
    return [cases[i] for i in sorted(taken)]


def phase(cases: list[pytest.Item]) -> int:
    """A number of the test, the same in every run."""
    return crc32(cases[0].nodeid.partition("[")[0].encode())


def values(item: pytest.Item) -> set[tuple[str, Any]]:
    """The values of a case's parameters, by their names; what has no hash is known by its place."""
    params = item.callspec.params  # type: ignore[attr-defined]
    return {(name, x if is_hashable(x) else id(x)) for name, x in params.items()}


def is_hashable(x: Any) -> bool:
    """Whether a set takes it."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


def has_words(item: pytest.Item, wanted: str) -> bool:
    """Whether a case's id has a word, or several in a row."""
    found = item.nodeid.partition("[")[2].removesuffix("]")
    return f"-{wanted}-" in f"-{found}-"


def words_that_keep_nothing(items: Iterable[pytest.Item]) -> list[str]:
    """The words of marks that no case of their test has."""
    wanted: dict[tuple[str, str], bool] = {}
    for item in items:
        for mark in map(item.get_closest_marker, ("full", "nightly")):
            keep = mark.kwargs.get("keep") if mark else None
            for word in keep if isinstance(keep, list) else ():
                name = (item.nodeid.partition("[")[0], word)
                wanted[name] = wanted.get(name, False) or has_words(item, word)
    return [f"{test}: {word}" for (test, word), keeps in wanted.items() if not keeps]


def untouched(features: Mapping[str, str], items: list[pytest.Item]) -> list[str]:
    """The features that none of the tests names.

    A test names what is written in its function, its decorators and the rest of its module (imports
    and other tests aside), what its parameters say, and its file's name.

    Args:
        features: what is called how -> the part of the tests' tree where it must be named.
    """
    named: dict[str, set[str]] = {}
    for item in items:
        module = item.module  # type: ignore[attr-defined]
        rest, tests = named_in(module)
        file = item.nodeid.partition("::")[0]
        found = named.setdefault(file, {Path(file).stem.removeprefix("test_"), *rest})
        found |= tests.get(item.originalname, set())  # type: ignore[attr-defined]
        if "[" in item.nodeid:
            found |= identifiers(item.nodeid.partition("[")[2])
            found |= identifiers(said([*item.callspec.params.values()]))  # type: ignore[attr-defined]
    return [
        name
        for name, where in features.items()
        if not any(
            file.startswith(where) and identifiers(name.rpartition(".")[2]) <= found
            for file, found in named.items()
        )
    ]


def said(value: Any) -> str:
    """What a parameter names: the text, the object's fields, or its type and name."""
    if isinstance(value, list | tuple):
        return " ".join(map(said, value))
    if isinstance(value, str) or (is_dataclass(value) and not isinstance(value, type)):
        return repr(value)
    name = getattr(value, "__name__", getattr(value, "name", ""))
    return f"{type(value).__name__} {name}"


@cache
def named_in(module: ModuleType) -> tuple[set[str], dict[str, set[str]]]:
    """What a module names outside of its tests, and in each of them."""
    rest, tests = set(), {}
    for node in ast.parse(inspect.getsource(module)).body:
        for part in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(part, ast.FunctionDef) and part.name.startswith("test"):
                tests[part.name] = identifiers(ast.unparse(part))
            elif not isinstance(part, ast.Import | ast.ImportFrom):
                rest |= identifiers(ast.unparse(part))
    return rest, tests


def identifiers(text: Any) -> set[str]:
    """The names in a text."""
    return {*re.findall(r"[A-Za-z_][A-Za-z_0-9]*", text)}
