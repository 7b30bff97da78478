"""The first Transformer: against torch's own, with caches, under padding, and what may leak."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import Trace
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder, transformer
from regard.models.generation import greedy
from regard.nn.blocks.blocks import PostNorm, PreNorm
from regard.positions import sinusoidal
from regard.span import Span

V, M, H = 11, 16, 4
PATHS = {"post-norm": PostNorm, "pre-norm": PreNorm}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def build(name: str = "post-norm", layers: int = 2) -> EncoderDecoder:
    torch.manual_seed(1)
    model = transformer(V, M, H, layers, hidden=24, residual=PATHS[name])
    for (
        parameter
    ) in model.parameters():  # norms too: with weights of 1 several mistakes are invisible
        parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def ids(*shape: int) -> Tensor:
    return torch.randint(0, V, shape)


def close(x: Tensor, y: Tensor) -> bool:
    return float((x - y).detach().abs().max()) < 1e-11 * float(y.detach().abs().max())


def give(theirs: nn.MultiheadAttention, ours: Any) -> None:
    parts = (ours.project.q, ours.project.k, ours.project.v)
    theirs.in_proj_weight.copy_(torch.cat([part.linear.weight for part in parts]))
    theirs.out_proj.weight.copy_(ours.output.weight)


def torch_stack(layers: Any, kind: type, cross: bool) -> list[Any]:
    """torch's own layers with the weights of blocks."""
    make: Any = nn.TransformerDecoderLayer if cross else nn.TransformerEncoderLayer
    made = []
    for block in layers:
        other = (
            make(M, H, 24, dropout=0.0, batch_first=True, norm_first=kind is PreNorm)
            .double()
            .eval()
        )
        for bias in (
            x for n, x in other.named_parameters() if n.endswith(("in_proj_bias", "out_proj.bias"))
        ):
            bias.zero_()
        give(other.self_attn, block.attention)
        norms = [block.attention_residual.norm]
        if cross:
            give(other.multihead_attn, block.cross)
            norms.append(block.cross_residual.norm)
        for i, norm in enumerate([*norms, block.feed_forward_residual.norm]):
            getattr(other, f"norm{i + 1}").load_state_dict(norm.state_dict())
        other.linear1.load_state_dict(block.feed_forward.up.state_dict())
        other.linear2.load_state_dict(block.feed_forward.down.state_dict())
        made.append(other)
    return made


def torch_model(
    model: EncoderDecoder, kind: type, source: Tensor, target: Tensor, scale: float
) -> Tensor:
    def embed(x: Tensor) -> Tensor:
        table = sinusoidal(x.shape[1], M, dtype=torch.float64)
        return model.embed.embedding.weight[x] * scale + table

    memory = embed(source)
    for layer in torch_stack(model.encoder.layers, kind, cross=False):
        memory = layer(memory)
    memory = model.encoder.norm(memory)
    x, ahead = embed(target), torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
    for layer in torch_stack(model.layers, kind, cross=True):
        x = layer(x, memory, tgt_mask=ahead)
    return model.norm(x) @ model.embed.embedding.weight.T


@pytest.mark.parametrize("name", PATHS)
def test_is_torchs(name: str) -> None:
    model, source, target = build(name), ids(2, 6), ids(2, 4)
    out = model(source, target)
    assert close(out, torch_model(model, PATHS[name], source, target, math.sqrt(M)))
    assert not close(out, torch_model(model, PATHS[name], source, target, 1.0)), (
        "an embedding without its factor"
    )


@pytest.mark.parametrize("name", PATHS)
def test_cached_decoding_in_any_chunks_is_one_pass(name: str) -> None:
    model, source, target = build(name), ids(2, 6), ids(2, 9)
    whole = model(source, target)
    for sizes in ([9], [1] * 9, [2, 5, 2]):
        caches, memory, parts, start = model.new_caches(), model.encoder(source), [], 0
        for n in sizes:
            given = {} if start else {"memory": memory}
            parts.append(model.run_decoder(target[:, start : start + n], caches, **given))
            start += n
        assert close(torch.cat(parts, 1), whole)
        assert [(len(own), len(cross)) for own, cross in caches] == [(9, 6)] * 2


