"""No public operation depends on torch's default dtype and device, which belong to the user, and
nothing that it keeps from such a context is wrong afterwards.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.surface.global_state import different

CONTEXTS = ("bfloat16:meta", "float64:cpu")
"""The contexts of the first use, each in a process of its own: a narrow and a wide dtype."""


def run(folder: Path, *context: str) -> dict[str, dict[str, object]]:
    """The results of all operations in a context, and outside of it."""
    path = folder / "results.pt"
    done = subprocess.run(
        [sys.executable, "-m", "tests.surface.global_state", str(path), *context],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    found: dict[str, dict[str, object]] = torch.load(path, weights_only=True)
    return found


@pytest.mark.full
def test_an_operation_gives_the_same_under_every_default(tmp_path: Path) -> None:
    unchanged = run(tmp_path)
    for context in CONTEXTS:
        for name, results in run(tmp_path, context).items():
            expected = unchanged.get(name, unchanged["outside"])
            wrong = [x for x, y in expected.items() if different(results[x], y)]
            assert wrong == [], f"{name}, after a first use in the context {context}"


SAID_BY_NUMBERS = {"arange", "as_tensor", "full", "randint", "randperm", "tensor"}
"""Functions whose dtype may come from the numbers that they are given."""

MAKERS = SAID_BY_NUMBERS | {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}
LIBRARY = ("biases", "caches", "integrations", "masks", "models", "nn", "ops", "parallel")
LIBRARY += ("positions", "scores")
"""The packages that compute; the others are tools, which make random inputs and reports."""


def taken_from_the_user(source: str) -> list[str]:
    """The tensors that are made with torch's default device or dtype, except for the parameters of
    a new module, which are the user's; and addresses, in files that call compiled code.
    """
    tree = ast.parse(source)
    makes_parameters = (ast.FunctionDef, ast.Call)
    own = {
        x
        for node in ast.walk(tree)
        if isinstance(node, makes_parameters) and _makes_parameters(node)
        for x in ast.walk(node)
    }
    compiled = re.search(r"compiled_entry|regard\.ops\.cpu import .*launch", source) is not None
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "data_ptr" and compiled:
            found.append(f"{node.lineno}: an address")
        if not isinstance(node, ast.Call) or node in own:
            continue
        module, _, name = ast.unparse(node.func).rpartition(".")
        given = {x.arg for x in node.keywords}
        if module == "torch" and name in MAKERS:
            says_dtype = "dtype" in given or (name in SAID_BY_NUMBERS and not compiled)
            if "device" not in given or not says_dtype:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def _makes_parameters(node: ast.FunctionDef | ast.Call) -> bool:
    """Whether this is `Parameter(...)`, the constructor of a module or of a variant."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).endswith("Parameter")
    variant = any("variant" in ast.unparse(x) for x in node.decorator_list)
    return variant or node.name in ("__init__", "reset_parameters", "_init")


@pytest.mark.full
def test_no_default_of_the_user_is_taken(root: Path) -> None:
    package = root / "src/regard"
    files = [x for name in LIBRARY for x in (package / name).rglob("*.py")]
    found = {
        str(x.relative_to(package)): taken
        for x in files
        if x != package / "ops/cpu/launch.py"
        and (taken := taken_from_the_user(x.read_text("utf-8")))
    }
    assert found == {}


def test_what_is_taken_from_the_user_is_found() -> None:
    found = taken_from_the_user(
        "from regard.ops.cpu import launch\n"
        "def f(x):\n"
        "    return torch.empty(3), torch.full((2,), 0, device='cpu'), x.data_ptr()\n"
        "def __init__(self):\n"
        "    self.w = torch.ones(3)\n"
    )
    assert [x.split(":")[0] for x in found] == ["3", "3", "3"]
