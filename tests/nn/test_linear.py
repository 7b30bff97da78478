"""A linear map in every dtype and number of rows, against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard.nn import linear as module
from regard.nn.linear import FP16_MATMUL_ROWS, Linear, linear
from tests.rules import assert_close_rule


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, FP16_MATMUL_ROWS - 1, FP16_MATMUL_ROWS, 70])
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
