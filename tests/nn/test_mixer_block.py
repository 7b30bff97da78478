"""Blocks of one sublayer: what they compute, their taps, and a layer that mixes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard
from regard.caches import Growing
from regard.inspect import attribute
from regard.nn import FeedForward, MoE, PreNorm, RMSNorm, SoftmaxRouter
from regard.nn.blocks.mixer_block import MixerBlock, NarrowingRMSNorm, Tokenwise, WidePreNorm
from regard.nn.variants import gqa, mamba2
from regard.span import Span
from tests.models.generation import stacks
from tests.nn.catalogue import in_chunks

M = 24


def blocks() -> list[MixerBlock]:
    torch.manual_seed(0)
    mixers = [Tokenwise(FeedForward(M, 32)), mamba2(M, 4, head_dim=5), gqa(M, 4, groups=2)]
    return [MixerBlock(mixer, PreNorm(RMSNorm(M))).eval() for mixer in mixers]


def tokens(length: int = 9) -> torch.Tensor:
    return torch.randn(2, length, M, generator=torch.Generator().manual_seed(1))


def test_a_block_is_its_mechanism_and_a_sum() -> None:
    x = tokens()
    for block in blocks():
        expected = x + block.attention(block.attention_residual.norm(x))
        assert torch.equal(block(x), expected)
        with regard.Trace("residual") as trace:
            block(x)
        assert torch.equal(trace["residual"], expected)


def test_a_layer_that_mixes_nothing() -> None:
    layer = blocks()[0].attention
    x, cache = tokens(), layer.new_cache()
    assert torch.allclose(in_chunks(layer, x, [4, 1, 4], cache), layer(x), atol=1e-6)
    assert (cache.next(1), cache.bytes) == (Span(9, 1), 0)
    assert cache.fork().next(1) == Span(9, 1)
    with pytest.raises(regard.ArgumentTypeError, match="the cache is Growing; a recurrence needs"):
        layer(x, None, Growing())


def test_costs_of_a_layer_that_mixes_nothing() -> None:
    dense = Tokenwise(FeedForward(M, 32, bias=False)).describe(7)
    assert dense.flops_per_token.value == 2 * 2 * M * 32
    assert dense.cached_values == 0
    experts = [FeedForward(M, 32, bias=False) for _ in range(6)]
    sparse = Tokenwise(MoE(SoftmaxRouter(M, 6, 2), experts, FeedForward(M, 8, bias=False)))
    used = 2 * (2 * M * 32) + 6 * M + 2 * M * 8
    assert sparse.describe(7).flops_per_token.value == 2 * used
    assert sparse.describe(7).parameters.value == sum(p.numel() for p in sparse.parameters())
    assert sparse.spec.prefill_flops(5) == 5 * 2 * 2 * (2 * M * 32)


def test_the_terms_of_the_residual_stream() -> None:
    """A block of one sublayer adds one term; the sum of all terms is the state."""
    decoder = stacks.stack(gqa(M, 4, groups=2))
    layers = [block for block in blocks() if not isinstance(block.attention, Tokenwise)]
    decoder.layers = nn.ModuleList([*decoder.layers, *layers]).requires_grad_(False)
    table = attribute(stacks.held(decoder), "one two three")
    assert [row for row in table.rows if "mlp" in row] == ["layers.0.mlp"]
    assert len([row for row in table.rows if ".head." in row]) == 12
    assert abs(float(table.values[-1, 0])) < 1e-4, "the rounding of the run"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_wide_sum(dtype: torch.dtype) -> None:
    path, last = WidePreNorm(RMSNorm(M)).to(dtype), NarrowingRMSNorm(M).to(dtype)
    seen: list[torch.dtype] = []

    def sublayer(normed: torch.Tensor) -> torch.Tensor:
        seen.append(normed.dtype)
        return normed

    x = tokens().to(dtype)
    y = path(path(x, sublayer), sublayer)
    assert seen == [dtype, dtype]
    assert y.dtype == torch.promote_types(dtype, torch.float32)
    assert last(y).dtype == dtype
