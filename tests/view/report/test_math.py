"""The page's own arithmetic, under node, against the recording and against the definition in
loops.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import regard
from regard.inspect import record
from regard.inspect.report import report
from tests.view.report.cases import CASES, Case, defined, inputs, recorded
from tests.view.report.node import NODE, WHY_NOT, ask

pytestmark = pytest.mark.skipif(NODE is None, reason=WHY_NOT)
BAR = 1e-6
"""What the page may differ from the recording by, weights being at most 1."""
LSE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""How far the kernel's own lse, in its dtype, may move a weight from the definition: the page shows
what was computed.
"""


def assert_same(found: Any, expected: Any, bar: float = BAR) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x == y or abs(x - y) <= bar * max(1.0, abs(y)), (x, y)


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_row_is_the_recordings_and_the_definitions(case: Case) -> None:
    recording = recorded(case)
    rows = [(h, i) for h in range(case.H) for i in range(case.T)]
    found = ask(report(recording), [("row", 0, h, i) for h, i in rows])
    for (h, i), row in zip(rows, found, strict=True):
        assert_same(row["weights"], recording.weights(0, h, i)[0].tolist())
        assert_same(row["scores"], recording.scores(0, h, i)[0].tolist())
        scores, weights = defined(case, h, i)
        assert_same(row["scores"], scores, 1e-12)
        assert_same(row["weights"], weights, LSE[case.dtype])
        seen = [s for s in scores if s != -math.inf]
        assert row["n"] == len(seen)
        assert row["max"] == pytest.approx(max(seen, default=-math.inf), abs=1e-12)
        assert row["sum"] + row["sink"] == pytest.approx(
            1.0 if seen or case.sink else 0.0, abs=LSE[case.dtype]
        )
        kept = [w for w in [*weights, *([1 - sum(weights)] if case.sink else [])] if w > 0]
        assert row["entropy"] == pytest.approx(
            -sum(w * math.log(w) for w in kept), abs=4 * LSE[case.dtype]
        )


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_cell_is_a_chain_whose_links_join(case: Case) -> None:
    recording = recorded(case)
    cells = [(h, i, j) for h in range(case.H) for i in range(case.T) for j in range(case.S)]
    found = ask(report(recording), [("cell", 0, h, i, j) for h, i, j in cells])
    q, k, _ = inputs(case)
    for (h, i, j), cell in zip(cells, found, strict=True):
        products = (q[0, h, i].double() * k[0, h // (case.H // case.G), j].double()).tolist()
        assert_same(cell["products"], products, 1e-14)
        assert cell["dot"] == pytest.approx(sum(products), abs=1e-12)
        assert cell["scaled"] == pytest.approx(sum(products) / math.sqrt(len(products)), abs=1e-12)
        cap = case.cap
        assert cell["capped"] == pytest.approx(
            cap * math.tanh(cell["scaled"] / cap) if cap else cell["scaled"]
        )
        assert cell["unmasked"] == cell["capped"] + cell["bias"]
        score = defined(case, h, i)[0][j]
        assert cell["visible"] is (score != -math.inf)
        assert bool(cell["why"]) is not cell["visible"]
        assert_same([cell["score"]], [score], 1e-12)
        assert_same([cell["weight"]], [recording.weights(0, h, i, j).item()])


def test_the_reason_names_the_terms_that_say_no() -> None:
    data = report(recorded(CASES[4]))  # causal & window(3) | sinks(1)
    future, far = ask(data, [("why", 0, 0, 2, 5), ("why", 0, 0, 9, 4)])
    assert [x["key"] for x in future] == ["why.future", "why.outside"]
    assert [x["values"]["mask"] for x in far] == ["window(3)", "sinks(1)"]
    padded = report(recorded(CASES[5]))
    assert ask(padded, [("why", 0, 0, 8, 0)]) == [[{"key": "why.padding", "values": {}}]]
    negated = report(recorded(CASES[8]))
    assert ask(negated, [("why", 0, 0, 3, 3)])[0] == [
        {"key": "why.inside", "values": {"mask": "window(2)"}}
    ]


@pytest.mark.full
def test_values_mix_to_what_the_kernel_gave() -> None:
    for case in CASES[:6]:
        recording = recorded(case)
        data = report(recording)
        rows = [(h, i) for h in range(case.H) for i in range(case.T)]
        weights = [recording.weights(0, h, i)[0].tolist() for h, i in rows]
        mixed = ask(data, [("mixed", 0, h, w) for (h, _), w in zip(rows, weights, strict=True)])
        given = ask(data, [("out", 0, h, i) for h, i in rows])
        for z, out in zip(mixed, given, strict=True):
            assert_same(z, out, 10 * LSE[case.dtype])


def what_if(case: Case, h: int, i: int, spec: dict[str, Any]) -> list[float]:
    """The weights of a row under another mechanism, in loops."""
    q, k, _ = inputs(case)
    at, keys = (
        case.q_positions or tuple(range(case.S - case.T, case.S)),
        case.k_positions or tuple(range(case.S)),
    )
    a, terms = q[0, h, i].double().tolist(), []
    scale = spec.get("scale", 1 / math.sqrt(len(a))) / spec.get("temperature", 1.0)
    cap = spec.get("softcap", case.cap)
    for j in range(case.S):
        b = k[0, h // (case.H // case.G), j].double().tolist()
        away = at[i] - keys[j]
        seen = keys[j] >= 0 and (bool(spec.get("nomask")) or case.sees(h, at[i], keys[j]))
        if not seen or away >= spec.get("window", math.inf):
            terms.append(0.0)
        elif spec.get("linear"):
            phi = [[x + 1 if x > 0 else math.exp(x) for x in side] for side in (a, b)]
            terms.append(sum(x * y for x, y in zip(*phi, strict=True)))
        else:
            s = sum(x * y for x, y in zip(a, b, strict=True)) * scale
            s = cap * math.tanh(s / cap) if cap else s
            s += 0.0 if spec.get("nobias") else case.adds(h, at[i], keys[j])
            terms.append(math.exp(s - spec.get("alibi", 0.0) * abs(away)))
    sink = case.sink is not None and not spec.get("nosink") and not spec.get("linear")
    total = sum(terms) + (math.exp(case.sink[h]) if sink and case.sink else 0.0)
    return [x / total if total else 0.0 for x in terms]


SPECS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 2},
    {"alibi": 0.3},
    {"softcap": 0.7},
    {"softcap": None},
    {"temperature": 3.0},
    {"scale": 1.0},
    {"linear": True},
    {"nomask": True},
    {"nobias": True},
    {"nosink": True},
    {"nosink": True, "window": 3, "temperature": 0.5},
)


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("number", [0, 4, 5, 8])
def test_another_mechanism_on_the_same_q_and_k(number: int) -> None:
    case = CASES[number]
    rows = [(h, i, n) for h in range(case.H) for i in range(case.T) for n in range(len(SPECS))]
    found = ask(report(recorded(case)), [("other", 0, h, i, SPECS[n]) for h, i, n in rows])
    for (h, i, n), row in zip(rows, found, strict=True):
        assert_same(row["weights"], what_if(case, h, i, SPECS[n]), 1e-12)


@pytest.mark.full
def test_decode_steps_show_each_row_with_the_keys_that_it_had() -> None:
    recording = record(regard.load("tiny"), "to be or not", tokens=3, cache="growing")
    place, data = recording[0], report(recording)
    assert len(place.steps) > 1
    rows = list(range(place.T))
    found = ask(data, [("weights", 0, 2, i) for i in rows])
    for i, weights in zip(rows, found, strict=True):
        assert_same(weights, recording.weights(0, 2, i)[0].tolist())
    first = place.steps[0].T
    assert ask(data, [("why", 0, 2, 0, place.N - 1)])[0][0]["key"] == "why.absent"
    assert ask(data, [("present", 0, first, 0)]) == [True]


def test_a_wrong_number_would_be_found() -> None:
    case = CASES[0]
    data = report(recorded(case))
    data["meta"]["places"][0]["rules"][0]["scale"] *= 1.001
    row = ask(data, [("weights", 0, 0, case.T - 1)])[0]
    with pytest.raises(AssertionError):
        assert_same(row, defined(case, 0, case.T - 1)[1])
