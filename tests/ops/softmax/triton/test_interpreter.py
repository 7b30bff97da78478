"""The Triton kernels without a GPU: triton's interpreter runs `contract.py` on CPU tensors.

The interpreter is chosen when kernels are decorated, so that it needs a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LEAST = 110
"""The fewest tests that must run, so that a contract that skips its cells fails here."""


@pytest.mark.full
def test_the_contract_holds_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'regard[gpu]'")
    # numpy warns where the interpreter computes inf - inf, which the kernels select away
    options = ["-n", "0", "-q", "--full", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(HERE / "contract.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "REGARD_TRITON_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        cwd=HERE.parents[3],
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= LEAST
    assert "skipped" not in done.stdout
