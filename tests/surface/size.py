"""How large the repository is: `python -m tests.surface.size`.

A line of code holds more than a comment and is no line of a docstring; a circle is a set of modules
that import one another, at once or in functions; what only type checkers read does not count.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SPACE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
        tokenize.ENCODING,
    }
)


class Lines(NamedTuple):
    """The lines of one or more sources."""

    code: int
    docstrings: int

    def __add__(self, other: tuple[int, ...]) -> Lines:  # type: ignore[override]
        return Lines(*(a + b for a, b in zip(self, other, strict=True)))


def count(path: Path) -> Lines:
    """The lines of a source."""
    texts = {n for node in ast.walk(parse(path)) for n in docstring_lines(node)}
    with tokenize.open(path) as file:
        tokens = [x for x in tokenize.generate_tokens(file.readline) if x.type not in SPACE]
    code = {n for x in tokens for n in range(x.start[0], x.end[0] + 1)}
    return Lines(len(code - texts), len(texts))


def parse(path: Path) -> ast.Module:
    """The syntax tree of a source."""
    return ast.parse(path.read_text("utf-8"))


def docstring_lines(node: ast.AST) -> Iterator[int]:
    """The numbers of the lines of texts that stand alone in a body."""
    for child in ast.iter_child_nodes(node):
        text = child.value if isinstance(child, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield from range(text.lineno, (text.end_lineno or text.lineno) + 1)


def sources(folder: Path) -> dict[str, Path]:
    """Module name to source, of a folder that is a package."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that a module imports, at once or in a function."""
    found: set[str] = set()
    waiting: list[ast.AST] = [parse(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & known.keys()) or {node.module}
        waiting += ast.iter_child_nodes(node)
    return (found & known.keys()) - {module}


def circles(folder: Path) -> list[list[str]]:
    """The sets of modules that import one another, by Tarjan's algorithm."""
    known = sources(folder)
    graph = {name: sorted(imports(name, path, known)) for name, path in known.items()}
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], number[other])
        if lowest[name] == number[name]:
            place = stack.index(name)
            circle, stack[place:] = stack[place:], []
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in graph:
        if name not in number:
            visit(name)
    return found


def cpp_lines(folder: Path) -> int:
    """The lines of C++ that hold more than a comment."""
    paths = [*folder.rglob("*.cpp"), *folder.rglob("*.h")]
    lines = [x.strip() for path in paths for x in path.read_text("utf-8").splitlines()]
    return sum(bool(x) and not x.startswith("//") for x in lines)


def report() -> str:
    """The table that `python -m tests.surface.size` prints."""
    package = sources(ROOT / "src" / "regard")
    total = sum(map(count, package.values()), Lines(0, 0))
    tests = sum(map(count, sources(ROOT / "tests").values()), Lines(0, 0))
    rows = [
        ("modules in src", len(package)),
        ("lines of code in src/regard", total.code),
        ("lines of docstrings in src/regard", total.docstrings),
        ("lines of C++ in src/regard", cpp_lines(ROOT / "src" / "regard")),
        ("lines of code in tests", tests.code),
        ("circles of imports", len(circles(ROOT / "src" / "regard"))),
        *((f"bytes of {name}.md", (ROOT / f"{name}.md").stat().st_size) for name in PAGES),
    ]
    return "\n".join(f"{name:36}{number:>10,}" for name, number in rows)


PAGES = ("DESIGN", "README", "CONTRIBUTING")

if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    print(report())
    for circle in circles(ROOT / "src" / "regard"):
        print("circle:", *circle)
