"""Which tests the quick run (`pytest`) takes, and which wait for the full one (`pytest --full`).

A test marked `@pytest.mark.full` is left out of the quick run. `@pytest.mark.full(keep=n)` leaves n
of its cases in it, the first and others at equal distances, so that every feature is covered once.
`keep=["llama", "bert"]` leaves in the cases whose ids have one of these words.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def quick(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests of the quick run, in their order."""
    tests: dict[str, list[pytest.Item]] = {}
    items = list(items)
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {item for cases in tests.values() for item in kept(cases)}
    return [item for item in items if item in chosen]


def kept(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Those of one test's cases that the quick run takes."""
    marks = {item: item.get_closest_marker("full") for item in cases}
    left = [item for item, mark in marks.items() if mark is None]
    if left:  # none is marked, or single cases are
        return left
    mark = marks[cases[0]]
    assert mark is not None
    if mark.args or {*mark.kwargs} - {"keep"}:
        raise pytest.UsageError(
            f"{cases[0].nodeid}: full takes keep=, not {mark.args or {*mark.kwargs}}"
        )
    keep = mark.kwargs.get("keep", 0)
    if not isinstance(keep, int):
        return [item for item in cases if words(item) & {*keep}]
    n = len(cases)
    return [cases[i * n // keep] for i in range(keep)] if keep < n else cases


def words(item: pytest.Item) -> set[str]:
    """The parts of a case's id."""
    return {*item.nodeid.partition("[")[2].removesuffix("]").split("-")}
