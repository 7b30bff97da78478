"""Functions whose result a compiled graph takes as a constant, without an import of dynamo."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from regard.process_state import constant_in_graphs


@pytest.mark.full
def test_the_mark_is_that_of_torch() -> None:
    def ours() -> bool:
        return True

    def theirs() -> bool:
        return True

    assert constant_in_graphs(ours) is ours
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}


@pytest.mark.full
def test_loading_a_model_does_not_import_dynamo() -> None:
    code = "import sys, regard; regard.load('tiny'); print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
