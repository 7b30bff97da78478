"""Parts look their submodules and parameters up in dictionaries, and are ordinary modules all the
same: hooks, parametrizations, replaced parts and compiled graphs work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

from regard.nn import Block, HeadProjection, PreNorm, RMSNorm, SwiGLU
from regard.nn.blocks.feed_forward import FeedForward
from regard.nn.variants import gqa
from regard.nn.weights import Linear
from regard.positions import Rotary
from regard.span import Span


class Twice(nn.Module):
    """A parametrization: the parameter times two."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def block() -> Block:
    return Block(gqa(8, 4, groups=2), SwiGLU(8, 16), PreNorm(RMSNorm(8)), PreNorm(RMSNorm(8)))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parametrized_linear_map(name: str) -> None:
    layer, x = Linear(3, 2), torch.randn(4, 3)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(layer.state_dict())
    before = layer(x)
    for each in (layer, plain):
        parametrize.register_parametrization(each, name, Twice())
    assert torch.allclose(layer(x), plain(x))
    assert not torch.allclose(layer(x), before), "control: the parametrization acts"


def test_parameters_of_a_functional_call() -> None:
    module, x = block(), torch.randn(1, 3, 8)
    doubled = {name: 2 * p for name, p in module.named_parameters()}
    found = torch.func.functional_call(module, doubled, (x,))
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2)
    assert torch.allclose(found, module(x), atol=1e-6)


def test_a_hook_on_every_part_is_called() -> None:
    module = block()
    called: set[str] = set()
    for name, part in module.named_modules():
        part.register_forward_hook(lambda *_args, name=name: called.add(name))
    module(torch.randn(1, 3, 8))
    lists = {
        name
        for name, part in module.named_modules()
        if isinstance(part, (nn.ModuleList, nn.ParameterList))
    }
    parts = {name for name, _ in module.named_modules()} - lists
    silent = {name for name in parts - called if not name.endswith(("dropout", "project"))}
    assert not silent


PATCHED = [
    (nn.SiLU, lambda: SwiGLU(8, 16)),
    (nn.Identity, lambda: partial(HeadProjection(8, 2, 4), positions=None)),
]


def test_a_hook_on_the_flat_part_changes_the_heads() -> None:
    heads, x = HeadProjection(8, 2, 4), torch.randn(1, 3, 8)
    before = heads(x, None)
    heads.flat.register_forward_hook(lambda _module, _args, y: 2 * y)
    assert torch.allclose(heads(x, None), 2 * before)


@pytest.mark.parametrize(("kind", "make"), PATCHED, ids=lambda x: getattr(x, "__name__", ""))
def test_a_patched_class_is_called_where_faster_code_stands_for_it(
    kind: type[nn.Module],
    make: Callable[[], Callable[[Tensor], Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, x = make(), torch.randn(1, 3, 8)
    before = module(x)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", lambda _self, x: 0 * x)
        assert not module(x).any()
    assert torch.equal(module(x), before)
    handle = register_module_forward_hook(lambda part, _, y: 0 * y if type(part) is kind else y)
    assert not module(x).any()
    handle.remove()
    assert torch.equal(module(x), before)


def test_replaced_parts_are_used() -> None:
    feed, heads, x = FeedForward(8, 16), HeadProjection(8, 2, 4), torch.randn(1, 3, 8)
    feed.down, heads.linear = nn.Linear(16, 8), nn.Linear(8, 8)  # type: ignore[assignment]
    assert torch.allclose(feed(x), feed.down(feed.up(x).relu()))
    joined = heads(x, None).transpose(1, 2).flatten(2)
    assert torch.allclose(joined, heads.linear(x))
    module = block()
    module._modules["feed_forward"] = nn.Identity()
    changed = module.attention_residual(x, lambda normed: module.attention(normed, None))
    assert torch.allclose(module(x), changed + module.feed_forward_residual.norm(changed))


@pytest.mark.parametrize(
    ("x", "positions", "message"),
    [
        (torch.zeros(2, 3, 4), Span(0, 3), "3 dimensions"),
        (torch.zeros(1, 2, 3, 4), Span(0, 2), "there are 3 slots"),
        (torch.zeros(1, 2, 3, 6), Span(0, 3), "head dim 6; it must be 4, the dim of this Rotary"),
        (torch.zeros(1, 2, 3, 4, dtype=torch.int64), Span(0, 3), "int64"),
        (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, dtype=torch.int64), r"must be \(1, 3\)"),
        ([1.0], Span(0, 1), "must be a torch tensor"),
    ],
)
def test_a_rotary_step_refuses_what_does_not_fit(x: Any, positions: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Rotary(4)(x, positions)
