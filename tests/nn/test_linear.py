"""A linear map in every dtype and number of rows, against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard.errors import ArgumentError
from regard.nn import set_fp32_product
from regard.nn import weights as module
from regard.nn.weights import FP32_MATMUL_ROWS, Linear, linear
from regard.ops import tokenwise
from regard.ops.onednn import MIN_ROWS, onednn_linear
from regard.ops.stored_linear import stored_linear
from regard.ops.stored_weights import Int8Weight
from tests.rules import assert_close_rule


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, FP32_MATMUL_ROWS - 1, FP32_MATMUL_ROWS, 70])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("block", [module.CONVERTED_BLOCK, 96, 1])
def test_linear(dtype: torch.dtype, rows: int, bias: bool, block: int) -> None:
    make = torch.Generator().manual_seed(rows)
    x, w = (torch.randn(n, 48, generator=make) for n in (rows, 10))
    b = torch.randn(10, generator=make) if bias else None
    x, w, b = (None if t is None else t.to(dtype) for t in (x, w, b))
    exact = F.linear(*(None if t is None else t.double() for t in (x, w, b)))
    found = linear(x, w, b, block=block)
    assert found.dtype == dtype
    assert_close_rule(found, F.linear(x, w, b), exact)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_rows_are_multiplied_in_fp32_where_torch_is_slow(
    dtype: torch.dtype, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, on every processor; under autocast torch chooses the dtype."""
    make = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 64, generator=make).to(dtype) for n in (FP32_MATMUL_ROWS, 8))
    record = Int8Weight.quantize(w)
    dense, w32 = (record.dequantize(t) if stored else w.to(t) for t in (dtype, torch.float32))
    narrow, wide = F.linear(x, dense), F.linear(x.float(), w32).to(dtype)
    for slow, expected in (((dtype,), wide), ((), narrow)):
        monkeypatch.setattr(tokenwise, "is_slow_in_torch", slow.__contains__)
        assert torch.equal(stored_linear(x, record) if stored else linear(x, w), expected)
    monkeypatch.setattr(tokenwise, "is_slow_in_torch", (dtype,).__contains__)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, w).dtype == F.linear(x, w).dtype


def test_shapes_and_gradients() -> None:
    layer = Linear(6, 5).half()
    plain = torch.nn.Linear(6, 5).double()
    plain.load_state_dict({k: v.double() for k, v in layer.state_dict().items()})
    x = torch.randn(2, 3, 4, 6).half()
    layer(x).float().square().sum().backward()
    plain(x.double()).square().sum().backward()
    assert layer(x).shape == (2, 3, 4, 5)
    error = (layer.weight.grad.double() - plain.weight.grad).abs().max()
    assert float(error) < 4 * torch.finfo(torch.float16).eps * float(plain.weight.grad.abs().max())
    assert linear(torch.zeros(0, 6).half(), layer.weight).shape == (0, 5)


@pytest.mark.parametrize("bias", [False, True])
def test_large_results_in_huge_pages(bias: bool) -> None:
    """The same numbers as by torch's own function, in memory of another kind."""
    rows = module.LARGE_RESULT // (4 * 8192) + 1
    x, w, b = torch.randn(1, rows, 4), torch.randn(8192, 4), torch.randn(8192) if bias else None
    found = linear(x, w, b)
    assert found.shape == (1, rows, 8192)
    assert torch.equal(found, F.linear(x, w, b))


def test_fp32_products_by_onednn_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bound of any order of M additions, and only for calls that oneDNN may serve."""
    M, N = 320, 256
    layer = Linear(M, N).eval()
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    x = torch.randn(MIN_ROWS, M)
    with torch.no_grad():
        if onednn_linear(x, layer.weight, layer.bias) is None:
            pytest.skip("this torch has no oneDNN")
        calls: list[int] = []  # numbers of rows; some processors give the same bits both ways

        def spy(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor | None:
            calls.append(len(x))
            return onednn_linear(x, *more)

        monkeypatch.setattr(module, "onednn_linear", spy)
        plain = layer(x)
        assert calls == []
        set_fp32_product(torch.nn.Sequential(layer), "onednn")
        found = layer(x)
        assert calls == [MIN_ROWS]
        assert torch.equal(found, onednn_linear(x, layer.weight, layer.bias))
        w, b = layer.weight.double(), layer.bias.double()
        exact = F.linear(x.double(), w, b)
        sums = F.linear(x.double().abs(), w.abs(), b.abs())
        assert bool(((found - exact).abs() <= (M + 1) * 2**-24 * sums).all())
        assert torch.equal(
            layer(x[: MIN_ROWS - 1]), linear(x[: MIN_ROWS - 1], w.float(), b.float())
        )
        set_fp32_product(layer, "torch")
        assert torch.equal(layer(x), plain)
    set_fp32_product(layer, "onednn")
    assert torch.equal(layer(x).detach(), plain)  # a call with gradients is computed as before
    for name, y in layer.state_dict().items():
        assert torch.equal(y, before[name])


def test_fp32_products_that_cannot_be_chosen() -> None:
    with pytest.raises(ArgumentError, match="product is 'mkl'; it must be one of torch, onednn"):
        set_fp32_product(Linear(2, 2), "mkl")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"ReLU contains no regard\.nn\.Linear"):
        set_fp32_product(torch.nn.ReLU(), "onednn")
