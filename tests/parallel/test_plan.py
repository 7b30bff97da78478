"""The plan of a call over ranks: bytes that are really sent, balance, and the choice of a
method.
"""

from __future__ import annotations

import pytest
import torch

from regard import masks
from regard.cost import machine_of
from regard.errors import ArgumentError
from regard.parallel import Shards, plan, spawn
from regard.parallel.plan import cheapest_method
from tests.parallel import ranks
from tests.parallel.ranks import LENGTHS, MASKS, D, E, G, H

COUNTED = ("none", "causal", "window", "window or sinks", "chunk", "prefix", "documents", "padding")


@pytest.mark.full
def test_the_bytes_that_are_sent_are_those_of_the_plan() -> None:
    W = 4
    cases = [
        (mask, lengths, method)
        for mask in COUNTED
        for lengths in LENGTHS
        for method in ("exchange", "gather", "heads")
    ]
    found = spawn(ranks.bytes_sent, W, cases)
    for n, (mask, lengths, method) in enumerate(cases):
        planned = plan(LENGTHS[lengths](W), MASKS[mask], heads=(H, G), dims=(D, E), batch=2)
        assert [rank[n] for rank in found] == list(planned[method].sent), (mask, lengths, method)
        if method == "exchange":
            by_step = [sum(step[r] for step in planned.steps) for r in range(W)]
            assert by_step == list(planned[method].sent)


def test_a_window_moves_its_halo_only() -> None:
    shards = Shards.even(65536, 4)
    found = plan(shards, masks.Causal() & masks.Window(512), heads=(8, 2), dims=(64, 64))
    every = 3 * 65536 * 2 * 128 * 4  # what a full exchange moves
    assert sum(found["exchange"].sent) == 3 * 511 * 2 * 128 * 4
    assert sum(found["exchange"].sent) <= 0.01 * every
    assert found.method == "exchange"


def test_a_plan_by_hand() -> None:
    """Three ranks of two tokens: each key has 3 heads of 3 + 5 numbers of 4 bytes."""
    key = 4 * 3 * (3 + 5)
    found = plan(Shards.even(6, 3), masks.Causal(), heads=(6, 3), dims=(3, 5))
    assert found.steps == ((2 * key, 2 * key, 0), (2 * key, 0, 0))  # to the next, to the one after
    assert found["exchange"].memory == (0, 4 * key, 4 * key)  # one block arrives, another is used
    assert found["gather"].sent == (2 * 2 * key,) * 3
    assert found["gather"].memory == (4 * key,) * 3
    # two thirds of the own keys, values and queries; results of two heads for the others' queries
    sent = 4 * (2 * (2 * 3 * (3 + 5) + 2 * 6 * 3) // 3 + 2 * 5 * 4)
    assert found["heads"].sent == (sent,) * 3


def test_flops_count_each_visible_pair_once() -> None:
    shards = Shards.zigzag(64, 4)
    found = plan(shards, masks.Causal(), heads=(8, 2), dims=(16, 32), batch=3)
    assert sum(found["exchange"].flops) == 2 * (16 + 32) * 3 * 8 * (64 * 65 // 2)
    assert found.efficiency == 1.0


def test_heads_are_chosen_where_they_move_less_and_can_be_shared() -> None:
    shards = Shards.even(4096, 4)
    assert plan(shards, heads=(32, 32), dims=(64, 64)).method == "heads"
    assert plan(shards, heads=(32, 1), dims=(64, 64)).method == "exchange"
    odd = plan(shards, heads=(6, 2), dims=(64, 64))
    assert odd.method == "exchange"
    assert "4 ranks cannot share 6 query heads" in str(odd)


def test_it_prints_a_table() -> None:
    text = str(plan(Shards.even(8, 2), masks.Causal(), heads=(2, 2), dims=(4, 4)))
    heads = text.splitlines()[0].split("  ")
    assert [x.strip() for x in heads if x.strip()] == [
        "method",
        "most sent",
        "most memory",
        "most FLOPs",
        "why not",
    ]
    assert ">  exchange" in text
    assert "256 B" in text
    assert "busiest rank: 0.69" in text


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match="4 query heads cannot be divided among 3 key/value heads"
    ):
        plan(Shards.even(8, 2), heads=(4, 3), dims=(4, 4))
    with pytest.raises(
        ArgumentError,
        match="the shards of the queries are for 3 ranks, and those of the keys for 2",
    ):
        plan(Shards.even(8, 2), heads=(4, 2), dims=(4, 4), q_shards=Shards.even(8, 3))


def test_half_precision_moves_half_the_bytes() -> None:
    one = plan(Shards.even(8, 2), heads=(2, 2), dims=(4, 4))
    half = plan(Shards.even(8, 2), heads=(2, 2), dims=(4, 4), dtype=torch.bfloat16)
    assert [2 * x for x in half["exchange"].sent] == list(one["exchange"].sent)


class Uncounted(masks.Full):
    """A mask whose pairs may not be counted."""

    def count(self, *_: object) -> int:
        """Refuse."""
        raise AssertionError("pairs were counted")


def test_the_choice_of_a_method_counts_no_pairs() -> None:
    shards = Shards.even(4096, 4)
    for groups, method in ((32, "heads"), (1, "exchange")):
        found = cheapest_method(shards, shards, Uncounted(), (32, groups), (64, 64))
        assert found == plan(shards, heads=(32, groups), dims=(64, 64)).method == method


def test_messages_overlap_with_the_work_of_the_step_before() -> None:
    shards = Shards.zigzag(1 << 16, 4)
    found = plan(shards, masks.Causal(), heads=(32, 8), dims=(128, 128), dtype=torch.bfloat16)
    assert [sum(rank) for rank in zip(*found.step_flops, strict=True)] == list(
        found["exchange"].flops
    )
    first = found.overlap("h100-sxm")[0]
    n, rate = (1 << 16) // 4, machine_of("h100-sxm").rate("bf16")
    assert first.send_seconds == max(found.steps[0]) / 450e9
    assert first.compute_seconds == pytest.approx(4 * 32 * 128 * n * (n + 0.5) / 2 / rate, rel=0.01)
    assert first.hidden
    # the equation of a full mask: n >= (G/H) (b/2) F / w tokens a rank
    needed = 8 / 32 * (2 / 2) * rate / 450e9
    for tokens, hidden in ((0.9 * needed, False), (1.1 * needed, True)):
        full = plan(
            Shards.even(4 * int(tokens), 4), heads=(32, 8), dims=(128, 128), dtype=torch.bfloat16
        )
        assert [step.hidden for step in full.overlap("h100-sxm")] == [hidden] * 3
    with pytest.raises(ArgumentError, match="the bandwidth between ranks of rtx-4090 is not known"):
        found.overlap("rtx-4090")
    assert found.overlap("rtx-4090", link=1e3)[0].hidden is False
