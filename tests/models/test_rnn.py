"""Recurrent encoder-decoders: their steps written out, padding, explicit state, and what attention
is good for.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard import Trace
from regard.models.rnn import RecurrentEncoderDecoder, recurrent
from regard.nn.blocks.rnn import BahdanauDecoder, PlainDecoder, RecurrentDecoder, run_rnn
from regard.nn.variants import bahdanau
from regard.span import Span
from tests.oracles.additive import additive

V, M, R = 11, 6, 8
CELLS = ("rnn", "gru", "lstm")
ATTENTIONS = (None, "bahdanau", "luong")
KINDS = [(cell, attention) for cell in CELLS for attention in ATTENTIONS]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def build(cell: str, attention: str | None, **options: Any) -> RecurrentEncoderDecoder:
    torch.manual_seed(1)
    model = recurrent(V, M, R, cell=cell, attention=attention, **options)
    for parameter in model.parameters():
        parameter.normal_(std=0.7)
    return model.double().eval()


def ids(*shape: int) -> Tensor:
    return torch.randint(0, V, shape)


def close(x: Tensor, y: Tensor) -> bool:
    return float((x - y).abs().max()) < 1e-12 * max(1.0, float(y.abs().max()))


# One step of each network, from its equation and the weights alone.


def cell_step(
    rnn: Any, x: Tensor, h: Tensor, c: Tensor, suffix: str = "_l0"
) -> tuple[Tensor, Tensor]:
    w, u, b, d = (
        getattr(rnn, f"{n}{suffix}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    a, r = w @ x + b, u @ h + d
    if isinstance(rnn, nn.LSTM):
        i, f, g, o = (a + r).chunk(4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    if isinstance(rnn, nn.GRU):
        (ar, az, an), (rr, rz, rn) = a.chunk(3), r.chunk(3)
        z, new = torch.sigmoid(az + rz), torch.tanh(an + torch.sigmoid(ar + rr) * rn)
        return (1 - z) * new + z * h, c
    return torch.tanh(a + r), c


def run(rnn: Any, xs: list[Tensor], suffix: str = "_l0") -> tuple[list[Tensor], Tensor, Tensor]:
    h, c, states = torch.zeros(R).double(), torch.zeros(R).double(), []
    for x in xs:
        h, c = cell_step(rnn, x, h, c, suffix)
        states.append(h)
    return states, h, c


def written_out(model: Any, source: Tensor, target: Tensor) -> Tensor:
    """One row, token by token: encoder, decoder, attention by the oracle."""
    embed, decoder = model.embedding.weight, model.decoder
    xs = [embed[i] for i in source]
    states, h, c = run(model.encoder, xs)
    if model.encoder.bidirectional:
        back, h, c = run(model.encoder, xs[::-1], "_l0_reverse")
        states = [torch.cat(pair) for pair in zip(states, back[::-1], strict=True)]
    memory = torch.stack(states)
    s = h if model.bridge is None else torch.tanh(model.bridge.weight @ h + model.bridge.bias)
    rows = []
    for i in target:
        y = embed[i]
        if isinstance(decoder, BahdanauDecoder):
            project, w = decoder.attention.project, decoder.attention.weight
            q, k = project.q.weight @ s, memory @ project.k.weight.T
            found = additive(q[None, None, None], k[None, None], memory[None, None], w)[0][0, 0, 0]
            s, c = cell_step(decoder.rnn, torch.cat([y, found]), s, c)
            pieces = decoder.read.weight @ torch.cat([s, y, found]) + decoder.read.bias
            out = torch.stack([max(pair) for pair in pieces.view(-1, 2)])
        else:
            s, c = cell_step(decoder.rnn, y, s, c)
            out = s
            if decoder.attention is not None:
                e = [float((decoder.attention.project.q.weight @ s) @ row) for row in memory]
                total = math.fsum(math.exp(x - max(e)) for x in e)
                found = sum(
                    math.exp(x - max(e)) / total * row for x, row in zip(e, memory, strict=True)
                )
                out = torch.tanh(decoder.combine.weight @ torch.cat([found, s]))
        rows.append(model.head.weight @ out + model.head.bias)
    return torch.stack(rows)


@pytest.mark.parametrize("cell, attention", KINDS)
def test_is_the_formula(cell: str, attention: str | None) -> None:
    model, source, target = build(cell, attention), ids(2, 5), ids(2, 4)
    out = model(source, target)
    for b in range(2):
        assert close(out[b], written_out(model, source[b], target[b]))
    # negative controls: the source read backwards, the target moved by one
    assert not close(out[0], written_out(model, source[0].flip(0), target[0]))
    assert not close(out[0], written_out(model, source[0], target[0].roll(1)))


@pytest.mark.parametrize("cell, attention", KINDS)
def test_padding_on_any_side_changes_nothing(cell: str, attention: str | None) -> None:
    """Left, right, in between, and beside a longer row; the ids of padding need not even exist."""
    model, source, target = build(cell, attention, layers=2), ids(1, 5), ids(1, 4)
    usual = model(source, target)
    places = ([2, 3, 4, 5, 6], [0, 1, 2, 3, 4], [0, 2, 3, 6, 7])
    for slots in places:
        wide, at = torch.full((2, 8), V + 3), torch.full((2, 8), -1)
        wide[0, slots], at[0, slots] = source[0], torch.arange(5)
        wide[1], at[1] = ids(8), torch.arange(8)
        other, to = torch.full((2, 8), -7), torch.full((2, 8), -1)
        kept = slots[:4]
        other[0, kept], to[0, kept] = target[0], torch.arange(4)
        other[1], to[1] = ids(8), torch.arange(8)
        out = model(wide, other, at, to)
        assert close(out[:1, kept], usual), slots
        assert close(out[1:], model(wide[1:], other[1:])), slots


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_that_is_not_marked_matters(attention: str | None) -> None:
    """Negative control, and the same for the alignment: padded slots have weight 0."""
    model, source, target = build("gru", attention), ids(1, 5), ids(1, 4)
    wide = torch.cat([source, ids(1, 3)], 1)
    assert not close(model(wide, target), model(source, target))
    if attention is None:
        return
    at = torch.tensor([[0, 1, 2, 3, 4, -1, -1, -1]])
    with Trace("pattern") as trace:
        model(wide, target, at)
    pattern = torch.cat(trace.every("decoder.pattern"), 2)
    assert pattern.shape == (1, 1, 4, 8)
    assert pattern[..., 5:].eq(0).all()
    assert close(pattern.sum(-1), torch.ones(1, 1, 4).double())


def test_rows_without_a_token() -> None:
    """A source of padding alone: the decoder starts from zeros, or their map, and finds nothing."""
    for attention in ATTENTIONS:
        model, target = build("lstm", attention), ids(1, 4)
        source, at = ids(2, 5), torch.arange(5).repeat(2, 1)
        at[0] = -1
        out = model(source, target.expand(2, -1), at)
        assert out.isfinite().all()
        assert close(out[:1], model(source[:1, :0], target))
        assert close(out[1:], model(source[1:], target))


@pytest.mark.parametrize("cell, attention", KINDS)
def test_steps_with_explicit_state_are_teacher_forcing(cell: str, attention: str | None) -> None:
    model, source, target = build(cell, attention, layers=2), ids(2, 5), ids(2, 9)
    at = torch.tensor([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]])
    whole = model(source, target, at)
    for sizes in ([1] * 9, [4, 0, 5], [9]):
        carried, parts, start = model.begin(model.run_encoder(source, at)), [], 0
        for n in sizes:
            logits, carried = model.step(target[:, start : start + n], carried)
            parts.append(logits)
            start += n
        assert close(torch.cat(parts, 1), whole)


def test_a_state_can_be_gone_back_to() -> None:
    """A step changes nothing in what it was given: two continuations of one state do not meet."""
    for attention in ATTENTIONS:
        model, source = build("lstm", attention), ids(2, 5)
        carried = model.begin(model.run_encoder(source))
        before = [x.clone() for x in carried.hidden]
        first, _ = model.step(ids(2, 3), carried)
        again, other = model.step(ids(2, 3), carried)
        assert not close(first, again)
        assert all(torch.equal(x, y) for x, y in zip(before, carried.hidden, strict=True))
        assert not torch.equal(other.hidden[0], carried.hidden[0])


def test_greedy_is_the_argmax_of_teacher_forcing() -> None:
    for attention in ATTENTIONS:
        model, source = build("gru", attention), ids(3, 5)
        found = model.greedy(source, start=0, end=V, limit=6)
        target = torch.zeros(3, 1, dtype=torch.long)
        for _ in range(6):
            target = torch.cat([target, model(source, target)[:, -1:].argmax(-1)], 1)
        assert torch.equal(found, target[:, 1:])


def test_scan_runs_in_the_order_of_positions() -> None:
    for make in (nn.RNN, nn.GRU, nn.LSTM):
        rnn: Any = make(3, 4, 2, batch_first=True, bidirectional=True).double()
        x = torch.randn(2, 5, 3).double()
        usual, after = run_rnn(rnn, x)
        order = torch.tensor([3, 0, 4, 1, 2])
        out, other = run_rnn(rnn, x[:, order], order[None])
        assert close(out, usual[:, order])
        for a, b in zip(after, other, strict=True):
            assert close(a, b)
        start = tuple(torch.randn_like(part) for part in after)
        blind, kept = run_rnn(rnn, torch.full_like(x, math.nan), torch.full((2, 5), -1), start)
        assert blind.eq(0).all()
        assert all(torch.equal(a, b) for a, b in zip(start, kept, strict=True)), (
            "no token, no change"
        )
        nothing, same = run_rnn(rnn, x[:, :0], None, start)
        assert nothing.shape == (2, 0, 8)
        assert same is start
        assert close(run_rnn(rnn, x, Span(-2, 5))[0][:, 2:], run_rnn(rnn, x[:, 2:])[0])


def test_gradients_pass_through_padding() -> None:
    for attention in ATTENTIONS:
        model, source, target = build("gru", attention), ids(2, 4), ids(2, 3)
        at = torch.tensor([[-1, 0, 1, -1], [0, 1, 2, 3]])
        with torch.enable_grad():
            grads = []
            for rows in ((source, target, at), None):
                model.zero_grad()
                if rows is not None:
                    model(*rows).sin().sum().backward()
                else:  # row by row, without padding
                    (
                        model(source[:1, 1:3], target[:1]).sin().sum()
                        + model(source[1:], target[1:]).sin().sum()
                    ).backward()
                grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert len(grads[0]) == len(list(model.parameters()))
        for a, b in zip(*grads, strict=True):
            assert float((a - b).abs().max()) < 1e-11 * max(1.0, float(b.abs().max()))


def test_copies_and_state_dict() -> None:
    model, source, target = build("lstm", "bahdanau"), ids(2, 5), ids(2, 4)
    usual = model(source, target)
    assert torch.equal(copy.deepcopy(model)(source, target), usual)
    again = recurrent(V, M, R, cell="lstm", attention="bahdanau").double()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(source, target), usual)


# What attention is good for.

LENGTH, HIDDEN = 8, 16


def learn(attention: str | None, steps: int) -> tuple[RecurrentEncoderDecoder, float]:
    """Train to say rows of eight letters backwards; return the model and its share of right letters
    on new rows.
    """
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    model = recurrent(10, 16, HIDDEN, attention=attention)
    adam = torch.optim.Adam(model.parameters(), lr=2e-2)

    def rows(n: int) -> tuple[Tensor, Tensor]:
        source = torch.randint(1, 10, (n, LENGTH), generator=draw)
        return source, source.flip(1)

    with torch.enable_grad():
        for _ in range(steps):
            source, target = rows(256)
            logits = model(source, F.pad(target, (1, -1)))
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
    source, target = rows(256)
    said = model.greedy(source, start=0, end=10, limit=LENGTH)
    return model, float((said == target).float().mean())


@pytest.mark.full
def test_attention_solves_a_length_that_one_state_does_not() -> None:
    """With the same state of 16 numbers and at least as many steps, the model without attention
    forgets; attention looks it up.
    """
    _, without = learn(None, 130)
    model, with_luong = learn("luong", 130)
    _, with_bahdanau = learn("bahdanau", 70)
    assert without < 0.6
    assert with_luong > 0.7
    assert with_bahdanau > 0.7
    source = torch.randint(1, 10, (64, LENGTH))
    with Trace("pattern") as trace:
        model(source, F.pad(source.flip(1), (1, -1)))
    looked = trace["decoder.pattern"][:, 0].mean(0).argmax(-1)
    back = torch.arange(LENGTH).flip(0)
    assert int(((looked - back).abs() <= 1).sum()) >= LENGTH - 2, (
        "step i looks at letter n - 1 - i, or beside it"
    )


def test_errors() -> None:
    gru = nn.GRU(3, 4, batch_first=True)
    two_ways = nn.GRU(3, 4, batch_first=True, bidirectional=True)
    embedding, head = nn.Embedding(V, 3), nn.Linear(4, V)

    def model(encoder: nn.RNNBase) -> RecurrentEncoderDecoder:
        return RecurrentEncoderDecoder(embedding, encoder, PlainDecoder(gru), head)

    cases: list[tuple[Any, str]] = [
        (lambda: recurrent(V, M, R, cell="qrnn"), "cell is 'qrnn'; it must be one of rnn, gru,"),
        (lambda: recurrent(V, M, R, attention="dot"), "attention is 'dot'; it must be one of"),
        (
            lambda: recurrent(V, M, R, score="dot"),
            "score is 'dot', but only attention=\"luong\" has several scores",
        ),
        (lambda: recurrent(V, M, R, attention="luong", score="x"), "score is 'x'; it must be one"),
        (lambda: recurrent(0, M, R), "vocabulary is 0; it must be at least 1"),
        (lambda: recurrent(V, M, -1), "hidden is -1; it must be at least 1"),
        (lambda: recurrent(V, M, R, layers=0), "layers is 0; it must be at least 1"),
        (lambda: model(nn.LSTM(3, 4, batch_first=True)), "the encoder's mode is LSTM and the"),
        (lambda: model(nn.GRU(3, 4, 2, batch_first=True)), "the encoder's num_layers is 2 and"),
        (lambda: model(nn.GRU(3, 5, batch_first=True)), "the encoder's hidden_size is 5 and the"),
        (lambda: model(nn.GRU(3, 4)), "GRU(3, 4) takes [length, batch, dim]; construct it with"),
        (lambda: PlainDecoder(two_ways), f"{two_ways} is bidirectional, but a decoder cannot read"),
        (lambda: model(gru)(ids(3), ids(1, 3)), "ids are (3,); they must be [batch, length]: use"),
        (
            lambda: model(gru)(ids(1, 3), ids(1, 3), torch.zeros(1, 2, dtype=torch.long)),
            "positions is (1, 2); it must be (1, 3) or (1, 3)",
        ),
    ]
    for call, message in cases:
        with pytest.raises(regard.ArgumentError) as error:
            call()
        assert str(error.value).startswith(message)
    with pytest.raises(TypeError, match="abstract"):
        RecurrentDecoder(gru)  # type: ignore[abstract]
    bare = BahdanauDecoder(nn.GRU(7, 4, batch_first=True), bahdanau(4), 4, features=5)
    assert bare.read.out_features == 10