@pytest.mark.parametrize("name", PATHS)
def test_padding_of_source_and_target_changes_nothing(name: str) -> None:
    """Left, right, and in a batch with longer rows; the ids of padding need not even exist."""
    model, source, target = build(name), ids(1, 6), ids(1, 4)
    usual = model(source, target)
    for (a, b), (c, d) in (((2, 0), (0, 0)), ((0, 3), (0, 0)), ((1, 2), (2, 1)), ((0, 0), (3, 0))):
        wide, other = torch.full((1, a + 6 + b), V + 7), torch.full((1, c + 4 + d), -5)
        wide[:, a : a + 6], other[:, c : c + 4] = source, target
        at, to = torch.full_like(wide, -1), torch.full_like(other, -1)
        at[:, a : a + 6], to[:, c : c + 4] = torch.arange(6), torch.arange(4)
        out = model(wide, other, at, to)[:, c : c + 4]
        assert close(out, usual), (a, b, c, d)
        rows = [
            torch.cat([x, y])
            for x, y in ((wide % V, ids(*wide.shape)), (other % V, ids(*other.shape)))
        ]
        longer = [torch.cat([x, torch.arange(x.shape[1])[None]]) for x in (at, to)]
        assert close(model(*rows, *longer)[:1, c : c + 4], usual), "beside a longer row"


def test_padding_that_is_not_marked_matters() -> None:
    """Negative control."""
    model, source, target = build(), ids(1, 6), ids(1, 4)
    wide = torch.cat([source, ids(1, 2)], 1)
    assert not close(model(wide, target), model(source, target))


def test_padded_rows_decode_with_caches() -> None:
    """Left-padded targets and sources, one token at a time: each row is what it is alone."""
    model, source, target = build(), ids(2, 6), ids(2, 7)
    at, to = torch.arange(6).repeat(2, 1), torch.arange(7).repeat(2, 1)
    at[0] = torch.tensor([-1, -1, 0, 1, 2, 3])
    to[0] = torch.tensor([-1, -1, 0, 1, 2, 3, 4])
    caches, memory = model.new_caches(), model.encoder(source, at)
    parts = [
        model.run_decoder(
            target[:, :4], caches, positions=to[:, :4], memory=memory, memory_positions=at
        )
    ]
    parts += [model.run_decoder(target[:, i : i + 1], caches) for i in range(4, 7)]
    out = torch.cat(parts, 1)
    assert close(out[:1, 2:], model(source[:1, 2:], target[:1, 2:]))
    assert close(out[1:], model(source[1:], target[1:]))


@pytest.mark.parametrize("name", PATHS)
def test_what_leaks_where(name: str) -> None:
    """Jacobians: a logit depends on no later target, on every earlier one, and on all of the
    source.
    """
    model = build(name)
    source, target = (torch.randn(1, n, M, dtype=torch.float64) for n in (4, 5))

    def run(source: Tensor, target: Tensor) -> Tensor:
        for layer in model.encoder.layers:
            source = layer(source)
        for layer in model.layers:
            target = layer(target, memory=model.encoder.norm(source))
        out: Tensor = model.head(model.norm(target))[0]
        return out[:, 0]

    with torch.enable_grad():
        by_source, by_target = torch.autograd.functional.jacobian(run, (source, target))
    assert torch.equal(
        by_target[:, 0].abs().amax(-1) > 0, torch.ones(5, 5, dtype=torch.bool).tril()
    )
    assert (by_source[:, 0].abs().amax(-1) > 0).all()


