"""The numbers of the page's panels, run under node, against Python loops written from their
definitions.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import subprocess
from importlib import resources
from typing import Any

import pytest
import torch

from regard.biases.distance import alibi_slopes
from regard.positions import rope_frequencies, rotate
from regard.span import Span

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no node on the PATH")
PANELS = resources.files("regard.view.page") / "panels.js"


def node(expression: str, **given: Any) -> Any:
    """The value of an expression over `panels` and what is given."""
    assert NODE is not None
    script = f"""
        const {{ panels }} = require({json.dumps(str(PANELS))});
        const input = require("fs").readFileSync(0, "utf8");
        const given = JSON.parse(input, (_, x) => x === "-inf" ? -Infinity : x);
        const shown = (_, x) => x instanceof Float64Array ? [...x] : x === -Infinity ? "-inf" : x;
        process.stdout.write(JSON.stringify(({expression}), shown));
    """
    done = subprocess.run(
        [NODE, "-e", script], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def normal(seed: int, n: int, scale: float = 1.0) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(0, scale) for _ in range(n)]


def close(a: list[float], b: list[float]) -> bool:
    """Equal up to fp64 rounding of sums of a few hundred terms."""
    return len(a) == len(b) and all(
        math.isclose(x, y, rel_tol=1e-11, abs_tol=1e-12) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dims", [8, 6])
def test_unrotating_undoes_the_rotation_of_the_package(layout: Any, dims: int) -> None:
    inv_freq = rope_frequencies(dims).inv_freq.double()
    rotary = {"layout": layout, "inv_freq": inv_freq.tolist(), "factor": 1.25, "dims": dims}
    x = torch.tensor(normal(0, 8, 3.0), dtype=torch.float64)
    turned = rotate(x[None, None, None], Span(1234, 1), inv_freq, layout=layout, factor=1.25)
    ask = "panels.unrotated(given.x, 1234, given.rotary)"
    assert close(node(ask, x=turned.flatten().tolist(), rotary=rotary), x.tolist())
    wrong = {**rotary, "layout": {"half": "interleaved", "interleaved": "half"}[layout]}
    assert not close(node(ask, x=turned.flatten().tolist(), rotary=wrong), x.tolist())


def test_frequencies_share_out_the_whole_dot() -> None:
    products = normal(1, 8)
    rotary = {"layout": "half", "inv_freq": [1.0, 0.1, 0.01]}
    found = node(
        "panels.byFrequency(given.products, given.rotary)", products=products, rotary=rotary
    )
    assert close([x["sum"] for x in found], [products[m] + products[m + 3] for m in range(3)])
    assert [x["dims"] for x in found] == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_the_online_softmax_ends_where_the_whole_one_does(scale: float) -> None:
    scores: list[Any] = normal(2, 21, scale)
    scores[5] = scores[6] = scores[7] = scores[20] = "-inf"
    values = [normal(100 + j, 3) for j in range(21)]
    cases = list(itertools.product((1, 3, 64), (None, 0.5, 90.0)))
    ask = (
        "given.cases.map(([block, sink]) => panels.online(given.scores, j => given.values[j], "
        "3, block, sink))"
    )
    seen = {j: s for j, s in enumerate(scores) if s != "-inf"}
    for (block, sink), rounds in zip(
        cases, node(ask, scores=scores, values=values, cases=cases), strict=True
    ):
        terms = [*seen.values(), *([] if sink is None else [sink])]
        lse = max(terms) + math.log(math.fsum(math.exp(s - max(terms)) for s in terms))
        z = [math.fsum(math.exp(s - lse) * values[j][d] for j, s in seen.items()) for d in range(3)]
        assert len(rounds) == math.ceil(17 / block) + (sink is not None)
        assert close([rounds[-1]["lse"], *rounds[-1]["z"]], [lse, *z])
        assert rounds[-1]["m"] == max(terms)


def test_the_online_softmax_of_nothing_but_a_sink() -> None:
    only = node("panels.online(given.scores, null, 0, 4, 2.0)", scores=["-inf", "-inf"])
    assert [(x["m"], x["l"], x["z"]) for x in only] == [(2.0, 1.0, None)]


def test_the_largest_are_those_of_sorting() -> None:
    values = [abs(x) for x in normal(3, 200)] + [0.0, 0.0]
    found = node("panels.topOf(given.values.length, j => given.values[j], 9)", values=values)
    assert found == sorted(range(202), key=lambda j: -values[j])[:9]
    assert node("panels.topOf(3, j => [0, 0, 5][j], 9)") == [2]
    assert node("panels.largest([1, -7, 3, 0], 2)") == [1, 2]


def test_keys_for_a_share() -> None:
    weights = [0.5, 0.0, 0.3, 0.1, 0.1]
    ask = "[0.5, 0.8, 0.81, 1].map(share => panels.keysFor(panels.falling(given.weights), share))"
    assert node(ask, weights=weights) == [1, 2, 3, 4]
    assert node("panels.keysFor(panels.falling([]), 0.9)") == 0


def test_mass_by_distance_lies_in_bins_that_double() -> None:
    weights = [0.1, 0.2, 0.0, 0.3, 0.25, 0.15]
    found = node("panels.byDistance(given.weights, j => [8, 3, 2, 1, 0, -1][j])", weights=weights)
    assert [(x["level"], x["low"], x["high"], x["mass"]) for x in found] == [
        (-1, 1, 1, 0.15),
        (0, 0, 0, 0.25),
        (1, 1, 1, 0.3),
        (2, 2, 3, 0.2),
        (4, 8, 15, 0.1),
    ]
    mean = node("panels.meanDistance(given.weights, j => [8, 3, 2, 1, 0, -1][j])", weights=weights)
    assert math.isclose(mean, 0.8 + 0.6 + 0.3 - 0.15)


def test_entropy_and_divergence() -> None:
    assert math.isclose(node("panels.entropy([0.25, 0.25, 0, 0.25], 0.25)"), math.log(4))
    assert node("panels.divergence([1, 0], [1, 0])") == 0
    assert node("panels.divergence([1, 0], [0, 1])") == 1
    p, q = [0.7, 0.2, 0.1], [0.1, 0.6, 0.3]
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    by_hand = (
        sum(a * math.log2(a / c) + b * math.log2(b / c) for a, b, c in zip(p, q, m, strict=True))
        / 2
    )
    assert math.isclose(node("panels.divergence(given.p, given.q)", p=p, q=q), by_hand)


@pytest.mark.parametrize("heads", [1, 8, 12, 20])
def test_the_slopes_of_alibi_are_those_of_the_package(heads: int) -> None:
    ask = "Array.from({ length: given.heads }, (_, h) => panels.alibiSlope(given.heads, h))"
    assert close(node(ask, heads=heads), list(alibi_slopes(heads)))


def test_distances_between_vectors() -> None:
    a, b = normal(4, 5), normal(5, 5)
    found = node("[panels.apart(given.a, given.b), panels.furthest(given.a, given.b)]", a=a, b=b)
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    assert close(found, [math.sqrt(math.fsum(d * d for d in differences)), max(differences)])
    assert node("panels.summary([3, -4])") == {"min": -4, "max": 3, "norm": 5}
    assert node("panels.running([1, 2, 4])") == [1, 3, 7]


def test_lines_hold_every_token_once_and_keep_to_the_width() -> None:
    tokens = ["def", "·f", "(", "x", "):", "⏎", "·" * 50, "注意力", "机制", "‹0A›", "end"]
    found = node("panels.lines(given.tokens, 12)", tokens=tokens)
    assert [j for a, b in found for j in range(a, b)] == list(range(len(tokens)))
    assert [0, 5] not in found  # too wide for one line
    assert all(b == 6 or a >= 6 for a, b in found if a <= 5 < b)  # a newline ends its line
    assert node("panels.wide('注a')") == 3
    assert node("panels.lines([], 12)") == []


@pytest.mark.full
def test_search_takes_text_and_patterns() -> None:
    tokens = ["The", "·cat", "the", "·c", "(", "C++"]
    ask = "panels.search(given.tokens, given.text)"
    assert node(ask, tokens=tokens, text="the") == [0, 2]
    assert node(ask, tokens=tokens, text="/^the$/") == [0, 2]
    assert node(ask, tokens=tokens, text="/^THE$/u") == []
    assert node(ask, tokens=tokens, text="E·Ca") == [0], "across tokens"
    assert node(ask, tokens=tokens, text="/e.c|\\(c/") == [0, 2, 4]
    assert node(ask, tokens=tokens, text="(") == [4]
    assert node(ask, tokens=tokens, text="/(/") is None
    assert node(ask, tokens=tokens, text="") == []
