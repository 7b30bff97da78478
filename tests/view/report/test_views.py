"""Atlas, map, compare and export in a real browser: what is drawn is what was recorded."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import masks
from regard.inspect import Recorder, Recording
from regard.inspect.report import report
from regard.tracing import named_scope
from regard.view.page import report_page
from tests.inspect.test_report import run
from tests.view.browser import CHROMIUM, WHY_NOT, Tab

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT), pytest.mark.full]
T, H = 96, 3
BAR = 1e-6


def broken() -> Recording:
    """One head whose query 2 is NaN and whose key 4 is infinite."""
    q, k, v = (
        torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(3)) for _ in range(3)
    )
    with torch.no_grad(), Recorder() as recorder:
        regard.attend(q, k, v, mask=masks.Causal())
    found = recorder.recording()
    found[0].steps[0].q[0, 0, 2] = math.nan
    found[0].steps[0].lse[0, 0, 4] = math.inf
    return found


def whole_model() -> Recording:
    """12 layers of 12 heads, 512 tokens."""
    make = torch.Generator().manual_seed(0)
    with torch.inference_mode(), Recorder() as recorder:
        for n in range(12):
            q, k, v = (torch.randn(1, 12, 512, 64, generator=make) for _ in range(3))
            with named_scope("layers"), named_scope(str(n)):
                regard.attend(q, k, v, mask=masks.Causal())
    return recorder.recording(pieces=tuple(f"t{i}" for i in range(512)))


@pytest.fixture(scope="module")
def recording() -> Recording:
    return run(layers=2, H=H, T=T, D=16)


@pytest.fixture(scope="module")
def folder(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("pages")
    (at / "all.html").write_text(report_page(report(recording, choice=(1, 1))), "utf-8")
    (at / "few.html").write_text(report_page(report(recording, choice=(1, 1), budget=0)), "utf-8")
    (at / "two.html").write_text(
        report_page(report(recording, run(layers=2, H=H, T=80, D=16, seed=5), choice=(0, 2))),
        "utf-8",
    )
    (at / "broken.html").write_text(report_page(report(broken())), "utf-8")
    return at


def opened(tab: Tab, folder: Path, name: str, state: str = "") -> Tab:
    return tab.ready(f"file://{folder}/{name}.html{state}")


def drawn(tab: Tab, plot: str) -> dict[str, Any]:
    """The numbers of a heatmap, once every row of it is computed."""
    tab.wait(f"{plot}.state().progress === 1")
    found: dict[str, Any] = tab.js(
        f"(() => {{ const s = {plot}.state(); return {{ rows: s.found.rows, cols: s.found.cols, "
        "a: s.a, b: s.b, values: Array.from(s.found.values, v => Number.isFinite(v) ? v : "
        f"String(v)) }}; }})()"
    )
    return found


def test_the_atlas_has_every_head_and_its_picture(tab: Tab, folder: Path) -> None:
    opened(tab, folder, "all")
    assert tab.count(".thumb") == 2 * H
    # below the diagonal something is painted, above it nothing: there the hatch shows through
    alpha = tab.js(
        "(() => { const c = document.querySelector('.thumb canvas'), x = "
        "c.getContext('2d').getImageData(0, 0, c.width, c.height).data; return [x[3 + 4 * "
        "(c.width - 1)], x[3 + 4 * c.width * (c.height - 1)]]; })()"
    )
    assert alpha == [0, 255]
    tab.click(".thumb[data-head='1 2']")
    tab.settle()
    assert tab.state("view", "place", "head") == ["map", 1, 2]


def test_the_atlas_sorts_filters_and_walks(tab: Tab, folder: Path) -> None:
    opened(tab, folder, "all", "#L0H0&sort=metric&metric=max_logit")
    order = tab.texts(".thumb", "dataset.head")
    peaks = [tab.js(f"R.metric('max_logit', {x.replace(' ', ',')})") for x in order]
    assert peaks == sorted(peaks, reverse=True)
    tab.choose("atlas-top", "2", "input")
    assert tab.texts(".thumb", "dataset.head") == order[:2]
    tab.set(sort="layers", place=0, head=1)
    assert tab.count(".thumb.faint") == 2 * H - 2
    tab.js("document.querySelector('.thumb[data-head=\"0 1\"]').focus()")
    tab.key("ArrowDown")
    assert tab.state("place", "head") == [1, 1]
    tab.key("ArrowLeft")
    assert tab.js("document.activeElement.dataset.head") == "1 0"
    tab.key("Enter")
    tab.settle()
    assert tab.js("R.state.view") == "map"


@pytest.mark.full(keep=1)
def test_the_map_shows_the_recorded_weights(tab: Tab, folder: Path, recording: Recording) -> None:
    opened(tab, folder, "all", "#L1H1&v=map&i=40&j=7&scale=linear")
    found, exact = drawn(tab, "R.plots.map"), recording.weights(1, 1)
    assert (found["rows"], found["cols"]) == (T, T)
    for n, value in enumerate(found["values"]):
        i, j = divmod(n, T)
        assert value == -2 if j > i else abs(value - exact[i, j].item()) < BAR
    assert tab.text_of("map-badge") == "exact"
    shown = tab.text_of("map-cell")
    said = re.search(r"weight([\d.e−-]+)score", shown)
    assert said is not None
    assert float(said[1].replace("−", "-")) == pytest.approx(exact[40, 7].item(), abs=BAR)


def test_the_map_pools_without_losing_mass(tab: Tab, folder: Path, recording: Recording) -> None:
    tab.resize(390, 844)
    opened(tab, folder, "all", "#L1H1&v=map")
    tab.js("R.plots.map.canvas.parentElement.closest('.mapsplit').style.width = '140px'")
    tab.js("R.redraw()")
    tab.settle()
    found, exact = drawn(tab, "R.plots.map"), recording.weights(1, 1)
    a, b = found["a"], found["b"]
    assert a > 1
    assert b > 1
    badge = tab.text_of("map-badge")
    assert f"pooled {a} × {b}" in badge
    for I in range(found["rows"]):
        row = [max(v, 0) for v in found["values"][I * found["cols"] : (I + 1) * found["cols"]]]
        assert sum(row) == pytest.approx(1, abs=1e-4)
        for J, value in enumerate(row):
            block = exact[I * a : (I + 1) * a, J * b : (J + 1) * b]
            assert value == pytest.approx(block.sum(1).mean().item(), abs=BAR)
    tab.set(stat="max")
    value = drawn(tab, "R.plots.map")["values"][found["cols"]]
    assert value == pytest.approx(exact[a : 2 * a, :b].max().item(), abs=BAR)


def test_the_map_zooms_by_keys_and_the_address_restores_the_cell(tab: Tab, folder: Path) -> None:
    opened(tab, folder, "all", "#L1H1&v=map&i=40&j=7")
    tab.js("R.plots.map.canvas.focus()")
    tab.key("+")
    tab.settle()
    drawn(tab, "R.plots.map")
    assert tab.js("R.plots.map.state().found.rows") == T // 2
    for _ in range(3):
        tab.key("ArrowDown")
    tab.key("ArrowRight")
    assert tab.state("i", "j") == [43, 8]
    assert tab.js("location.hash").endswith("i=43&j=8")
    tab.key("0")
    tab.settle()
    assert tab.js("R.plots.map.state().found.rows") == T
    tab.key("Enter")
    tab.settle()
    assert tab.js("R.state.view") == "cell"


def test_hiding_the_first_positions_renormalizes_and_says_so(
    tab: Tab, folder: Path, recording: Recording
) -> None:
    opened(tab, folder, "all", "#L1H1&v=map&sinks=0")
    found, exact = drawn(tab, "R.plots.map"), recording.weights(1, 1)
    for i in range(8, T):
        row = found["values"][i * T : (i + 1) * T]
        assert row[:4] == [-3] * 4
        rest = 1 - exact[i, :4].sum().item()
        assert row[i] == pytest.approx(exact[i, i].item() / rest, abs=BAR)
    assert "renormalized" in tab.text_of("map-sinks-note")
    assert not tab.js("document.getElementById('map-sinks-note').hidden")


def test_the_bars_beside_the_map_say_what_they_are(
    tab: Tab, folder: Path, recording: Recording
) -> None:
    opened(tab, folder, "all", "#L1H1&v=map&scale=linear")
    drawn(tab, "R.plots.map")
    beside = (
        "(({ left, top }, s) => [left + s.left + %s, top + s.top + %s])"
        "(R.plots.map.canvas.getBoundingClientRect(), R.plots.map.state().shape)"
    )
    tab.hover(beside % ("3.5 / 96 * s.width", "s.height + 8"))
    said = tab.text_of("tip")
    exact = recording.weights(1, 1)[3:, 3].mean().item()
    assert said.startswith("3 t3\n")
    assert float(said.split(": ")[1]) == pytest.approx(exact, rel=1e-3)
    tab.hover(beside % ("s.width + 8", "50.5 / 96 * s.height"))
    said = tab.text_of("tip")
    p = [w for w in recording.weights(1, 1)[50].tolist() if w > 0]
    entropy = -sum(w * math.log(w) for w in p) / math.log(51)
    assert float(re.findall(r"[\d.]+", said)[-1]) == pytest.approx(entropy, rel=1e-2)


def test_the_scatter_is_walked_with_arrows(tab: Tab, folder: Path) -> None:
    opened(tab, folder, "all", "#L0H0")
    tab.js("document.getElementById('scatter').open = true")
    tab.wait("document.querySelectorAll('.dot').length === 6")
    assert (
        tab.js(
            "[...document.querySelectorAll('.dot')].filter(x => x.getAttribute('tabindex') === "
            "'0').length"
        )
        == 1
    )
    tab.js("document.querySelector('.dot[tabindex=\"0\"]').focus()")
    before = tab.js("Number(document.activeElement.getAttribute('cx'))")
    lowest = tab.js(
        "Math.min(...[...document.querySelectorAll('.dot')].map(x => Number(x.getAttribute('cx'))))"
    )
    key, sign = ("ArrowRight", 1) if before == lowest else ("ArrowLeft", -1)
    tab.key(key)
    assert (tab.js("Number(document.activeElement.getAttribute('cx'))") - before) * sign > 0
    tab.key("Enter")
    tab.settle()
    assert tab.js("R.state.view") == "map"


def test_a_head_that_is_not_embedded_is_blocks_and_says_what_embeds_it(
    tab: Tab, folder: Path, recording: Recording
) -> None:
    opened(tab, folder, "few", "#L0H2&v=map")
    assert tab.text_of("map-badge") == "thumbnail · pooled 2 × 2"
    assert "regard explain TEXT --layer 0 --head 2 --html FILE" in tab.js("document.body.innerText")
    found, exact = drawn(tab, "R.plots.map"), recording.weights(0, 2)
    size = T // found["rows"]
    for I in range(0, found["rows"], 7):
        for J in range(0, found["cols"], 5):
            i, j = I * size, J * size
            mass = exact[i - i % 2 : i - i % 2 + 2, j - j % 2 : j - j % 2 + 2].sum(1).mean().item()
            value = found["values"][I * found["cols"] + J]
            assert (
                value == -2
                if j - j % 2 > i - i % 2 + 1
                else value == pytest.approx(mass, rel=0.034, abs=2.0**-24)
            )


def test_numbers_that_are_not_finite_are_seen(tab: Tab, folder: Path) -> None:
    opened(tab, folder, "broken", "#L0H0&v=map&i=2&j=1")
    found = drawn(tab, "R.plots.map")
    assert found["values"][2 * 6 : 2 * 6 + 3] == ["NaN"] * 3
    assert "NaN" in tab.text_of("map-cell")
    color = tab.js(
        "(() => { const c = R.plots.map.state().picture; return "
        "[...c.getContext('2d').getImageData(1, 2, 1, 1).data.slice(0, 3)]; })()"
    )
    red = tab.js("R.css('--bad')")
    assert color == [int(red[n : n + 2], 16) for n in (1, 3, 5)]


def divergence(p: list[float], q: list[float]) -> float:
    """Jensen-Shannon, in bits, from the definition."""
    total = 0.0
    for a, b in zip(p, q, strict=True):
        m = (a + b) / 2
        total += (a / 2 * math.log2(a / m) if a else 0.0) + (b / 2 * math.log2(b / m) if b else 0.0)
    return total


def test_compare_two_heads(tab: Tab, folder: Path, recording: Recording) -> None:
    opened(tab, folder, "all", "#L1H1&v=compare&b=L0H2")
    a, b = recording.weights(1, 1), recording.weights(0, 2)
    found = drawn(tab, "R.plots.compare[2]")
    for n, value in enumerate(found["values"]):
        i, j = divmod(n, T)
        assert value == -2 if j > i else abs(value - (a[i, j] - b[i, j]).item()) < BAR
    tab.wait("document.getElementById('compare-strip').textContent !== ''")
    assert "the divergence of each row" in tab.text_of("compare-strip")
    tab.choose("compare-how", "ratio")
    ratio = drawn(tab, "R.plots.compare[2]")["values"]
    for i in range(1, T, 9):
        assert ratio[i * T] == pytest.approx(math.log2(a[i, 0].item() / b[i, 0].item()), abs=1e-3)
    tab.wait("R.divergences && R.divergences.found.length === 96")
    for i, d in enumerate(tab.js("R.divergences.found")):
        assert d == pytest.approx(divergence(a[i].tolist(), b[i].tolist()), abs=1e-5)


def test_compare_zooms_in_step(tab: Tab, folder: Path) -> None:
    opened(tab, folder, "all", "#L1H1&v=compare&b=L0H2&i=10&j=5")
    tab.js("R.plots.compare[1].canvas.focus()")
    tab.key("+")
    tab.settle()
    assert [tab.js(f"R.plots.compare[{n}].state().found.rows") for n in range(3)] == [T // 2] * 3


def test_compare_one_head_with_itself_under_a_window(
    tab: Tab, folder: Path, recording: Recording
) -> None:
    opened(tab, folder, "all", "#L1H1&v=compare&b=L1H1&m=window:5")
    scores = recording.scores(1, 1)
    found = drawn(tab, "R.plots.compare[1]")["values"]
    for i in range(0, T, 5):
        seen = {j: math.exp(scores[i, j].item()) for j in range(max(0, i - 4), i + 1)}
        for j in range(T):
            value, total = found[i * T + j], sum(seen.values())
            assert value == -2 if j not in seen else abs(value - seen[j] / total) < BAR
    assert "hypothetical" in tab.text_of("compare-note")


def test_compare_two_recordings_on_what_both_have(
    tab: Tab, folder: Path, recording: Recording
) -> None:
    opened(tab, folder, "two", "#L0H2&v=compare")
    assert tab.js("R.state.b") == {"place": 2, "head": 2}, "the same head of the other recording"
    other = run(layers=2, H=H, T=80, D=16, seed=5)
    found = drawn(tab, "R.plots.compare[2]")
    assert found["rows"] == 80
    a, b = recording.weights(0, 2)[:80, :80], other.weights(0, 2)
    for i in range(0, 80, 7):
        assert found["values"][i * 80] == pytest.approx((a[i, 0] - b[i, 0]).item(), abs=BAR)
    assert "80 rows" in tab.text_of("compare-note")


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_figure_carries_its_recipe(tab: Tab, folder: Path, kind: str) -> None:
    opened(tab, folder, "all", "#L1H1&v=map")
    drawn(tab, "R.plots.map")
    tab.call("Page.setDownloadBehavior", behavior="deny")
    tab.click(f"#save-map-{kind}")
    tab.wait("R.saved")
    assert tab.js("R.saved.name") == f"regard-map.{kind}"
    if kind == "png":
        start = tab.js("R.saved.blob.slice(0, 8).arrayBuffer().then(x => [...new Uint8Array(x)])")
        assert bytes(start) == b"\x89PNG\r\n\x1a\n"
        assert tab.js("createImageBitmap(R.saved.blob).then(x => x.height)") > tab.js(
            "R.plots.map.canvas.height"
        )
        return
    text = tab.js("R.saved.blob.text()")
    recipe = json.loads(re.sub("&quot;", '"', re.search(r"<desc>(.*?)</desc>", text)[1]))  # type: ignore[index]
    assert (recipe["place"], recipe["head"], recipe["mask"]) == ("layers.1", 1, "causal")
    assert recipe["reduction"] == "none: every query-key pair is shown"
    assert recipe["scale"] == "log"
    assert "head 1" in re.sub("<desc>.*</desc>", "", text)


def test_a_page_of_144_heads_has_8_megabytes_at_most_and_shows_each(
    tab: Tab, tmp_path: Path
) -> None:
    """How soon it is drawn is measured by `python -m benchmarks draw-page`."""
    text = report_page(report(whole_model()))
    assert len(text.encode()) <= 8_000_000
    (tmp_path / "large.html").write_text(text, "utf-8")
    opened(tab, tmp_path, "large")
    assert tab.count(".thumb") == 144
    assert tab.js("R.exactHeads().length") >= 8
