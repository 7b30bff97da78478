"""Marks that this package sets itself are those that torch sets."""

from __future__ import annotations

import torch

from regard.process_state import constant_in_graphs


def test_a_constant_is_marked_as_torch_marks_it() -> None:
    def ours() -> int:
        return 1

    def theirs() -> int:
        return 1

    assert constant_in_graphs(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(theirs)) != {}
