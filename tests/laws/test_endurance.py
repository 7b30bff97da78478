"""Nothing of a generation is left behind: a short run of `python -m tests.endurance`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from tests.endurance import __main__ as endurance


@pytest.fixture(scope="module")
def model() -> Any:
    return regard.load("tiny")


@pytest.mark.full
def test_rounds_of_generation_leave_nothing_behind(model: Any) -> None:
    texts, states = endurance.run(model, 3, lambda n: n == 5)
    assert texts == 5 * len(endurance.jobs(model, 3))
    assert states[-1].tensors == states[2].tensors
    assert states[-1].objects <= states[2].objects + 100


def test_what_a_round_leaves_behind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[torch.Tensor] = []
    monkeypatch.setattr(endurance, "jobs", lambda *_: [lambda: left.append(torch.zeros(1))])
    _, states = endurance.run(None, 3, lambda n: n == 3)
    assert states[-1].tensors == states[0].tensors + 2
