"""SwiGLU's products in one pass, against fp64, and when nobody may listen to the activation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn import SwiGLU
from regard.nn.blocks import feed_forward
from regard.ops.tokenwise import MIN_SIZE, silu_product
from tests.rules import assert_close_rule

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def exact(gate: Tensor, up: Tensor) -> Tensor:
    """Silu(gate) * up, element by element from the definition."""
    values = [x / (1 + math.exp(-x)) for x in gate.double().view(-1).tolist()]
    return torch.tensor(values, dtype=torch.float64).view(gate.shape) * up.double()


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
def test_against_fp64(dtype: torch.dtype, size: float) -> None:
    make = torch.Generator().manual_seed(7)
    shape = (3, MIN_SIZE // 16 + 1, 48)  # several tasks, the last of them smaller
    gate, up = (size * torch.randn(2, *shape, generator=make)).to(dtype)
    found, plain = silu_product(gate, up), F.silu(gate) * up
    assert found.shape == shape
    assert_close_rule(found, plain, exact(gate, up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_limits(dtype: torch.dtype) -> None:
    """Large numbers of both signs, infinities and NaN, as by torch's two operators."""
    some = torch.tensor([0.0, -0.0, 80.0, -80.0, 300.0, -300.0, torch.inf, torch.nan])
    gate = some.repeat(MIN_SIZE // len(some)).to(dtype)
    up = torch.full_like(gate, 0.5)
    found, right = silu_product(gate, up), (F.silu(gate.double()) * 0.5).to(dtype)
    assert torch.equal(found.isnan(), right.isnan())
    seen = ~right.isnan()
    assert torch.allclose(found[seen].float(), right[seen].float(), atol=1e-30, rtol=2e-3)
    assert float(silu_product(torch.full_like(gate, -torch.inf), up).nan_to_num(0)[0]) == 0


def test_what_the_loop_cannot_read() -> None:
    """Gradients, other dtypes, other strides and a number of elements that fills no register."""
    gate, up = torch.randn(2, 128, 131).requires_grad_(), torch.randn(2, 128, 131)
    y = silu_product(gate, up)
    assert torch.equal(y, F.silu(gate) * up)
    assert y.requires_grad
    wide = gate.detach().double()
    assert torch.equal(silu_product(wide, wide), F.silu(wide) * wide)
    plain = gate.detach()[:, :, :128]
    assert_close_rule(silu_product(plain, plain), F.silu(plain) * plain, exact(plain, plain))
    odd = gate.detach()[0, 0].repeat(99)
    assert torch.equal(silu_product(odd, odd), F.silu(odd) * odd)


def test_a_hook_of_the_activation_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = SwiGLU(8, 64), torch.randn(1, 300, 8)
    calls: list[str] = []

    def spy(gate: Tensor, up: Tensor) -> Tensor:
        calls.append("one pass")
        return silu_product(gate, up)

    monkeypatch.setattr(feed_forward, "silu_product", spy)
    with torch.no_grad():
        plain = layer.down(F.silu(layer.gate(x)) * layer.up(x))
        assert torch.allclose(layer(x), plain, atol=1e-6)
        assert calls == ["one pass"]
        with layer.activation.register_forward_hook(lambda *_: calls.append("hook")):
            layer(x)
        assert calls == ["one pass", "hook"]
        layer.activation = nn.GELU()
        layer(x)
    assert calls == ["one pass", "hook"]


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_each_step_is_rounded_to_nearest(dtype: torch.dtype) -> None:
    """Where silu(100) = 100 the product is torch's to the bit, and nearly always elsewhere, too."""
    make = torch.Generator().manual_seed(11)
    gate, up = torch.randn(2, MIN_SIZE, generator=make).to(dtype)
    hundred = torch.full_like(gate, 100)
    assert torch.equal(silu_product(hundred, up), 100 * up)
    same = silu_product(gate, up) == F.silu(gate) * up
    assert same.float().mean() > 0.99
