"""Which tests the quick run takes: what is marked full is left out, but for the cases that stand
for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests import selection


@dataclass(eq=False)
class Item:
    nodeid: str
    marks: dict[str, Any] | None = field(default_factory=dict)

    def get_closest_marker(self, name: str) -> Any:
        assert name == "full"
        return None if self.marks is None else SimpleNamespace(args=(), kwargs=self.marks)


def quick(*items: Item) -> list[str]:
    return [item.nodeid for item in selection.quick(items)]  # type: ignore[arg-type]


def cases(n: int, **marks: Any) -> list[Item]:
    return [Item(f"a.py::test_a[{i}]", marks) for i in range(n)]


def test_what_is_not_marked_runs() -> None:
    assert quick(Item("a.py::test_a", None), Item("a.py::test_b")) == ["a.py::test_a"]


@pytest.mark.parametrize(
    ("n", "keep", "kept"),
    [
        (10, 1, [0]),
        (10, 2, [0, 5]),
        (10, 3, [0, 3, 6]),
        (2, 5, [0, 1]),
        (3, 3, [0, 1, 2]),
        (3, 0, []),
    ],
)
def test_some_cases_stand_for_the_others(n: int, keep: int, kept: list[int]) -> None:
    assert quick(*cases(n, keep=keep)) == [f"a.py::test_a[{i}]" for i in kept]


def test_the_cases_of_each_test_are_counted_apart() -> None:
    other = [Item(f"a.py::test_b[{i}]", {"keep": 1}) for i in range(3)]
    assert quick(*cases(3, keep=1), *other) == ["a.py::test_a[0]", "a.py::test_b[0]"]


def test_cases_are_kept_by_a_word_of_their_ids() -> None:
    items = [
        Item(f"a.py::test_a[{x}]", {"keep": ["llama", "t5"]}) for x in ("llama", "llama3", "t5-x")
    ]
    assert quick(*items) == ["a.py::test_a[llama]", "a.py::test_a[t5-x]"]


def test_only_some_cases_may_be_marked() -> None:
    assert quick(Item("a.py::test_a[0]", None), Item("a.py::test_a[1]", {})) == ["a.py::test_a[0]"]
    assert quick(Item("a.py::test_a[0]", {}), Item("a.py::test_a[1]", None)) == ["a.py::test_a[1]"]


def test_a_misspelt_mark_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match=r"test_a\[0\]: full takes keep=, not \{'kep'\}"):
        quick(*cases(2, kep=1))
