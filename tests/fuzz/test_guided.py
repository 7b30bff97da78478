"""Recipes of damage, and the corpus of those that reached something new."""

from __future__ import annotations

import random

from tests.fuzz import guided


def test_a_recipe_comes_back_from_its_bytes_and_from_its_line() -> None:
    recipe = (3, 7, [1, 2**32 - 1])
    assert guided.decode(guided.encode(*recipe)) == recipe
    assert guided.decode(b"") == (0, 0, [])
    near = [guided.mutate(guided.encode(*recipe), 26, seed) for seed in range(200)]
    assert near == [guided.mutate(guided.encode(*recipe), 26, seed) for seed in range(200)]
    assert len(set(near)) == 200
    assert all(0 < len(guided.decode(data)[2]) <= guided.MAX_SEEDS for data in near)
    draw = random.Random(0)
    assert all(guided.decode(draw.randbytes(26))[2] for _ in range(20))


def test_the_kept_corpus_names_readers_and_stays_small() -> None:
    from tests.fuzz import targets

    names = list(targets.TARGETS)
    lines = guided.CORPUS.read_text("utf-8").splitlines()
    assert len(guided.read_corpus(names)) == len(lines) > 100
    assert lines == sorted(set(lines))
    assert guided.CORPUS.stat().st_size <= 300_000
