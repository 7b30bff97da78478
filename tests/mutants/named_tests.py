"""A plugin of pytest: of the tests of the quick run (or of --full), those that are named.

pytest itself runs whatever is named `file.py::test`, as the full run does, with all examples.
"""

from __future__ import annotations

import os

import pytest

VARIABLE = "REGARD_NAMED_TESTS"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests that no name begins."""
    names = os.environ[VARIABLE].split("\n")
    items[:] = [item for item in items if any(is_named(item.nodeid, name) for name in names)]


def is_named(test: str, name: str) -> bool:
    """Whether a test is what a name says, a case of it, or in its file or folder."""
    return test == name or test.startswith((f"{name}[", f"{name}::", f"{name}/"))
