"""Blocks of the first Transformer against torch's own with the same weights; caches; the small
parts.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.masks import Causal
from regard.nn import Attention
from regard.nn.blocks.blocks import Block, DecoderBlock, PostNorm, PreNorm, Residual
from regard.nn.blocks.embedding import InputEmbedding, SinusoidalPositions
from regard.nn.blocks.feed_forward import FeedForward
from regard.nn.variants import cross_attention
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.positions import LearnedPositions
from regard.span import Span
from tests.nn.catalogue import random
from tests.rules import assert_refused

pytestmark = pytest.mark.usefixtures("no_gradients")

M, H, WIDE = 12, 3, 20
PATHS = {"post-norm": PostNorm, "pre-norm": PreNorm}
PADDED = torch.tensor([[-1, -1, 0, 1, 2, -1], [0, 1, 2, 3, 4, 5]])


def attention(mask: Causal | None) -> Attention:
    D = M // H
    return Attention(
        separate_qkv(M, H, H, D, bias=True), output_projection(M, H, D, bias=True), mask=mask
    )


def paths(kind: type[Residual], n: int) -> list[Residual]:
    return [kind(nn.LayerNorm(M)) for _ in range(n)]


def encoder_block(kind: type[Residual], activation: nn.Module | None = None) -> Block:
    feed = FeedForward(M, WIDE, activation)
    return random(Block(attention(None), feed, *paths(kind, 2))).double().eval()  # type: ignore[no-any-return]


def decoder_block(kind: type[Residual]) -> DecoderBlock:
    cross, feed = cross_attention(M, H, bias=True), FeedForward(M, WIDE)
    block = DecoderBlock(attention(Causal()), cross, feed, *paths(kind, 3))
    return random(block).double().eval()  # type: ignore[no-any-return]


def give(theirs: nn.MultiheadAttention, ours: Any) -> None:
    parts = (ours.project.q, ours.project.k, ours.project.v)
    theirs.in_proj_weight.copy_(torch.cat([part.linear.weight for part in parts]))
    theirs.in_proj_bias.copy_(torch.cat([part.linear.bias for part in parts]))
    theirs.out_proj.load_state_dict(ours.output.state_dict())


def torch_block(block: Any, kind: type[Residual], activation: Any = F.relu) -> Any:
    """torch's own layer with the weights of a block."""
    cross = isinstance(block, DecoderBlock)
    make = nn.TransformerDecoderLayer if cross else nn.TransformerEncoderLayer
    other: Any = make(
        M,
        H,
        WIDE,
        dropout=0.0,
        activation=activation,
        batch_first=True,
        norm_first=kind is PreNorm,
        dtype=torch.float64,
    ).eval()
    give(other.self_attn, block.attention)
    other.linear1.load_state_dict(block.feed_forward.up.state_dict())
    other.linear2.load_state_dict(block.feed_forward.down.state_dict())
    other.norm1.load_state_dict(block.attention_residual.norm.state_dict())
    if cross:
        give(other.multihead_attn, block.cross)
        other.norm2.load_state_dict(block.cross_residual.norm.state_dict())
    last = other.norm3 if cross else other.norm2
    last.load_state_dict(block.feed_forward_residual.norm.state_dict())
    return other


def close(x: Tensor, y: Tensor) -> bool:
    return float((x - y).detach().abs().max()) < 1e-12 * float(y.detach().abs().max())


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU()])
def test_encoder_block_is_torchs(name: str, activation: nn.Module) -> None:
    kind = PATHS[name]
    block, x = encoder_block(kind, activation), torch.randn(2, 6, M, dtype=torch.float64)
    theirs = torch_block(block, kind, activation)
    with torch.enable_grad():  # without gradients torch takes another path, which drops padded rows
        assert close(block(x), theirs(x))
        out = theirs(x, src_key_padding_mask=PADDED < 0)
    ours, real = block(x, PADDED), PADDED >= 0
    assert close(ours[real], out[real])
    assert not close(block(x)[real], out[real]), "negative control: padding that takes part"
    other = PostNorm if kind is PreNorm else PreNorm
    assert not close(encoder_block(other, activation)(x), block(x)), "the norm's place matters"


@pytest.mark.parametrize("name", PATHS)
def test_decoder_block_is_torchs(name: str) -> None:
    kind = PATHS[name]
    block, theirs = decoder_block(kind), torch_block(decoder_block(kind), kind)
    x, memory = (torch.randn(2, n, M, dtype=torch.float64) for n in (5, 6))
    ahead = torch.ones(5, 5, dtype=torch.bool).triu(1)
    out = theirs(x, memory, tgt_mask=ahead, memory_key_padding_mask=PADDED < 0)
    assert close(block(x, memory=memory, memory_positions=PADDED), out)
    assert not close(theirs(x, memory, memory_key_padding_mask=PADDED < 0), out), "a causal leak"
    block.cross.project.k, block.cross.project.v = block.cross.project.v, block.cross.project.k
    assert not close(block(x, memory=memory, memory_positions=PADDED), out), "keys for values"


