"""Layers refuse what they were not built for, with one error: with and without a gradient, with and
without compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import nn
from regard.nn.variants import build
from regard.nn.weights import linear
from regard.ops import tokenwise as gemv_module
from regard.ops.tokenwise import gemv, rms_norm


@pytest.fixture(params=["grad", "no_grad", "no_grad, no kernels"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if "no kernels" in request.param:
        monkeypatch.setattr(gemv_module, "has_kernels", lambda: False)
    with torch.set_grad_enabled(request.param == "grad"):
        yield


MAP, NORM = lambda x: nn.Linear(256, 256)(x), lambda x: nn.RMSNorm(256)(x)
REFUSED: list[tuple[Callable[[Any], Any], Any, str]] = [
    *(
        (MAP, torch.ones(1, rows, n), rf"^x is \(1, {rows}, {n}\); its last .* must be 256, as the")
        for rows in (1, 16)
        for n in (64, 512)
    ),
    *(
        (norm, torch.ones(1, 1, n), rf"^x is \(1, 1, {n}\) and the weight of the norm is \(256,\)")
        for norm in (NORM, lambda x: nn.OffsetRMSNorm(256)(x))
        for n in (64, 512)
    ),
    (
        lambda x: linear(x, torch.ones(4096, 256), torch.ones(4)),
        torch.ones(1, 256),
        r"^bias is \(4,\); it must be \(4096,\), one number for each row of the weight",
    ),
    (lambda x: build("gqa", 256, 8, groups=2)(x), torch.ones(1, 3, 64), r"^x is \(1, 3, 64\); its"),
    (lambda x: build("gqa", 256, 8, groups=2)(x), torch.ones(3, 256), r"^x is \(3, 256\); it must"),
    (MAP, torch.ones(1, 256).bfloat16(), r"^x is bfloat16 and weight is float32; all"),
    (MAP, torch.ones(1, 256).long(), r"^x is int64 and weight is float32"),
    (MAP, [1.0], r"^x is list; it must be a torch tensor \[\.\.\., features\]$"),
    (MAP, torch.ones(1, 256, device="meta"), r"^x is on meta and weight on cpu; move one"),
    (NORM, torch.ones(1, 256, device="meta"), r"^x is on meta and weight on cpu; move one"),
]


@pytest.mark.parametrize("layer, x, message", REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_a_layer_was_not_built_for(
    ways: None, layer: Callable[[Any], Any], x: Any, message: str
) -> None:
    with pytest.raises((regard.ArgumentError, regard.ArgumentTypeError), match=message):
        layer(x)


def test_autocast_converts_as_ever() -> None:
    layer = nn.Linear(256, 256)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(1, 2, 256)).dtype == torch.bfloat16
        assert layer(torch.randn(1, 2, 256).bfloat16()).dtype == torch.bfloat16
        with pytest.raises(regard.ArgumentError, match=r"^x is \(1, 2, 64\)"):
            layer(torch.randn(1, 2, 64))


def test_what_torch_would_broadcast_or_convert() -> None:
    for heads, dim, x in ((4, 8, (1, 1, 3, 8)), (1, 8, (1, 4, 3, 8)), (4, 1, (1, 4, 3, 8))):
        message = (
            rf"^x is \({', '.join(map(str, x))}\); this norm needs \[batch, {heads}, length, "
            rf"{dim}\]"
        )
        with pytest.raises(regard.ArgumentError, match=message):
            nn.HeadNorm(heads, dim)(torch.randn(x))
    with pytest.raises(regard.ArgumentTypeError, match=r"^x is int64; it must be float64, float32"):
        rms_norm(torch.ones(1, 4, dtype=torch.int64), torch.ones(4), 0.0)


@pytest.mark.parametrize(
    "x, weight, bias",
    [
        (torch.ones(1, 4), torch.ones(4, 6).mT, None),  # strided
        (torch.ones(1, 4), torch.ones(6, 4), torch.ones(12)[::2]),
        (torch.ones(0, 4), torch.ones(6, 4), None),
        (torch.ones(1, 0), torch.ones(6, 0), None),
        (torch.ones(1, 4, dtype=torch.float64), torch.ones(6, 4, dtype=torch.float64), None),
        (torch.ones(1, 4), torch.ones(6, 4, requires_grad=True), None),
        (
            torch.ones(1, 4),
            torch.nn.Buffer(torch.ones(6, 4)).as_subclass(type("Other", (Tensor,), {})),
            None,
        ),
    ],
    ids=[
        "weight strided",
        "bias strided",
        "no rows",
        "no features",
        "float64",
        "a gradient",
        "a subclass",
    ],
)
def test_what_compiled_code_cannot_read(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    with pytest.raises(regard.ArgumentError, match=r"^gemv was given x float.*use"):
        gemv(x, weight, bias)
