"""Random arguments for every kernel; each entry that the library has is in the table."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import Tensor

from regard.ops.cpu.instruction_sets import SOURCES
from tests.kernels import require_kernels
from tests.ops.cpu import fuzz

require_kernels()


@pytest.mark.parametrize("name", fuzz.KERNELS)
def test_random_arguments(name: str) -> None:
    for seed in range(1000, 1005 if name == "step" else 1030):  # whole models take longer
        fuzz.assert_case(name, seed)


def test_every_entry_is_in_the_table() -> None:
    text = "".join(x.read_text("utf-8") for x in sorted(SOURCES.glob("*.cpp")))
    entries = set(re.findall(r"^REGARD_ENTRIES\((\w+),", text, re.MULTILINE))
    assert entries == fuzz.KERNELS.keys()


@pytest.mark.parametrize("name", fuzz.KERNELS)
def test_a_wrong_result_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: the last number of a result is not written."""

    class Forgets(fuzz.Draw):
        def check(self, found: Tensor, *rest: Any, **options: Any) -> None:
            found = found.clone()
            found.view(-1)[-1] = float("nan")
            super().check(found, *rest, **options)

    monkeypatch.setattr(fuzz, "Draw", Forgets)
    with pytest.raises(AssertionError, match="NaN at 1 places"):
        fuzz.assert_case(name, 3)
