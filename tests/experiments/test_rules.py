"""The rules that decide on claims: numbers as predicted hold, contrary ones do not, and every claim
has both.
"""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from experiments import CLAIMS, VERDICTS, Criterion, Outcome, find_claim, run_claims
from experiments.claim import (
    ATTN_JOURNEY,
    DEEPSEEK_NOTE,
    OUTLINE,
    OVERVIEW,
    RASCHKA_NOTES,
    Role,
    median_criterion,
    verdict,
)
from experiments.cpu_timing import (
    combine_rounds,
    fit_exponent,
    length_exponents,
    round_ratios,
    time_cases,
)
from experiments.render import as_csv, outcome_section, outcome_text, summary
from regard.compare import ExperimentStore, Session
from regard.errors import ArgumentError
from regard.view.charts import svg
from tests.experiments.planted import CONTRARY, PLANTED, WIDE, changed

ROOT = Path(__file__).parents[2]
SEEDS = (ROOT / "docs" / "seeds.md").read_text("utf-8")
LINE = re.compile(r"\b([SE][1-5]\.\d+|X[1-5])\b(?!\.)")
"""An id of a line of docs/seeds.md."""
NOTES = {DEEPSEEK_NOTE, ATTN_JOURNEY, RASCHKA_NOTES, OVERVIEW, OUTLINE}
SENTENCE = re.compile(r"[A-Z0-9][^.;:]*\.")
"""One statement: no second sentence, and nothing joined on by a semicolon or a colon."""


def test_every_claim_is_listed_under_its_id_and_names_a_section_of_a_note() -> None:
    assert set(CLAIMS) == set(PLANTED)
    for name, claim in CLAIMS.items():
        assert claim.id == name
        assert claim.sources
        assert {source.note for source in claim.sources} <= NOTES
        assert all(str(source).startswith(f"{source.note}, ") for source in claim.sources)
        for words in (claim.statement, claim.prediction, claim.scope, claim.takeaway):
            assert re.fullmatch(r"\S.+[.:]", words), words


def test_the_page_of_the_notes_lists_the_lines_of_every_claim() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|$", SEEDS, re.MULTILINE))
    assert list(rows) == list(CLAIMS)
    for name, lines in rows.items():
        ids = lines.split(", ")
        assert all(f"| {line} |" in SEEDS for line in ids), lines
        notes = [line[1] for line in ids if line[0] == "S"]
        said_in = {DEEPSEEK_NOTE: "1", ATTN_JOURNEY: "2", RASCHKA_NOTES: "3", OVERVIEW: "4"}
        found = {said_in.get(source.note, "5") for source in CLAIMS[name].sources}
        assert found == set(notes), name


@pytest.mark.parametrize("folder", ["src", "experiments", "docs", "tests"])
def test_ids_of_lines_stand_on_the_page_of_the_notes_only(folder: str) -> None:
    """The tests that check that page may name them, too."""
    own = {
        ROOT / "docs" / "seeds.md",
        ROOT / "docs" / "seeds.zh-CN.md",
        ROOT / "tests" / "docs" / "test_seeds.py",
        Path(__file__),
    }
    files = {p for kind in ("py", "md", "js") for p in (ROOT / folder).rglob(f"*.{kind}")} - own
    found = {p.name: LINE.findall(p.read_text("utf-8")) for p in files}
    assert {name: ids for name, ids in found.items() if ids} == {}


def test_an_id_of_a_line_is_found() -> None:
    assert LINE.findall("as S2.3, E4.14 and (X5) say; not X1.2, S6.1 or AVX2") == [
        "S2.3",
        "E4.14",
        "X5",
    ]


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_says_one_thing(name: str) -> None:
    assert SENTENCE.fullmatch(CLAIMS[name].statement), CLAIMS[name].statement


def test_claims_that_share_an_experiment_measure_the_same() -> None:
    for claim in CLAIMS.values():
        owner = CLAIMS[claim.measured_with or claim.id]
        assert owner.measure is claim.measure, claim.id


@pytest.mark.full(keep=25)
@pytest.mark.parametrize("name", PLANTED)
def test_numbers_as_predicted_hold(name: str) -> None:
    outcome = Outcome(CLAIMS[name], PLANTED[name]())
    assert [c.quantity for c in outcome.checks if c.answer not in ("yes", "reported")] == []
    assert any(c.role == "claim" for c in outcome.checks)
    assert outcome.verdict == "holds"
    assert outcome.picture.drawable
    assert svg(outcome.picture).startswith("<svg")


