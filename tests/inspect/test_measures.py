"""Metrics of recordings: against loops over the whole pattern, and on heads whose behaviour was
built in by hand.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.errors import ArgumentError
from regard.inspect import (
    Recorder,
    Recording,
    keys_for,
    measure,
    redundancy,
    repeated_ids,
    retrieval_score,
)
from regard.span import Span
from tests.inspect.recorded import recorded_call

T, V = 24, 40
NAMES = ("previous", "induction", "sink", "uniform", "window", "window again", "duplicate")
SHARP = 60.0


def built(ids: Tensor) -> Recording:
    """Seven heads with hand-set queries and keys, in one causal call.

    A token is one-hot, a position a point on the circle; a head that looks for a token asks for it,
    one that looks back n asks for the position n before its own, and key j of the induction head
    carries the token that stood before it.
    """
    word = torch.eye(V)[ids]
    at = torch.arange(T, dtype=torch.float32)
    circle = torch.stack([torch.cos(at * 2 * math.pi / 64), torch.sin(at * 2 * math.pi / 64)], 1)
    before = torch.cat([torch.zeros(1, V), word[:-1]])
    first = torch.zeros(T, V)
    first[0, 0] = 1.0

    def pad(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, V - x.shape[1]))

    def back(n: int) -> Tensor:
        shifted = (at - n) * 2 * math.pi / 64
        return pad(torch.stack([torch.cos(shifted), torch.sin(shifted)], 1))

    pull = {"previous": 3000.0, "window": 400.0, "window again": 400.0}
    pairs = {
        "previous": (back(1), pad(circle)),
        "induction": (word, before),
        "sink": (torch.eye(V)[torch.zeros(T, dtype=torch.long)], first),
        "uniform": (torch.zeros(T, V), torch.zeros(T, V)),
        "window": (back(0), pad(circle)),
        "window again": (back(0), pad(circle)),
        "duplicate": (word, word),
    }
    q = torch.stack([pull.get(name, SHARP) * pairs[name][0] for name in NAMES])[None]
    k = torch.stack([pairs[name][1] for name in NAMES])[None]
    return recorded_call(q, k, mask=masks.Causal(), scale=1.0)


IDS = torch.cat([torch.randperm(V, generator=torch.Generator().manual_seed(0))[: T // 2]] * 2)


def test_heads_built_by_hand_are_recognized() -> None:
    found = built(IDS)
    place = found[0]
    got = measure(place, IDS, sinks=1, local_distance=4)
    by = {n: dict(zip(NAMES, got[n].tolist(), strict=True)) for n in got.values}
    assert max(by["previous_token"], key=by["previous_token"].get) == "previous"  # type: ignore[arg-type]
    assert by["previous_token"]["previous"] > 0.9
    assert by["induction"]["induction"] > 0.99
    assert max(by["induction"][n] for n in NAMES if n != "induction") < 0.2
    assert by["sink"]["sink"] > 0.99
    assert max(by["sink"][n] for n in NAMES if n not in ("sink", "uniform")) < 0.3
    assert by["entropy"]["uniform"] == pytest.approx(1, abs=1e-6)
    assert by["effective_keys"]["uniform"] == pytest.approx((T + 1) / 2, rel=1e-5)
    assert by["local"]["window"] > 0.9 > by["local"]["uniform"] > by["local"]["sink"]
    # the other half looks at itself
    assert by["duplicate"]["duplicate"] == pytest.approx(0.5, abs=1e-6)
    assert by["duplicate"]["induction"] < 1e-6
    assert by["distance"]["sink"] == pytest.approx((T - 1) / 2, rel=1e-5)
    assert by["distance"]["uniform"] == pytest.approx((T - 1) / 4, rel=1e-5)
    for name in ("future", "empty", "learned_sink"):
        assert got[name].abs().max() == 0
    apart = redundancy(place).values
    same = NAMES.index("window"), NAMES.index("window again")
    assert apart[same] == 0
    assert apart[NAMES.index("previous"), NAMES.index("sink")] > 0.8
    apart.fill_diagonal_(1)
    apart[same] = apart[same[::-1]] = 1
    assert float(apart.min()) > 0.01  # no other two are alike
    few, _ = keys_for(place, 0.9)
    assert few[NAMES.index("sink")] == 1
    assert few[NAMES.index("uniform")] == few.max()
    received = got["received"]
    assert received[NAMES.index("sink"), 0] == pytest.approx(T, rel=1e-6)


def measured_by_loops(
    p: Tensor, s: Tensor, q_at: list[int], k_at: list[int], ids: Tensor, sink: float | None
) -> dict[str, float]:
    """The definitions, pair by pair, in Python; rows are the last len(q_at) tokens."""
    first = len(k_at) - len(q_at)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for i, row in enumerate(p.tolist()):
        seen = [j for j in range(len(k_at)) if s[i, j] > -math.inf]
        me = first + i
        share = 0.0
        if q_at[i] < 0 or not seen:
            continue
        if sink is not None:
            share = 1 / (1 + sum(math.exp(float(s[i, j]) - sink) for j in seen))
        entropy = -sum(row[j] * math.log(row[j]) for j in seen if row[j] > 0)
        entropy -= share * math.log(share) if share else 0.0
        n = len(seen) + (sink is not None)
        if n > 1:
            found["entropy"].append(entropy / math.log(n))
        found["effective_keys"].append(math.exp(entropy))
        if q_at[i] >= 2:
            found["sink"].append(sum(row[j] for j in seen if 0 <= k_at[j] < 2))
        found["learned_sink"].append(share)
        if q_at[i] - 1 in k_at and q_at[i] > 0:
            found["previous_token"].append(row[k_at.index(q_at[i] - 1)])
        earlier = [j for j in range(me) if k_at[j] >= 0 and ids[j] == ids[me]]
        if earlier:
            found["duplicate"].append(sum(row[j] for j in earlier))
        behind = [j + 1 for j in earlier if j + 1 < me]
        if behind:
            found["induction"].append(sum(row[j] for j in behind))
        found["distance"].append(sum(row[j] * (q_at[i] - k_at[j]) for j in seen))
        found["local"].append(sum(row[j] for j in seen if abs(q_at[i] - k_at[j]) < 3))
        found["missing"].append(abs(1 - sum(row) - share))
    return {n: (max(x) if n == "missing" else sum(x) / len(x)) for n, x in found.items()}


def random_call(sink: Tensor | None = None) -> tuple[Recording, Tensor]:
    """A left-padded batch: prompt of 14 in one call, and 5 tokens one by one."""
    make = torch.Generator().manual_seed(5)
    x = torch.randn(3, 2, 4, 19, 8, generator=make)
    at = torch.tensor([[-1, -1, -1, *range(16)], [*range(19)]])
    ids = torch.randint(6, (2, 19), generator=make)
    mask = masks.Causal() & masks.Window(9)
    with Recorder(keep=()) as recorder:
        for start, stop in [(0, 14), *((i, i + 1) for i in range(14, 19))]:
            q, k = x[0][:, :, start:stop], x[1][:, :2, :stop]
            where = {"q_positions": at[:, start:stop], "k_positions": at[:, :stop]}
            regard.attend(q, k, k, mask=mask, sink=sink, **where)
    return recorder.recording(), ids


@pytest.mark.parametrize(
    ("size", "sinks"), [(4, torch.tensor([0.5, -2.0, 1.0, 3.0])), (4, None), (256, None)]
)
def test_streamed_numbers_are_the_definitions(size: int, sinks: Tensor | None) -> None:
    found, ids = random_call(sinks)
    place = found[0]
    for batch in (0, 1):
        got = measure(place, ids[batch], batch=batch, sinks=2, local_distance=3, size=size)
        at = place.column_positions[batch].tolist()
        for h in range(4):
            p, s = found.weights(0, h, batch=batch), found.scores(0, h, batch=batch)
            right = measured_by_loops(
                p, s, at, at, ids[batch], None if sinks is None else float(sinks[h])
            )
            for name, value in right.items():
                assert float(got[name][h]) == pytest.approx(value, rel=1e-5, abs=2e-6), name
            assert float(got["max_logit"][h]) == float(s.max())
            assert (got["received"][h] - p.sum(0)).abs().max() < 1e-12
            pairs = [(i, j) for i in range(19) for j in range(19) if min(at[i], at[j]) >= 0]
            for d, offset in enumerate(got["offsets"][h].tolist()):
                these = [float(p[i, j]) for i, j in pairs if at[i] - at[j] == d]
                assert offset == pytest.approx(sum(these) / len(these), abs=1e-12)


def test_leaks_are_found() -> None:
    """A decoder without its mask looks ahead; a mask that forgets padding looks there: both are
    counted.
    """
    q = torch.randn(1, 2, 8, 4)
    found = recorded_call(q)
    padding = torch.tensor([True, True, *[False] * 6])
    got = measure(found[0], padding=padding)
    for h in range(2):
        p = found.weights(0, h)
        assert float(got["future"][h]) == pytest.approx(float(p.triu(1).sum()), rel=1e-12)
        assert float(got["padding"][h]) == pytest.approx(float(p[:, :2].sum()), rel=1e-12)
    assert float(got["future"].min()) > 1
    broken = recorded_call(q, mask=masks.Causal(), k_positions=Span(0, 8))
    assert measure(broken[0])["future"].abs().max() == 0
    lse = broken[0].steps[0].lse + 0.5
    place = replace(broken[0], steps=(replace(broken[0].steps[0], lse=lse),))
    assert measure(place)["missing"].tolist() == pytest.approx([1 - math.exp(-0.5)] * 2, rel=1e-5)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 1.0])
def test_keys_for_a_share_of_the_mass(share: float) -> None:
    found, _ = random_call()
    got = keys_for(found[0], share, batch=1, rows=99)
    assert got.rows == 19
    for h in range(4):
        counts = []
        for row in found.weights(0, h, batch=1).tolist():
            total, n = 0.0, 0
            for w in sorted(row, reverse=True):
                if total >= share * sum(row) - 1e-12:
                    break
                total, n = total + w, n + 1
            counts.append(n)
        assert float(got.values[h]) == pytest.approx(sum(counts) / 19)
    assert keys_for(found[0], share, batch=0, rows=99).rows == 16  # three are padding
    assert keys_for(found[0], share, batch=0, rows=5).rows == 5


def test_redundancy_is_the_divergence_of_jensen_and_shannon() -> None:
    found, _ = random_call(torch.zeros(4))
    got = redundancy(found[0], batch=1, rows=99)
    rows = [found.weights(0, h, batch=1) for h in range(4)]
    for a, b in itertools.product(range(4), range(4)):
        p, r = (x / x.sum(1, keepdim=True) for x in (rows[a], rows[b]))
        m = (p + r) / 2
        terms = torch.xlogy(p, p / m) + torch.xlogy(r, r / m)
        total = float(terms[m > 0].sum()) / 2 / math.log(2)
        assert float(got.values[a, b]) == pytest.approx(total / 19, abs=1e-9)
    assert bool((got.values <= 1).all())


def test_a_head_that_copies_the_needle_while_it_is_written() -> None:
    """Prompt with a needle of 3 tokens, then the 3 tokens written out; one head looks at each in
    turn, one elsewhere.
    """
    needle = torch.tensor([30, 31, 32])
    ids = torch.cat([torch.arange(10), needle, torch.arange(10, 14), needle])
    L = len(ids)
    word = torch.eye(V)
    following = word[ids[(torch.arange(L) + 1).clamp(max=L - 1)]]
    ask = torch.stack([following, torch.zeros(L, V)])
    with Recorder(keep=()) as recorder:
        for start, stop in [(0, 17), (17, 18), (18, 19)]:
            k = word[ids[:stop]].expand(1, 2, -1, -1)
            regard.attend(SHARP * ask[None, :, start:stop], k, k, mask=masks.Causal())
    place = recorder.recording()[0]
    scores = retrieval_score(place, ids, slice(10, 13))
    assert scores.tolist() == [1.0, 0.0]
    assert retrieval_score(place, ids, slice(8, 13))[0] == pytest.approx(3 / 5)
    with pytest.raises(ArgumentError, match=r"needle is .* it must contain some of the 19"):
        retrieval_score(place, ids, slice(5, 5))


def test_what_the_tokens_do_not_allow_is_left_out() -> None:
    got = measure(built(IDS)[0])
    assert "induction" not in got.values
    with pytest.raises(ArgumentError, match="'induction' was not measured at ; measured: entropy"):
        _ = got["induction"]
    once = measure(built(IDS)[0], torch.arange(T))
    assert "duplicate" not in once.values


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda p: measure(p, torch.arange(3)), "ids are (3,);  has 24 columns"),
        (lambda p: measure(p, padding=torch.ones(3).bool()), "padding are (3,)"),
        (lambda p: measure(p, batch=1), "batch is 1;  has batch rows 0 to 0"),
        (lambda p: keys_for(p, 0.0), "share is 0.0; it must be above 0 and at most 1"),
        (lambda p: keys_for(p, rows=0), "rows is 0; it must be at least 1"),
        (lambda p: redundancy(p, rows=0), "rows is 0; it must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        call(built(IDS)[0])


def test_head_scores_want_repeated_tokens() -> None:
    model = regard.load("tiny")
    with pytest.raises(ArgumentError, match="in ids no token occurs twice"):
        regard.inspect.head_scores(model, torch.arange(8)[None])
    scores = regard.inspect.head_scores(model, repeated_ids(1024, 12, batch=1))
    assert {x.shape for x in scores.values()} == {torch.Size([4, 8])}
