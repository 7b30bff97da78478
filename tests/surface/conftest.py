"""The sources of the package and of the tests, read and parsed once for all structural tests."""

from __future__ import annotations

import ast
from functools import cached_property
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "src" / "regard"
OUTSIDE = [TESTS.parent / name for name in ("benchmarks", "experiments")]


class Source:
    """A module of the package."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """The module, parsed."""
        return ast.parse(self.text)

    @property
    def docstring(self) -> str | None:
        """What it says that it is."""
        return ast.get_docstring(self.tree)

    @cached_property
    def code(self) -> str:
        """The module without docstrings and comments: what runs."""
        tree = ast.parse(self.text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value = ast.Constant(...)
        return ast.unparse(tree)


@pytest.fixture(scope="session")
def sources() -> dict[str, Source]:
    """Every module of the package, by its path in it, of the benchmarks and the experiments."""
    return {
        path.relative_to(base).as_posix(): Source(path)
        for folder, base in ((PACKAGE, PACKAGE), *((x, x.parent) for x in OUTSIDE))
        for path in sorted(folder.rglob("*.py"))
    }


@pytest.fixture(scope="session")
def trees() -> dict[str, ast.Module]:
    """Every module of the tests, by its path; what is fuzzed is no test."""
    return {
        path.relative_to(TESTS).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(TESTS.rglob("*.py"))
        if "fuzz" not in path.parts
    }
