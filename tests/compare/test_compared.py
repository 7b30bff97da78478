"""One comparison told in four ways: JSON, CSV, a table and a page say the same numbers."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest

from regard.compare.comparison import (
    as_csv,
    as_json,
    collect_entries,
    cost_of,
    pareto_names,
    with_overlap,
)
from regard.compare.render import (
    context_plots,
    cost_charts,
    overlap_legend,
    quality_charts,
    render_page,
    render_table,
)
from regard.language import use_language
from regard.view.charts import ScatterPoint
from regard.view.plotting import unit_in
from tests.compare import small
from tests.compare.small import MACHINE, taught

NAMES = ("mha", "mqa", "linear")
PLAN = taught(*NAMES, seeds=(0, 1), rates=(0.003,))
COST = {"mha": (4096, 0.003), "mqa": (1024, 0.002), "linear": (2048, 0.001)}
"""Cache bytes, and seconds of a token."""
RIGHT = {"mha": (0.9, 0.7), "mqa": (0.5, 0.7), "linear": (0.25, 0.75)}
"""Of each seed: means 0.8, 0.6 and 0.5."""


def timed(low: float, t: float, high: float, *kernels: str) -> dict[str, Any]:
    """The times of one mechanism in 7 rounds."""
    spread = {"quartiles": [low, high], "ratio": 1.0, "rounds": 7}
    return {"seconds": t, **spread, "kernels": list(kernels)}


def done(*, without: str | tuple[str, ...] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for context in PLAN.timing.contexts:
        decode, prefill = {}, {}
        for n, (b, t) in COST.items():
            kept = {"kv_bytes": b, "kv_bytes_formula": b}
            decode[n] = timed(0.9 * t, t, 1.1 * t, "sdpa") | kept
            prefill[n] = timed(5 * t, 10 * t, 15 * t)
        found[f"decode/{context}"] = {"rows": decode}
        found[f"prefill/{context}"] = {"rows": prefill, "rounds": 2}
    steps = {n: {"seconds": 0.25, "kernels": []} for n in NAMES}
    found["training/12"] = {"rows": steps, "rounds": 2}
    for n in NAMES:
        found[f"memory/{n}"] = {"prefill": 3 << 20, "training": None}
        for seed, right in enumerate(RIGHT[n]):
            trained = {"validation": 1.0, "accuracy": right, "steps": 9, "tokens": 90}
            found[f"mqar/{n}/lr 0.003/seed {seed}"] = trained
    return {name: numbers for name, numbers in found.items() if not name.startswith(without)}


def told(**more: Any) -> dict[str, Any]:
    return json.loads(
        json.dumps(as_json(PLAN, done(), MACHINE, "regard compare mha", **more), allow_nan=False)
    )


def test_json_has_every_number_and_where_it_comes_from() -> None:
    found = told(notes=["steps: 9"])
    assert (found["command"], found["machine"]) == ("regard compare mha", MACHINE)
    assert found["training"]["seeds"] == [0, 1]
    assert found["shape"]["hidden"] == 96
    entry = {e["name"]: e for e in found["mechanisms"]}["linear"]
    assert entry["decode"]["20"]["kv_bytes"] == 2048
    assert entry["quality"]["mqar"]["mean"] == 0.5
    assert (entry["quality"]["mqar"]["low"], entry["quality"]["mqar"]["high"]) == (0.25, 0.75)
    assert entry["memory"] == {"prefill": 3 << 20, "training": None}
    vocabulary = PLAN.configs["linear"].vocab_size
    assert entry["parameters"] == vocabulary * 64 + 3 * 32 + 4 * 32 * 32 + 3 * 32 * 96


def test_fronts_weigh_less_cost_against_more_right_answers() -> None:
    # cache: mqa 1024/0.6, linear 2048/0.5 (beaten by mqa), mha 4096/0.8; time: linear 1/0.5, mqa
    # 2/0.6, mha 3/0.8
    assert told()["fronts"] == {
        "mqar against kv_bytes": ["mha", "mqa"],
        "mqar against decode_seconds": ["mha", "mqa", "linear"],
    }
    entries = collect_entries(PLAN, done(without="mqar/mha"))
    assert pareto_names(entries, PLAN.tasks[0], "kv_bytes", 20) == ["mqa"]
    assert cost_of(entries[0], "decode_seconds", 999) is None


def test_csv_is_the_json_flat() -> None:
    rows = {row["name"]: row for row in csv.DictReader(io.StringIO(as_csv(PLAN, done())))}
    assert list(rows) == list(NAMES)
    for name, row in rows.items():
        assert float(row["kv_bytes_6"]) == COST[name][0]
        assert float(row["decode_seconds_20"]) == COST[name][1]
        assert float(row["prefill_seconds_20"]) == 10 * COST[name][1]
        assert float(row["training_seconds"]) == 0.25
        assert row["training_seconds_q1"] == ""
        quartiles = [float(row[f"decode_seconds_20_q{n}"]) for n in (1, 3)]
        assert quartiles == [0.9 * COST[name][1], 1.1 * COST[name][1]]
        assert float(row["mqar_accuracy"]) == pytest.approx(sum(RIGHT[name]) / 2)
        assert [float(row[f"mqar_{end}"]) for end in ("low", "high")] == sorted(RIGHT[name])
        assert (row["prefill_peak_bytes"], row["training_peak_bytes"]) == (str(3 << 20), "")


def line(text: str, name: str, part: int = 0) -> list[str]:
    return re.split(r"  +", [row for row in text.splitlines() if row.startswith(f"{name} ")][part])


def test_the_table_says_machine_n_and_seeds() -> None:
    text = render_table(told(notes=["steps: mqar 9"]))
    assert "CPU, 2 cores, 1 thread, torch 2, regard 0" in text
    assert "medians and quartiles of 7 rounds, mechanisms in turns" in text
    assert "seeds 0, 1" in text
    assert "note: steps: mqar 9" in text
    assert "(0.003 for mha mqa linear), tested on other data" in text
    parameters = f"{told()['mechanisms'][2]['parameters']:,}"
    assert line(text, "linear") == ["linear", parameters, "2.00 KiB", "2.00 KiB", "3.00 MiB", "-"]
    # prompts of 5 to 15 ms overlap those of 15 to 45; tokens of 0.9 to 1.1 ms are below 2.7 to 3.3;
    # steps have no rounds
    times = ["~10.0 ms", "~10.0 ms", "1.00 ms", "1.00 ms", "~250 ms"]
    assert line(text, "linear", 1) == ["linear", *times, "state / sdpa"]
    rows = text.splitlines()
    below = rows[next(i for i, row in enumerate(rows) if re.match(r"linear +~", row)) + 1]
    assert " ".join(below.split()) == "5.00..15.0 ms 5.00..15.0 ms 0.90..1.10 ms 0.90..1.10 ms"
    assert line(text, "mha", 1)[1] == "30.0 ms", "the first is what the others are held against"
    assert "~ the quartiles overlap those of mha, or there were fewer than 4 rounds: the" in text
    assert line(text, "linear", 2) == ["linear", "50.0 %", "25.0 % .. 75.0 %", "0.003", "9"]
    assert "mqar against cache bytes: mha, mqa" in text


def test_times_that_overlap_are_not_told_apart() -> None:
    """2.18 against 0.43 ms of two rounds is noise: one in three such pairs is all below the other
    by chance.
    """
    two = {
        n: {"seconds": t, "quartiles": [t, t], "rounds": 2} for n, t in (("a", 2.18), ("b", 0.43))
    }
    assert with_overlap(two, "b")["overlaps_first"] is True
    four = {n: {**row, "rounds": 4} for n, row in two.items()}
    assert with_overlap(four, "b")["overlaps_first"] is False
    assert with_overlap(four, "a")["overlaps_first"] is None
    assert "overlaps_first" not in four["b"], "kept numbers are as they were measured"
    assert with_overlap({"a": {"why": "no room"}, "b": four["b"]}, "b")["overlaps_first"] is None
    assert with_overlap({"a": {"why": "no room"}, "b": four["b"]}, "a") == {"why": "no room"}
    entry = {e["name"]: e for e in told()["mechanisms"]}["linear"]
    assert entry["decode"]["20"]["overlaps_first"] is False
    assert entry["prefill"]["20"]["overlaps_first"] is True
    plain = {"name": "a", "prefill": {}, "decode": {"9": with_overlap(four, "b")}, "training": None}
    assert overlap_legend({"mechanisms": [plain]}) == ""
    marked = {"name": "a", "prefill": {}, "decode": {}, "training": with_overlap(two, "b")}
    legend = overlap_legend({"mechanisms": [marked]})
    assert legend.startswith("~ the quartiles overlap those of a, ")


def test_a_page_without_quality_has_plots() -> None:
    plan = small.plan(*NAMES)
    found = json.loads(json.dumps(as_json(plan, done(), MACHINE, "regard compare mha")))
    text = render_page(found)
    assert list(quality_charts(found)) == []
    assert text.count("<svg") == 2 + 3
    against_cache, against_prompt = cost_charts(found)
    marks = {mark.name: mark for mark in against_cache.marks}
    assert (marks["mqa"].x, marks["mqa"].y) == (1024, 0.002)
    assert marks["mqa"].span == pytest.approx((0.0018, 0.0022))
    assert [m.name for m in against_cache.marks if m.on_pareto_front] == ["mqa", "linear"], (
        "mha costs more of both"
    )
    assert [m.name for m in against_prompt.marks if m.on_pareto_front] == ["linear"]
    drawn = {picture.title: picture for picture in context_plots(found)}
    assert list(drawn) == ["Time of a prompt", "Time of a decoded token", "Cache"]
    assert drawn["Cache"].lines[1].points == ((6.0, 1024.0), (20.0, 1024.0))
    for words in ("against one another", "over the context"):
        assert f"Costs {words}" in text
    assert "show the quartiles of the token" in text
    assert "Quality against cost" not in text
    one = {**found, "timing": {**found["timing"], "contexts": [20]}}
    assert context_plots(one) == []
    assert render_page(one).count("<svg") == 2
    nothing = as_json(plan, {}, MACHINE, "regard compare", interrupted=True)
    assert render_page(nothing).count("<svg") == 0


def test_charts_are_in_the_language_of_the_reader() -> None:
    """Every title, axis and caption is Chinese, and its unit is still known."""
    found = told()
    with use_language("zh"):
        scatters = [*quality_charts(found), *cost_charts(found)]
        plots = context_plots(found)
    texts = [x for one in scatters for x in (one.title, one.x.title, one.y.title, one.caption)]
    texts += [x for one in plots for x in (one.title, one.x, one.y)]
    assert [x for x in texts if not re.search("[\u4e00-\u9fff]", x)] == []
    assert [x for x in texts if re.search("[a-z]{3,} [a-z]{2,}", x)] == []
    assert [unit_in(one.y) for one in plots] == ["seconds", "seconds", "bytes"]


def test_what_is_missing_is_shown_as_missing() -> None:
    partial = done(without=("mqar/linear", "memory", "training"))
    partial["decode/20"]["rows"]["mha"] = {"why": "no room"}
    found = as_json(PLAN, partial, MACHINE, "regard compare", interrupted=True)
    text = render_table(found)
    assert line(text, "linear", 2) == ["linear", "-", "-", "-", "-"]
    assert "not run: mha, decode @20: no room" in text
    assert text.endswith("interrupted: missing values were not measured")
    nothing = as_json(PLAN, {}, MACHINE, "regard compare", interrupted=True)
    assert line(render_table(nothing), "mha")[2:5] == ["-", "-", "-"]
    assert nothing["fronts"] == {"mqar against kv_bytes": [], "mqar against decode_seconds": []}
    assert "interrupted" in render_page(nothing)


def test_a_mechanism_that_diverged_is_told() -> None:
    numbers = done()
    numbers["mqar/mha/lr 0.003/seed 1"] = {"diverged": True, "seconds": 1.0}
    found = as_json(PLAN, numbers, MACHINE, "regard compare")
    assert line(render_table(found), "mha", 2)[1] == "diverged"
    assert "mha" not in found["fronts"]["mqar against kv_bytes"]


def test_the_page_draws_each_lesson_against_each_cost() -> None:
    found = told(notes=["steps <b>"])
    drawn = list(quality_charts(found))
    assert [chart.title for chart in drawn] == [
        "mqar against cache",
        "mqar against time of a decoded token",
    ]
    marks = {mark.name: mark for mark in drawn[0].marks}
    assert marks["mqa"] == ScatterPoint("mqa", 1024, 0.6, (0.5, 0.7), on_pareto_front=True)
    assert not marks["linear"].on_pareto_front
    html = render_page(found)
    assert html.count("<svg") == 2 + 2 + 3
    assert "regard compare mha" in html
    assert "steps &lt;b&gt;" in html
    assert "<b>0, 1</b>" in html
    for foreign in ("<script", "http://", "https://", "src=", "url("):
        assert foreign not in html.replace("http://www.w3.org/2000/svg", ""), foreign
    assert "default-src 'none'" in html