def test_nothing_of_the_future_reaches_a_logit() -> None:
    model, source, target = build(), ids(2, 6), ids(2, 9)
    usual = model(source, target)
    for first in (1, 5, 8):
        changed = target.clone()
        changed[:, first:] = (changed[:, first:] + 1) % V
        out = model(source, changed)
        assert torch.equal(out[:, :first], usual[:, :first])
        assert not close(out[:, first], usual[:, first])


def test_a_refused_call_leaves_every_cache() -> None:
    model, source, target = build(), ids(2, 6), ids(2, 3)
    caches = model.new_caches()

    def sizes() -> list[tuple[int, int]]:
        return [(len(own), len(cross)) for own, cross in caches]

    memory = model.encoder(source)
    with pytest.raises(regard.ArgumentError, match="there is no memory to attend to"):
        model.run_decoder(target, caches)
    assert sizes() == [(0, 0)] * 2
    caches[1].cross.update((torch.zeros(2, 4, 5, 4).double(),) * 2, Span(0, 5))
    with pytest.raises(regard.ArgumentError, match="written once"):  # by the second layer
        model.run_decoder(target, caches, memory=memory)
    assert sizes() == [(0, 0), (0, 5)]
    with pytest.raises(regard.ArgumentError, match="1 pair of caches for 2 layers; new_caches"):
        model.run_decoder(target, caches[:1], memory=memory)
    with pytest.raises(regard.ArgumentError, match=r"ids are \(3,\); they must be \[batch"):
        model.run_decoder(target[0], memory=memory)
    with pytest.raises(regard.ArgumentError, match=r"ids are \(6,\); they must be \[batch"):
        model.encoder(source[0])


def test_taps_have_places() -> None:
    model = build()
    with Trace("pattern", "decoder.layers.1.cross.z") as trace:
        model(ids(2, 6), ids(2, 4))
    shapes = {name: tuple(trace[name].shape) for name in trace}
    assert shapes == {
        **{f"encoder.layers.{i}.pattern": (2, H, 6, 6) for i in range(2)},
        **{f"decoder.layers.{i}.attention.pattern": (2, H, 4, 4) for i in range(2)},
        **{f"decoder.layers.{i}.cross.pattern": (2, H, 4, 6) for i in range(2)},
        "decoder.layers.1.cross.z": (2, H, 4, 4),
    }


def test_one_matrix_serves_both_embeddings_and_the_head() -> None:
    model = build()
    assert model.head.weight is model.embed.embedding.weight
    assert model.encoder.embed is model.embed
    names = {name for name, _ in model.named_parameters()}
    assert not any(name.startswith(("head", "embed")) for name in names), (
        "counted once, in the encoder"
    )
    other = copy.deepcopy(model)
    assert other.head.weight is other.encoder.embed.embedding.weight
    assert other.head.weight is not model.head.weight
    again = build("post-norm")
    again.load_state_dict(model.state_dict())
    source, target = ids(1, 3), ids(1, 3)
    assert torch.equal(again(source, target), model(source, target))
    assert torch.equal(other(source, target), model(source, target))


@pytest.mark.full
def test_compiles_without_a_break() -> None:
    torch._dynamo.reset()
    model = build(layers=1).float()
    source, target, at = ids(2, 6), ids(2, 4), torch.arange(6).repeat(2, 1)
    at[0, :2] = -1
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = run(source, target, at)
    assert float((out - model(source, target, at)).abs().max()) < 1e-4


