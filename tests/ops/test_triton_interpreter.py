"""The Triton kernels without a GPU: triton's interpreter runs `contract.py` on CPU tensors.

The interpreter is chosen when kernels are decorated, so that it needs a process of its own.
"""

from __future__ import annotations

import re

import pytest

from tests.ops.triton_compiler import run_contract


@pytest.mark.full
@pytest.mark.parametrize(("folder", "least"), [("linear", 60), ("softmax", 110)])
def test_the_contract_holds_in_the_interpreter(folder: str, least: int) -> None:
    """`least` is the fewest tests that must run: a contract that skips its cells fails here."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'regard[gpu]'")
    # numpy warns where the interpreter computes inf - inf, which the kernels select away
    warnings = ("-W", "ignore::RuntimeWarning")
    found = run_contract(folder, *warnings, TRITON_INTERPRET="1", REGARD_TRITON_DEVICE="cpu")
    passed = re.search(r"(\d+) passed", found)
    assert passed is not None
    assert int(passed[1]) >= least
    assert folder != "softmax" or "skipped" not in found
