"""How tests are written: a helper that judges is named assert_*, no answer of one that says yes or
no is dropped, and no constant of the package is patched.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

ACTS = {"start_and_kill"}
"""Helpers that do something, and assert on the way that it could be done."""


def helpers(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions of a module that are neither tests nor fixtures."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("test"):
            continue
        if not any("fixture" in ast.unparse(x) for x in node.decorator_list):
            yield node


def silent(tree: ast.Module) -> list[str]:
    """Tests without an assertion in sight: nothing that they compute can make them fail."""
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test")
        and not any(
            isinstance(x, ast.Assert)
            or called(x).startswith("assert")
            or called(x) in ("raises", "warns", "fail")
            for x in ast.walk(node)
        )
    ]


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


@pytest.mark.full
def test_helpers_that_assert_say_so(trees: dict[str, ast.Module]) -> None:
    assert len(trees) > 200
    assert {name: found for name, tree in trees.items() if (found := misnamed(tree))} == {}


@pytest.mark.full
def test_every_test_asserts(trees: dict[str, ast.Module]) -> None:
    assert {name: found for name, tree in trees.items() if (found := silent(tree))} == {}


@pytest.mark.full
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
    assert silent(tree) == ["test_a"]


# constants: what a test wants to be another value is a parameter, or the case is made large enough

PATCHED = {
    "ops/softmax/test_cpu_quantized.py": 1,
    "ops/softmax/test_reference.py": 1,
    "ops/softmax/test_sdpa.py": 1,
    "ops/softmax/test_weights.py": 1,
}
"""What is left of former times; a patch that is gone leaves this table, and no file comes in."""

CONSTANT = re.compile(r"_?[A-Z][A-Z_0-9]+")


def patched(tree: ast.Module) -> list[str]:
    """The constants of the package that a module of the tests sets: by setattr of a name, or by an
    assignment.
    """
    ours = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("regard"):
            ours |= {x.asname or x.name: x.name for x in node.names}
    names = {"regard", "module", *ours}
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        places = [ast.unparse(x) for x in getattr(node, "targets", [])]
        if called(node) == "setattr" and isinstance(node, ast.Call):
            texts = [x.value if isinstance(x, ast.Constant) else ast.unparse(x) for x in node.args]
            places = [texts[0], f"{texts[0]}.{texts[1]}"]
        for place in places:
            home, _, name = str(place).rpartition(".")
            if home.partition(".")[0] in names and CONSTANT.fullmatch(name):
                found.append((node.lineno, place))
    return [f"line {line}: {place}" for line, place in sorted(found)]


@pytest.mark.full
def test_no_constant_is_patched(trees: dict[str, ast.Module]) -> None:
    found = {name: places for name, tree in trees.items() if (places := patched(tree))}
    assert {name: len(places) for name, places in found.items()} == PATCHED, found


def test_a_patched_constant_would_be_found() -> None:
    tree = ast.parse(
        "from regard.ops import tiled\nimport torch\n\ndef test_a(monkeypatch):\n"
        "    monkeypatch.setattr(tiled, 'ROWS', 1)\n    monkeypatch.setattr('regard.ops.LONG', 1)\n"
        "    tiled.KEYS = 2\n    monkeypatch.setattr(tiled, 'rows', 1)\n"
        "    monkeypatch.setattr(torch, 'FLAG', 1)\n"
        "    monkeypatch.setattr(tiled.other, '_NO', 1)\n"
    )
    assert patched(tree) == [
        "line 5: tiled.ROWS",
        "line 6: regard.ops.LONG",
        "line 7: tiled.KEYS",
        "line 10: tiled.other._NO",
    ]
