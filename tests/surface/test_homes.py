"""A line's home: what may stand in which module only (DESIGN section 4)."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.surface.conftest import Source
from tests.surface.size import ROOT, circles

# a line of code -> the only places where it may stand
HOMES = {
    # the others are what we are compared with
    r"scaled_dot_product_attention\(": {
        "ops/softmax/sdpa.py",
        "benchmarks/attention_peers.py",
        "benchmarks/architectures.py",
        "benchmarks/training.py",
    },
    r"flex_attention\(": {"ops/softmax/flex.py"},
    r"torch\.cat\(\[?\(?\s*(self\.)?_?(keys?|values?|k|v|memory)\b": {"caches"},
    # no file is read as a pickle; messages between our own processes are
    r"import pickle|pickle\.|torch\.load\(": {"benchmarks/runner.py"},
    r"(?<![.\w])(eval|exec)\(": set(),
    # a family, or what families share: they never import one another
    r"(self_attn|model\.layers)\.": {
        "models/families",
        "models/assembly/llama_like.py",
        "models/assembly/gated_delta.py",
        "models/checkpoint/gguf_architectures.py",  # what a file joins under these names
        "configs",  # names that differ from Llama's
        "benchmarks/interventions.py",  # the modules of transformers that nnsight edits
    },
    r"\bnan_to_num\(": set(),
    r"(from|import) huggingface_hub": {"models/hub.py"},
    # states of the whole process: other threads see them
    r"compiler\.is_compiling\(|\bfork_rng\(|\bcatch_warnings\(": {"process_state.py"},
}


@pytest.mark.parametrize("line", HOMES)
def test_a_line_has_one_home(line: str, sources: dict[str, Source]) -> None:
    strangers = {
        name
        for name, source in sources.items()
        if not any(name.startswith(home) for home in HOMES[line])
        and re.search(line, source.text)  # most modules need not be looked at more closely
        and re.search(line, source.code)
    }
    assert strangers == set()


@pytest.mark.full
def test_every_module_says_what_it_is(sources: dict[str, Source]) -> None:
    assert len(sources) > 100
    assert [name for name, source in sources.items() if not source.docstring] == []


def test_the_checks_would_find_an_offender(tmp_path: Path) -> None:
    offender = tmp_path / "offender.py"
    offender.write_text(
        '"""F.scaled_dot_product_attention(q)"""\nF.scaled_dot_product_attention(q)\n'
    )
    line = next(iter(HOMES))
    assert len(re.findall(line, Source(offender).code)) == 1  # the docstring does not count


ROOT_FILES = {
    ".ci",
    ".gitignore",
    ".prettierrc.json",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "DESIGN.md",
    "LICENSE",
    "LOG.md",
    "Makefile",
    "README.md",
    "README.zh-CN.md",
    "SECURITY.md",
    "benchmarks",
    "constraints.txt",
    "docs",
    "experiments",
    "hatch_build.py",
    "pyproject.toml",
    "src",
    "tests",
}


def test_the_checkout_holds_no_file_that_an_example_wrote(root: Path) -> None:
    """Examples that run in the checkout must not leave files there that a commit then picks up."""
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        pytest.skip("this is no checkout of git")
    listed = subprocess.run([git, "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    names = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert names <= ROOT_FILES, f"unexpected: {sorted(names - ROOT_FILES)}"
    assert {"src", "tests", "pyproject.toml"} <= names


@pytest.mark.full
def test_records_of_tensors_are_compared_by_identity(sources: dict[str, Source]) -> None:
    """Python 3.13 compares the fields of dataclasses with `==` one by one, where a tensor answers
    with a tensor, even if both are the same; before, the same tensor was equal to itself.
    """
    found = [
        f"{path}: {node.name}"
        for path, source in sources.items()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and _compares_tensors(node)
    ]
    assert found == []


def _compares_tensors(node: ast.ClassDef) -> bool:
    decorators = [d for d in map(ast.unparse, node.decorator_list) if d.startswith("dataclass")]
    fields = [ast.unparse(x.annotation) for x in node.body if isinstance(x, ast.AnnAssign)]
    own = any(isinstance(x, ast.FunctionDef) and x.name == "__eq__" for x in node.body)
    holds = any(re.match(r"(\w+\[)?Tensor\b", x) for x in fields)
    return holds and bool(decorators) and "eq=False" not in decorators[0] and not own


@pytest.mark.full
def test_no_modules_import_each_other(tmp_path: Path) -> None:
    assert circles(ROOT / "src" / "regard") == []
    toy = tmp_path / "toy"
    toy.mkdir()
    (toy / "__init__.py").write_text("")
    (toy / "a.py").write_text("from toy import b\n")
    (toy / "b.py").write_text("def late() -> None:\n    from toy.c import x\n")
    (toy / "c.py").write_text("import toy.a\n")
    assert circles(toy) == [["toy.a", "toy.b", "toy.c"]]
