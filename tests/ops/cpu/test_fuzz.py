"""Random arguments for every kernel; each entry that the library has is in the table."""

from __future__ import annotations

import re

import pytest
import torch

from regard.ops.cpu.instruction_sets import SOURCES
from tests.kernels import require_kernels
from tests.ops.cpu import fuzz

require_kernels()


@pytest.mark.parametrize("name", fuzz.KERNELS)
def test_random_arguments(name: str) -> None:
    for seed in range(1000, 1040):
        fuzz.run_case(name, seed)


def test_every_entry_is_in_the_table() -> None:
    text = "".join(x.read_text("utf-8") for x in sorted(SOURCES.glob("*.cpp")))
    entries = set(re.findall(r"^REGARD_ENTRIES\((\w+),", text, re.MULTILINE))
    assert entries == fuzz.KERNELS.keys() | LATER


LATER: set[str] = set()
"""Entries without a case of their own here: their tests are run under the sanitizers, too."""


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: the last number of an output is not written."""

    class Forgets(fuzz.Draw):
        def run(self, *given: object) -> None:
            super().run(*given)  # type: ignore[arg-type]
            (y,) = [x for x in given if isinstance(x, torch.Tensor)][-1:]
            y.view(-1)[-1] = float("nan")

    monkeypatch.setattr(fuzz, "Draw", Forgets)
    for name in fuzz.KERNELS:
        with pytest.raises(AssertionError):
            fuzz.run_case(name, 3)
