"""HCA and CSA: pooled entries against numbers and loops, and whole layers against DeepSeek-V4 in
transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4RotaryEmbedding,
)

from regard.caches import Compressed, Growing
from regard.cost.compressed import CompressedSpec
from regard.errors import ArgumentError
from regard.nn import (
    BlockPooling,
    CompressedAttention,
    EntryIndexer,
    FinishedProjection,
    HeadProjection,
    InverseRotary,
    RMSNorm,
    SharedKeyValue,
)
from regard.nn.attention.compressed import last_closed_block
from regard.nn.projections.steps import WeightlessRMSNorm
from regard.nn.variants import VARIANTS
from regard.ops.selection import block_layout
from regard.positions import Rotary
from regard.span import Span
from regard.tracing import Trace
from tests.nn.catalogue import example, in_chunks, tokens

NAMES = ("hca", "csa")
KINDS = {"hca": "heavily_compressed_attention", "csa": "compressed_sparse_attention"}


def test_entries_of_the_fixture() -> None:
    """Eight tokens of fixture F in blocks of 4, with z = q and y = k; the numbers are from loops
    in fp64.
    """
    t, d = torch.arange(8.0)[:, None].double(), torch.arange(3.0)
    q, k = torch.sin(t + 2 * d + 1)[None, None], torch.cos(2 * t + d)[None, None]
    layout = block_layout(Span(0, 8), 4)
    plain = BlockPooling(3, 3, 4).double()
    found = plain((k, q), layout)[0, 0, 0].tolist()
    assert found == pytest.approx([0.1532637806, 0.3030776391, 0.1401532527], abs=1e-9)
    both = BlockPooling(3, 3, 4, overlap=True).double()
    parts = torch.cat([k, q], -1), torch.cat([q, k], -1)  # each half is the other's gate
    found = both(parts, layout)[0, 0, 1].tolist()
    assert found == pytest.approx([0.2409512473, 0.4022738376, -0.1624946560], abs=1e-9)


def oracle(layer: Any, x: Tensor) -> Tensor:
    """The heads [H,T,D] of a text from position 0, from dense scores over window and entries."""
    T, m, W = x.shape[1], layer.pooling.block, layer.window
    t, s, b = torch.arange(T)[:, None], torch.arange(T), torch.arange(T // m)
    project, layout = layer.project, block_layout(Span(0, T), m)
    q, k = project.query(x, Span(0, T))[0], project.remember(x, Span(0, T))[0][0, 0]
    e = layer.pooling(layer.pooling.remember(x), layout)[0, 0, : T // m]
    seen = b < (t + 1) // m
    if (index := layer.indexer) is not None:
        keys = index.pooling(index.pooling.remember(x), layout)[0, 0, : T // m]
        dots = (index.q(x, Span(0, T))[0] @ keys.T).relu() / keys.shape[-1] ** 0.5  # [J,T,C]
        weights = index.weight(x)[0].T[..., None] / len(dots) ** 0.5
        order = (dots * weights).sum(0).masked_fill(~seen, -torch.inf).argsort(-1, descending=True)
        seen = seen & torch.zeros_like(seen).scatter(-1, order[:, : index.topk], True)
    visible = torch.cat([(s <= t) & (s > t - W), seen], 1)
    memory = torch.cat([k, e])
    scores = (q @ memory.T / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    with_sink = torch.cat([scores, layer.sink[:, None, None].expand(-1, T, 1)], -1)
    z = with_sink.softmax(-1)[..., :-1] @ memory
    found: Tensor = project.postprocess_at(z[None], x, Span(0, T))[0]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_head_is_one_softmax_over_window_and_entries(name: str) -> None:
    layer: Any = example(VARIANTS[name])
    x = tokens(23, B=1)
    with torch.no_grad():
        expected = layer.output(oracle(layer, x).transpose(0, 1).flatten(1))
        assert torch.allclose(layer(x)[0], expected, atol=1e-10)
        layer.sink.add_(1)
        assert not torch.allclose(layer(x)[0], expected, atol=1e-4), "negative control"


class Grouped(nn.Module):
    """The output map of DeepSeek-V4: groups of heads to small vectors, and these to the state."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.a, self.b, self.groups = theirs.o_a_proj, theirs.o_b_proj, theirs.config.o_groups

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(z.unflatten(-1, (self.groups, -1))).flatten(2))
        return out


def pooling(theirs: Any, rotary: Rotary, *, overlap: bool) -> BlockPooling:
    d, m = theirs.kv_norm.weight.shape[0], theirs.compress_rate
    own = BlockPooling(32, d, m, RMSNorm(d), rotary, overlap=overlap)
    own.content, own.gate = theirs.kv_proj, theirs.gate_proj
    own.places = theirs.position_bias
    own.steps[0].weight = theirs.kv_norm.weight
    return own


