"""A line's home: what may stand in which module only (DESIGN section 4)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "regard"
FILES = sorted(SOURCES.rglob("*.py"))


def short(path: Path) -> str:
    return path.relative_to(SOURCES).as_posix()


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
    r"(from|import) huggingface_hub": {"models/hub.py"},
    # states of the whole process: other threads see them
    r"compiler\.is_compiling\(|\bfork_rng\(|\bcatch_warnings\(": {"process.py"},
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
    offender = tmp_path / "offender.py"
    offender.write_text(
        '"""F.scaled_dot_product_attention(q)"""\nF.scaled_dot_product_attention(q)\n'
    )
    line = next(iter(HOMES))
    assert len(re.findall(line, code_of(offender))) == 1  # the docstring does not count