def test_greedy_with_caches_is_greedy_without() -> None:
    model, source = build(), ids(3, 6)
    caches, memory = model.new_caches(), model.encoder(source)
    given = {"memory": memory}

    def step(ids: Tensor) -> Tensor:
        logits = model.run_decoder(ids, caches, **given)
        given.clear()
        return logits

    found = greedy(step, torch.zeros(3, dtype=torch.long), end=V, limit=8)
    target = torch.zeros(3, 1, dtype=torch.long)
    for _ in range(8):
        target = torch.cat([target, model(source, target)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, target[:, 1:])


def test_greedy_refuses() -> None:
    def step(ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, 2)

    with pytest.raises(regard.ArgumentError, match="limit is 0; it must be at least 1"):
        greedy(step, torch.zeros(1, dtype=torch.long), end=1, limit=0)
    with pytest.raises(regard.ArgumentError, match=r"first is \(1, 1\); it must be one id per row"):
        greedy(step, torch.zeros(1, 1, dtype=torch.long), end=1, limit=1)


def test_an_encoder_alone() -> None:
    encoder: Any = build("pre-norm").encoder
    assert isinstance(encoder, Encoder)
    source, at = ids(1, 6), torch.tensor([[-1, 0, 1, 2, 3, -1]])
    assert close(encoder(source, at)[:, 1:5], encoder(source[:, 1:5]))
    before = encoder(source)
    encoder.norm.weight.zero_()
    assert torch.equal(encoder(source), encoder.norm.bias.expand_as(before)), (
        "a pre-norm stack ends in a norm"
    )


def parameters(
    vocabulary: int = 37000, dim: int = 512, heads: int = 8, layers: int = 6, hidden: int = 2048
) -> int:
    with torch.device("meta"):
        made = transformer(vocabulary, dim, heads, layers, hidden=hidden)
    return sum(x.numel() for x in made.parameters())


def test_the_papers_sizes() -> None:
    """The base model by hand, and the differences between rows of table 3, which are printed in
    millions.
    """
    attention, feed, norm = 4 * 512**2, 2 * 512 * 2048 + 2048 + 512, 2 * 512
    reads, writes = attention + feed + 2 * norm, 2 * attention + feed + 3 * norm
    assert parameters() == 37000 * 512 + 6 * (reads + writes) == 63_045_632
    for more, less, printed in (
        ({"layers": 4}, {"layers": 2}, 50 - 36),
        ({"layers": 8}, {}, 80 - 65),
        ({}, {"hidden": 1024}, 65 - 53),
        ({"hidden": 4096}, {}, 90 - 65),
        ({"heads": 16}, {"heads": 8}, 0),
    ):
        difference = (parameters(**more) - parameters(**less)) / 1e6
        assert abs(difference - printed) <= 1, "either number is rounded"
    # 65 of the base and 213 of the big one: the shared vocabulary is about 37000 words, which is
    # its only free size
    assert abs(parameters() / 65e6 - 1) < 0.04
    assert abs(parameters(dim=1024, heads=16, hidden=4096) / 213e6 - 1) < 0.01


def test_what_the_encoder_makes_is_encode() -> None:
    """At its place among the taps, and as forward uses it."""
    model, source, target = build(), ids(2, 6), ids(2, 4)
    at = (
        torch.arange(6).expand(2, -1).masked_fill(torch.tensor([[0] * 5 + [1], [0] * 6]).bool(), -1)
    )
    with Trace("z") as trace:
        memory = model.run_encoder(source, at)
    assert list(trace) == [f"encoder.layers.{i}.z" for i in range(2)]
    assert close(memory[:, :5], model.encoder(source, at)[:, :5])
    assert torch.equal(
        model.run_decoder(target, memory=memory, memory_positions=at), model(source, target, at)
    )


def test_errors() -> None:
    cases = [
        (lambda: transformer(0, 8, 2, 1), "vocabulary is 0; it must be at least 1"),
        (lambda: transformer(V, -8, 2, 1), "dim is -8; it must be at least 1"),
        (lambda: transformer(V, 8, 2, 0), "layers is 0; it must be at least 1"),
        (lambda: transformer(V, 8, 2, 1, hidden=0), "hidden is 0; it must be at least 1"),
        (lambda: transformer(V, 8, 3, 1), "dim 8 is not divisible by 3 heads; give head_dim, or"),
        (lambda: transformer(V, 8, 2, 1, dropout=1.0), "dropout is 1.0; it must be at least 0 and"),
    ]
    for make, message in cases:
        with pytest.raises(regard.ArgumentError) as error:
            make()
        assert str(error.value).startswith(message)