def twins(name: str) -> tuple[CompressedAttention, DeepseekV4Attention, DeepseekV4RotaryEmbedding]:
    """A layer of ours with the weights of a layer of transformers."""
    config = DeepseekV4Config(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=8,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=6,
        sliding_window=5,
        index_n_heads=3,
        index_head_dim=8,
        index_topk=3,
        partial_rotary_factor=1.0,
        layer_types=[KINDS[name]],
        compress_rates={KINDS["hca"]: 4, KINDS["csa"]: 2},
        attn_implementation="eager",
    )
    theirs: Any = DeepseekV4Attention(config, 0)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    rotary = Rotary(8, config.compress_rope_theta, layout="interleaved")
    q, kv = HeadProjection(32, 4, 8, WeightlessRMSNorm(), rotary), HeadProjection(32, 1, 8)
    low: Any = nn.Sequential(theirs.q_a_proj, theirs.q_a_norm)
    q.linear = nn.Sequential(low, theirs.q_b_proj)  # type: ignore[assignment]
    kv.linear, kv.steps = theirs.kv_proj, nn.ModuleList([RMSNorm(8), rotary])
    kv.steps[0].weight = theirs.kv_norm.weight
    indexer = None
    if name == "csa":
        index, index_q = theirs.compressor.indexer, HeadProjection(32, 3, 8, rotary)
        index_q.linear = nn.Sequential(low, index.q_b_proj)  # type: ignore[assignment]
        own = pooling(index, rotary, overlap=True)
        indexer = EntryIndexer(index_q, own, index.scorer.weights_proj, topk=3)
    layer = CompressedAttention(
        FinishedProjection(SharedKeyValue(q, kv), InverseRotary(rotary)),
        pooling(theirs.compressor, rotary, overlap=name == "csa"),
        Grouped(theirs),
        window=5,
        indexer=indexer,
        sink=theirs.sinks,
    )
    return layer.eval(), theirs.eval(), DeepseekV4RotaryEmbedding(config)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_that_of_transformers(name: str) -> None:
    layer, theirs, rotary = twins(name)
    x, at = tokens(23, dtype=torch.float32), torch.arange(23)[None]
    embeddings = {kind: rotary(x, at, layer_type=kind) for kind in ("main", "compress")}
    distance = at[0, :, None] - at[0]
    hidden = ((distance < 0) | (distance >= 5))[None, None].expand(2, -1, -1, -1)
    mask = torch.zeros(2, 1, 23, 23).masked_fill(hidden, -torch.inf)
    with torch.no_grad():
        expected = theirs(x, embeddings, at.expand(2, -1), mask)[0]
        assert torch.allclose(layer(x), expected, atol=2e-5)
        assert torch.allclose(in_chunks(layer, x, [9, 1, 1, 7, 5]), expected, atol=2e-5)
        layer.pooling.places.data.add_(torch.randn_like(layer.pooling.places))
        assert not torch.allclose(layer(x), expected, atol=1e-3), "negative control"


def test_a_query_sees_the_blocks_that_are_closed_for_it() -> None:
    found = last_closed_block(Span(0, 9), 4)
    assert isinstance(found, Tensor)
    assert found.tolist() == [[-1, -1, -1, 0, 0, 0, 0, 1, 1]]
    assert last_closed_block(Span(7, 1), 4) == Span(1, 1)
    padded = last_closed_block(torch.tensor([[-1, 3]]), 4)
    assert isinstance(padded, Tensor)
    assert padded.tolist() == [[-1, 0]]


def test_a_crop_goes_back_to_the_open_block_only() -> None:
    cache, x = Compressed(4, 20), torch.arange(18.0).view(1, 1, 9, 2)
    cache.recent.update((x,), Span(0, 9))
    cache.open.update((x,), Span(0, 9))
    cache.open.store((), Span(0, 9))
    cache.entries.update((x[:, :, :2],), Span(0, 2))
    assert (cache.open.closed, len(cache.open), len(cache.entries)) == (2, 1, 2)
    with pytest.raises(ArgumentError, match="crop to 7, but the tokens before position 8"):
        cache.crop(7)
    assert cache.next(1) == Span(9, 1)
    cache.crop(8)
    assert (cache.next(1), len(cache.open), len(cache.entries)) == (Span(8, 1), 0, 2)
    cache.crop(0)
    assert (cache.next(1), len(cache.entries)) == (Span(0, 1), 0)


def test_costs_of_a_million_tokens() -> None:
    """The vectors of DeepSeek-V4-Flash: heads of 512, index keys of 128."""
    S = 1 << 20
    hca, csa = (VARIANTS[n].build(4096, 64, head_dim=512, rotary_dim=64).spec for n in NAMES)
    assert isinstance(hca, CompressedSpec)
    assert isinstance(csa, CompressedSpec)
    assert hca.cached(S).values == 512 * (128 + S // 128)
    assert csa.cached(S).values == 512 * 128 + (512 + 128) * (S // 4) + 4 * 4 * (512 + 128)
    assert csa.read(S).values == 512 * (128 + 512) + 128 * (S // 4)
    for spec in (hca, csa):
        steps = sum(spec.step(t).value for t in range(1, 1025))
        once = 1024 // spec.block * spec._pooling(1)  # a step counts its share of each block
        assert spec.prefill_flops(1024) == steps - 1024 * (spec._pooling(1) // spec.block) + once


def test_what_does_not_fit_is_refused() -> None:
    layer: Any = example(VARIANTS["hca"])
    x = tokens(5)
    with pytest.raises(ArgumentError, match="needs a Compressed cache with"):
        layer(x, cache=Growing())
    with pytest.raises(ArgumentError, match="needs a Compressed cache with"):
        layer(x, cache=Compressed(2, 6))
    with pytest.raises(ArgumentError, match="entries have width 4; keys and values must be one"):
        CompressedAttention(layer.project, BlockPooling(32, 4, 4), layer.output, window=6)
    indexer = example(VARIANTS["csa"]).indexer
    with pytest.raises(
        ArgumentError,
        match="of 2 to 8, overlap=True, and the entries blocks",
    ):
        CompressedAttention(
            layer.project,
            layer.pooling,
            layer.output,
            window=6,
            indexer=indexer,  # type: ignore[arg-type]
        )
    with pytest.raises(ArgumentError, match="which has no single call"), Trace("pattern"):
        layer(x)
