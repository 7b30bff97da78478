"""The tasks can be learned: a handful of examples by heart, and the alignment that comes of it."""

from __future__ import annotations

import pytest
import torch

from regard.train import Settings, fit
from regard.train.losses import AnswerLoss, Seq2SeqLoss
from regard.train.tasks import TASKS, Example
from regard.train.tasks.evaluate import alignment, answer_examples
from regard.train.tasks.task import TaskBatches
from regard.train.tasks.task_training import Recipe, build


def learned(
    task_name: str, model_name: str, examples: list[Example], steps: int, lr: float, **sizes: int
):
    task = TASKS[task_name]
    model = build(task, model_name, Recipe(layers=1, **sizes))
    made = TaskBatches(task, batch=8, examples=examples)
    loss = Seq2SeqLoss(0.05) if task.kind == "seq2seq" else AnswerLoss()
    fit(model, made, Settings(steps=steps, lr=lr, warmup=10, weight_decay=0.0), loss=loss)
    return model.eval(), answer_examples(model, task, examples)


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "name", "steps", "lr", "sizes"),
    [
        ("translate", "lstm+bahdanau", 60, 0.03, {"dim": 16, "hidden": 32}),
        ("translate-back", "gru+luong", 80, 0.03, {"dim": 16, "hidden": 32}),
        ("translate", "transformer", 120, 0.01, {"dim": 32, "hidden": 32, "heads": 2}),
        ("dates", "gru", 100, 0.03, {"dim": 16, "hidden": 32}),
    ],
)
def test_a_handful_of_pairs_is_learned_by_heart(
    task: str, name: str, steps: int, lr: float, sizes: dict[str, int]
) -> None:
    examples = sorted(TASKS[task].examples("train", 60), key=lambda e: e.length)[2:6]
    model, found = learned(task, name, examples, steps, lr, **sizes)
    assert [o for o in found if not o.correct] == []
    assert all(o.correct for o in answer_examples(model, TASKS[task], examples, beams=3))
    untrained = build(TASKS[task], name, Recipe(layers=1, **sizes))
    assert not any(o.correct for o in answer_examples(untrained, TASKS[task], examples[:1]))


@pytest.mark.parametrize("name", ["decoder", "gru"])
def test_a_handful_of_rows_is_learned_by_heart(name: str) -> None:
    examples = sorted(TASKS["mqar"].examples("train", 40), key=lambda e: e.length)[2:6]
    untrained = build(TASKS["mqar"], name, Recipe(dim=32, hidden=32, heads=2, layers=1))
    assert not any(o.correct for o in answer_examples(untrained, TASKS["mqar"], examples))
    _, found = learned("mqar", name, examples, 80, 0.01, dim=32, hidden=32, heads=2)
    assert all(o.correct for o in found)


@pytest.mark.full
def test_copying_aligns_each_letter_with_itself() -> None:
    """Not by heart: words of four letters out of six, most of them never seen, so it must look at
    the letter it says.
    """
    pick = torch.Generator().manual_seed(3)
    words = [
        "".join(chr(97 + int(c)) for c in row)
        for row in torch.randint(0, 6, (300, 4), generator=pick)
    ]
    examples = [Example(tuple(w), tuple(w)) for w in words]
    model, _ = learned("copy", "gru+luong", examples[20:], 200, 0.01, dim=16, hidden=24)
    held = [o for o in answer_examples(model, TASKS["copy"], examples[:20]) if o.correct]
    assert len(held) >= 15
    assert len({o.example.source for o in held} - {e.source for e in examples[20:]}) > 8
    diagonal = 0
    for o in held:
        found = alignment(model, TASKS["copy"], o)
        assert found is not None
        looked = found.weights[:4].argmax(1).tolist()
        diagonal += sum(at == i for i, at in enumerate(looked))
    assert diagonal / (4 * len(held)) > 0.8  # one in five by chance
