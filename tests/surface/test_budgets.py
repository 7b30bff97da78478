"""Budgets of size, and the home of each line: DESIGN section 4."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "regard"
FILE_LINES, FUNCTION_LINES, PARAMETERS = 250, 40, 10

# name -> the reason why it may be larger
LONGER_FILES: dict[str, str] = {
    "ops/softmax/tiled.py": "one kernel, forward and backward, is read together",
}
LONGER_FUNCTIONS: dict[str, str] = {
    "cli/train.py:train": "a command's signature is its table of options",
    "ops/jit/decode.py:run_tasks": "the loop over tiles, compiled as one",
    "ops/jit/quantised.py:run_tasks": "the loop over tiles, compiled as one",
}
MORE_PARAMETERS: dict[str, str] = {
    "cli/audit.py:audit": "a command's options",
    "cli/bench.py:bench": "a command's options",
    "cli/compare.py:compare": "a command's options",
    "cli/convert.py:convert": "a command's options",
    "cli/cost.py:cost": "a command's options",
    "cli/train.py:train": "a command's options",
    "cli/explain.py:explain": "a command's options",
    "cli/extend.py:extend": "a command's options",
    "cli/generate.py:generate": "a command's options",
    "cli/show.py:show": "a command's options",
    "ops/memory/infini.py:infini_attention": "a public signature: the equation's inputs, by keyword",
    "ops/softmax/attend.py:attend": "the public signature of DESIGN section 3",
    "ops/softmax/call.py:make_call": "the public signature of DESIGN section 3, checked",
}
FILES = sorted(SOURCES.rglob("*.py"))


def short(path: Path) -> str:
    return path.relative_to(SOURCES).as_posix()


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{short(path)}:{node.name}", node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body behind the docstring: a long explanation is no long function."""
    body = node.body
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(body) > 1:
        first = body[1]
    return (node.end_lineno or 0) - first.lineno + 1


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_files_are_at_most_250_lines() -> None:
    sizes = {short(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    over = {name: n for name, n in sizes.items() if n > FILE_LINES and name not in LONGER_FILES}
    assert over == {}


def test_functions_are_at_most_40_lines() -> None:
    over = {
        name: length(node)
        for path in FILES
        for name, node in functions(path)
        if length(node) > FUNCTION_LINES and name not in LONGER_FUNCTIONS
    }
    assert over == {}


def test_functions_have_at_most_10_parameters() -> None:
    over = {
        name: parameters(node)
        for path in FILES
        for name, node in functions(path)
        if parameters(node) > PARAMETERS and name not in MORE_PARAMETERS
    }
    assert over == {}


def test_exemptions_name_what_exists() -> None:
    known = {name for path in FILES for name, _ in functions(path)} | {short(p) for p in FILES}
    listed = {*LONGER_FILES, *LONGER_FUNCTIONS, *MORE_PARAMETERS}
    assert sorted(listed - known) == []


# a line of code -> the only places where it may stand
HOMES = {
    # the second is what we are compared with
    r"scaled_dot_product_attention\(": {"ops/softmax/sdpa.py", "bench/peers/torch_sdpa.py"},
    r"flex_attention\(": {"ops/softmax/flex.py"},
    r"torch\.cat\(\[?\(?\s*(self\.)?_?(keys?|values?|k|v|memory)\b": {"caches"},
    r"import pickle|pickle\.|torch\.load\(": set(),
    r"(?<![.\w])(eval|exec)\(": set(),
    # a family, or what families share: they never import one another
    r"(self_attn|model\.layers)\.": {
        "models/families",
        "models/assembly/grouped.py",
        "models/assembly/gemmas.py",
        "models/assembly/deepseek.py",
    },
    r"\bnan_to_num\(": set(),
}


@pytest.mark.parametrize("line", HOMES)
def test_a_line_has_one_home(line: str) -> None:
    strangers = {
        short(path)
        for path in FILES
        if re.search(line, code_of(path))
        and not any(short(path).startswith(home) for home in HOMES[line])
    }
    assert strangers == set()


def code_of(path: Path) -> str:
    """The source without docstrings and comments: what runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(...)
    return ast.unparse(tree)


def test_every_module_says_what_it_is() -> None:
    silent = [short(p) for p in FILES if not ast.get_docstring(ast.parse(p.read_text("utf-8")))]
    assert silent == []


def test_the_checks_would_find_an_offender(tmp_path: Path) -> None:
    body = "\n".join(["    x = 1"] * 41)
    (tmp_path / "long.py").write_text(
        f'def f(a, b, c, d, e, f, g, h, i, j, k):\n    "Doc."\n{body}\n'
    )
    tree = ast.parse((tmp_path / "long.py").read_text())
    node = tree.body[0]
    assert isinstance(node, ast.FunctionDef)
    assert (length(node), parameters(node)) == (41, 11)
    assert re.search(next(iter(HOMES)), "F.scaled_dot_product_attention(q, k, v)")
