"""No public operation depends on torch's default dtype and device, which belong to the user, and
nothing that it keeps from such a context is wrong afterwards. None depends on the deterministic
mode, the number of threads, earlier random numbers, warnings filters or the locale, or changes one.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.surface.global_state import SETTINGS, different

CONTEXTS = ("bfloat16:meta", "float64:cpu")
"""The contexts of the first use, each in a process of its own: a narrow and a wide dtype."""


def run(folder: Path, *context: str) -> Any:
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
    return torch.load(path, weights_only=True)


@pytest.mark.full
def test_an_operation_gives_the_same_under_every_default(tmp_path: Path) -> None:
    unchanged = run(tmp_path)
    for context in CONTEXTS:
        for name, results in run(tmp_path, context).items():
            expected = unchanged.get(name, unchanged["outside"])
            wrong = [x for x, y in expected.items() if different(results[x], y)]
            assert wrong == [], f"{name}, after a first use in the context {context}"


def products_need_threads() -> bool:
    """Whether the bits of torch's own products depend on the number of threads here."""
    x, w, before = torch.randn(5, 64), torch.randn(24, 64), torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results += [[F.linear(x[:n, :m], w[:, :m]) for n in range(1, 6) for m in (8, 16, 64)]]
    torch.set_num_threads(before)
    return different(*results)


def far_apart(x: Any, y: Any) -> bool:
    """Whether two results differ by more than torch's own tolerance for their dtype."""
    if isinstance(x, list) and isinstance(y, list):
        return len(x) != len(y) or any(map(far_apart, x, y))
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        return different(x, y)
    try:
        torch.testing.assert_close(x, y, equal_nan=True)
    except AssertionError:
        return True
    return False


PLANTED = ("changes", "draws")
"""The negative controls: one changes the environment, one draws from Python's random numbers."""


@pytest.mark.full
def test_an_operation_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    """In this process gradient mode, device and dtype stay as well; that results do not depend on
    them is the test above.
    """
    results, changed = run(tmp_path, "settings")
    assert {(name, what) for _, name, what in changed} == {
        ("changes", "environment"),
        ("draws", "Python's random numbers"),
    }
    usual = results.pop("")
    assert set(results) == set(SETTINGS[1:])
    for setting, found in results.items():
        # on some processors torch's own products do, in their last bits
        compare = far_apart if setting == "threads" and products_need_threads() else different
        wrong = {name for name, x in found.items() if compare(x, usual[name])}
        assert wrong - {*PLANTED} == set(), f"depends on the {setting}"
        assert "draws" in wrong


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
    compiled = re.search(r"compiled_entry|regard\.ops\.cpu import .*arguments", source) is not None
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
        if x != package / "ops/cpu/arguments.py"
        and (taken := taken_from_the_user(x.read_text("utf-8")))
    }
    assert found == {}


def test_what_is_taken_from_the_user_is_found() -> None:
    found = taken_from_the_user(
        "from regard.ops.cpu import arguments\n"
        "def f(x):\n"
        "    return torch.empty(3), torch.full((2,), 0, device='cpu'), x.data_ptr()\n"
        "def __init__(self):\n"
        "    self.w = torch.ones(3)\n"
    )
    assert [x.split(":")[0] for x in found] == ["3", "3", "3"]
