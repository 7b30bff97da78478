"""Blocks of recorded patterns against the definition in fp64 loops, whatever the call was made
of.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect import Recorder, Recording
from regard.span import Span
from regard.tracing import named_scope
from tests.inspect.fp64_patterns import Case, plain_lses, tokens
from tests.inspect.recorded import recorded_call as recorded
from tests.rules import assert_close_rule

SLOPES = [0.5, 0.25, 0.125, 0.0625]
SINK = torch.tensor([0.5, -1.0, 2.0, 0.0])
PADDED = torch.tensor([[-1, -1, *range(10)], [*range(12)]])


def causal(q: int, k: int) -> bool:
    return k <= q


def near(q: int, k: int) -> bool:
    return k <= q and q - k < 4


def prefix(q: int, k: int) -> bool:
    return k <= q or k < 3


def packed(q: int, k: int) -> bool:
    return k <= q and (q < 5) == (k < 5)


def all_of(q: int, k: int) -> bool:
    return True


def penalty(h: int, q: int, k: int) -> float:
    return -SLOPES[h] * (q - k)


# name -> (mask, its rule written a second time, other options of attend, the same for the loops)
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "full": (None, all_of, {}, {}),
    "causal": (masks.Causal(), causal, {}, {}),
    "window": (masks.Causal() & masks.Window(4), near, {}, {}),
    "prefix": (masks.Causal() | masks.Prefix(3), prefix, {}, {}),
    "documents": (masks.Causal() & masks.Document((0, 5, 12)), packed, {}, {}),
    "scale": (masks.Causal(), causal, {"scale": -0.7}, {"scale": -0.7}),
    "softcap": (masks.Causal(), causal, {"softcap": 1.5}, {"softcap": 1.5}),
    "alibi": (masks.Causal(), causal, {"bias": biases.ALiBi(slopes=SLOPES)}, {"penalty": penalty}),
    "sink": (masks.Causal(), causal, {"sink": SINK}, {"sink": SINK}),
    "everything": (
        masks.Causal() & masks.Window(4),
        near,
        {"bias": biases.ALiBi(slopes=SLOPES), "softcap": 2.0, "sink": SINK, "scale": 0.4},
        {"penalty": penalty, "softcap": 2.0, "sink": SINK, "scale": 0.4},
    ),
}


def assert_right(found: Recording, case: Case) -> None:
    """Scores and weights to fp64's last digits, given the kernel's lse; which is as near as plain
    math in its dtype.
    """
    G, scale = case.k.shape[1], case.scale or case.q.shape[3] ** -0.5
    every: list[list[Tensor]] = []
    for b, h in itertools.product(*map(range, case.q.shape[:2])):
        scores, weights = case.pattern(b, h)
        got = found.scores(0, h, batch=b)
        assert torch.equal(got.isneginf(), scores.isneginf())
        seen = scores.isfinite()
        assert (got - scores)[seen].abs().max() <= 1e-14 * (1 + scores[seen].abs().max())
        lse, true = found[0].steps[0].lse[b, h], scores.logsumexp(1)
        plain = plain_lses(case.q[b, h], case.k[b, h // (4 // G)], scores, scale)
        every.append([lse, true, *(x.to(lse.dtype) for x in plain)])
        whole = [lse.double(), true]
        if case.sink is not None:
            whole = [torch.logaddexp(y, case.sink[h].double()) for y in whole]
        factor = torch.exp(whole[1] - whole[0]).masked_fill(true.isneginf(), 0)
        exact = weights * factor[:, None]
        assert (found.weights(0, h, batch=b) - exact).abs().max() <= 1e-12
        assert bool((found.weights(0, h, batch=b)[~seen] == 0).all())
    x, right, *plain = (torch.stack(y) for y in zip(*every, strict=True))
    assert_close_rule(x, plain, right)  # together: of few numbers plain math may be right by luck


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("name", CASES)
def test_a_recorded_pattern_is_the_definition(name: str, spread: float) -> None:
    mask, sees, options, same = CASES[name]
    q, k = tokens(1, 4, 12, 8, spread=spread), tokens(1, 2, 12, 8, seed=1, spread=spread)
    at = [list(range(12))]
    assert_right(recorded(q, k, mask=mask, **options), Case(q, k, at, at, sees, **same))


@pytest.mark.parametrize("name", ["causal", "everything"])
@pytest.mark.parametrize("G", [1, 2, 4])
def test_padding_on_the_left_and_groups(name: str, G: int) -> None:
    mask, sees, options, same = CASES[name]
    q, k = tokens(2, 4, 12, 8), tokens(2, G, 12, 8, seed=1)
    k[0, :, :2] = torch.nan  # nobody may see what stands there
    found = recorded(q, k, mask=mask, q_positions=PADDED, k_positions=PADDED, **options)
    assert_right(found, Case(q, k, PADDED.tolist(), PADDED.tolist(), sees, **same))
    assert found.sums(0, 0, batch=0)[:2].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    q, k = tokens(1, 4, 12, 8, dtype=dtype), tokens(1, 2, 12, 8, seed=1, dtype=dtype)
    at = [list(range(12))]
    assert_right(recorded(q, k, mask=masks.Causal()), Case(q, k, at, at, causal))


def test_masks_and_biases_that_speak_of_slots() -> None:
    q, k = tokens(1, 4, 5, 8), tokens(1, 4, 7, 8, seed=1)
    table = torch.rand(5, 7, generator=torch.Generator().manual_seed(2)) < 0.6
    bias = tokens(1, 4, 5, 7, seed=3)
    q_at, k_at = [[*range(2, 7)]], [[*range(7)]]
    found = recorded(q, k, mask=masks.Dense(table), bias=bias)

    def sees(i: int, j: int) -> bool:
        return bool(table[i - 2, j])

    def add(h: int, i: int, j: int) -> float:
        return float(bias[0, h, i - 2, j])

    assert_right(found, Case(q, k, q_at, k_at, sees, add))
    table.fill_(True)
    bias.zero_()  # what the caller does with its own tensors changes no recording
    assert not bool((found.weights(0, 0) > 0).all())


def some() -> Recording:
    q = tokens(1, 4, 12, 8)
    return recorded(q, q, mask=masks.Causal() & masks.Window(4), sink=SINK)


def test_blocks_rows_columns_and_sums_are_parts_of_one_pattern() -> None:
    found = some()
    whole = found.weights(0, 2)
    assert torch.equal(found.weights(0, 2, slice(3, 9), slice(2, 7)), whole[3:9, 2:7])
    assert torch.equal(found.weights(0, 2, -2, -4), whole[-2:-1, -4:-3])
    assert torch.equal(found.weights(0, 2, slice(7, 3)), whole[:0])
    assert torch.equal(found.row(0, 2, 5), whole[5])
    assert torch.equal(found.column("", 2, 5), whole[:, 5])
    assert (found.sums(0, 2) - whole.sum(1)).abs().max() < 1e-15
    assert torch.equal(found.scores(0, 2, 5)[0].isneginf(), whole[5] == 0)
    assert found.positions(0).tolist() == list(range(12))


def test_the_strongest_keys_and_how_many_others_there_are() -> None:
    found = some()
    row = found.row(0, 1, 9)
    top = found.top(0, 1, 9, 2)
    order = sorted(range(12), key=lambda j: -row[j])
    assert top.columns.tolist() == order[:2]
    assert top.weights.tolist() == row[order[:2]].tolist()
    assert top.others == 2  # the window holds four keys
    assert top.rest == pytest.approx(float(row[order[2:]].sum()), rel=1e-14)
    assert found.top(0, 1, 1, 5).columns.numel() == 2
    x, nothing = tokens(1, 1, 2, 4), masks.Dense(torch.zeros(2, 2).bool())
    blind = recorded(x, x, mask=nothing).top(0, 0, 0)
    assert (blind.others, blind.columns.numel()) == (0, 0)


def test_a_row_of_nan_stays_nan_where_it_may_be_seen_only() -> None:
    q, k = tokens(1, 1, 6, 4), tokens(1, 1, 6, 4, seed=1)
    k[0, 0, 3] = torch.nan
    found = recorded(q, k, mask=masks.Causal()).weights(0, 0)
    assert bool(found[:3].isfinite().all())
    assert bool(found[3:, :4].isnan().any(1).all())
    assert torch.equal(found[4, 5:], torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r[3], "3 was not recorded; recorded: "),
        (lambda r: r["layers.9"], "'layers.9' was not recorded; recorded: "),
        (lambda r: Recording({})[0], "0 was not recorded; recorded: nothing"),
        (lambda r: r.weights(0, 4), "head 4 of  was not recorded; recorded heads: 0, 1, 2, 3 of 4"),
        (lambda r: r.weights(0, 0, 12), "rows is 12; there are 12 rows, so .* from -12 to 11"),
        (lambda r: r.weights(0, 0, None, -13), "columns is -13; there are 12 columns"),
        (lambda r: r.weights(0, 0, batch=1), "batch is 1;  has batch rows 0 to 0"),
        (lambda r: r.top(0, 0, 0, 0), "n is 0; it must be at least 1"),
        (lambda r: r.pooled(0, 0, 0), "size is 0; a block has at least 1 row and 1 column"),
    ],
)
def test_what_is_not_there_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(some())


def test_a_slice_has_the_step_1() -> None:
    with pytest.raises(ArgumentTypeError, match=r"rows is slice.* it must be a slice of step 1"):
        some().weights(0, 0, slice(0, 4, 2))


def test_negative_control_another_rule_is_far() -> None:
    """What is asserted above would not hold for a rule that is slightly another one."""
    found = some()
    place = found[0]
    for change in ({"mask": masks.Causal() & masks.Window(5)}, {"scale": 0.36}, {"sink": None}):
        step = replace(place.steps[0], **change)
        other = replace(place, steps=(step,)).block(slice(0, 12), slice(0, 12)).weights[0, 2]
        assert (other - found.weights(0, 2)).abs().max() > 1e-3, change


def test_a_span_of_queries_behind_the_keys() -> None:
    q, k = tokens(1, 4, 3, 8), tokens(1, 2, 9, 8, seed=1)
    found = recorded(q, k, mask=masks.Causal(), q_positions=Span(4, 3), k_positions=Span(2, 9))
    assert_right(found, Case(q, k, [[4, 5, 6]], [[*range(2, 11)]], causal))


def test_a_notebook_shows_places_and_audits_as_text() -> None:
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    with Recorder() as recorder, named_scope("layers.0<img src=x>"):
        regard.attend(q, k, k, mask=masks.Causal())
    shown = recorder.recording()._repr_html_()
    assert "<td>layers.0&lt;img src=x&gt;</td>" in shown
    assert "<td>4 over 2</td><td>6 x 6</td>" in shown
    assert "6 of 6 rows checked: sound</td>" in shown
    assert "<img" not in shown
