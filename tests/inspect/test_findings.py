"""The findings of docs/research.md about trained models, computed again."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

import regard
from regard.inspect import ablate, attribute, compare, logit_lens, measure, patch, record, rollout
from regard.models import TextEncoder
from tests.models.small import named_model

SENTENCE = "a fluffy blue creature roamed the verdant forest"
SIMILAR = "a furry animal walked through the green woods"
GOOD, BAD = "The film was good, and I liked it.", "The film was bad, and I liked it."
PRAISE = "an excellent movie"
TEXTS = [
    SENTENCE,
    "The animal did not cross the street because it was too tired.",
    "the cat sat on the mat and the dog sat on the rug",
    "one two three one two three one two three three",
    "She said that he said that she said it.",
]


@cache
def minilm() -> TextEncoder:
    return named_model("minilm", TextEncoder)


@pytest.mark.full
def test_zero_ablation_measures_constant_parts() -> None:
    zero, mean = (ablate(minilm(), SENTENCE, SIMILAR, method=m) for m in ("zero", "mean"))  # type: ignore[arg-type]
    best = zero.top(1)[0]
    assert (best["layer"], best["head"], round(best[zero.quantity], 3)) == ("layers.5", "1", 0.084)
    assert abs(mean.values[5, 1]) < 0.009
    assert abs(np.corrcoef(zero.values.ravel(), mean.values.ravel())[0, 1]) < 0.1
    slopes = attribute(minilm(), SENTENCE, SIMILAR, method="integrated_gradients")
    assert np.corrcoef(slopes.values.ravel(), zero.values.ravel())[0, 1] < -0.9


@pytest.mark.full
def test_one_head_of_minilm_reads_the_opinion() -> None:
    heads = patch(minilm(), GOOD, BAD, PRAISE, what="heads")
    assert divmod(int(heads.share.argmax()), 12) == (5, 9)
    assert round(float(heads.share.max()), 2) == 0.42
    differing = compare(record(minilm(), GOOD), record(minilm(), BAD))
    assert divmod(int(differing.values.argmax()), 12) == (5, 9)
    estimate = attribute(minilm(), GOOD, PRAISE, method="gradient", corrupt=BAD)
    assert np.corrcoef(estimate.values.ravel(), heads.values.ravel())[0, 1] > 0.97
    first, second = (cell[estimate.quantity] for cell in estimate.top(2))
    assert divmod(int(estimate.values.argmax()), 12) == (5, 9)
    assert (round(first, 3), round(second, 3)) == (0.066, 0.013)


@pytest.mark.full
def test_where_the_opinion_is_kept() -> None:
    states = patch(minilm(), GOOD, BAD, PRAISE).share
    changed = 4
    assert [round(float(states[i, changed]), 2) for i in (0, 3, 5)] == [1.0, 0.94, 0.83]


def test_states_of_a_sentence_become_alike() -> None:
    ids = minilm().encode(SENTENCE)
    with regard.Trace("embed", "layers.*.residual") as trace, torch.no_grad():
        minilm().hidden(*ids)
    cosines = []
    for name in trace:
        x = torch.nn.functional.normalize(trace[name][0].double(), dim=-1)
        cosines.append((x @ x.T).numpy())
    others = ~np.eye(len(cosines[0]), dtype=bool)
    assert [round(float(c[4, 2]), 2) for c in cosines[:2]] == [0.19, 0.37]
    means = [float(c[others].mean()) for c in cosines]
    assert (round(means[0], 2), round(means[-1], 2)) == (0.03, 0.39)
    assert means == sorted(means)


def test_rollout_hides_what_a_head_reads() -> None:
    table = rollout(minilm(), SENTENCE)
    row = dict(zip(table.columns, table.values[4], strict=True))
    assert round(row["0 [CLS]"], 2) == 0.65
    assert row["2 fluffy"] < 0.03
    assert record(minilm(), SENTENCE).weights(0, 1)[4, 2] > 0.39


def test_previous_token_and_induction_heads() -> None:
    found = measure(minilm(), TEXTS)["previous_token"]
    assert divmod(int(found.argmax()), 12) == (0, 2)
    assert float(found.max()) > 0.999
    tiny = regard.load("tiny")
    heads = measure(tiny, ["def f(a):\n    return a\n" * 3, "x = 1\ny = 2\nx = 1\ny = 2\n"])
    assert divmod(int(heads["previous_token"].argmax()), 8) == (1, 6)
    assert divmod(int(heads["induction"].argmax()), 8) == (2, 1)


def test_what_tiny_says_after_to_be_or_not_to() -> None:
    tiny = regard.load("tiny")
    table = attribute(tiny, "to be or not to", " be")
    parts = dict(zip(table.rows, table.values[:, 0], strict=True))
    assert table.baseline is not None
    assert round(table.baseline, 3) == 3.7
    assert round(sum(x for name, x in parts.items() if name.endswith(".mlp")), 2) == 2.45
    assert round(sum(x for name, x in parts.items() if ".head." in name), 2) == 1.22
    lens = logit_lens(tiny, "to be or not to")
    assert [row[-1] for row in lens.cells] == ["u", "·the", "ke", "·be", "·be"]
