"""The sources of the package, read and parsed once for all structural tests."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "regard"


class Source(NamedTuple):
    """A module: what its docstring says, and its code without docstrings and comments, which is
    what runs.
    """

    docstring: str | None
    code: str

    @classmethod
    def of(cls, path: Path) -> Source:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstring = ast.get_docstring(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value = ast.Constant(...)
        return cls(docstring, ast.unparse(tree))


@pytest.fixture(scope="session")
def sources() -> dict[str, Source]:
    """Every module of the package, by its path in it."""
    return {
        path.relative_to(PACKAGE).as_posix(): Source.of(path)
        for path in sorted(PACKAGE.rglob("*.py"))
    }
