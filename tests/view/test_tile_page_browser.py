"""The page of `regard view` in a browser: what is drawn is what the server computed; hostile tokens
are text; no request leaves the host; keys, search, languages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import regard
from regard import masks
from regard.inspect import Recorder, Recording
from regard.tracing import named_scope
from tests.view.browser import CHROMIUM, HOSTILE, WHY_NOT, Tab, chromium

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT), pytest.mark.full]

LENGTH = 1500
NEEDLE = (1201, 333)
SIXTY = tuple(f"{seed}{end}" for seed in HOSTILE[:15] for end in ("", " ", "\n", "\ufeff"))


def made() -> Recording:
    draw = torch.Generator().manual_seed(0)
    q, k = (0.5 * torch.randn(1, 1, LENGTH, 8, generator=draw) for _ in range(2))
    q[..., 0] = k[..., 0] = 0
    q[0, 0, NEEDLE[0], 0] = k[0, 0, NEEDLE[1], 0] = 6.0
    with torch.inference_mode(), Recorder(keep=()) as recorder:
        regard.attend(q, k, k, mask=masks.Causal())
    pieces = tuple(f" w{n}" for n in range(LENGTH))
    return replace(recorder.recording(), pieces=pieces, ids=torch.arange(LENGTH)[None])


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with chromium() as browser:
        yield browser.tab(1280, 860)


def open_page(
    tab: Tab, recording: Recording, b: Recording | None = None
) -> regard.inspect.tile_server.serve.Server:
    server = regard.inspect.view(recording, b)
    tab.open("about:blank")  # the page of the test before may still ask its server
    tab.errors.clear()
    tab.requests.clear()
    tab.open(server.url)
    tab.wait('document.documentElement.dataset.ready === "yes"')
    tab.wait('document.documentElement.dataset.known === "true"')
    return server


def test_a_needle_is_found_from_the_whole_map(tab: Tab) -> None:
    recording = made()
    server = open_page(tab, recording)
    with server:
        assert "token" not in tab.js("location.href"), "the token leaves the address"
        tab.wait('document.querySelector("#peaks button") !== null')
        tab.click("#peaks button")  # the most concentrated weight is the needle: one click
        tab.wait("document.documentElement.dataset.level === '0'")
        assert (tab.js("R.state.i"), tab.js("R.state.j")) == NEEDLE
        path = f"/cell/0/0/{NEEDLE[0]}/{NEEDLE[1]}"
        tab.wait(f'document.getElementById("inspector").dataset.shows === "{path}"')
        weight = recording.weights(0, 0)[NEEDLE].item()
        shown = float(tab.text_of("cell-weight"))
        assert shown == pytest.approx(weight, rel=1e-9)
        # the numbers from which a tile is drawn are the recording's
        found = tab.js(f"R.map.value({NEEDLE[0]}, {NEEDLE[1] - 3}).max")
        assert found == pytest.approx(recording.weights(0, 0)[1201, 330].item(), rel=2**-9)
        # and so is the colour of a cell on the canvas
        drawn = tab.js(f"""(() => {{
            const tile = source.get("0/0/0/{NEEDLE[0] // 256}/{NEEDLE[1] // 256}");
            const data = tile.picture.getContext("2d")
                .getImageData({NEEDLE[1] % 256}, {NEEDLE[0] % 256}, 1, 1).data;
            const u = R.SCALES.log.at({weight});
            const wanted = new Uint8Array(new Uint32Array(
                [R.lut("weights")[Math.round(255 * Math.min(1, u))]]).buffer);
            return [[...data], [...wanted]];
        }})()""")
        assert drawn[0] == drawn[1]
        assert tab.errors == []
        assert all(address.startswith((server.origin, "data:")) for address in tab.requests)


def test_the_tooltip_says_what_is_under_the_pointer_now(tab: Tab) -> None:
    """A pointer that rests while the page zooms by key, jumps to a hit, or changes the head reads
    the number of the cell that then lies under it.
    """
    a, _ = two_runs()
    a = replace(a, pieces=tuple(f" w{n}" for n in range(400)), ids=torch.arange(400)[None])
    server = open_page(tab, a)
    cell = "(({ i0, j0, s }) => [Math.floor(i0 + 100 * s), Math.floor(j0 + 90 * s)])(R.map.view)"

    def told() -> str:
        """What the tooltip says: the cell under the pointer, and its weight in the recording."""
        tab.wait('document.documentElement.dataset.known === "true"')
        i, j = tab.js(cell)
        place, head = tab.js("[R.state.place, R.state.head]")
        weight = a.weights(place, head)[i, j].item()
        number = 'Number(document.getElementById("tip").textContent.split(" ").at(-1))'
        tab.wait(f"Math.abs({number} / {weight!r} - 1) < 1e-3")
        shown = tab.text_of("tip")
        assert f" {i}  w{i}\n" in shown
        assert f" {j}  w{j}\n" in shown
        return str(shown)

    with server:
        tab.js('document.getElementById("map").focus(); R.map.open(350, 30)')
        tab.wait("R.map.view.s < 1 / 20")
        tab.hover("""(({ left, top }, s) => [left + s.left + 90, top + s.top + 100])(
            document.getElementById("map").getBoundingClientRect(), R.map.shape())""")
        seen = []
        for act in (
            "",
            "R.map.center(310, 40)",
            "R.set({ head: 1 })",
            "R.set({ place: 1 })",
            'R.set({ lang: "en", i: 390, j: 200 }); R.map.reveal(390, 200)',
        ):
            tab.js(act)
            seen.append(told())
        assert len(set(seen)) == len(seen)
        tab.js('R.set({ view: "atlas" })')
        tab.wait('document.getElementById("tip").hidden')
        assert tab.errors == []


def test_small_weights_and_nan_are_neither_0_nor_masked(tab: Tab) -> None:
    """Beside a weight of 1, one of 1e-30 is printed; a row of NaN has the colour of errors, in the
    map and among the heads.
    """
    q, k = torch.zeros(2, 1, 1, 40, 4)
    q[0, 0, :, 0], k[0, 0, 0, 0] = 2.0, 30 * 2.302585
    q[0, 0, 30] = torch.nan
    with torch.inference_mode(), Recorder(keep=()) as recorder:
        regard.attend(q, k, k, mask=masks.Causal(), scale=0.5)
    recording = replace(recorder.recording(), pieces=tuple(f" w{n}" for n in range(40)))
    server = open_page(tab, recording)
    wrong = "[...new Uint8Array(new Uint32Array([R.pixel('--bad')]).buffer)]"
    with server:
        small = recording.weights(0, 0)[20, 5].item()
        assert 1e-40 < small < 1e-20
        value = tab.js("R.map.value(20, 5)")
        assert value["max"] == pytest.approx(small, rel=1e-4)
        assert tab.js("R.map.value(5, 20).masked")
        assert tab.js("Number.isNaN(R.map.value(30, 5).max)")
        drawn = tab.js("[...source.get('0/0/0/0/0').picture.getContext('2d')"
                       ".getImageData(5, 30, 1, 1).data]")  # fmt: skip
        assert drawn == tab.js(wrong)
        tab.js('R.set({ view: "atlas" })')
        tab.wait('document.querySelector("#atlas")?.dataset.drawn === "1"')
        picture = tab.js("""[...document.querySelector(".thumb canvas").getContext("2d")
            .getImageData(3, 30, 1, 1).data]""")
        assert picture == tab.js(wrong)
        assert tab.errors == []


def test_keys_search_and_languages(tab: Tab) -> None:
    server = open_page(tab, made())
    with server:
        tab.js('document.getElementById("map").focus(); R.set({ i: 1499, j: 0 })')
        before = tab.js("R.state.i")
        tab.key("ArrowUp")
        assert tab.js("R.state.i") == before - 1
        tab.wait('document.getElementById("live").textContent.includes("w1498")')
        tab.key("m")
        assert tab.js("R.state.stat") == "mass"
        tab.key("/")
        assert tab.js("document.activeElement.id") == "search"
        tab.type("w77")
        tab.wait("R.hits.length > 0")
        assert tab.js("R.hits") == [77, *range(770, 780)]
        tab.key("Enter")
        assert tab.js("R.state.j") == 77
        tab.choose("search", "/w7{2}$|w123/", "input")
        assert tab.js("R.hits")[:2] == [77, 123]
        tab.js('document.getElementById("search").blur()')
        tab.key("?")
        assert tab.js('document.getElementById("help").open')
        tab.key("Escape")
        tab.js('R.set({ lang: "zh", theme: "dark" })')
        assert tab.js("document.documentElement.lang") == "zh-Hans"
        tab.wait('document.querySelector("#tab-row").textContent === "行"')
        assert tab.js("document.documentElement.dataset.theme") == "dark"
        tab.resize(390, 844)
        tab.wait("document.getElementById('map').clientWidth < 390")
        assert tab.js("document.documentElement.scrollWidth") <= 390
        tab.resize(1280, 860)
        tab.js('R.set({ view: "atlas", lang: "en" })')
        tab.wait('document.querySelector("#atlas")?.dataset.drawn === "1"')
        assert tab.js("R.missing.size") == 0
        assert tab.errors == []


def test_the_page_opens_on_what_is_notable(tab: Tab) -> None:
    """The second head of the second place reads one far key; the page opens there, in the language
    of the browser, and stays where a reader went.
    """
    draw = torch.Generator().manual_seed(2)
    with torch.inference_mode(), Recorder(keep=()) as recorder:
        for n in range(2):
            q, k = (0.2 * torch.randn(1, 2, 300, 8, generator=draw) for _ in range(2))
            if n:
                q[0, 1, :, 0], k[0, 1, 40, 0] = 9.0, 9.0
            with named_scope(f"layers.{n}"):
                regard.attend(q, k, k, mask=masks.Causal())
    tab.call("Emulation.setUserAgentOverride", userAgent="x", acceptLanguage="fr, zh-CN")
    server = open_page(tab, recorder.recording())
    with server:
        assert tab.js("R.state.lang") == "zh"
        tab.wait("R.state.place === 1 && R.state.head === 1 && R.state.j === 40")
        assert tab.js("R.state.i") > 48
        tab.key("[")
        assert tab.js("R.state.head") == 0
        tab.wait('document.getElementById("running").textContent === ""')
        tab.wait("new Promise(done => setTimeout(() => done(true), 1200))")
        assert tab.js("R.state.head") == 0
        overlap = """((a, b) => Math.max(0, Math.min(a.right, b.right) - Math.max(a.left, b.left)) *
            Math.max(0, Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)))(...["map", "inset"]
            .map(x => document.getElementById(x).getBoundingClientRect()))"""
        for width in (1280, 390):
            tab.resize(width, 860)
            assert tab.js(overlap) == 0, "the small picture covers nothing"
        tab.resize(1280, 860)
    tab.call("Emulation.setUserAgentOverride", userAgent="x", acceptLanguage="en")
    server = regard.inspect.view(recorder.recording(), lang="zh")
    with server:
        tab.open("about:blank")
        tab.open(server.url)
        tab.wait('document.documentElement.dataset.ready === "yes"')
        assert tab.js("R.state.lang") == "zh"
        assert tab.errors == []


def test_sixty_hostile_tokens_are_text(tab: Tab) -> None:
    assert len(set(SIXTY)) == 60
    pieces = tuple(SIXTY[n % 60] for n in range(LENGTH))
    hostile = replace(made(), pieces=pieces, metadata={"model": SIXTY[0], SIXTY[4]: SIXTY[8]})
    server = open_page(tab, hostile)
    with server:
        for kind in ("cell", "row", "column"):
            tab.js(f'R.set({{ tab: "{kind}", i: 700, j: 60 }})')
            tab.wait(f'document.getElementById("inspector").dataset.shows.startsWith("/{kind}")')
        tab.js("R.map.open(60, 60)")
        tab.js('R.set({ side: "q" })')
        tab.js('R.set({ view: "atlas" })')
        tab.js('R.set({ view: "map" })')
        tab.wait('document.querySelectorAll(".tokenrow").length > 10')
        shown = tab.js('[...document.querySelectorAll(".tokenrow .token")].map(x => x.textContent)')
        assert any("</script>" in text for text in shown)
        assert tab.js("window.hit === undefined")
        scripts = tab.js("document.scripts.length")
        assert scripts == 2, "the data and the page's own"
        assert tab.count("#page img, #page script, #page style") == 0
        assert tab.errors == []
        assert all(address.startswith((server.origin, "data:")) for address in tab.requests)


def test_without_a_token_the_page_says_so(tab: Tab) -> None:
    with regard.inspect.view(made()) as server:
        tab.open(f"{server.origin}/")
        tab.wait("document.documentElement.dataset.ready !== undefined")
        assert "regard view" in tab.text_of("page")


def two_runs() -> tuple[Recording, Recording]:
    """Two recordings of two layers with two heads each."""
    runs = []
    for seed in range(2):
        draw = torch.Generator().manual_seed(seed)
        with torch.inference_mode(), Recorder(keep=()) as recorder:
            for n in range(2):
                q, k = torch.randn(2, 1, 2, 400, 8, generator=draw)
                with named_scope("layers"), named_scope(str(n)):
                    regard.attend(q, k, k, mask=masks.Causal())
        runs.append(recorder.recording())
    return runs[0], runs[1]


def test_pinned_heads_move_with_the_map_and_show_differences(tab: Tab) -> None:
    a, b = two_runs()
    server = open_page(tab, a, b)
    with server:
        assert tab.js("R.meta.places.map(x => x.source)") == [0, 0, 1, 1]
        tab.js("R.set({ place: 2, head: 1 })")
        tab.js('document.getElementById("map").focus()')
        tab.key("b")
        tab.js("R.set({ place: 0, head: 1 }); R.map.open(300, 120)")
        tab.wait("R.map.panes().length === 1 && R.map.panes()[0].node.dataset.known === 'true'")
        tab.wait('location.hash.includes("pins=2.1")')
        centre = "(({ i0, i1, j0, j1 }) => [(j0 + j1) / 2, (i0 + i1) / 2])"
        main, pane = (tab.js(f"{centre}({x}.view)") for x in ("R.map", "R.map.panes()[0]"))
        assert pane == pytest.approx(main), "the same centre"
        before = tab.js("R.map.view.j0")
        box = tab.js(
            '(b => [b.left + 60, b.top + 60])(document.querySelector(".pane canvas")'
            ".getBoundingClientRect())"
        )
        path = (("mouseMoved", 0), ("mousePressed", 0), ("mouseMoved", 40), ("mouseReleased", 40))
        for kind, by in path:
            tab.press(kind, box[0] + by, box[1])
        assert tab.js("R.map.view.j0") < before, "dragging a pane moves the large map"
        tab.key("d")
        tab.wait("R.state.diff === '1' && source.get('2/1/0/1/0')?.difference")
        drawn, wanted = tab.js(f"""(() => {{
            const data = source.get("2/1/0/1/0").difference.picture.getContext("2d")
                .getImageData(120, 300 - 256, 1, 1).data;
            const d = {a.weights(0, 1)[300, 120].item()} - {b.weights(0, 1)[300, 120].item()};
            const colour = R.lut("signed")[Math.round(255 * R.SCALES.signedlog.at(d))];
            return [[...data], [...new Uint8Array(new Uint32Array([colour]).buffer)]];
        }})()""")
        assert drawn == wanted
        # the tooltip says the number that is drawn: in the pane the difference, in blocks theirs
        tab.hover("""(({ left, top }, { i0, j0, s }) => [left + 1 + (120.5 - j0) / s,
            top + 1 + (300.5 - i0) / s])(document.querySelector(".pane canvas")
            .getBoundingClientRect(), R.map.panes()[0].view)""")
        told = 'document.getElementById("tip").textContent.split(" ").at(-1).replace("−", "-")'
        wanted = a.weights(0, 1)[300, 120].item() - b.weights(0, 1)[300, 120].item()
        tab.wait(f"Math.abs(Number({told}) / {wanted!r} - 1) < 1e-3")
        tab.js("R.set({ diff: '', stat: 'mass' }); R.map.whole()")
        tab.wait('document.documentElement.dataset.known === "true" && R.map.level() === 1')
        tab.hover("""(({ left, top }, s) => [left + s.left + 40, top + s.top + 200])(
            document.getElementById("map").getBoundingClientRect(), R.map.shape())""")
        tab.wait('document.getElementById("tip").textContent.includes("total weight of 2 × 2")')
        i, j = tab.js("(({ s }) => [Math.floor(200 * s / 2) * 2, Math.floor(40 * s / 2) * 2])"
                      "(R.map.view)")  # fmt: skip
        block = a.weights(0, 1)[i : i + 2, j : j + 2].sum(1).mean().item()
        tab.wait(f"Math.abs(Number({told}) / {block!r} - 1) < 1e-3")
        tab.click(".unpin")
        assert tab.js("R.state.pins") == ""
        tab.wait("R.map.panes().length === 0")
        assert tab.errors == []


def test_heads_are_filtered_and_opened_from_the_scatter(tab: Tab) -> None:
    a, b = two_runs()
    server = open_page(tab, a, b)
    with server:
        tab.js('R.set({ view: "atlas" })')
        tab.wait('document.querySelector("#scatter")?.dataset.drawn === "8"')
        tab.js('R.set({ metric: "previous_token", least: "0.5" })')
        tab.wait('document.querySelector("#atlas").dataset.kept === "0"')
        assert tab.count(".thumb.faint") == 8
        tab.js('R.set({ least: "" })')
        tab.wait('document.querySelector("#scatter").dataset.drawn === "8"')
        tab.click('.dot[data-head="3 1"]')
        assert tab.js("[R.state.place, R.state.head, R.state.view]") == [3, 1, "map"]
        tab.js('R.set({ view: "atlas" })')
        tab.js("""document.querySelector(".thumb").dispatchEvent(
            new MouseEvent("click", { shiftKey: true }))""")
        assert tab.js("R.state.pins") == "0.0"
        assert tab.errors == []
