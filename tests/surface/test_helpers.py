"""Helpers of the tests: one that judges is named assert_*, and no answer of one that says yes or no
is dropped.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ACTS = {"start_and_kill"}
"""Helpers that do something, and assert on the way that it could be done."""


@pytest.fixture(scope="session")
def trees() -> dict[str, ast.Module]:
    """Every module of the tests, by its path; what is fuzzed is no test."""
    return {
        path.relative_to(TESTS).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(TESTS.rglob("*.py"))
        if "fuzz" not in path.parts
    }


def helpers(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions of a module that are neither tests nor fixtures."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("test"):
            continue
        if not any("fixture" in ast.unparse(x) for x in node.decorator_list):
            yield node


def misnamed(tree: ast.Module) -> list[str]:
    """Helpers that give nothing back and contain an assertion, or the call of one that does."""
    return [
        node.name
        for node in helpers(tree)
        if not node.name.lstrip("_").startswith("assert_")
        and node.name not in ACTS
        and not any(isinstance(x, ast.Return | ast.Yield) and x.value for x in ast.walk(node))
        and any(
            isinstance(x, ast.Assert) or called(x).startswith("assert_") for x in ast.walk(node)
        )
    ]


def dropped(tree: ast.Module) -> list[str]:
    """Calls of helpers that say yes or no, where nobody looks at the answer."""
    judges = {
        node.name
        for node in helpers(tree)
        if isinstance(node.returns, ast.Name)
        and node.returns.id == "bool"
        and not node.name.startswith("assert_")
    }
    alone = [x.value for x in ast.walk(tree) if isinstance(x, ast.Expr)]
    return [
        f"line {x.lineno}: {called(x)}"
        for x in alone
        if isinstance(x, ast.Call)
        and isinstance(x.func, ast.Name)
        and called(x) in judges  # a method is another thing
    ]


def called(node: ast.AST) -> str:
    """The last name of what a call calls; of anything else, nothing."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return getattr(function, "id", "") or getattr(function, "attr", "")


def test_helpers_that_assert_say_so(trees: dict[str, ast.Module]) -> None:
    assert len(trees) > 200
    assert {name: found for name, tree in trees.items() if (found := misnamed(tree))} == {}


def test_no_answer_is_dropped(trees: dict[str, ast.Module]) -> None:
    assert {name: found for name, tree in trees.items() if (found := dropped(tree))} == {}


def test_offenders_would_be_found() -> None:
    """A negative control: the second defect stood in the tests of a well-known library."""
    tree = ast.parse(
        "def check(x):\n    assert x\n\ndef near(x) -> bool:\n    return x\n\ndef test_a():\n    "
        "near(1)\n"
    )
    assert misnamed(tree) == ["check"]
    assert dropped(tree) == ["line 8: near"]