@pytest.mark.parametrize(("name", "path", "value", "wanted"), CONTRARY)
def test_contrary_numbers_do_not(
    name: str, path: tuple[str | int, ...], value: Any, wanted: str
) -> None:
    assert Outcome(CLAIMS[name], changed(PLANTED[name](), path, value)).verdict == wanted


def test_every_claim_has_numbers_that_contradict_it() -> None:
    assert {name for name, *_, wanted in CONTRARY if wanted == VERDICTS[3]} == set(PLANTED)


def test_every_timed_claim_has_numbers_that_leave_it_open() -> None:
    timed = {name for name, claim in CLAIMS.items() if claim.timed} - {"loops"}  # a factor of tens
    assert timed <= {name for name, *_, wanted in CONTRARY if wanted == VERDICTS[2]}


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ({}, "holds"),
        ({"limit": "no"}, "holds with limits"),
        ({"limit": "undecided"}, "holds with limits"),
        ({"claim": "no"}, "does not hold"),
        ({"claim": "no", "limit": "no"}, "does not hold"),
        ({"claim": "undecided"}, "undecided"),
        ({"claim": "undecided", "limit": "no"}, "undecided"),
        ({"control": "no", "claim": "no"}, "undecided"),
        ({"control": "undecided"}, "undecided"),
    ],
)
def test_the_verdict_by_the_answers(answers: dict[Role, str], wanted: str) -> None:
    value: dict[str, tuple[float, tuple[float, float] | None]] = {
        "yes": (1.0, None),
        "no": (0.0, None),
        "undecided": (1.0, (0.2, 1.4)),
    }
    checks = [Criterion("reported", -5.0, low=0.5, role="reported")]
    for role in get_args(Role):
        number, spread = value[answers.get(role, "yes")]
        checks.append(
            Criterion(
                role,
                number,
                low=0.5,
                role="reported" if role == "reported" else role,
                spread=spread,
            )
        )
    assert verdict(checks) == wanted


@pytest.mark.parametrize(
    ("value", "answer"),
    [(1.0, "yes"), (2.0, "yes"), (0.999, "no"), (2.001, "no"), (math.nan, "no"), (math.inf, "no")],
)
def test_bounds_are_inside_and_nan_is_not(value: float, answer: str) -> None:
    check = Criterion("x", value, 1.0, 2.0)
    assert check.answer == answer
    assert check.as_dict()["value"] == (value if math.isfinite(value) else None)
    assert check.bounds == "1 to 2"


@pytest.mark.parametrize(
    ("spread", "answer"),
    [
        ((1.0, 2.0), "yes"),
        ((0.9, 1.5), "undecided"),
        ((1.5, 2.1), "undecided"),
        ((0.5, 3.0), "undecided"),
        ((0.1, 0.9), "no"),
        ((2.1, 9.0), "no"),
        ((math.nan, math.nan), "no"),
    ],
)
def test_a_bound_inside_the_spread_is_not_decided(spread: tuple[float, float], answer: str) -> None:
    assert Criterion("x", 1.5, 1.0, 2.0, spread=spread).answer == answer


def test_what_scatters_is_told_with_its_spread() -> None:
    check = median_criterion("x", [1.0, 2.0, 3.0, 4.0, 50.0], high=3.5)
    assert (check.value, check.spread, check.answer) == (3.0, (2.0, 4.0), "undecided")
    few = median_criterion("seeds", [0.5, 0.1])
    assert (few.value, few.spread) == (pytest.approx(0.3), (0.1, 0.5))


