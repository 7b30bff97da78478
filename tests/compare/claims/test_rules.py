"""The rules that decide on claims: numbers as predicted hold, contrary ones do not, and every claim has both."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.compare import Session, Store
from regard.compare.claims import CLAIMS, VERDICTS, Check, Outcome, find_claim, run
from regard.compare.claims.base import verdict
from regard.compare.claims.timed import exponent, ratios, seconds
from regard.compare.claims.told import as_csv, section, summary, text
from regard.errors import ArgumentError
from regard.view.curves import svg
from tests.compare.claims.planted import CONTRARY, PLANTED, changed

SEEDS = (Path(__file__).parents[3] / "docs" / "seeds.md").read_text("utf-8")
MEASURED = ("minus-infinity", "dropout", "positions", "decode-mask")
"""Claims that are quick enough to be contradicted by what they measure: test_measured.py."""


def test_every_claim_is_listed_under_its_id_and_belongs_to_a_seed() -> None:
    assert set(CLAIMS) == {*PLANTED, *MEASURED}
    for name, claim in CLAIMS.items():
        assert claim.id == name
        assert claim.seeds
        assert all(f"| {seed} |" in SEEDS for seed in claim.seeds), claim.seeds
        for words in (claim.says, claim.predicts, claim.scale, claim.lesson):
            assert re.fullmatch(r"\S.+[.:]", words), words


@pytest.mark.parametrize("name", PLANTED)
def test_numbers_as_predicted_hold(name: str) -> None:
    outcome = Outcome(CLAIMS[name], PLANTED[name]())
    assert [check.says for check in outcome.checks if not check.passed] == []
    assert outcome.verdict == "holds"
    assert outcome.picture.drawable
    assert svg(outcome.picture).startswith("<svg")


@pytest.mark.parametrize(("name", "path", "value", "wanted"), CONTRARY)
def test_contrary_numbers_do_not(
    name: str, path: tuple[str | int, ...], value: Any, wanted: str
) -> None:
    assert Outcome(CLAIMS[name], changed(PLANTED[name](), path, value)).verdict == wanted


def test_every_claim_has_numbers_that_contradict_it() -> None:
    assert {name for name, *_, wanted in CONTRARY if wanted == VERDICTS[2]} == set(PLANTED)


@pytest.mark.parametrize(
    ("failing", "wanted"),
    [((), 0), (("limit",), 1), (("essential",), 2), (("essential", "limit"), 2)],
)
def test_the_verdict_by_what_fails(failing: tuple[str, ...], wanted: int) -> None:
    checks = [Check(name, 0.0 if name in failing else 1.0, low=0.5, essential=name == "essential") for name in ("essential", "limit")]  # fmt: skip
    assert verdict(checks) == VERDICTS[wanted]


@pytest.mark.parametrize(
    ("value", "passed"),
    [
        (1.0, True),
        (2.0, True),
        (0.999, False),
        (2.001, False),
        (math.nan, False),
        (math.inf, False),
    ],
)
def test_bounds_are_inside_and_nan_is_not(value: float, passed: bool) -> None:
    check = Check("x", value, 1.0, 2.0)
    assert check.passed is passed
    assert check.as_dict()["value"] == (value if math.isfinite(value) else None)
    assert check.bounds == "1 to 2"


def test_what_is_told() -> None:
    good = Outcome(CLAIMS["mla"], PLANTED["mla"]())
    bad = Outcome(CLAIMS["scale"], changed(PLANTED["scale"](), ("by_dim", 2, "spread"), 4096.0), reused=True)  # fmt: skip
    assert summary([good, bad]) == "2 claims: 1 hold, 0 hold with limits, 1 do not hold"
    lines = text(bad).splitlines()
    assert lines[0] == "scale: does not hold (kept from an earlier run)"
    assert lines[3].split()[0] == "no"
    assert "at most 5" in lines[3]
    table = as_csv([good, bad]).splitlines()
    assert len(table) == 1 + len(good.checks) + len(bad.checks)
    assert table[1].startswith("mla,holds,")
    assert ",6.4,2.0,,True,True" in table[1]
    assert (section(good).good, section(bad).good) == (True, False)
    assert section(bad).rows[0][0] == "no"
    told = bad.as_dict()
    assert told["verdict"] == "does not hold"
    assert told["checks"][0]["passed"] is False
    assert told["picture"]["lines"]


def test_a_timed_claim_says_that_nothing_is_dropped() -> None:
    timed = {name for name, claim in CLAIMS.items() if claim.timed}
    assert timed == {"fused", "mla", "kv-cache", "exponents", "order"}
    (found,) = run(Session(Store(None)), [CLAIMS["order"]], 0.004)
    assert found.numbers["dropout"] == 0.0
    assert found.numbers["threads"] == torch.get_num_threads()
    assert "evaluation" in found.numbers["mode"]
    with torch.inference_mode():
        times = seconds(
            {"a": lambda: None, "b": lambda: torch.zeros(200_000).exp()}, 0.01, sample=0.0
        )
    assert ratios(times, "a")["b"] > 1, "what is slower is told as slower"
    assert ratios(times, "b")["a"] < 1


def test_an_unknown_claim_names_its_neighbour() -> None:
    with pytest.raises(ArgumentError, match=r"there is no claim 'dropot'; did you mean dropout\? --list"):  # fmt: skip
        find_claim("dropot")


def test_exponent_is_the_slope() -> None:
    lengths, noise = [100.0, 200.0, 400.0, 800.0], [1.1, 0.9, 0.9, 1.1]
    assert exponent(lengths, [7 * n**1.5 for n in lengths]) == pytest.approx(1.5, abs=1e-12)
    # symmetric noise moves the level and leaves the slope
    assert exponent(lengths, [n * e for n, e in zip(lengths, noise, strict=True)]) == pytest.approx(1.0, abs=1e-12)  # fmt: skip
