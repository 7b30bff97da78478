"""Layers refuse what they were not built for, with one error: with and without a gradient, with and
without compiled kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import regard
from regard import nn
from regard.nn.variants import build
from regard.nn.weights import linear
from regard.ops import gemv as gemv_module
from regard.ops.gemv import gemv
from regard.ops.tokenwise import rms_norm


@pytest.fixture(params=["grad", "no_grad", "no_grad, no kernels"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if "no kernels" in request.param:
        monkeypatch.setattr(gemv_module, "has_kernels", lambda: False)
    with torch.set_grad_enabled(request.param == "grad"):
        yield


@pytest.mark.parametrize("size", [64, 512])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_linear_map_of_other_features(ways: None, rows: int, size: int) -> None:
    message = (
        rf"^x is \(1, {rows}, {size}\); its last dimension must be 256, as the weight "
        rf"\(256, 256\) requires: pass vectors of that size"
    )
    with pytest.raises(regard.ArgumentError, match=message):
        nn.Linear(256, 256)(torch.randn(1, rows, size))


def test_a_bias_of_other_rows(ways: None) -> None:
    message = (
        r"^bias is \(4,\); it must be \(4096,\), one number for each row of the weight "
        r"\(4096, 256\)$"
    )
    with pytest.raises(regard.ArgumentError, match=message):
        linear(torch.randn(1, 256), torch.randn(4096, 256), torch.randn(4))


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.OffsetRMSNorm])
@pytest.mark.parametrize("size", [64, 512])
def test_a_norm_of_other_features(ways: None, size: int, norm: type[nn.RMSNorm]) -> None:
    message = (
        rf"^x is \(1, 1, {size}\) and the weight of the norm is \(256,\); the weight "
        rf"must have one number for each feature of x"
    )
    with pytest.raises(regard.ArgumentError, match=message):
        norm(256)(torch.randn(1, 1, size))


def test_a_mechanism_of_other_features(ways: None) -> None:
    attention = build("gqa", 256, 8, groups=2)
    with pytest.raises(regard.ArgumentError, match=r"^x is \(1, 3, 64\); its last dimension must"):
        attention(torch.randn(1, 3, 64))
    with pytest.raises(regard.ArgumentError, match=r"^x is \(3, 256\); it must be \[batch, length"):
        attention(torch.randn(3, 256))


@pytest.mark.parametrize(
    "x, message",
    [
        (torch.ones(1, 256, dtype=torch.bfloat16), r"^x is bfloat16 and weight is float32; all"),
        (torch.ones(1, 256, dtype=torch.int64), r"^x is int64 and weight is float32"),
        ([1.0], r"^x is list; it must be a torch tensor \[\.\.\., features\]$"),
    ],
)
def test_a_linear_map_of_another_dtype(ways: None, x: Tensor, message: str) -> None:
    with pytest.raises(regard.ArgumentTypeError, match=message):
        nn.Linear(256, 256)(x)


def test_a_linear_map_elsewhere(ways: None) -> None:
    with pytest.raises(regard.ArgumentError, match=r"^x is on meta and weight on cpu; move one"):
        nn.Linear(256, 256)(torch.ones(1, 256, device="meta"))
    with pytest.raises(regard.ArgumentError, match=r"^x is on meta and weight on cpu; move one"):
        nn.RMSNorm(4)(torch.ones(1, 4, device="meta"))


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
