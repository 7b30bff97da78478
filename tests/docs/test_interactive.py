"""The interactive figures: what docs/interactive.js computes is what the package computes, and a
reader who changes a number sees the weights follow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from docs import interactive
from regard.biases import alibi_slopes
from regard.configs.suggested_sizes import base_model, mechanism_costs
from regard.cost import Setting
from regard.masks import Causal, parse
from regard.positions import NTK, LinearScaling, YaRN, rope_frequencies
from tests.docs.test_site import ROOT, builder
from tests.view.browser import CHROMIUM, WHY_NOT, Browser, Tab, chromium

NUMBERS: dict[str, Any] = json.loads(interactive.FILE.read_text("utf-8"))
PAGE = """<!doctype html><html lang="{language}"><meta charset="utf-8">
<link rel="stylesheet" href="site.css"><body style="margin:8px">
{places}<script src="figure_numbers.js"></script><script src="interactive.js"></script>"""
KINDS = ("head", "head smollm2", "masks", "cache", "positions")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(WHY_NOT)
    with chromium() as running:
        yield running


def show(
    browser: Browser, folder: Path, *kinds: str, language: str = "en", width: int = 900
) -> Tab:
    """A page with figures, opened from a file."""
    for name in (builder().STYLE, "interactive.js"):
        (folder / name).write_text((ROOT / "docs" / name).read_text("utf-8"), "utf-8")
    (folder / "figure_numbers.js").write_text(builder().figure_numbers(), "utf-8")
    places = "".join(f'<div data-figure="{kind}"><img alt="still"></div>' for kind in kinds)
    path = folder / "page.html"
    path.write_text(PAGE.format(language=language, places=places), "utf-8")
    tab = browser.tab(width, 900)
    tab.open(path.as_uri())
    return tab.settle()


def parts(name: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    head = NUMBERS["heads"][name]
    q, k, v = (torch.tensor(head[each], dtype=torch.float64)[None, None] for each in "qkv")
    return q, k, v, head


@pytest.mark.full
@pytest.mark.parametrize("head", interactive.HEADS, ids=lambda head: head.model)
def test_the_numbers_are_those_of_the_model(head: interactive.Head) -> None:
    try:
        words, _, _, _, pattern = interactive.trace(head)
    except regard.errors.RegardError as error:
        pytest.skip(str(error))
    q, k, _, stored = parts(head.model)
    assert stored["words"] == words
    assert (stored["query"], stored["key"]) == (head.query, head.key)
    mask = Causal() if stored["causal"] else None
    weights = regard.attention_weights(q, k, mask=mask)[0, 0]
    assert (weights - pattern).abs().max() < 1e-4  # five digits of each number
    row = weights[head.query]
    assert int(row.argmax()) == head.key  # creature reads fluffy, "to" reads Mary
    assert row[head.key] > 0.35


@pytest.mark.full
@pytest.mark.parametrize("name", NUMBERS["heads"])
def test_a_head_is_computed_as_by_the_package(browser: Browser, tmp_path: Path, name: str) -> None:
    tab = show(browser, tmp_path, "head")
    q, k, v, head = parts(name)
    for query in (head["query"], 0):
        for causal, factor in ((False, 1.0), (True, 1.0), (True, 0.5)):
            found = tab.js(
                f"regardFigures.attend(regardData.heads.{name}, {query}, {json.dumps(causal)},"
                f" {factor})"
            )
            mask, scale = (Causal() if causal else None), factor * head["scale"]
            weights = regard.attention_weights(q, k, mask=mask, scale=scale)[0, 0, query]
            out = regard.attend(q, k, v, mask=mask, scale=scale)[0, 0, query]
            assert torch.allclose(
                torch.tensor(found["p"], dtype=torch.float64), weights, atol=1e-12
            )
            assert torch.allclose(torch.tensor(found["z"], dtype=torch.float64), out, atol=1e-12)
    tab.close()


@pytest.mark.full
def test_masks_have_the_pairs_of_the_package(browser: Browser, tmp_path: Path) -> None:
    tab = show(browser, tmp_path, "masks")
    checked = 0
    for n, w, g in ((16, 4, 2), (9, 1, 1), (23, 7, 3)):
        table = (
            "Object.entries(regardFigures.RULES).map(([rule, { text }]) => [text(%s), rows(rule)])"
        )
        rows = f"const rows = rule => regardFigures.maskRows(rule, {n}, {w}, {g})"
        rules = tab.js(f"(() => {{ {rows}; return {table % f'{w}, {g}, {n}'}; }})()")
        for text, visible in rules:
            span = regard.Span(0, n)
            assert torch.equal(torch.tensor(visible), parse(text).block(span, span)[0, 0]), text
            checked += 1
    assert checked == 30
    assert "136 of 256 pairs are visible (53.1%)" in tab.text(".rf-lead")
    tab.js(
        "(x => { x.value = 'window'; x.dispatchEvent(new Event('change')); })"
        "(document.querySelector('.rf select'))"
    )
    window = parse("causal & window(4)").count(regard.Span(0, 16), regard.Span(0, 16))
    assert f"{window} of 256" in tab.text(".rf-lead")
    tab.js("document.querySelector('.rf-grid').focus()")
    tab.key("ArrowDown")
    assert "Query 10 sees 4 keys: 7–10" in tab.text(".rf")
    tab.close()


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp8", "int8", "int4"])
def test_caches_have_the_bytes_of_the_package(
    browser: Browser, tmp_path: Path, precision: str
) -> None:
    tab = show(browser, tmp_path, "cache")
    for heads, groups, layers, length, window in ((32, 8, 32, 32768, 4096), (16, 2, 7, 1000, 128)):
        base = base_model({"layers": layers, "dim": 128 * heads, "heads": heads}, groups)
        names = ("mha", f"gqa:{groups}", "mqa", "mla", f"window:{window}")
        rows = mechanism_costs(names, base, Setting(length, kv_dtype=precision))
        sizes = {"heads": heads, "groups": groups, "layers": layers, "dim": 128, "length": length}
        sizes |= {"window": window}
        for kind, row in zip(("mha", "gqa", "mqa", "mla", "window"), rows, strict=True):
            state = json.dumps(sizes | {"precision": precision})
            found = tab.js(f"regardFigures.cacheBytes('{kind}', {state})")
            assert found == row.report.kv_bytes, (kind, sizes)
    tab.close()


@pytest.mark.full
def test_positions_have_the_angles_of_the_package(browser: Browser, tmp_path: Path) -> None:
    tab = show(browser, tmp_path, "positions")
    for s in (1, 4, 16, 64):
        scalings = {"plain": None, "pi": LinearScaling(s), "ntk": NTK(s), "yarn": YaRN(s, 4096)}
        for method, scaling in scalings.items():
            right = rope_frequencies(128, scaling=scaling)
            found = tab.js(f"regardFigures.frequencies('{method}', {s})")
            assert torch.allclose(
                torch.tensor(found, dtype=torch.float64), right.inv_freq, rtol=1e-12
            )
            factor = tab.js(f"regardFigures.yarnFactor('{method}', {s})")
            assert math.isclose(factor, right.rotary_factor, rel_tol=1e-12)
    assert tab.js("regardFigures.slopes(8)") == list(alibi_slopes(8))
    angle = float(tab.js("document.querySelectorAll('[data-angle]')[2].dataset.angle"))
    assert math.isclose(angle, 64 * float(rope_frequencies(128).inv_freq[18]), rel_tol=1e-12)
    tab.close()


@pytest.mark.full
def test_a_reader_changes_numbers_and_the_weights_follow(browser: Browser, tmp_path: Path) -> None:
    """The query by mouse, by dragging and by keys; a score; the scale; the mask."""
    tab = show(browser, tmp_path, "head")
    assert "“creature” reads “fluffy”: 39.9%" in tab.text(".rf-lead")
    assert "The numbers are the model's" in tab.text(".rf-lead")
    tab.click("[data-index='3']")
    assert tab.text("[aria-pressed=true] span") == "blue"
    tab.key("ArrowRight")
    assert tab.text("[aria-pressed=true] span") == "creature"
    tab.drag("[data-index='4']", "[data-index='2']")
    assert tab.text("[aria-pressed=true] span") == "fluffy"
    tab.click("[data-index='4']")
    type_score = """(value => { const x = document.querySelectorAll('.rf tbody input')[3];
        x.value = value; x.dispatchEvent(new Event('input')); })"""
    tab.js(f"{type_score}(30)")
    assert "“creature” reads “blue”: 100.0%" in tab.text(".rf-lead")
    assert "You changed a number" in tab.text(".rf-lead")
    move = """(x => { x.value = 0; x.dispatchEvent(new Event('input')); })
        (document.querySelector('[name=factor]'))"""
    tab.js(move)  # scale 0: every key has the same weight
    assert set(tab.texts(".rf .p")) == {f"{100 / 13:.1f}%"}
    tab.click(".rf-check input")
    assert tab.texts(".rf .p") == ["20.0%"] * 5 + ["0.0%"] * 8
    tab.click(".rf-reset")
    assert "39.9%" in tab.text(".rf-lead")
    for step, said in ((1, "18.017"), (2, "3.185"), (3, "13"), (4, "39.9%"), (5, "0.40 × fluffy")):
        tab.click(f".rf-steps button:nth-child({step})")
        assert said in tab.text(".rf")
    assert tab.errors == []
    tab.close()


@pytest.mark.full
@pytest.mark.parametrize("language", ["en", "zh"])
def test_figures_fit_a_phone_from_a_file(browser: Browser, tmp_path: Path, language: str) -> None:
    tab = show(browser, tmp_path, *KINDS, language=language, width=360)
    assert tab.count(".rf") == len(KINDS)
    assert tab.js("document.documentElement.scrollWidth") <= 360
    assert set(tab.texts("img", "hidden")) == {True}  # a picture without the script
    sizes = (
        "[...document.querySelectorAll('.rf *')].map(x => parseFloat(getComputedStyle(x).fontSize))"
    )
    assert min(tab.js(sizes)) >= 12
    text = tab.text("body")
    assert ("的分数" not in text) if language == "en" else ("查询" in text and "query" not in text)
    assert [x for x in tab.requests if not x.startswith("file:")] == []
    assert tab.errors == []
    tab.close()
