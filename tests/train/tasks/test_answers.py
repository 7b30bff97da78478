"""What a model says and how it is counted: against searches that recompute everything, and counts
by hand.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models import EncoderDecoder, RecurrentEncoderDecoder, recurrent, transformer
from regard.models.generation import beam_search
from regard.nn.blocks.blocks import PreNorm
from regard.tracing import Trace
from regard.train.tasks import BOS, EOS, TASKS, Example
from regard.train.tasks.evaluate import (
    AccuracyBin,
    IncrementalDecoder,
    Seq2SeqModel,
    TaskAnswer,
    accuracy_by_length,
    alignment,
    answer_examples,
    generate_ids,
)
from regard.train.tasks.task import pad
from regard.train.tasks.task_training import (
    CAUSAL_MODELS,
    SEQ2SEQ_MODELS,
    Recipe,
    build,
    check_model,
    models_for,
    recipe,
)

COPY, MQAR, INDUCTION = TASKS["copy"], TASKS["mqar"], TASKS["induction"]
SMALL = Recipe(dim=8, hidden=12, layers=1, heads=2)
EXAMPLES = [Example(tuple(word), tuple(word)) for word in ("cafe", "a", "abcdefghij", "zebra")]
LIMIT = 7


def reader(name: str) -> Seq2SeqModel:
    model = build(COPY, name, SMALL)
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False).normal_(
            std=1.3 if "+" in name or name == "lstm" else 0.7
        )
    assert isinstance(model, (EncoderDecoder, RecurrentEncoderDecoder))
    return model.double().eval()


READERS = ("lstm", "gru+bahdanau", "rnn+luong", "transformer")


@torch.no_grad()
def recomputed(model: nn.Module, source: list[int]) -> list[int]:
    """Greedy, the whole beginning anew for every token, one source at a time: no cache, no
    padding.
    """
    said = [BOS]
    while len(said) <= LIMIT and said[-1] != EOS:
        logits = model(torch.tensor([source]), torch.tensor([said]))
        said.append(int(logits[0, -1].argmax()))
    return [i for i in said[1:] if i != EOS]


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", READERS)
def test_what_is_said_needs_no_cache_and_no_neighbours(name: str) -> None:
    model = reader(name)
    source = pad(COPY, EXAMPLES).source
    found = generate_ids(model, source, limit=LIMIT)
    alone = [recomputed(model, [*COPY.vocabulary.encode(e.source), EOS]) for e in EXAMPLES]
    assert found == alone
    assert len({tuple(ids) for ids in found}) > 1  # the sources make a difference


class Recomputing:
    """The step of a beam search that keeps nothing but ids."""

    def __init__(self, model: nn.Module, source: list[int]) -> None:
        self.model, self.source, self.texts = (
            model,
            torch.tensor([source]),
            torch.zeros(1, 0).long(),
        )

    def step(self, ids: Tensor) -> Tensor:
        self.texts = torch.cat([self.texts, ids], 1)
        return self.model(self.source.expand(len(self.texts), -1), self.texts)[:, -1:]

    def select(self, rows: Tensor) -> None:
        self.texts = self.texts[rows]


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", READERS)
def test_beams_carry_what_belongs_to_them(name: str) -> None:
    model = reader(name)
    found = generate_ids(model, pad(COPY, EXAMPLES).source, limit=LIMIT, beams=3)
    for e, ids in zip(EXAMPLES, found, strict=True):
        alone = Recomputing(model, [*COPY.vocabulary.encode(e.source), EOS])
        first = torch.tensor([BOS])
        (best,) = beam_search(
            alone.step, first, end=EOS, limit=LIMIT, reorder=alone.select, beams=3
        )
        assert ids == list(best[0].ids)
    if name == "transformer":  # the control: a search whose rows stay where they are is another one
        telling = IncrementalDecoder(model, pad(COPY, EXAMPLES[:1]).source)
        telling.step(torch.tensor([[BOS]]))
        telling.select(torch.tensor([0, 0]))
        logits = telling.step(torch.tensor([[4], [5]]))
        assert not torch.equal(logits[0], logits[1])


def test_outcomes_come_in_order_and_leave_the_mode() -> None:
    model = reader("gru+bahdanau").train()
    found = answer_examples(model, COPY, EXAMPLES, batch=3)
    assert [o.example for o in found] == EXAMPLES
    assert model.training
    limit = 2 * COPY.lengths[2] + 8
    for o in found[:1]:
        ids = generate_ids(model.eval(), pad(COPY, [o.example]).source, limit=limit)[0]
        assert list(o.predicted) == COPY.vocabulary.decode(ids)
    assert answer_examples(model, COPY, EXAMPLES[::-1], batch=1) == found[::-1]


class Oracle(nn.Module):
    """Answers what it is told to, at every token of a row."""

    def __init__(self, ids: Tensor, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.functional.one_hot(ids, vocabulary).float())

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[: len(ids), : ids.shape[1]]


def test_a_row_is_right_when_every_answer_is() -> None:
    e = MQAR.examples("train", 1, 5)[0]
    answers = [MQAR.vocabulary.encode([w])[0] if w else 0 for w in e.target]
    right = Oracle(torch.tensor([answers]), len(MQAR.vocabulary))
    (found,) = answer_examples(right, MQAR, [e])
    assert found.correct
    assert found.predicted == tuple(w for w in e.target if w)
    at = next(i for i, w in enumerate(e.target) if w)
    answers[at] = 0
    (found,) = answer_examples(Oracle(torch.tensor([answers]), len(MQAR.vocabulary)), MQAR, [e])
    assert not found.correct
    assert found.predicted[0] == ""


def test_bins_count_every_outcome_once() -> None:
    examples = [Example(("a",) * n, ("a",) * n) for n in (1, 2, 2, 3, 7, 20)]
    found = [TaskAnswer(e, e.source if e.length != 2 else ("b",), e.target) for e in examples]
    assert accuracy_by_length(COPY, "validation", found, 4) == [
        AccuracyBin("validation", 1, 5, 4, 2),
        AccuracyBin("validation", 6, 10, 1, 1),
        AccuracyBin("validation", 16, 20, 1, 1),
    ]
    assert accuracy_by_length(COPY, "longer", found) == []
    long = [TaskAnswer(Example(("a",) * n, ()), (), ()) for n in (21, 40)]
    assert [(b.low, b.high) for b in accuracy_by_length(COPY, "longer", long, 3)] == [
        (21, 27),
        (35, 40),
    ]


@pytest.mark.parametrize(("n", "right"), [(10, 0), (10, 3), (40, 40), (400, 200)])
def test_the_interval_is_where_the_share_is_no_surprise(n: int, right: int) -> None:
    """Its ends are the shares p at which |right/n - p| is 1.96 standard deviations of a share:
    solved by bisection.
    """

    def surprise(p: float) -> float:
        return abs(right / n - p) - 1.96 * math.sqrt(p * (1 - p) / n)

    def solve(inside: float, outside: float) -> float:
        for _ in range(100):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if surprise(middle) <= 0 else (inside, middle)
        return inside

    low, high = AccuracyBin("validation", 1, 2, n, right).interval
    assert low == pytest.approx(solve(right / n, 0.0) if right else 0.0, abs=1e-9)
    assert high == pytest.approx(solve(right / n, 1.0) if right < n else 1.0, abs=1e-9)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", ["gru+bahdanau", "lstm+luong", "transformer"])
def test_an_alignment_is_what_the_model_computed(name: str) -> None:
    model = reader(name)
    (o,) = answer_examples(model, COPY, EXAMPLES[:1])
    o = TaskAnswer(o.example, o.predicted[:5], o.expected)
    found = alignment(model, COPY, o)
    assert found is not None
    assert found.source == (*"cafe", "⏎")
    assert found.predicted == (*o.predicted, "⏎")
    assert found.weights.shape == (len(found.predicted), 5)
    torch.testing.assert_close(found.weights.sum(1), torch.ones(len(found.predicted)))
    # turning what the heaviest column brings into nothing changes the answer: those weights are in
    # use
    source = torch.tensor([[*COPY.vocabulary.encode("cafe"), EOS]])
    target = torch.tensor([[BOS, *COPY.vocabulary.encode(o.predicted)]])
    with torch.no_grad():
        plain = model(source, target)
        with Trace(edit={"pattern": lambda p: p if p.shape[-1] != 5 else p.roll(1, -1)}):
            other = model(source, target)
    assert not torch.allclose(plain, other)


def test_bahdanau_weights_by_hand() -> None:
    """The first row: softmax_j v . tanh(W s_0 + U h_j), from the paper."""
    model = reader("gru+bahdanau")
    assert isinstance(model, RecurrentEncoderDecoder)
    source = torch.tensor([[*COPY.vocabulary.encode("cafe"), EOS]])
    (o,) = answer_examples(model, COPY, EXAMPLES[:1])
    found = alignment(model, COPY, o)
    assert found is not None
    encoded = model.run_encoder(source)
    attention = model.decoder.attention
    assert attention is not None
    maps = dict(attention.project.named_parameters())
    W, U = (
        next(p for n, p in maps.items() if part in n and n.endswith("weight"))
        for part in ("q", "k")
    )
    bias = next((p for n, p in maps.items() if n.endswith("bias")), torch.zeros(()))
    s = encoded.hidden[0][-1][0]
    scores = []
    for h in encoded.source.states[0]:
        total = 0.0
        for a in range(len(W)):
            inner = sum(W[a, i] * s[i] for i in range(len(s))) + sum(
                U[a, i] * h[i] for i in range(len(h))
            )
            total += float(
                attention.weight[0, a] * torch.tanh(inner + (bias[a] if bias.ndim else bias))
            )
        scores.append(total)
    weights = [math.exp(x - max(scores)) for x in scores]
    assert found.weights[0].tolist() == pytest.approx([w / sum(weights) for w in weights], abs=1e-6)


def test_a_decoder_looks_at_its_row_and_a_recurrence_has_nothing_to_show() -> None:
    e = INDUCTION.examples("train", 1, 3)[0]
    for name in CAUSAL_MODELS:
        model = build(INDUCTION, name, SMALL).eval()
        (o,) = answer_examples(model, INDUCTION, [e])
        found = alignment(model, INDUCTION, o)
        if name == "decoder":
            assert found is not None
            assert found.weights.shape == (len(o.expected), e.length)
            assert found.label.endswith("of 2 heads")
        else:
            assert found is None
    (o,) = answer_examples(reader("lstm"), COPY, EXAMPLES[:1])
    assert alignment(reader("lstm"), COPY, o) is None


def test_the_sharpest_head_is_taken() -> None:
    model = build(COPY, "transformer", Recipe(dim=8, hidden=8, layers=2, heads=2)).eval()
    for p in model.parameters():
        p.requires_grad_(requires_grad=False).normal_(std=0.8)
    o = TaskAnswer(EXAMPLES[0], EXAMPLES[0].source, EXAMPLES[0].target)
    with Trace("pattern") as trace:
        model(
            torch.tensor([[*COPY.vocabulary.encode("cafe"), EOS]]),
            torch.tensor([[BOS, *COPY.vocabulary.encode("cafe")]]),
        )
    heads = {
        f"decoder layer {layer}, head {h}": trace[f"decoder.layers.{layer}.cross.pattern"][0, h]
        for layer in range(2)
        for h in range(2)
    }
    sharp = {name: float(p.amax(-1).mean()) for name, p in heads.items()}
    best = max(sharp, key=sharp.__getitem__)
    found = alignment(model, COPY, o)
    assert found is not None
    assert found.label == f"{best}, the sharpest of 4 heads"
    assert torch.equal(found.weights, heads[best])
    assert len(set(sharp.values())) == 4


def test_every_model_can_be_built_and_says_what_it_cannot() -> None:
    for task in (COPY, MQAR):
        for name in models_for(task):
            sizes = recipe(task, name).with_overrides(
                {"dim": 8, "hidden": 8, "steps": None, "other": 3}
            )
            assert (sizes.dim, sizes.steps) == (8, recipe(task, name).steps)
            assert sum(p.numel() for p in build(task, name, sizes).parameters()) > 0
    assert len(SEQ2SEQ_MODELS) == 10
    with pytest.raises(ArgumentError, match=r"'mqar' .*has no source for an encoder"):
        check_model(MQAR, "lstm+luong")
    with pytest.raises(ArgumentError, match=r"task 'copy' maps a source to a target.*'decoder'"):
        check_model(COPY, "decoder")
    with pytest.raises(ArgumentError, match=r"no model 'lstm\+bahdnau'; did you mean"):
        build(COPY, "lstm+bahdnau", SMALL)
    with pytest.raises(ArgumentError, match="--kv-heads is an option of model 'decoder', and the"):
        build(MQAR, "gru", replace(SMALL, kv_heads=2))
    with pytest.raises(ArgumentError, match="dim 6 / heads 2 is the dim of a head and must be"):
        build(MQAR, "decoder", Recipe(dim=6, heads=2))


def test_a_decoder_attends_with_what_it_is_told() -> None:
    plain = build(MQAR, "decoder", SMALL)
    assert plain.layers[0].attention.project.shape.G == 2  # type: ignore[union-attr,index]
    for change, name in (
        ({"attention": "retention"}, "Recurrent"),
        ({"attention": "mqa", "window": 4}, "Attention"),
    ):
        made = build(MQAR, "decoder", replace(SMALL, **change))
        assert type(made.layers[0].attention).__name__ == name  # type: ignore[union-attr,index]
    with pytest.raises(ArgumentError, match="did you mean 'retention'"):
        build(MQAR, "decoder", replace(SMALL, attention="retnetion"))


def test_what_is_wrong_is_refused() -> None:
    model = reader("lstm")
    with pytest.raises(ArgumentError, match="batch is 0; it must be 1 or more"):
        answer_examples(model, COPY, EXAMPLES, batch=0)
    with pytest.raises(ArgumentError, match="count is 0; it must be 1 or more"):
        accuracy_by_length(COPY, "validation", [], 0)
    with pytest.raises(ArgumentError, match="task 'mqar' predicts single tokens, so beams must be"):
        answer_examples(model, MQAR, [], beams=2)
    with pytest.raises(ArgumentError, match="beams is 0; it must be at least 1"):
        answer_examples(model, COPY, EXAMPLES, beams=0)
    with pytest.raises(ArgumentError, match="limit is 0; it must be at least 1"):
        generate_ids(transformer(7, 8, 2, 1, residual=PreNorm), torch.tensor([[3, EOS]]), limit=0)
    assert generate_ids(recurrent(7, 4, 4), torch.tensor([[3, EOS]]), limit=1)
