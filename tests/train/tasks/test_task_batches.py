"""Batches of made examples: padding, order, resuming; and the losses on them against loops in
float64.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models import recurrent, transformer
from regard.train.losses import AnswerLoss, Seq2SeqLoss, padded_positions, smoothed_cross_entropy
from regard.train.tasks import BOS, EOS, PAD, TASKS, Example
from regard.train.tasks.task import IGNORE_INDEX, POOL_BATCHES, PaddedBatch, TaskBatches, pad
from tests.rules import GRADIENT, assert_close_rule

COPY, MQAR = TASKS["copy"], TASKS["mqar"]


def test_pairs_are_padded_on_the_right() -> None:
    found = pad(COPY, [Example(("b",), ("c", "a")), Example(("a", "b", "c"), ())])
    assert found.source.tolist() == [[4, EOS, PAD, PAD], [3, 4, 5, EOS]]
    assert found.target.tolist() == [[BOS, 5, 3, EOS], [BOS, EOS, PAD, PAD]]


def test_rows_hold_what_must_come_next() -> None:
    a, b = MQAR.vocabulary.encode(["k0", "v0"])
    found = pad(MQAR, [Example(("k0",), ("v0",)), Example(("k0", "v0", "k0"), ("", "", "v0"))])
    assert found.source.tolist() == [[a, PAD, PAD], [a, b, a]]
    assert found.target.tolist() == [
        [b, IGNORE_INDEX, IGNORE_INDEX],
        [IGNORE_INDEX, IGNORE_INDEX, b],
    ]


def test_parts_lose_the_padding_that_they_share() -> None:
    found = pad(COPY, [Example(("a",) * n, ("b",) * n) for n in (1, 2, 5)])
    first, second = found.split(2)
    assert (len(found), len(first), len(second)) == (3, 2, 1)
    assert (first.source.shape, first.target.shape) == ((2, 3), (2, 4))
    assert torch.equal(second.source, found.source[2:])
    rows = pad(MQAR, [Example(("k0",) * n, ("v0",) * n) for n in (1, 4)])
    assert [part.target.shape for part in rows.split(1)] == [(1, 1), (1, 4)]
    nothing = PaddedBatch(torch.tensor([[3]]), torch.tensor([[IGNORE_INDEX]]))
    assert next(nothing.split(1)).target.shape == (1, 1)
    assert found.to("cpu") == found or torch.equal(found.to("cpu").source, found.source)


def test_batches_are_of_like_length_and_hold_training_examples() -> None:
    made = TaskBatches(COPY, batch=8, seed=2)
    seen: Counter[tuple[int, ...]] = Counter()
    spread = []
    for rows in islice(made, 2 * POOL_BATCHES):
        lengths = (rows.source != PAD).sum(1)
        spread.append(int(lengths.max() - lengths.min()))
        seen.update(tuple(row) for row in rows.source.tolist())
        for row in rows.source.tolist():
            words = tuple(COPY.vocabulary.decode(row))
            assert COPY.split_of(words) == "train"
    assert max(spread) <= 6
    assert len(seen) > 200
    assert iter(made) is made


def test_tokens_per_example_are_counted() -> None:
    made = TaskBatches(MQAR, batch=32)
    answers = [int((rows.target != IGNORE_INDEX).sum()) for rows in islice(made, POOL_BATCHES)]
    assert made.context == round(sum(answers) / (32 * POOL_BATCHES))


@pytest.mark.parametrize("stop", [0, 5, POOL_BATCHES, 2 * POOL_BATCHES + 3])
def test_a_saved_order_goes_on(stop: int) -> None:
    whole, cut, other = (TaskBatches(COPY, batch=2, seed=1) for _ in range(3))
    wanted = [rows.source.tolist() for rows in islice(whole, 3 * POOL_BATCHES)]
    assert [rows.source.tolist() for rows in islice(cut, stop)] == wanted[:stop]
    other.load_state_dict(cut.state_dict())
    assert [rows.source.tolist() for rows in islice(other, 3 * POOL_BATCHES - stop)] == wanted[
        stop:
    ]
    assert [
        rows.source.tolist() for rows in islice(TaskBatches(COPY, batch=2, seed=2), 9)
    ] != wanted[:9]


def test_a_state_of_other_data_is_refused() -> None:
    state = TaskBatches(COPY, batch=2).state_dict()
    for other in (
        TaskBatches(COPY, batch=3),
        TaskBatches(COPY, batch=2, seed=1),
        TaskBatches(MQAR, batch=2),
    ):
        with pytest.raises(ArgumentError, match="belongs to another task, batch size or seed than"):
            other.load_state_dict(state)
    with pytest.raises(ArgumentError, match="batch is 0; it must be 1 or more"):
        TaskBatches(COPY, batch=0)


def oracle(logits: Tensor, labels: Tensor, eps: float, ignored: int) -> Tensor:
    """The definition, label by label, in the dtype of the logits."""
    total, n, V = logits.new_zeros(()), 0, logits.shape[-1]
    for row, y in zip(logits.flatten(0, -2), labels.flatten().tolist(), strict=True):
        if y == ignored:
            continue
        log_p = row - row.max() - (row - row.max()).exp().sum().log()
        wanted = torch.full((V,), eps / V, dtype=logits.dtype)
        wanted[y] += 1 - eps
        total, n = total - (wanted * log_p).sum(), n + 1
    return total / max(1, n)


@pytest.mark.parametrize("eps", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
def test_smoothed_cross_entropy_is_the_definition(eps: float, size: float) -> None:
    logits = size * torch.randn(3, 5, 7)
    labels = torch.randint(0, 7, (3, 5)).masked_fill(torch.rand(3, 5) < 0.3, IGNORE_INDEX)
    x, x32, x64 = (
        logits.to(d).requires_grad_() for d in (torch.float32, torch.float32, torch.float64)
    )
    ours, plain, ref = (
        smoothed_cross_entropy(x, labels, eps),
        oracle(x32, labels, eps, IGNORE_INDEX),
        oracle(x64, labels, eps, IGNORE_INDEX),
    )
    assert_close_rule(ours, plain, ref, what="loss")
    grads = [torch.autograd.grad(loss, at)[0] for loss, at in ((ours, x), (plain, x32), (ref, x64))]
    assert_close_rule(*grads, factor=GRADIENT, what="gradient")
    if size == 1.0:  # the control: weight on the wrong word
        wrong = oracle(
            x64, (labels + 1).clamp(max=6).masked_fill(labels < 0, IGNORE_INDEX), eps, IGNORE_INDEX
        )
        assert abs((wrong - ref).item()) > 1e-3


def test_the_gradient_is_that_of_differences() -> None:
    labels = torch.tensor([2, IGNORE_INDEX, 0])
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: smoothed_cross_entropy(x, labels, 0.2), logits)
    half = smoothed_cross_entropy(logits.to(torch.bfloat16), labels, 0.2)
    assert half.dtype is torch.float32


def test_smoothing_prefers_doubt() -> None:
    sure = torch.tensor([[50.0, 0.0, 0.0]])
    label = torch.tensor([0])
    assert smoothed_cross_entropy(sure, label) < 1e-6
    assert smoothed_cross_entropy(sure, label, 0.3).item() == pytest.approx(
        0.3 * 50 * 2 / 3, rel=1e-6
    )


def test_what_does_not_count_reaches_nothing() -> None:
    logits = torch.randn(1, 3, 4)
    labels = torch.tensor([[1, IGNORE_INDEX, 2]])
    wanted = smoothed_cross_entropy(logits, labels, 0.1)
    logits[0, 1] = math.nan
    logits.requires_grad_()
    found = smoothed_cross_entropy(logits, labels, 0.1)
    assert torch.equal(found, wanted)
    found.backward()
    assert logits.grad is not None
    assert logits.grad[0, 1].tolist() == [0] * 4
    nothing = smoothed_cross_entropy(logits, torch.full((1, 3), IGNORE_INDEX))
    assert nothing.item() == 0


@pytest.mark.parametrize("eps", [-0.1, 1.0, math.nan])
def test_a_wrong_smoothing_is_refused(eps: float) -> None:
    for make in (
        Seq2SeqLoss,
        AnswerLoss,
        lambda e: smoothed_cross_entropy(torch.zeros(1, 2), torch.tensor([0]), e),
    ):
        with pytest.raises(
            ArgumentError, match=f"smoothing is {eps}; it must be at least 0 and less"
        ):
            make(eps)


def models() -> dict[str, nn.Module]:
    V = len(COPY.vocabulary)
    return {
        "lstm": recurrent(V, 6, 8, cell="lstm"),
        "bahdanau": recurrent(V, 6, 8, attention="bahdanau"),
        "luong": recurrent(V, 6, 8, attention="luong"),
        "transformer": transformer(V, 8, 2, 1),
    }


@pytest.mark.parametrize("name", models())
def test_a_batch_is_its_examples_one_by_one(name: str) -> None:
    model = models()[name].double()
    examples = [
        Example(("a", "b"), ("c",)),
        Example(tuple("abcde"), tuple("fghij")),
        Example(("z",), tuple("xyz")),
    ]
    found = Seq2SeqLoss()(model.eval(), pad(COPY, examples))
    total, count = 0.0, 0
    for e in examples:
        one = pad(COPY, [e])  # without any padding
        logits = model(one.source, one.target[:, :-1]).log_softmax(-1)
        for t, y in enumerate(one.target[0, 1:].tolist()):
            total, count = total - logits[0, t, y].item(), count + 1
    assert found.item() == pytest.approx(total / count, rel=1e-12)
    smooth = Seq2SeqLoss(0.2)
    assert smooth(model, pad(COPY, examples)) == found  # in evaluation mode there is no smoothing
    assert smooth(model.train(), pad(COPY, examples)) != found


def test_answers_alone_count() -> None:
    torch.manual_seed(1)
    model = nn.Embedding(len(MQAR.vocabulary), len(MQAR.vocabulary))
    e = MQAR.examples("train", 1)[0]
    rows = pad(MQAR, [e])
    ids = MQAR.vocabulary.encode(e.source)
    wanted = [
        -model.weight[ids[i]].double().log_softmax(0)[MQAR.vocabulary.encode([word])[0]].item()
        for i, word in enumerate(e.target)
        if word
    ]
    assert AnswerLoss()(model, rows).item() == pytest.approx(sum(wanted) / len(wanted), rel=1e-5)


def test_positions_of_padding() -> None:
    assert torch.equal(
        torch.as_tensor(padded_positions(torch.tensor([[5, 6, PAD]]))), torch.tensor([[0, 1, -1]])
    )
