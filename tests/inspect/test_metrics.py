"""Scores of heads, on patterns whose scores are known, and on the patterns that should score
low.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from regard import Trace
from regard.errors import ArgumentError
from regard.inspect import (
    duplicate_score,
    entropy,
    head_scores,
    induction_score,
    previous_token_score,
    repeated_ids,
    sink_share,
)
from tests.inspect.small_model import model

T = 12
IDS = torch.tensor([5, 1, 4, 2, 3, 0, 5, 1, 4, 2, 3, 0])  # six tokens, twice


def uniform() -> torch.Tensor:
    """Every visible key alike."""
    return torch.tril(torch.ones(T, T)) / torch.arange(1, T + 1)[:, None]


def looks_back(n: int) -> torch.Tensor:
    """All weight n keys back; the first rows look at key 0."""
    pattern = torch.zeros(T, T)
    for i in range(T):
        pattern[i, max(0, i - n)] = 1
    return pattern


def test_a_previous_token_head_scores_1_and_others_low() -> None:
    heads = torch.stack([looks_back(1), looks_back(0), looks_back(2), uniform()])
    scores = previous_token_score(heads)
    # two keys back is key 0 for row 1: 1 of 11 rows is right by chance; a uniform row i gives
    # 1/(i+1)
    harmonic = sum(1 / (i + 1) for i in range(1, T)) / (T - 1)
    assert scores.tolist() == pytest.approx([1.0, 0.0, 1 / (T - 1), harmonic])
    assert harmonic < 0.2


def test_an_induction_head_scores_1_and_others_low() -> None:
    heads = torch.stack([looks_back(5), looks_back(6), looks_back(1), looks_back(0), uniform()])
    scores = induction_score(heads, IDS)
    # the last key after a copy is i - 5; the previous-token head never stands there, nor does the
    # duplicate head
    chance = sum(1 / (i + 1) for i in range(6, T)) / 6
    assert scores.tolist() == pytest.approx([1.0, 0.0, 0.0, 0.0, chance])
    assert chance < 0.12


def test_a_duplicate_head_scores_1_and_an_induction_head_does_not() -> None:
    heads = torch.stack([looks_back(6), looks_back(5), uniform()])
    assert duplicate_score(heads, IDS)[:2].tolist() == [1.0, 0.0]
    assert duplicate_score(heads, IDS)[2] < 0.12


def test_every_earlier_copy_counts() -> None:
    ids = torch.tensor([7, 8, 7, 9, 7])
    pattern = torch.zeros(5, 5)
    pattern[2, 1], pattern[4, 1], pattern[4, 3] = 0.5, 0.25, 0.5
    assert induction_score(pattern, ids).item() == pytest.approx((0.5 + 0.75) / 2)
    pattern[4, 4] = 9.0  # not a key behind a copy
    assert induction_score(pattern, ids).item() == pytest.approx((0.5 + 0.75) / 2)


def test_index_lists_equal_a_dense_comparison() -> None:
    """Against T x T masks, the other way to write them."""
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(4, (20,), generator=g)
    pattern = torch.randn(3, 20, 20, generator=g).tril().exp()
    same = (ids[:, None] == ids[None, :]) & torch.ones(20, 20, dtype=torch.bool).tril(-1)
    after = torch.zeros_like(same)
    after[:, 1:] = same[:, :-1]
    after &= torch.ones(20, 20, dtype=torch.bool).tril(-1)
    for score, cells in ((duplicate_score, same), (induction_score, after)):
        rows = cells.any(1)
        expected = (pattern * cells)[:, rows].sum(-1).mean(-1)
        assert torch.allclose(score(pattern, ids), expected)


def test_entropy_of_uniform_and_of_one_key() -> None:
    assert torch.allclose(entropy(uniform()), torch.arange(1, T + 1).log(), atol=1e-6)
    assert entropy(looks_back(1)).abs().max() == 0


def test_sink_share_leaves_the_sinks_themselves_out() -> None:
    first = torch.zeros(T, T)
    first[:, 0] = 1
    assert sink_share(first).item() == 1
    assert sink_share(looks_back(0)).item() == 0
    shares = [4 / (i + 1) for i in range(4, T)]
    assert sink_share(uniform()).item() == pytest.approx(sum(shares) / len(shares))
    assert sink_share(first, first=1).item() == 1


def test_head_scores_equal_the_scores_of_the_captured_patterns() -> None:
    m = model()
    ids = repeated_ids(m.config.vocab_size, 7, batch=3)
    scores = head_scores(m, ids)
    with torch.inference_mode(), Trace("pattern") as trace:
        m.forward(ids, backend="reference")
    assert set(scores) == {"previous_token", "induction", "duplicate", "entropy", "sink"}
    for layer in range(3):
        pattern = trace[f"layers.{layer}.pattern"]  # [3, 4, 14, 14]
        rows = [induction_score(p, row) for p, row in zip(pattern, ids, strict=True)]
        expected = {
            "previous_token": previous_token_score(pattern).mean(0),
            "induction": torch.stack(rows).mean(0),
            "entropy": (entropy(pattern)[..., 1:] / torch.arange(2, 15).log()).mean((0, 2)),
            "sink": pattern[:, :, 1:, 0].mean((0, 2)),
        }
        for name, value in expected.items():
            assert torch.allclose(scores[name][layer], value, atol=1e-6), name


def test_an_untrained_model_has_neither_head() -> None:
    m = model(sharp=1.0)
    scores = head_scores(m, repeated_ids(m.config.vocab_size, 20))
    assert scores["induction"].max() < 0.2
    assert scores["previous_token"].max() < 0.3
    assert scores["entropy"].min() > 0.9


def test_repeated_ids_are_seeded_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    a, b = repeated_ids(300, 20, batch=2), repeated_ids(300, 20, batch=2, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(a, repeated_ids(300, 20, batch=2))
    assert not torch.equal(a, b)
    assert torch.equal(a[:, :20], a[:, 20:])
    assert all(len(set(row.tolist())) == 20 for row in a)
    assert repeated_ids(3, 5, batch=1).max() < 3


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: previous_token_score(torch.eye(1)), "pattern has 1 row"),
        (lambda: sink_share(torch.eye(4)), "at least 5"),
        (lambda: sink_share(torch.eye(4), first=0), "first is 0"),
        (lambda: induction_score(torch.eye(3), torch.tensor([1, 2, 3])), "no token occurs twice"),
        (lambda: repeated_ids(0, 1), "at least 1"),
    ],
)
def test_what_cannot_be_scored_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        call()
