"""An audit of code that runs on a device finds what it finds on the CPU, on a pretended device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.audit import Audit, audit
from regard.audit.adapters.base import is_moved, placed, run_on, to_checks
from regard.errors import ArgumentError
from regard.nn.variants import gqa
from tests.pretended_device import PretendedTensor, pretended_cuda

ran_on: set[type[Tensor]] = set()
"""The classes of the tensors that the audited code got."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    ran_on.add(type(q))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def attend_without_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def rotate(x: Tensor) -> Tensor:
    ran_on.add(type(x))
    return regard.positions.Rotary(x.shape[-1])(x, regard.Span(0, x.shape[2]))


class Wrapped(nn.Module):
    """torch's module, and a record of where it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        ran_on.add(type(x))
        result: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


def adapter(target: Any, x: Tensor) -> Tensor:
    ran_on.add(type(x))
    result: Tensor = target(x)
    return result


def _module() -> nn.Module:
    torch.manual_seed(0)
    return Wrapped()


TARGETS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "function": (lambda: attend, {"heads": 2, "head_dim": 4}),
    "fault": (lambda: attend_without_scale, {"heads": 2, "head_dim": 4}),
    "module": (_module, {"dim": 8, "heads": 2}),
    "adapter": (_module, {"dim": 8, "heads": 2, "adapter": adapter}),
    "mixer": (lambda: gqa(8, 4, groups=2), {}),
    "rotary": (lambda: rotate, {"adapter": "rotary", "head_dim": 4}),
}


def run(name: str, device: str | None) -> Audit:
    torch.manual_seed(1)
    make, options = TARGETS[name]
    return audit(make(), device=device, **options)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.full(keep=["function"])
def test_the_findings_are_those_of_the_cpu(name: str) -> None:
    ran_on.clear()
    expected = run(name, None)
    assert PretendedTensor not in ran_on
    with pretended_cuda() as device, device.reads():
        found = run(name, "cuda")
    assert PretendedTensor in ran_on or name in ("fault", "mixer")
    assert found.names == expected.names
    assert found.names == (("scale-missing",) if name == "fault" else ())
    assert [check.name for check in found.passed] == [check.name for check in expected.passed]
    assert found.not_tried == expected.not_tried


def test_a_placed_module_takes_and_returns_tensors_of_the_cpu() -> None:
    linear = nn.Linear(2, 3)
    x = torch.randn(4, 2)
    expected = linear(x)
    with pretended_cuda() as device, device.reads(), run_on("cuda"):
        there = placed(linear)
        assert type(there.weight.data) is PretendedTensor
        assert torch.equal(there(x), expected)
        assert type(there(to_checks(x))) is Tensor
    assert not is_moved()


@pytest.mark.parametrize("device", ["meta", "warp"])
def test_a_device_that_cannot_be_used(device: str) -> None:
    with pytest.raises(ArgumentError, match=f"device '{device}' cannot be used: .*; use cpu"):
        audit(attend, heads=1, head_dim=4, device=device)
