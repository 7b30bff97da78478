"""Texts in packed rows: equal to each text alone, and what runs the network as it is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.masks import Document
from regard.models import TextEncoder
from regard.models.encoder import Encoder
from regard.models.families import family
from regard.models.packed_encoder import (
    PackedEncoder,
    TextGroup,
    find_groups,
    why_not_packed_encoder,
)
from regard.models.text_encoder import _batches_of
from regard.nn import Attention, Block, FeedForward, InputEmbedding, PreNorm, RMSNorm
from regard.nn.blocks.embedding import SinusoidalPositions
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.ops.onednn import why_not_packed
from regard.ops.tokenwise import is_slow_in_torch
from tests.models.test_text_encoder import CONFIG, TEXTS, tokenizer
from tests.rules import assert_close_rule

bert = family("bert")

REASON = why_not_packed(torch.eye(2))
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"nothing can be packed: {REASON}")

LENGTHS = [1, 1, 4, 4, 4, 9, 2]


def post_norm() -> Encoder:
    """A BERT with random norms and biases."""
    network = bert.build(CONFIG).encoder
    for parameter in network.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return network.eval()


def pre_norm() -> Encoder:
    """Pre-norm blocks with grouped heads, a scale, RMS norms, no biases, and another activation."""
    M, H, G, D = 12, 4, 2, 5

    def block() -> Block:
        attention = Attention(separate_qkv(M, H, G, D), output_projection(M, H, D), scale=0.7)
        return Block(
            attention,
            FeedForward(M, 20, nn.ELU(), bias=False),
            *(PreNorm(RMSNorm(M)) for _ in "ab"),
        )

    embed = InputEmbedding(nn.Embedding(len("abcdefghijkl"), M), SinusoidalPositions(M))
    return Encoder(embed, [block(), block()], RMSNorm(M)).eval()


def row(dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(12, (1, sum(LENGTHS)), generator=generator)


def alone(encoder: Encoder, ids: Tensor) -> Tensor:
    """The states of each text by itself, one after another."""
    return torch.cat([encoder(part) for part in ids.split(LENGTHS, dim=1)], dim=1)


@pytest.mark.parametrize("build", [post_norm, pre_norm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_equals_each_text_alone(build: Callable[[], Encoder], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    encoder, ids = build().to(dtype), row()
    packed = PackedEncoder(encoder)
    reason = why_not_packed_encoder(encoder)
    if is_slow_in_torch(dtype):
        pytest.skip(str(reason))
    assert reason is None
    got, plain = packed(ids, LENGTHS), alone(encoder, ids)
    exact = alone(encoder.double(), ids)
    assert_close_rule(got, plain, exact)
    with pytest.raises(AssertionError, match="error"):  # negative control: other texts
        assert_close_rule(PackedEncoder(encoder.to(dtype))(ids, LENGTHS[::-1]), plain, exact)


@torch.no_grad()
def test_equals_the_document_mask() -> None:
    """One row under the mask `Document`, with positions that start again."""
    torch.manual_seed(1)
    encoder, ids = post_norm(), row()
    q, k, v = torch.randn(3, 1, 3, sum(LENGTHS), 4, dtype=torch.float64)
    masked = regard.attend(q, k, v, mask=Document.from_lengths(LENGTHS), backend="reference")
    parts = zip(*(x.split(LENGTHS, dim=2) for x in (q, k, v)), strict=True)
    joined = torch.cat([regard.attend(*part, backend="reference") for part in parts], dim=2)
    assert torch.allclose(masked, joined, rtol=1e-12)
    assert torch.equal(PackedEncoder(encoder)(ids, LENGTHS), PackedEncoder(encoder)(ids, LENGTHS))


@torch.no_grad()
def test_changed_weights_are_packed_again() -> None:
    torch.manual_seed(2)
    encoder, ids = post_norm(), row()
    packed = PackedEncoder(encoder)
    before = packed(ids, LENGTHS)
    encoder.layers[0].feed_forward.up.weight.mul_(2)  # type: ignore[union-attr, operator]
    after = packed(ids, LENGTHS)
    assert float((after - before).abs().max()) > 0.01
    assert_close_rule(after, alone(encoder, ids), alone(encoder.double(), ids))


def test_what_runs_the_network_as_it_is_written() -> None:
    """Every reason is named, and `embed` gives the same vectors without packed rows."""
    torch.manual_seed(4)
    network = bert.build(CONFIG).eval()
    model = TextEncoder(network, tokenizer(), CONFIG, max_seq_length=10)
    vectors = model.embed(TEXTS)
    encoder = network.encoder
    assert model.why_not_packed() is None
    assert why_not_packed_encoder(encoder) == "gradients are enabled: use torch.no_grad()"
    calls: list[int] = []
    hook = encoder.layers[1].register_forward_hook(lambda *_: calls.append(1))
    assert model.why_not_packed() == "layers.1: Block has a hook"
    assert torch.allclose(model.embed(TEXTS), vectors, atol=1e-6)
    assert calls, "the hook was called"
    hook.remove()
    hook = network.register_forward_hook(lambda *_: None)
    assert "HeadedEncoder has a hook" in str(model.why_not_packed())
    hook.remove()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.LayerNorm, "forward", lambda self, x: x)
        assert "LayerNorm.forward was replaced" in str(model.why_not_packed())
    with regard.Trace("z") as trace:
        assert "a trace is open" in str(model.why_not_packed())
        model.embed(TEXTS)
    assert "layers.1.z" in trace
    with torch.autocast("cpu"):
        assert model.why_not_packed() == "autocast is on"
    attention = encoder.layers[0].attention
    attention.mask = regard.masks.Causal()  # type: ignore[union-attr]
    assert model.why_not_packed() == "block 0 has attention with mask"
    with torch.no_grad(), pytest.raises(regard.ArgumentError, match="cannot be packed: block 0"):
        PackedEncoder(encoder)(row(), LENGTHS)
    attention.mask = None  # type: ignore[union-attr]
    with torch.no_grad(), pytest.raises(regard.ArgumentError, match="the lengths add up to 3"):
        PackedEncoder(encoder)(row(), [3])
    assert model.why_not_packed() is None
    network.double()
    assert "float64" in str(model.why_not_packed())
    assert torch.allclose(model.embed(TEXTS).float(), vectors, atol=1e-6)


def test_order_progress_and_sizes() -> None:
    torch.manual_seed(5)
    model = TextEncoder(bert.build(CONFIG).eval(), tokenizer(), CONFIG)
    seen: list[tuple[int, int]] = []
    vectors = model.embed(TEXTS, batch_size=2, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(2, 5), (4, 5), (5, 5)]
    each = torch.cat([model.embed(text) for text in TEXTS])
    assert torch.allclose(vectors, each, atol=1e-6)
    long = model.embed(TEXTS, normalize=False)
    assert torch.allclose(nn.functional.normalize(long, dim=-1), each, atol=1e-6)
    assert not torch.allclose(long.norm(dim=-1), torch.ones(5))
    assert find_groups([3, 3, 1]) == [TextGroup(0, 2, 3), TextGroup(6, 1, 1)]
    sizes = [1000, 1000, 1000, 1000, 3000]
    assert list(_batches_of(range(5), sizes, None, packed=True)) == [[0, 1], [2, 3], [4]]
    assert list(_batches_of(range(5), sizes, 1, packed=True)) == [[0], [1], [2], [3], [4]]
    assert list(_batches_of(range(5), sizes, None, packed=False)) == [[0, 1, 2, 3, 4]]
