"""A decode step compiles as one graph with every cache, and few graphs serve all steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from regard import masks
from regard.caches import Cache, Fixed, Growing, Ring, Streaming
from regard.nn import Attention, HeadProjection, SeparateQKV
from regard.positions import Rotary

CAUSAL = masks.Causal()
KINDS: dict[str, tuple[Callable[[], Cache], masks.Mask, int, int]] = {
    # graphs that 64 steps may need: with rows that are alike, and with padding
    "growing": (Growing, CAUSAL, 2, 2),
    "fixed": (lambda: Fixed(90), CAUSAL, 2, 2),
    "ring": (lambda: Ring(16), CAUSAL & masks.Window(16), 2, 1),
    "streaming": (lambda: Streaming(4, 16), CAUSAL & (masks.Window(16) | masks.Sinks(4)), 2, 1),
}


@pytest.fixture(autouse=True)
def no_graphs_left() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attention(mask: masks.Mask) -> Attention:
    rotary = Rotary(8)
    project = SeparateQKV(
        HeadProjection(16, 4, 8, rotary), HeadProjection(16, 2, 8, rotary), HeadProjection(16, 2, 8)
    )
    return Attention(project, nn.Linear(32, 16), mask=mask)


@pytest.mark.nightly(keep=3)
@pytest.mark.full
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_decode_steps_share_few_graphs(name: str, padded: bool) -> None:
    make, mask, alike, ragged = KINDS[name]
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    module = attention(mask)
    step = torch.compile(module, backend=count, fullgraph=True)  # a break raises
    left = torch.tensor([[-1, -1, -1, 0, 1], [0, 1, 2, 3, 4]]) if padded else None
    x, mine, other = torch.randn(2, 69, 16), make(), make()
    with torch.no_grad():
        for cache in (mine, other):
            module(x[:, :5], left, cache)
        for t in range(5, 69):
            found, right = step(x[:, t : t + 1], None, mine), module(x[:, t : t + 1], None, other)
            assert float((found - right).abs().max()) < 1e-5
    assert len(graphs) == (ragged if padded else alike)
    assert len(mine) == len(other)


@pytest.mark.full
def test_a_graph_that_writes_in_place_through_aot() -> None:
    """aot_eager turns writes into values and back: the ring must come out written."""
    module = attention(CAUSAL & masks.Window(6))
    x, mine, other = torch.randn(1, 24, 16), Ring(6), Ring(6)
    step = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for cache in (mine, other):
            module(x[:, :4], None, cache)
        for t in range(4, 24):
            found, right = step(x[:, t : t + 1], None, mine), module(x[:, t : t + 1], None, other)
            assert float((found - right).abs().max()) < 1e-5
        # and back in eager mode, with a chunk
        last = torch.randn(1, 9, 16)
        assert float((module(last, None, mine) - module(last, None, other)).abs().max()) < 1e-5
