"""docs/mechanisms.md: every mechanism of the catalogue is in it, with the costs that the commands
print, and the page is what the program writes from the kept measurements.
"""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest

from regard.cli import main
from regard.compare.mechanisms import count_parameters
from regard.configs.suggested_sizes import MECHANISM_CHOICES
from regard.nn.mixer import MaskVisibility
from regard.nn.variants import VARIANTS
from tests.compare.catalogue_table import behaviour, page
from tests.compare.catalogue_table.kept import QUALITY, SPEED, read
from tests.compare.catalogue_table.quality import MOST_USED, STEPS, models
from tests.compare.catalogue_table.rows import cost_rows, quality_results, speeds
from tests.compare.catalogue_table.sizes import CONTEXT, MODEL, SEEN_KEYS, reference_report

COMMAND = "python -m tests.compare.catalogue_table"


def cells(code: str) -> dict[str, list[str]]:
    """The cells of the first table, by mechanism."""
    text = page.PAGES[code].read_text("utf-8").split("\n## ")[1]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--json"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("code", page.PAGES)
def test_the_page_is_what_the_program_writes(code: str) -> None:
    written = page.PAGES[code].read_text("utf-8")
    assert page.page(code) == written, f"run {COMMAND} page"


@pytest.mark.parametrize("code", page.PAGES)
def test_every_mechanism_has_a_row(code: str) -> None:
    rows = cells(code)
    assert set(rows) == set(VARIANTS), f"run {COMMAND} speed, then {COMMAND} page"
    assert {len(row) for row in rows.values()} == {len(page.HEADS) - 1}
    assert f" {len(VARIANTS)} " in page.PAGES[code].read_text("utf-8").split("\n## ")[0]


@pytest.mark.full
def test_cache_and_flops_are_those_of_regard_cost(capsys: pytest.CaptureFixture[str]) -> None:
    names, rows = ",".join(MECHANISM_CHOICES), cells("en")
    told = printed(capsys, "cost", MODEL, "--mechanisms", names, "--context", str(CONTEXT))
    mechanisms = json.loads(told)["mechanisms"]
    assert len(mechanisms) > 50
    for one in mechanisms:
        row = rows[one["mechanism"]]  # kind, result, beyond, then the costs
        shown = [row[3], row[5], row[6], row[7]]
        units = {"kv_bytes_per_token": 2**10, "kv_bytes": 2**20, "prefill_flops": 1e12}
        wanted = [page.plain(one[k] / unit) for k, unit in {**units, "decode_flops": 1e9}.items()]
        if shown[0] != page.NONE:  # it decodes
            assert shown == wanted, one["mechanism"]


@pytest.mark.full
def test_the_others_are_those_of_regard_describe(capsys: pytest.CaptureFixture[str]) -> None:
    """32 layers, each with the parameters and the cache that `regard describe` prints."""
    for name in ("qk_norm", "forgetting", "dsa", "chunked", "cope"):
        told = json.loads(printed(capsys, "describe", name, "--context", str(CONTEXT)))
        report = reference_report(name)
        assert report.kv_bytes == 32 * (2 * told["cached_values"]), name
        described = report.model.layers[0].mixer.describe(CONTEXT)
        assert described.flops_per_token.value == told["flops_per_token"]["value"]


@pytest.mark.parametrize("name", SEEN_KEYS)
def test_formulas_of_patterns_count_what_the_mask_allows(name: str) -> None:
    visible = reference_report(name).model.layers[0].mixer.visible
    by_mask = MaskVisibility(visible.mask)
    for context in (1, 128, 129, 1300):
        assert visible.pairs(context) == by_mask.pairs(context)
        assert visible.visible_keys(context) == SEEN_KEYS[name](context - 1)


def test_measurements_are_positive_and_of_every_mechanism() -> None:
    settings, lines = speeds()
    assert {"date", "processor", "torch", "tokens", "rounds"} <= set(settings)
    assert set(lines) == set(VARIANTS) == {line["name"] for line in read(SPEED)[1:]}
    for line in lines.values():
        for work in {"prefill", "step"} & set(line):
            low, median, high = line[work]
            assert 0 < low <= median <= high


def test_words_name_mechanisms_once() -> None:
    for groups in (behaviour.RESULTS, behaviour.BEYOND):
        named = Counter(name for group in groups for name in group.names)
        assert set(named) <= set(VARIANTS)
        assert set(named.values()) == {1}
    # a mask of its own, a state, a choice or a budget is no softmax over every earlier token
    exact = [name for name in VARIANTS if behaviour.result_of(name) == behaviour.RESULTS[0]]
    assert {VARIANTS[name].family for name in exact} == {"softmax", "latent", "cross", "additive"}


@pytest.mark.full
def test_models_that_were_trained_have_equal_parameters() -> None:
    wanted = count_parameters(models()["mha"].config)
    for name, one in models().items():
        assert abs(count_parameters(one.config) / wanted - 1) < 0.01, name
    assert len(MOST_USED) == 20


@pytest.mark.full
def test_the_kept_runs_are_those_of_the_page() -> None:
    results = quality_results()
    assert set(results) == {(task, name) for task in STEPS for name in MOST_USED}
    assert len(results["mqar", "mha"]) >= 2, "one seed says nothing"
    for (task, _), values in results.items():
        assert len(values) == len(results[task, "mha"])
        assert all(math.isfinite(x) and x >= 0 for x in values)
    configs = {name: one.config for name, one in models().items()}
    for line in read(QUALITY):
        task, name = line["name"].split("/")[:2]
        assert line["settings"]["model"]["attention"] == configs[name].attention
        assert line["settings"]["steps"] == STEPS[task]
        assert {"date", "processor", "torch", "python"} <= set(line)
    for task in ("mqar", "passkey"):  # plain attention learns to recall at this size
        assert min(results[task, "mha"]) > 0.75
    for name in ("sliding_window", "chunked"):  # which cannot see the answer: a digit is guessed
        assert max(results["passkey", name]) < 0.2


@pytest.mark.full
def test_numbers_are_plain() -> None:
    shown = [page.plain(x) for x in (0.0, 0.01234, 8.0, 131.27, 16384.0)]
    assert shown == ["0", "0.0123", "8", "131", "16384"]
    rows = list(cost_rows())
    assert [row.name for row in rows[:20]] == list(MOST_USED)
    assert next(row for row in rows if row.name == "gqa").cache_bytes == 4 * 2**30
