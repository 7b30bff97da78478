"""Batches: rows of the stream, repeated rows, an own random state, exact resume."""

from __future__ import annotations

import json

import pytest
import torch

from regard.errors import ArgumentError
from regard.models.tokenizer import Tokenizer
from regard.train import Batches, TextDocument, validation_rows
from regard.train.batches import token_stream

TOKENS = torch.arange(1000)


def test_rows_are_runs_of_the_stream_and_reach_its_ends() -> None:
    rows = torch.cat([next(Batches(TOKENS[:12], batch=200, context=9, seed=s)) for s in range(3)])
    assert rows.shape == (600, 10)
    assert bool((rows.diff() == 1).all())
    assert sorted(set(rows[:, 0].tolist())) == [0, 1, 2]


def test_a_stream_of_exactly_one_row() -> None:
    assert next(Batches(TOKENS[:5], batch=2, context=4)).tolist() == [[0, 1, 2, 3, 4]] * 2


def periods(rows: torch.Tensor) -> list[int | None]:
    """The shortest period of each row, None where nothing repeats."""
    length = rows.shape[1]
    found = []
    for row in rows:
        whole = (p for p in range(1, length - 3) if bool((row[p:] == row[:-p]).all()))
        found.append(next(whole, None))
    return found


@pytest.mark.parametrize("random", [0.0, 1.0])
def test_repeated_rows_say_a_segment_again(random: float) -> None:
    batches = Batches(TOKENS, batch=300, context=40, seed=1, repeat=1.0, repeat_random=random)
    rows = next(batches)
    found = periods(rows)
    assert set(found) == set(range(8, 41 // 2 + 1))
    runs = torch.stack([row[:8].diff() == 1 for row in rows]).all(1)
    assert runs.float().mean().item() == 1 - random


def test_the_share_of_repeated_rows_is_as_asked_and_zero_by_default() -> None:
    share = [
        p is not None for p in periods(next(Batches(TOKENS, batch=2000, context=20, repeat=0.25)))
    ]
    assert abs(sum(share) / 2000 - 0.25) < 0.05
    assert set(periods(next(Batches(TOKENS, batch=500, context=20)))) == {None}


def test_same_seed_same_rows_other_seed_other_rows() -> None:
    first, same, other = (
        next(Batches(TOKENS, batch=9, context=8, seed=s, repeat=0.5)) for s in (3, 3, 4)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    batches = Batches(TOKENS, batch=4, context=8, repeat=0.5)
    one = next(batches)
    batches.load_state_dict(batches.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)  # and it does not change what is drawn
    assert torch.equal(next(Batches(TOKENS, batch=4, context=8, repeat=0.5)), one)


@pytest.mark.parametrize("done", [0, 1, 7])
def test_resume_goes_on_exactly(done: int) -> None:
    batches = Batches(TOKENS, batch=4, context=8, seed=5, repeat=0.3)
    for _ in range(done):
        next(batches)
    state = json.loads(json.dumps(batches.state_dict()))
    expected = [next(batches) for _ in range(3)]
    fresh = Batches(TOKENS, batch=4, context=8, seed=5, repeat=0.3)
    fresh.load_state_dict(state)
    assert all(torch.equal(next(iter(fresh)), rows) for rows in expected)


@pytest.mark.parametrize(
    "other",
    [
        {"batch": 5},
        {"context": 9},
        {"seed": 1},
        {"repeat": 0.4},
        {"repeat_random": 0.1},
        {"tokens": TOKENS + 1},
    ],
)
def test_a_state_of_other_data_is_refused(other: dict[str, object]) -> None:
    settings = {"tokens": TOKENS, "batch": 4, "context": 8, "seed": 0, "repeat": 0.3}
    state = Batches(**settings).state_dict()  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="belongs to other tokens, batch, context, seed or rep"):
        Batches(**settings | other).load_state_dict(state)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch is 0; it must be 1 or more"),
        ({"context": 0}, "context is 0; it must be 1 or more"),
        ({"repeat": 1.5}, "repeat is 1.5; it is a share"),
        ({"repeat_random": -0.1}, "repeat_random is -0.1; it is a share"),
        ({"context": 1000}, "the stream has 1,000 tokens; a row needs context [+] 1 = 1001"),
    ],
)
def test_bad_arguments(change: dict[str, float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Batches(TOKENS, **{"batch": 2, "context": 8} | change)  # type: ignore[arg-type]


def test_validation_rows_are_spread_over_the_whole_stream() -> None:
    rows = validation_rows(TOKENS, context=9, limit=7)
    assert rows.shape == (7, 10)
    assert rows[0, 0] == 0
    assert rows[-1, -1] == 999
    assert bool((rows.diff() == 1).all())
    assert validation_rows(TOKENS[:25], context=9, limit=7).shape == (2, 10)
    with pytest.raises(ArgumentError, match="limit is 0"):
        validation_rows(TOKENS, context=9, limit=0)
    with pytest.raises(ArgumentError, match="the validation stream has 9 tokens; a row needs"):
        validation_rows(TOKENS[:9], context=9, limit=1)


def test_documents_become_a_stream_with_ends() -> None:
    tokenizer = Tokenizer.train(["x"], vocab_size=257)
    ids = token_stream([TextDocument("1", "ab"), TextDocument("2", "<|endoftext|>")], tokenizer)
    assert ids.dtype == torch.long
    assert (ids == 0).nonzero().flatten().tolist() == [2, len(ids) - 1]
    assert tokenizer.decode(ids.tolist()) == "ab<|endoftext|><|endoftext|><|endoftext|>"
    tokenizer._special.clear()
    with pytest.raises(ArgumentError, match=r"tokenizer has no <.endoftext.> token"):
        token_stream([TextDocument("1", "ab")], tokenizer)