@pytest.mark.parametrize("name", PATHS)
def test_a_decoder_block_with_caches_in_any_chunks_is_one_pass(name: str) -> None:
    block = decoder_block(PATHS[name])
    x, memory = (torch.randn(2, n, M, dtype=torch.float64) for n in (9, 6))
    whole = block(x, memory=memory, memory_positions=PADDED)
    for sizes in ([9], [1] * 9, [4, 1, 0, 4]):
        caches, parts = block.new_caches(), []
        for part in x.split(sizes, 1):
            source = {} if parts else {"memory": memory, "memory_positions": PADDED}
            parts.append(block(part, None, caches, **source))
        assert close(torch.cat(parts, 1), whole)
        assert (len(caches.self_attention), len(caches.cross)) == (9, 6)


def test_a_refused_call_leaves_both_caches() -> None:
    block = decoder_block(PostNorm)
    x, memory = (torch.randn(2, n, M, dtype=torch.float64) for n in (3, 6))
    caches = block.new_caches()
    with pytest.raises(regard.ArgumentError, match="there is no memory to attend to"):
        block(x, None, caches)
    assert (len(caches.self_attention), len(caches.cross)) == (0, 0), (
        "the self-attention had stored already"
    )
    usual = block(x, None, caches, memory=memory)
    with pytest.raises(regard.ArgumentError, match="written once"):
        block(x, None, caches, memory=memory)
    assert (len(caches.self_attention), len(caches.cross)) == (3, 6)
    assert torch.equal(block(x, memory=memory), usual)


def test_residual_paths() -> None:
    x, norm = torch.randn(1, 3, M), nn.LayerNorm(M)
    twice = lambda x: 2 * x  # noqa: E731
    assert torch.equal(PreNorm(norm)(x, twice), x + 2 * norm(x))
    assert torch.equal(PostNorm(norm)(x, twice), norm(x + 2 * x))
    path = PreNorm(nn.Identity(), dropout=0.5)
    assert torch.equal(path.eval()(x, twice), 3 * x)
    added = path.train()(x, torch.ones_like) - x
    assert set(added.round().flatten().tolist()) == {0.0, 2.0}, (
        "what the sublayer adds is dropped, or doubled"
    )
    with pytest.raises(regard.ArgumentError, match=r"dropout is 1\.0; it must be at least 0 and"):
        PostNorm(norm, 1.0)
    with pytest.raises(TypeError, match="abstract"):
        Residual(norm)  # type: ignore[abstract]


def test_embed() -> None:
    embedding = nn.Embedding(7, 4).double()
    ids, positions = torch.tensor([[5, -100, 6]]), torch.tensor([[0, -1, 1]])
    out = InputEmbedding(embedding, SinusoidalPositions(4), scale=2.0)(ids, positions)
    row = [math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)]
    right = 2 * embedding.weight[6] + torch.tensor(row, dtype=torch.float64)
    assert float((out[0, 2] - right).abs().max()) < 1e-15
    assert torch.equal(
        InputEmbedding(embedding, SinusoidalPositions(4), scale=2.0)(ids[:, :1], Span(0, 1)),
        out[:, :1],
    )
    learned = LearnedPositions(8, 4)
    assert torch.equal(
        InputEmbedding(embedding, learned)(ids[:, :1]), embedding(ids[:, :1]) + learned(Span(0, 1))
    )
    assert (
        InputEmbedding(embedding.bfloat16(), SinusoidalPositions(4))(ids[:, :1]).dtype
        == torch.bfloat16
    )
    assert "scale=2" in repr(InputEmbedding(embedding, SinusoidalPositions(4), scale=2.0))
    assert list(SinusoidalPositions(4).state_dict()) == []
    cases = [
        (lambda: InputEmbedding(embedding, SinusoidalPositions(4))(ids[0]), "ids are (3,); they"),
        (
            lambda: InputEmbedding(embedding, SinusoidalPositions(4), scale=math.nan),
            "scale is nan; it must be finite",
        ),
        (lambda: InputEmbedding(embedding, SinusoidalPositions(4), dropout=1.5), "dropout is"),
        (lambda: SinusoidalPositions(0), "dim is 0; it must be at least 1"),
    ]
    assert_refused(cases)


def test_embedding_dropout_is_off_in_eval() -> None:
    embed = InputEmbedding(nn.Embedding(7, 4), SinusoidalPositions(4), dropout=0.5)
    ids = torch.arange(7)[None]
    assert torch.equal(embed.eval()(ids), embed(ids))
    assert embed.train()(ids).eq(0).any()
