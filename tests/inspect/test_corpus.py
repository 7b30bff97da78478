"""Metrics of every head over a corpus against loops over dense patterns, and planted heads that
must be found by what they do.
"""

from __future__ import annotations

import csv
import itertools
import math
from pathlib import Path

import pytest
import torch

from regard.errors import ArgumentError
from regard.inspect import CorpusMeasures, measure, name_mover_scores, record
from tests.inspect.planted import (
    DUPLICATE_HEAD,
    END,
    INDUCTION_HEAD,
    NAME_MOVER_HEAD,
    PREVIOUS_HEAD,
    planted_model,
)
from tests.inspect.small_model import model
from tests.inspect.test_measures import measured_by_loops

CORPUS = [torch.tensor([row]) for row in ([5, 9, 2, 9, 31], [7, 7, 1, 3, 7, 7], [4, 8, 4, 8, 1])]
RUNS = [
    torch.tensor([[0, *row]])
    for row in ([4, 5, 6, 7, 4, 5, 6], [8, 9, 4, 6, 8, 9, 4], [5, 7, 9, 10, 5, 7, 9])
]


@pytest.mark.full
def test_metrics_over_a_corpus_equal_a_loop() -> None:
    small = model()
    small.decoder.double()  # else the lse of the kernel has the precision of fp32
    found = measure(small, iter(CORPUS))
    # an error e of the lse changes each weight by e, and no metric here by more than 6 e, where 6
    # is the length of the longest text
    allowed = 6 * float(found["missing"].max()) + 1e-12
    assert (found.texts, found.tokens) == (3, 16)
    runs = [(record(small, ids), ids[0], [*range(ids.shape[1])]) for ids in CORPUS]
    for at in itertools.product(range(3), range(4)):
        rights = [
            measured_by_loops(run.weights(*at), run.scores(*at), positions, positions, ids, None)
            for run, ids, positions in runs
        ]
        for name in ("previous_token", "duplicate", "induction", "distance", "entropy"):
            numbers = [right[name] for right in rights if name in right]
            mean = sum(numbers) / len(numbers)
            assert abs(float(found[name][at]) - mean) <= allowed, (name, at)
            spread = math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))
            assert abs(float(found.deviations[name][at]) - spread) <= 2 * allowed
            assert found.counts[name] == len(numbers)
    largest = max(float(record(small, ids).scores(1, 2).max()) for ids in CORPUS)
    assert float(found["max_logit"][1, 2]) == largest
    assert 0 < allowed < 1e-7


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("previous_token", PREVIOUS_HEAD),
        ("duplicate", DUPLICATE_HEAD),
        ("induction", INDUCTION_HEAD),
    ],
)
def test_planted_heads_are_found_by_their_behaviour(name: str, planted: tuple[int, int]) -> None:
    scores = measure(planted_model(), RUNS)[name]
    assert divmod(int(scores.argmax()), 4) == planted
    rest = scores.flatten().sort(descending=True).values
    assert float(rest[0]) > 0.9 > 0.6 > float(rest[1]), "and clearly"


def test_the_planted_name_mover_is_found() -> None:
    ids = torch.tensor([[0, 4, 5, 2, 7, 8, 6, END]])
    scores = name_mover_scores(planted_model(), ids, 2)
    best = scores.top(2)
    assert (best[0]["layer"], best[0]["head"]) == (f"layers.{NAME_MOVER_HEAD[0]}", "1")
    assert best[0][scores.quantity] > 3 * abs(best[1][scores.quantity])
    with pytest.raises(ArgumentError, match="does not stand in the text"):
        name_mover_scores(planted_model(), ids, 9)


def test_a_corpus_as_a_table(tmp_path: Path) -> None:
    found = measure(model(), CORPUS)
    assert isinstance(found, CorpusMeasures)
    table = found.table("induction")
    assert table.values.shape == (3, 4)
    shown = found._repr_html_()
    assert shown.count("<tr>") == 1 + 3 * 4
    assert f"{float(found['entropy'][2, 3]):.4g}" in shown
    with found.to(tmp_path / "heads.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 12
    assert float(rows[5]["entropy"]) == float(found["entropy"][1, 1])
    with pytest.raises(ArgumentError, match=r"'inductio' was not measured.*did you mean"):
        found.table("inductio")
    with pytest.raises(ArgumentError, match=r"must end in \.csv"):
        found.to(tmp_path / "heads.png")


def test_what_is_refused() -> None:
    small = model()
    with pytest.raises(ArgumentError, match="the corpus is empty"):
        measure(small, [])
    with pytest.raises(ArgumentError, match="takes a list of texts"):
        measure(small, "one text")
    with pytest.raises(ArgumentError, match="neither batch, padding nor also"):
        measure(small, CORPUS, batch=1)  # type: ignore[call-overload]
