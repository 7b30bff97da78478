"""A recording as a page's data: thumbnails and numbers against loops, rules, what is embedded, and
what is refused.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard import biases, masks
from regard.errors import ArgumentError
from regard.inspect import Choice, Recorder, Recording, record
from regard.inspect.record.recorded_place import KeyValuePool, Place
from regard.inspect.record.tiles import PoolAccumulator
from regard.inspect.report import report
from regard.inspect.report.page_data import (
    METRICS,
    PAGE_BUDGET,
    as_bytes,
    cost_facts,
    place_overview,
)
from regard.inspect.report.page_rules import split_by_pool
from regard.tracing import named_scope
from regard.view.page import report_page
from tests.inspect.recorded import recorded_call
from tests.view.report.cases import CASES, Case, defined, recorded


def run(
    *, layers: int = 2, H: int = 4, T: int = 24, D: int = 8, G: int | None = None, seed: int = 0
) -> Recording:
    """A recording of several places, of random q, k and v."""
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad(), Recorder() as recorder:
        for n in range(layers):
            q, k, v = (torch.randn(1, heads, T, D, generator=make) for heads in (H, G or H, G or H))
            with named_scope("layers"), named_scope(str(n)):
                regard.attend(2 * q, k, v, mask=masks.Causal())
    return recorder.recording(pieces=tuple(f"t{i}" for i in range(T)), model="made")


def test_a_character_of_several_tokens_stands_once_in_the_title() -> None:
    parts = {"今": 2, "👩": 3, "‹U+200D›": 2, "👧": 3, "·₿": 1}
    pieces = [f"{x}‹{i + 1}/{n}›" if n > 1 else x for x, n in parts.items() for i in range(n)]
    found = replace(run(layers=1, T=11), pieces=tuple(pieces))
    assert report(found)["meta"]["sources"][0]["title"] == "今👩‹U+200D›👧 ₿"


def pattern(case: Case, h: int) -> list[list[float]]:
    return [defined(case, h, i)[1] for i in range(case.T)]


LONG = Case(
    "seventy", 2, 1, 70, 70, lambda h, p, r: r <= p and p - r < 40,
    {"mask": masks.Causal() & masks.Window(40)},
)  # fmt: skip


def edges(length: int) -> list[int]:
    size = -(-length // 64)
    return [*range(0, length, size), length]


@pytest.mark.parametrize("case", [*CASES[:2], *CASES[4:], LONG], ids=lambda case: case.name)
def test_thumbnails_are_block_sums_and_maxima(case: Case) -> None:
    """Mass: over the keys of a block, mean over its rows that see any."""
    found = place_overview(recorded(case)[0]).blocks
    rows, columns = (list(itertools.pairwise(edges(n))) for n in (case.T, case.S))
    assert found.mass.shape == (case.H, len(rows), len(columns))
    assert max(found.mass.shape[1:]) <= 64
    for h in range(case.H):
        p = pattern(case, h)
        sees = [any(s != -math.inf for s in defined(case, h, i)[0]) for i in range(case.T)]
        for I, (a, b) in enumerate(rows):
            for J, (c, d) in enumerate(columns):
                cells = [[p[i][j] for j in range(c, d)] for i in range(a, b)]
                mass = sum(map(sum, cells)) / max(1, sum(sees[a:b]))
                assert found.mass[h, I, J].item() == pytest.approx(mass, abs=1e-12)
                assert found.max[h, I, J].item() == pytest.approx(max(map(max, cells)), abs=1e-12)


def test_metrics_are_those_of_measure_by_head() -> None:
    recording = record(regard.load("tiny"), "to be or not to be")
    metrics = report(recording)["meta"]["metrics"]
    assert set(metrics) <= set(METRICS)
    assert {"entropy", "induction", "duplicate", "missing"} <= set(metrics)
    assert "learned_sink" not in metrics, "nobody has one"
    assert recording.ids is not None
    for p, each in enumerate(recording.places.values()):
        size = PoolAccumulator(each, 1).tile_size  # 6 tokens: one tile, and one pass in fp32
        single = {"size": size, "dtype": torch.float32}
        measured = regard.inspect.measure(each, recording.ids[0], **single).values
        exact = regard.inspect.measure(each, recording.ids[0]).values
        for name in set(metrics) - {"missing"}:
            assert metrics[name]["of"][p] == measured[name].tolist()
            # each weight has the relative error of its score, which the largest one bounds
            allowed = 8 * 2**-23 * float(1 + exact["max_logit"].abs().max())
            scale = 1 + exact[name].abs().max()
            assert float((measured[name] - exact[name]).abs().max() / scale) <= allowed


def test_a_metric_that_is_not_finite_or_not_defined_is_null() -> None:
    recording = run(layers=1, H=2)
    recording[0].steps[0].lse[0, 1] = math.nan
    metrics = report(recording)["meta"]["metrics"]
    assert metrics["entropy"]["of"][0][1] is None
    assert metrics["entropy"]["of"][0][0] is not None
    assert "induction" not in metrics, "there are no ids"


def test_a_byte_is_a_step_of_the_logarithm() -> None:
    weights = torch.tensor([1.0, 0.5, 1e-3, 2.0**-24, 2.0**-60, 0.0, math.nan], dtype=torch.float64)
    found = as_bytes(weights).tolist()
    assert found[0] == 255
    assert found[3:] == [1, 1, 0, 255]
    for byte, w in zip(found[:3], weights[:3].tolist(), strict=True):
        assert 2 ** (24 * ((byte - 1) / 254 - 1)) == pytest.approx(w, rel=2 ** (12 / 254) - 1)


def test_where_the_page_opens() -> None:
    recording = run()
    data = report(recording, choice=Choice(1, 2, ""), query=-1)
    weights = recording.weights(1, 2, -1)[0]
    assert data["meta"]["start"] == {"place": 1, "head": 2, "i": 23, "j": int(weights.argmax())}
    start = report(recording, choice=("layers.1", 3), query=5, key=-21)["meta"]["start"]
    assert start == {"place": 1, "head": 3, "i": 5, "j": 3}
    assert "induction" not in data["meta"]["metrics"]
    steady = data["meta"]["metrics"]["previous_token"]["of"]
    best = max((x, p, h) for p, of in enumerate(steady) for h, x in enumerate(of))
    start = report(recording)["meta"]["start"]
    assert (start["place"], start["head"]) == best[1:], "the first leader that there is"


def heads(data: dict[str, Any]) -> set[tuple[int, int]]:
    """The heads that are embedded exactly."""
    found = [name.split(".q") for name in data["arrays"] if ".q" in name and "position" not in name]
    return {(int(p[1:]), int(h)) for p, h in found}


def test_what_is_embedded_follows_the_budget_and_the_chosen_head_is_always_there() -> None:
    recording = run(layers=3, H=4, T=64, D=16)
    assert len(heads(report(recording))) == 12
    small = report(recording, choice=(2, 3), budget=1)
    assert heads(small) == {(2, 3)}
    assert all(f"p{p}.{name}" in small["arrays"] for p in range(3) for name in ("mass", "max"))
    some = report(recording, choice=(2, 3), budget=600_000)
    assert 1 < len(heads(some)) < 12
    assert (2, 3) in heads(some)


def test_the_output_and_the_values_of_the_chosen_head_give_way_to_its_pattern() -> None:
    recording = run(layers=1, H=2, G=1, T=512, D=64)
    parts = {"p0.q1", "p0.lse1", "p0.k0", "p0.v0", "p0.out1"}
    for budget, missing in ((1, {"p0.v0", "p0.out1"}), (950_000, {"p0.out1"}), (1_150_000, set())):
        arrays = report(recording, choice=(0, 1), budget=budget)["arrays"]
        assert parts & set(arrays) == parts - missing, budget


@pytest.mark.full
def test_a_page_of_8192_tokens_keeps_its_budget() -> None:
    recording = run(layers=1, H=1, G=1, T=8192, D=64)
    data = report(recording)
    assert {"p0.q0", "p0.k0", "p0.v0"} <= set(data["arrays"])
    assert len(report_page(data).encode()) < PAGE_BUDGET


def test_bytes_of_a_cache_by_hand() -> None:
    k, v = torch.zeros(1, 2, 7, 3, dtype=torch.bfloat16), torch.zeros(1, 2, 7, 5)
    pool = KeyValuePool(k, v, torch.arange(7), (0, 1), 2)
    found = cost_facts(Place("x", (), (pool,), 4, (0, 1, 2, 3), 7), 28)
    one_head = 7 * (3 + 5) * 2
    assert found["kv_bytes"] == {"MHA": 4 * one_head, "GQA": 2 * one_head, "MQA": one_head}
    assert found["flops"] == 2 * 28 * (3 + 5)


def test_groups_share_their_keys() -> None:
    arrays = report(run(layers=1, H=4, G=2))["arrays"]
    kept = {name for name in arrays if name[:4] in ("p0.k", "p0.v")}
    assert kept == {"p0.k0", "p0.k1", "p0.v0", "p0.v1"}


def test_numbers_travel_as_the_kernel_got_them() -> None:
    recording = run(layers=1, H=2)
    arrays, step = report(recording)["arrays"], recording[0].steps[0]
    assert np.array_equal(arrays["p0.q1"], step.q[0, 1].numpy())
    assert np.array_equal(arrays["p0.lse1"], step.lse[0, 1].numpy())
    low = recorded(CASES[3])
    bits = report(low)["arrays"]["p0.q0"].astype(np.uint32) << 16
    assert np.array_equal(bits.view(np.float32), low[0].steps[0].q[0, 0].float().numpy())


def test_two_recordings_stand_side_by_side() -> None:
    data = report(run(seed=1), run(seed=2), choice=(1, 2), budget=1)
    places = data["meta"]["places"]
    assert [x["source"] for x in places] == [0, 0, 1, 1]
    assert heads(data) == {(1, 2), (3, 2)}
    assert len(data["meta"]["sources"]) == 2
    assert places[0]["q_text"] == places[3]["q_text"], "equal texts travel once"


def test_a_long_fact_is_shortened() -> None:
    """The text of a run stands among the facts: a book must not push the tabs off the screen."""
    recording = replace(run(layers=1, T=4), metadata={"text": "word " * 5000})
    fact = report(recording)["meta"]["sources"][0]["metadata"]["text"]
    assert len(fact) < 200
    assert fact.endswith(("(24,840 more characters)", "(24840 more characters)"))


def test_equal_masks_travel_once() -> None:
    data = report(run(layers=3))
    ranges = {place["rules"][0]["mask"]["ranges"] for place in data["meta"]["places"]}
    assert len(ranges) == 1
    assert sum(name.startswith("ranges") for name in data["arrays"]) == 1


def test_a_mask_travels_as_the_ranges_of_its_rows() -> None:
    """8 bytes a row, whatever the length; only a mask of many ranges travels as bits."""
    T = 40
    scattered = (torch.arange(T)[:, None] * 7 + torch.arange(T) * 5) % 2 == 0
    scattered[:, 0] = True
    for mask, kind in ((masks.Causal(), "ranges"), (masks.Dense(scattered), "bits")):
        q = torch.randn(1, 1, T, 4, generator=torch.Generator().manual_seed(0))
        data = report(recorded_call(q, mask=mask))
        leaf = data["meta"]["places"][0]["rules"][0]["mask"]
        expected = mask.block(regard.span.Span(0, T), regard.span.Span(0, T))[0, 0]
        array = data["arrays"][leaf[kind]]
        if kind == "bits":
            found = np.unpackbits(array, bitorder="little")[: T * T].reshape(T, T)
        else:
            assert array.nbytes == 8 * T
            columns = np.arange(T)
            found = (columns >= array[0, :, :1]) & (columns < array[0, :, 1:])
        assert np.array_equal(found.astype(bool), expected.numpy())


@pytest.mark.parametrize(
    "bias, kind",
    [
        (biases.ALiBi(2), "offset"),
        (biases.T5Relative(torch.randn(8, 2), bidirectional=False), "offset"),
        (biases.ALiBi(2) + biases.DenseBias(torch.randn(1, 2, 12, 12)), "dense"),
    ],
)
def test_a_bias_of_distances_is_a_table_of_distances(bias: biases.Bias, kind: str) -> None:
    q, k, v = (torch.randn(1, 2, 12, 4) for _ in range(3))
    data = report(recorded_call(q, k, v, mask=masks.Causal(), bias=bias))
    found, at = data["meta"]["places"][0]["rules"][0]["bias"], regard.span.Span(0, 12)
    assert found["kind"] == kind
    for (_, h, i, j), exact in np.ndenumerate(bias.block(at, at, dtype=torch.float64).numpy()):
        if kind == "offset":
            table = data["arrays"][found["array"]].reshape(found["heads"], -1)
            value = table[h % found["heads"], i - j - found["low"]]
        else:
            value = data["arrays"][found["arrays"][str(h)]][i, j]
        assert value == pytest.approx(exact, abs=1e-12)


def test_steps_of_other_keys_are_places_of_their_own() -> None:
    sizes = {"kv_rank": 24, "nope_dim": 12, "rope_dim": 4, "value_dim": 10}
    layer = regard.nn.variants.build("mla", 64, 4, **sizes).eval()
    cache = layer.new_cache()
    with torch.inference_mode(), Recorder() as recorder:
        layer(torch.randn(1, 9, 64), cache=cache)
        for _ in range(2):
            layer(torch.randn(1, 1, 64), cache=cache)
    recording = recorder.recording(pieces=tuple(f"t{i}" for i in range(11)))
    whole = recording[0]
    parts = split_by_pool(whole)
    assert sum(part.T for part in parts) == whole.T
    assert all(part.has_one_key_per_column for part in parts)
    first = 0
    for part in parts:
        block = part.block(slice(0, part.T), slice(0, part.N)).weights
        rows = slice(first, first + part.T)
        assert torch.equal(block, whole.block(rows, slice(0, whole.N)).weights)
        first += part.T
    data = report(recording)
    assert len(data["meta"]["places"]) == len(parts)
    assert sum(place["T"] for place in data["meta"]["places"]) == whole.T
    texts = [data["meta"]["texts"][place["q_text"]] for place in data["meta"]["places"]]
    assert texts == [[f"t{i}" for i in range(9)], ["t9", "t10"]]


def test_selected_heads_keep_their_numbers() -> None:
    recording = record(regard.load("tiny"), "to be or not to be", heads=[1, 5])
    data = report(recording, choice=(0, 5))
    assert data["meta"]["places"][0]["heads"] == [1, 5]
    assert data["meta"]["start"]["head"] == 5
    assert heads(data) == {(p, h) for p in range(4) for h in (1, 5)}
    assert len(data["meta"]["metrics"]["entropy"]["of"][0]) == 2
    with pytest.raises(ArgumentError, match=r"head 2 of .* recorded heads: 1, 5 of 8"):
        report(recording, choice=(0, 2))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"row": 1}, "batch is 1; layers.0 has batch rows 0"),
        ({"choice": (2, 0)}, "layer is 2; there are 2 layers"),
        ({"choice": (0, 4)}, "head is 4; there are 4 heads"),
        ({"choice": ("x", 0)}, "'x' was not recorded; recorded: layers.0, layers.1$"),
        ({"query": 24}, "query is 24; there are 24"),
        ({"key": -25}, "key is -25; there are 24"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        report(run(), **options)


def test_nothing_recorded() -> None:
    with pytest.raises(ArgumentError, match="contains no attention call; record one first"):
        report(Recording({}))


def test_the_models_rotary_travels_with_its_places() -> None:
    model = regard.load("tiny")
    data = report(record(model, "to be"), model=model)
    rotary = data["meta"]["places"][0]["rotary"]
    assert rotary["layout"] == "half"
    assert rotary["dims"] == 32
    assert rotary["inv_freq"] == pytest.approx([10000.0 ** (-2 * i / 32) for i in range(16)])
    assert report(record(model, "to be"))["meta"]["places"][0]["rotary"] is None


def test_what_the_rotary_says_turns_the_queries_back() -> None:
    """Against the projection without its step, not against another rotation."""
    model = regard.load("tiny")
    recording = record(model, "to be or not")
    found = report(recording, model=model)["meta"]["places"][0]["rotary"]
    heads = model.decoder.layers[0].attention.project.q
    heard: list[torch.Tensor] = []
    handle = heads.linear.register_forward_hook(
        lambda module, given, out: heard.append(out.detach())
    )
    record(model, "to be or not")
    handle.remove()
    a, b = recording[0].steps[0].q[0, 3].double().chunk(2, -1)
    plain = heard[0][0].unflatten(-1, (8, 32))[:, 3].double()
    angle = torch.arange(len(a))[:, None] * torch.tensor(found["inv_freq"], dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    back = torch.cat([a * cos + b * sin, b * cos - a * sin], -1) / found["factor"]
    assert (back - plain).abs().max() < 1e-5