def test_what_is_told() -> None:
    good = Outcome(CLAIMS["fused"], PLANTED["fused"]())
    bad = Outcome(
        CLAIMS["scale"], changed(PLANTED["scale"](), ("by_dim", 2, "spread"), 4096.0), reused=True
    )
    open_ = Outcome(
        CLAIMS["fused"], changed(PLANTED["fused"](), ("by_mode", 0, "times", "GPT"), WIDE)
    )
    assert (
        summary([good, bad, open_])
        == "3 claims: 1 hold, 0 hold with limits, 1 undecided, 1 do not hold"
    )
    lines = outcome_text(bad).splitlines()
    assert lines[0] == "scale: does not hold (reused from an earlier run)"
    assert lines[3].split()[0] == "no"
    assert "at most 5" in lines[3]
    assert re.search(
        r"^  undecided +1\.01 .* \(0\.\d+ to 1\.\d+\)$", outcome_text(open_), re.MULTILINE
    )
    table = as_csv([good, bad]).splitlines()
    assert len(table) == 1 + len(good.checks) + len(bad.checks)
    assert table[1].startswith("fused,holds,")
    assert table[1].endswith(",,0.95,yes,claim")
    assert [outcome_section(one).good for one in (good, bad, open_)] == [True, False, None]
    assert outcome_section(bad).rows[0][0] == "no"
    told = bad.as_dict()
    assert told["verdict"] == "does not hold"
    assert (told["checks"][0]["answer"], told["checks"][0]["role"]) == ("no", "claim")
    assert told["picture"]["lines"]


def test_mha_gpt_and_mla_stand_side_by_side_in_text_and_page() -> None:
    outcome = Outcome(CLAIMS["fused"], PLANTED["fused"]())
    lines, page = outcome_text(outcome), outcome_section(outcome).html()
    for name in ("MHA", "GPT", "MLA", "MLA, dropout 0.0"):
        assert re.search(
            rf"^    {name} +training +4 x 128 x 512 +0\.0000 +0\.2000 +\d+\.\d\d$",
            lines,
            re.MULTILINE,
        )
        assert f"<td>{name}</td><td>training</td><td>4 x 128 x 512</td><td>0.0000</td>" in page
    assert "<th>mean</th><th>std</th><th>ms</th>" in page
    assert outcome.as_dict()["table"][0] == ["", "mode", "shape", "mean", "std", "ms"]


def test_a_timed_claim_says_how_it_was_timed() -> None:
    timed = {name for name, claim in CLAIMS.items() if claim.timed}
    assert timed == {
        "fused",
        "mla-time",
        "mla-absorbed",
        "mla-step",
        "kv-cache",
        "sparse-time",
        "order-time",
        "loops",
    }
    threads = torch.get_num_threads()
    (found,) = run_claims(Session(ExperimentStore(None)), [CLAIMS["loops"]], 0.004)
    assert found.numbers["dropout"] == 0.0
    assert (found.numbers["threads"], found.numbers["clock"]) == (1, "processor time")
    assert torch.get_num_threads() == threads
    assert "evaluation" in found.numbers["mode"]


def test_waiting_is_not_counted() -> None:
    work = {"waits": lambda: time.sleep(0.02), "works": lambda: sum(range(100_000))}
    times = time_cases(work, 0.01, sample=0.0)
    assert max(round_ratios(times, "waits", "works")) < 1, "a wait of 20 ms against a sum of a few"


def test_ratios_and_slopes_go_round_by_round() -> None:
    assert round_ratios({"a": [1.0, 3.0], "b": [2.0, 2.0]}, "a", "b") == [0.5, 1.5]
    assert combine_rounds([[1.0, 4.0], [4.0, 1.0]]) == [2.0, 2.0]
    rows = [{"length": n, "times": {"a": [n * 1e-6, n**2 * 1e-6]}} for n in (8, 64)]
    assert length_exponents(rows, "a") == [1.0, 2.0]


def test_claims_of_one_experiment_measure_it_once() -> None:
    session = Session(ExperimentStore(None))
    shared = [CLAIMS[name] for name in ("minus-infinity", "minus-infinity-hides", "large-negative")]
    found = run_claims(session, shared)
    assert session.measured == 1
    assert [one.reused for one in found] == [False, False, False]
    assert found[0].numbers == found[2].numbers


def test_an_unknown_claim_names_its_neighbour() -> None:
    with pytest.raises(ArgumentError, match="there is no claim 'dropot'; did you mean 'dropout'"):
        find_claim("dropot")


def test_exponent_is_the_slope() -> None:
    lengths, noise = [100.0, 200.0, 400.0, 800.0], [1.1, 0.9, 0.9, 1.1]
    assert fit_exponent(lengths, [7 * n**1.5 for n in lengths]) == pytest.approx(1.5, abs=1e-12)
    # symmetric noise moves the level and leaves the slope
    assert fit_exponent(
        lengths, [n * e for n, e in zip(lengths, noise, strict=True)]
    ) == pytest.approx(1.0, abs=1e-12)
