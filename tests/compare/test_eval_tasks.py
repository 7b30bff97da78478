"""What is learned: bits and shares from their definitions, and data that is chosen by, judged by
and trained on apart.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from regard.compare.quality import EvalTask, RecallTask, TextTask, eval_tasks
from regard.errors import ArgumentError
from regard.train.corpus import TextDocument
from regard.train.tasks.task import IGNORE_INDEX

LETTERS = [TextDocument(f"{i}", f"{chr(97 + i)}" * 900) for i in range(4)]


def table(seed: int) -> nn.Module:
    """Logits that depend on the last byte alone."""
    generator = torch.Generator().manual_seed(seed)
    return nn.Embedding.from_pretrained(
        torch.randn(256, 256, generator=generator, dtype=torch.float64)
    )


def test_bits_per_byte_are_counted_byte_by_byte() -> None:
    lesson, model = TextTask(LETTERS, context=10, batch=2), table(0)
    rows = _judged_rows(lesson)
    total = 0.0
    for row in rows.tolist():
        for now, then in pairwise(row):
            logits = model.weight[now].tolist()
            total -= math.log2(math.exp(logits[then]) / sum(math.exp(x) for x in logits))
    found = lesson.score(model)
    assert found["rows"] == len(rows)
    # the loss is taken in fp32
    assert found["bits_per_byte"] == pytest.approx(total / (len(rows) * 10), rel=1e-6)


def _judged_rows(lesson: TextTask) -> Tensor:
    seen: list[Tensor] = []

    class Spy(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            seen.append(ids)
            return torch.zeros(*ids.shape, 256)

    lesson.score(Spy())
    inputs = torch.cat(seen)
    stream = lesson._streams[2]
    # each row is a stretch of the stream: find what follows its inputs
    for start in range(len(stream) - 10):
        same = (inputs == stream[start : start + 10]).all(1)
        if bool(same.any()):
            assert start + 10 < len(stream)
    starts = torch.linspace(0, len(stream) - 11, len(inputs)).long()
    return stream[starts[:, None] + torch.arange(11)]


def test_text_is_cut_in_three_that_share_no_byte_of_the_source() -> None:
    letters = "".join(chr(33 + i % 90) for i in range(4000))
    lesson = TextTask([TextDocument("one", letters)], context=8, batch=2)
    train, select, judge = (bytes(s.tolist()).rstrip(b"\0").decode() for s in lesson._streams)
    assert train + select + judge == letters
    assert len(judge) == pytest.approx(2 * len(select), abs=3)
    rows = next(lesson.batches(0))
    assert rows.shape == (2, 9)
    text = bytes(rows[0].tolist()).decode()
    assert text in train


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"text here leaves .* bytes for validation, but rows"):
        TextTask([TextDocument("a", "b" * 2000)], 100, 2, "here").batches(0)


@pytest.mark.parametrize("name,length", [("mqar", 12), ("passkey", 30)])
def test_recall_is_counted_answer_by_answer(name: str, length: int) -> None:
    lesson = RecallTask(name, length, 4)
    examples = lesson.task.examples("validation", 512, "judge")
    vocabulary = lesson.task.vocabulary

    class Half(nn.Module):
        """Right where the answer's id is even: logits from the examples, padded as they are."""

        def forward(self, ids: Tensor) -> Tensor:
            out = torch.zeros(*ids.shape, 256)
            for b, row in enumerate(ids.tolist()):
                words = tuple(vocabulary.words[i - 3] for i in row if i > 2)
                target = answers[words]
                for t, word in enumerate(target):
                    if word:
                        i = vocabulary.encode([word])[0]
                        out[b, t, i if i % 2 == 0 else 0] = 1.0
            return out

    answers = {e.source: e.target for e in examples}
    asked = [vocabulary.encode([w])[0] for e in examples for w in e.target if w]
    right = sum(i % 2 == 0 for i in asked)
    whole = sum(all(vocabulary.encode([w])[0] % 2 == 0 for w in e.target if w) for e in examples)
    assert lesson.score(Half()) == {
        "accuracy": right / len(asked),
        "whole": whole / 512,
        "answers": len(asked),
        "examples": 512,
    }


def test_rates_are_chosen_by_other_examples_than_models_are_judged_by() -> None:
    lesson = RecallTask("passkey", 40, 4)
    trained = {tuple(row.tolist()) for _ in range(20) for row in next(lesson.batches(0)).source}
    chosen = {tuple(row.tolist()) for row in lesson.validation.source}  # type: ignore[attr-defined]
    assert trained.isdisjoint(chosen)
    assert (lesson.validation.target != IGNORE_INDEX).sum(1).tolist() == [5] * 256  # type: ignore[attr-defined]


def test_seeds_draw_other_batches() -> None:
    for lesson in (RecallTask("mqar", 12, 4), TextTask(LETTERS, 8, 2)):
        first, again, other = (next(lesson.batches(seed)) for seed in (0, 0, 1))
        rows = [x if isinstance(x, Tensor) else x.source for x in (first, again, other)]
        assert torch.equal(rows[0], rows[1])
        assert rows[0].shape != rows[2].shape or not torch.equal(rows[0], rows[2])


def test_settings_tell_data_apart() -> None:
    def told(lesson: EvalTask) -> str:
        return repr(lesson.settings)

    same = TextTask(LETTERS, 8, 2)
    assert told(same) == told(TextTask(list(LETTERS), 8, 2))
    for other in (TextTask(LETTERS[:3], 8, 2), TextTask(LETTERS, 9, 2), TextTask(LETTERS, 8, 3)):
        assert told(other) != told(same)
    assert told(RecallTask("mqar", 12, 4)) != told(RecallTask("mqar", 13, 4))


def test_lessons_that_are_refused() -> None:
    with pytest.raises(ArgumentError, match="there is no evaluation task 'copy'; the tasks are"):
        eval_tasks(["copy"])
    with pytest.raises(ArgumentError, match="the tasks are mqar, mqar; name each task once"):
        eval_tasks(["mqar", "mqar"])
    with pytest.raises(ArgumentError, match="rows of passkey need at least 27 tokens, but the"):
        eval_tasks(["passkey"], length=100)
