"""The page in a real browser: opened from a file, driven by mouse and keyboard, its numbers against
the recording's.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import regard
from regard.inspect.record import Recorder, record
from regard.inspect.record.recording import Recording
from regard.inspect.report import report
from regard.language import PLACEHOLDER
from regard.view.page import catalogue, report_page
from tests.view.browser import CHROMIUM, HOSTILE, WHY_NOT, Browser, Tab

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT), pytest.mark.full]

TEXT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n"
LAYER, HEAD, QUERY, KEY = 1, 2, 20, 3
VIEWS = ("atlas", "map", "compare", "text", "row", "cell", "diagnostics")


class Made(NamedTuple):
    """A recording, and where its pages are."""

    recording: Recording
    others: dict[str, Recording]
    folder: Path

    def url(self, state: str = "", name: str = "page") -> str:
        return f"file://{self.folder}/{name}.html{state}"

    def at(self, view: str, **more: Any) -> str:
        extra = "".join(f"&{name}={value}" for name, value in more.items())
        return self.url(f"#L{LAYER}H{HEAD}&v={view}&i={QUERY}&j={KEY}{extra}")


def pseudo(code: str) -> dict[str, str]:
    """A language in which every sentence is only its placeholders between marks: what shows letters
    outside them is none.
    """
    return {
        key: f"«{''.join(f'{{{x}}}' for x in PLACEHOLDER.findall(text))}»"
        for key, text in catalogue(code).items()
    }


def raw() -> Recording:
    """One call with everything that a score can have; its queries and its keys are two texts."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, *shape, generator=draw) for shape in ((4, 12, 8), (2, 17, 8), (2, 17, 6))
    )
    mask, bias = regard.masks.Causal() & regard.masks.Window(9), regard.biases.ALiBi(4)
    with Recorder() as recorder:
        regard.attend(
            3 * q, k, v, mask=mask, bias=bias, softcap=5.0, sink=torch.randn(4, generator=draw)
        )
    return replace(recorder.recording(), pieces=tuple(f"w{n}" for n in range(17)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("pages")
    model = regard.load("tiny")
    recording = record(model, TEXT)
    recordings = {"page": recording}
    data = report(recording, model=model)
    (folder / "page.html").write_text(report_page(data), "utf-8")
    few = report(recording, model=model, choice=(LAYER, HEAD), budget=0)
    (folder / "few.html").write_text(report_page(few, "zh"), "utf-8")
    pieces = tuple(HOSTILE[n % len(HOSTILE)] for n in range(len(recording.pieces)))
    hostile = report(
        replace(recording, pieces=pieces, metadata={"model": HOSTILE[0], HOSTILE[1]: HOSTILE[2]}),
        model=model,
        title=HOSTILE[0],
    )
    (folder / "hostile.html").write_text(report_page(hostile), "utf-8")
    for name, made in (("raw", raw()), ("decoded", record(model, "to be or not to be", tokens=4))):
        (folder / f"{name}.html").write_text(report_page(report(made, model=model)), "utf-8")
        recordings[name] = made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.view.page.catalogue", pseudo)
        (folder / "pseudo.html").write_text(report_page(data), "utf-8")
    return Made(recording, recordings, folder)


def close(a: float, b: float) -> bool:
    """fp64 on both sides, from the same fp32 q, k and lse: sums of a few dozen terms."""
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


def shown_as(found: float, right: float) -> bool:
    """A number of the page has nine digits."""
    return math.isclose(found, right, rel_tol=5.1e-9, abs_tol=1e-9)


def chain_of(tab: Tab) -> list[float]:
    """The numbers from the dot product to the score."""
    shown = tab.texts("#cell-step-4 tbody td:last-child")
    return [float(x.replace("−", "-")) for x in shown if x != "="]


def step_down(tab: Tab) -> None:
    """To the next row by the slider."""
    tab.js("document.getElementById('row-slider').focus()")
    tab.key("ArrowRight")
    tab.settle()


def facts_of(tab: Tab, body: str) -> dict[str, str]:
    names, values = (tab.texts(f"{body} .fact {part}") for part in ("span", "b"))
    return dict(zip(names, values, strict=True))


# ---- it opens, and keeps to itself


@pytest.mark.full
def test_every_view_opens_without_a_word_and_without_a_request(tab: Tab, made: Made) -> None:
    tab.ready(made.url())
    assert tab.js("R.views.map(x => x.name)") == list(VIEWS)
    for view in VIEWS:
        tab.click(f'.tab[data-view="{view}"]')
        tab.settle()
        assert tab.js(f"!document.getElementById('view-{view}').hidden")
        assert len(tab.text(f"#view-{view}")) > 40, view
    assert tab.js("[...R.missing]") == []
    assert len(tab.requests) == 1


def test_a_page_that_would_call_out_is_noticed(browser: Browser, tmp_path: Path) -> None:
    """The negative control of every test here: errors and requests are seen."""
    (tmp_path / "bad.html").write_text(
        '<img src="http://127.0.0.1:9/x.png"><script>null.x</script>'
    )
    opened = browser.tab()
    opened.open(f"file://{tmp_path}/bad.html")
    opened.wait("true")
    assert any("null" in error for error in opened.errors)
    assert "http://127.0.0.1:9/x.png" in opened.requests
    opened.close()


def test_the_policy_keeps_even_our_own_page_from_calling_out(browser: Browser, made: Made) -> None:
    opened = browser.tab()
    opened.ready(made.url())
    refused = opened.js("fetch('http://127.0.0.1:9/').then(() => 'went', error => String(error))")
    assert "Failed to fetch" in refused
    assert any("Content Security Policy" in error for error in opened.errors)
    opened.close()


# ---- from the atlas to a cell, by clicks


@pytest.mark.full(keep=1)
def test_from_the_atlas_to_the_map_to_a_cell_by_clicks(tab: Tab, made: Made) -> None:
    tab.ready(made.url("#L0H0&v=atlas"))
    tab.click(f'.thumb[data-head="{LAYER} {HEAD}"]')
    tab.settle()
    assert tab.state("view", "place", "head") == ["map", LAYER, HEAD]
    tab.click("#view-map canvas.heat", at=(0.45, 0.6))
    tab.settle()
    i, j = tab.state("i", "j")
    assert (i, j) != (0, 0)
    tab.key("Enter")
    tab.wait("R.state.view === 'cell'")
    tab.settle()
    assert tab.state("place", "head", "i", "j") == [LAYER, HEAD, i, j]
    weight = made.recording.weights(LAYER, HEAD)[i, j].item()
    assert close(
        tab.js("R.math.cell(R.state.place, R.state.head, R.state.i, R.state.j).weight"), weight
    )


def test_a_deep_link_restores_what_was_seen(tab: Tab, made: Made) -> None:
    tab.ready(made.at("cell"))
    first = tab.text("#view-cell")
    tab.click("#cell-i")
    tab.js("document.getElementById('cell-i').select()")
    tab.type("17")
    tab.key("Enter")
    tab.settle()
    link = tab.js("location.href")
    assert f"#L{LAYER}H{HEAD}" in link
    assert "i=17" in link
    seen = tab.text("#view-cell")
    assert seen != first
    tab.open("about:blank")
    tab.ready(link)
    assert tab.text("#view-cell") == seen
    tab.js("location.hash = '#L1H2&v=cell&i=20&j=3'")
    tab.settle()
    assert tab.text("#view-cell") == first


def test_a_link_that_means_nothing_is_no_harm(tab: Tab, made: Made) -> None:
    tab.ready(made.url("#L99H99&v=nowhere&i=1e9&j=-4&lang=xx&theme=pink&stat=<b>&b=L7H7"))
    assert tab.state("place", "head", "i", "j", "lang", "theme") == [3, 7, 0, 0, "en", "auto"]


def test_the_tooltip_of_a_resting_pointer_follows_the_head(tab: Tab, made: Made) -> None:
    tab.ready(made.at("map"))
    tab.hover("""(node => {
        node.scrollIntoView({ block: "center", behavior: "instant" });
        const b = node.getBoundingClientRect();
        return [b.left + 0.5 * b.width, b.top + 0.7 * b.height];
    })(document.querySelector("#view-map canvas.heat"))""")
    tips = []
    for head in (HEAD, HEAD + 1, HEAD + 2):
        tab.set(head=head)
        assert not tab.js("document.getElementById('tip').hidden")
        tips.append(tab.text_of("tip"))
    assert len({tip.splitlines()[0] for tip in tips}) == 1, "the same cell"
    assert len(set(tips)) == 3, "in three heads"
    tab.set(view="atlas")
    assert tab.js("document.getElementById('tip').hidden")


# ---- explain cell: every number is the recording's


def test_the_cell_says_the_numbers_of_the_recording(tab: Tab, made: Made) -> None:
    tab.ready(made.at("cell"))
    tab.key("0")  # all steps
    place = made.recording[LAYER]
    row, column = slice(QUERY, QUERY + 1), slice(KEY, KEY + 1)
    block = place.block(row, column, slice(HEAD, HEAD + 1))
    score, weight = block.scores.item(), block.weights.item()
    shown = tab.text("#cell-step-4 tbody tr:last-child td:last-child").replace("−", "-")
    assert shown_as(float(shown), score)
    assert f"weight {weight:.2e}".replace("e-0", "e-") in tab.text("#cell-says")
    q, k = place.steps[0].q[0, HEAD, QUERY].double(), place.k[0, HEAD // 2, KEY].double()
    chain = chain_of(tab)
    assert shown_as(chain[0], (q @ k).item())
    assert shown_as(chain[1], (q @ k).item() / math.sqrt(32))
    assert tab.count("#cell-step-3 .bars rect") >= 32


def test_a_masked_cell_says_why(tab: Tab, made: Made) -> None:
    tab.ready(made.url(f"#L{LAYER}H{HEAD}&v=cell&i=3&j=20"))
    tab.key("0")  # all steps
    assert "future" in tab.text("#cell-step-1 .bad")
    assert "future" in tab.text("#cell-step-4")
    assert "weight 0." in tab.text("#cell-says")


def test_before_the_rotation_q_is_what_the_model_projected(tab: Tab, made: Made) -> None:
    tab.ready(made.at("cell"))
    tab.key("0")  # all steps
    numbers = (
        "document.querySelector('#cell-step-2 .numbers').open = true, new Promise(r => "
        "setTimeout(() => r(JSON.parse(document.querySelector('#cell-step-2 .numbers "
        "pre').textContent)), 50))"
    )
    rotated = torch.tensor(tab.js(numbers), dtype=torch.float64)
    assert torch.equal(rotated.float(), made.recording[LAYER].steps[0].q[0, HEAD, QUERY])
    tab.click("#cell-rotary")
    tab.settle()
    before = torch.tensor(tab.js(numbers), dtype=torch.float64)
    inv_freq = torch.tensor(tab.js("R.place().rotary.inv_freq"), dtype=torch.float64)
    again = regard.positions.rotate(
        before[None, None, None],
        regard.Span(QUERY, 1),
        inv_freq,
        layout=tab.js("R.place().rotary.layout"),
    )
    assert (again.flatten() - rotated).abs().max() < 1e-12 * rotated.abs().max()
    assert (before - rotated).abs().max() > 0.1


def test_what_if_is_a_softmax_of_its_own(tab: Tab, made: Made) -> None:
    tab.ready(made.at("cell"))
    tab.key("0")  # all steps
    tab.choose("whatif-temperature", "2", "input")
    shown = tab.text("tr:has([data-whatif='temperature']) td:nth-child(3)")
    one = slice(QUERY, QUERY + 1)
    scores = made.recording[LAYER].block(one, slice(0, 28), slice(HEAD, HEAD + 1)).scores[0, 0, 0]
    assert math.isclose(float(shown), (scores / 4).softmax(0)[KEY].item(), rel_tol=1e-3)
    assert math.isclose(
        float(tab.text(".asis td:nth-child(3)")), scores.softmax(0)[KEY].item(), rel_tol=2e-3
    )
    tab.click("[data-whatif='window']")
    assert "window" in tab.text(".whatif h3")


def test_the_steps_go_by_keys_and_the_blocks_end_in_the_kernels_lse(tab: Tab, made: Made) -> None:
    tab.ready(made.at("cell"))
    still_open = "[...document.querySelectorAll('.step[open]')].map(x => x.id)"
    assert tab.js(still_open) == [], "the page opens on the sentence"
    for _ in range(5):
        tab.key("n")
        tab.settle()
    assert tab.js(still_open) == ["cell-step-5"]
    tab.click(".online summary")
    tab.settle()
    mine, kernel = re.findall(
        r"Final value: ([\d.−]+); the kernel's value: ([\d.−]+)\.", tab.text(".online")
    )[0]
    assert abs(float(mine) - float(kernel)) < 1e-5
    tab.key("p")
    tab.settle()
    assert tab.js(still_open) == ["cell-step-4"]
    tab.click("#cell-step-2 > summary")
    tab.settle()
    assert tab.js(still_open) == ["cell-step-2"], "one at a time"
    tab.click("#cell-all")
    assert len(tab.js(still_open)) == 10
    tab.click("#cell-all")
    assert tab.js(still_open) == []
    tab.key("q")
    tab.key("K")
    tab.settle()
    assert tab.state("i", "j") == [QUERY + 1, KEY - 1]


def test_the_page_opens_on_the_words_and_their_weights(tab: Tab, made: Made) -> None:
    tab.ready(made.at("cell"))
    place = made.recording[LAYER]
    row = place.block(slice(QUERY, QUERY + 1), slice(0, place.N), slice(HEAD, HEAD + 1))
    share = "Number(x.style.getPropertyValue('--share'))"
    shares = tab.js(f"[...document.querySelectorAll('.said')].map(x => {share})")
    weights = row.weights[0, 0, 0].tolist()
    assert shares == pytest.approx(weights, abs=1e-6), "without words, each token is one"
    assert tab.count(".said.q") == tab.count(".said.k") == 1
    tab.click("#cell-heads button:last-child")
    tab.settle()
    assert tab.state("place", "head") != [LAYER, HEAD], "another head was chosen"


def test_a_head_that_is_not_embedded_says_so(tab: Tab, made: Made) -> None:
    tab.ready(made.url(f"#L{LAYER}H{HEAD + 1}&v=cell", "few"))
    for view in ("cell", "row", "text", "diagnostics"):
        tab.click(f'.tab[data-view="{view}"]')
        tab.settle()
        assert "regard" in tab.text(f"#view-{view}")
        assert tab.count(".step, .curve, .bars") == 0


def test_softcap_bias_and_sink_each_have_their_link(tab: Tab, made: Made) -> None:
    tab.ready(made.url("#L0H1&v=cell&i=10&j=8", "raw"))
    tab.key("0")  # all steps
    place = made.others["raw"][0]
    step, one = place.steps[0], slice(1, 2)
    block = place.block(slice(10, 11), slice(0, 17), one)
    chain = chain_of(tab)
    dot = (step.q[0, 1, 10].double() @ place.pools[0].k[0, 0, 8].double()).item()
    capped = 5 * math.tanh(dot / math.sqrt(8) / 5)
    for found, right in zip(
        chain, (dot, dot / math.sqrt(8), capped, capped - 7 / 16, capped - 7 / 16), strict=True
    ):
        assert shown_as(found, right)
    assert shown_as(chain[-1], block.scores[0, 0, 0, 8].item())
    assert step.sink is not None
    share = math.exp(step.sink[1].item() - step.denominator[0, 1, 10].item())
    assert f"weight {share:.4}" in tab.text("#cell-step-5 .cards")
    tab.click(".online summary")
    assert "the sink" in tab.text(".online tbody tr:last-child")
    tab.set(j=2)
    assert "window(9)" in tab.text("#cell-step-1 .bad").lower()


# ---- row, text lens, diagnostics


def test_decode_steps_are_rows_too(tab: Tab, made: Made) -> None:
    place = made.others["decoded"][0]
    first = place.steps[0].T
    tab.ready(made.url(f"#L0H0&v=row&i={first - 1}", "decoded"))
    assert tab.text("#row-at").endswith(", prefill")
    step_down(tab)
    assert tab.text("#row-at").endswith(", call 1 after the prefill")
    assert f"{first + 1} of {place.N} keys" in tab.text("#row-body")
    weights = made.others["decoded"].weights(0, 0)[first]
    shown = float(tab.text("#row-body .listrow .num"))
    assert math.isclose(shown, weights.max().item(), rel_tol=1e-3)


def test_two_texts_have_two_panes(tab: Tab, made: Made) -> None:
    tab.ready(made.url("#L0H1&v=text&i=10&j=8", "raw"))
    assert tab.texts(".lens", "querySelectorAll('.word').length") == [12, 17]
    tab.click('#text-k [data-token="15"]')
    tab.wait("document.querySelector('#text-says').textContent.startsWith('Queries')")
    column = made.others["raw"].weights(0, 1)[:, 15]
    assert math.isclose(
        float(tab.text("#view-text .listrow .num")), column.max().item(), rel_tol=1e-3
    )
    assert tab.count("#text-q .word[style*=background]") == int((column > 0).sum())


def test_the_row_adds_up(tab: Tab, made: Made) -> None:
    tab.ready(made.at("row"))
    weights = made.recording.weights(LAYER, HEAD)[QUERY]
    entropy = -(weights[weights > 0] * weights[weights > 0].log()).sum().item()
    facts = facts_of(tab, "#row-body")
    assert facts["visible"] == "21 of 28 keys"
    assert math.isclose(float(facts["entropy, nats"]), entropy, rel_tol=1e-3)
    assert math.isclose(float(facts["effective keys"]), math.exp(entropy), rel_tol=1e-3)
    share = 100 * weights[:4].sum().item()
    assert math.isclose(float(facts["first four keys"].rstrip(" %")), share, rel_tol=1e-2)
    first = tab.js("document.querySelector('#row-body .listrow .token').textContent")
    assert first.split()[0] == str(int(weights.argmax()))
    step_down(tab)
    assert tab.state("i") == [QUERY + 1]
    tab.click("#row-body .listrow")
    tab.settle()
    assert tab.state("view") == ["cell"]


def test_a_span_of_text_shows_where_it_looks_and_who_looks_at_it(tab: Tab, made: Made) -> None:
    tab.ready(made.at("text"))
    tab.drag('[data-token="8"]', '[data-token="11"]')
    tab.settle()
    weights = made.recording.weights(LAYER, HEAD)
    assert tab.count(".word.chosen") == 4
    out, into = weights[8:12].mean(0), weights[:, 8:12].sum(1)

    def listed() -> list[tuple[int, float]]:
        names, values = (
            tab.texts("#view-text .listrow", f"children[{n}].textContent") for n in (0, 1)
        )
        return [(int(x.split()[0]), float(y)) for x, y in zip(names, values, strict=True)]

    found = listed()
    assert [n for n, _ in found] == out.topk(8).indices.tolist()
    assert all(math.isclose(x, out[n].item(), rel_tol=1e-3) for n, x in found)
    tab.click("#text-side-k")
    tab.wait("document.querySelector('#text-says').textContent.startsWith('Queries')")
    found = listed()
    assert [n for n, _ in found] == into.topk(8).indices.tolist()
    assert all(math.isclose(x, into[n].item(), rel_tol=1e-3) for n, x in found)


def test_the_lens_follows_the_keyboard_and_the_search(tab: Tab, made: Made) -> None:
    tab.ready(made.at("text"))
    tab.js("document.getElementById('text-q').focus()")
    tab.key("ArrowLeft")
    tab.key("ArrowRight", shift=True)
    assert tab.texts(".word.chosen", "dataset.token") == [f"{QUERY - 1}", f"{QUERY}"]
    tab.click("#text-search")
    tab.type("return")
    tab.settle()
    marked = [str(n) for n, piece in enumerate(made.recording.pieces) if "return" in piece]
    assert tab.texts(".word.found", "dataset.token") == marked
    tab.key("Enter")
    tab.settle()
    assert tab.text("#text-found") == f"{len(marked)} found, showing 1"
    tab.js("document.getElementById('text-search').value = ''")
    tab.type("/(/")
    tab.settle()
    assert tab.text("#text-found") == "invalid regular expression"


def test_the_lens_holds_only_the_lines_in_sight(tab: Tab, made: Made) -> None:
    tab.ready(made.at("text"))
    tab.js("R.meta.texts[0] = Array.from({ length: 100000 }, (_, n) => `w${n}`), R.redraw()")
    tab.settle()
    assert tab.count(".textline") < 60
    assert tab.js("document.querySelector('.lines').clientHeight") > 100_000
    tab.js("document.getElementById('text-q').scrollTop = 1e9")
    tab.wait("document.querySelector('[data-token=\"99999\"]')")
    assert tab.count(".textline") < 60


def test_diagnostics_name_the_worst_row(tab: Tab, made: Made) -> None:
    tab.ready(made.at("diagnostics"))
    tab.wait("document.querySelector('#diagnostics-body .fact')")
    facts = facts_of(tab, "#diagnostics-body")
    weights = made.recording.weights(LAYER, HEAD)
    worst = (weights.sum(1) - 1).abs().max().item()
    assert math.isclose(float(facts["largest |Σ p − 1|"]), worst, rel_tol=1e-2)
    z = weights @ made.recording[LAYER].v[0, HEAD // 2].double()  # type: ignore[index]
    out = made.recording[LAYER].steps[0].out
    assert out is not None
    apart = (z - out[0, HEAD]).abs().max().item()
    assert math.isclose(float(facts["largest |Δ out|"]), apart, rel_tol=1e-2)
    for name in ("rows with NaN or ∞", "weights above 1", "weight on empty slots"):
        assert facts[name] == "0"
    assert facts["weight on future keys"] == "0 %"
    assert "28 rows" in tab.text("#diagnostics-body .badge")


def test_an_audit_that_found_something_is_not_hidden(tab: Tab, made: Made) -> None:
    tab.ready(made.at("diagnostics"))
    assert tab.text(".audit .good").startswith("Audit: no errors found")
    tab.js(
        "(() => { Object.assign(R.meta.places[1].audit, { sound: false, residual: 0.7, findings: "
        "['<b>lse</b> is in base 2'] }); R.set({ head: 3 }); })()"
    )
    tab.settle()
    assert tab.text(".audit .bad") == "Audit: errors found."
    assert tab.text(".audit .finding") == "<b>lse</b> is in base 2"
    assert tab.count(".audit td .bad") == 1


# ---- languages, colours, sizes


def test_the_language_switch_turns_every_word(tab: Tab, made: Made) -> None:
    tab.ready(made.at("cell"))
    tab.choose("lang", "zh")
    assert tab.js("document.documentElement.lang") == "zh-Hans"
    assert tab.text('.tab[data-view="cell"]') == catalogue("zh")["cell.title"]
    assert tab.text("#cell-step-9 h2").endswith(catalogue("zh")["cell.step_9"])
    assert "lang=zh" in tab.js("location.hash")
    for view in VIEWS:
        tab.set(view=view)
    assert tab.js("[...R.missing]") == []


def test_a_page_opens_in_the_language_it_was_written_for(tab: Tab, made: Made) -> None:
    tab.ready(made.url(name="few"))
    assert tab.state("lang") == ["zh"]
    assert re.search("[\u4e00-\u9fff]", tab.text("nav"))


BARE = """(() => {
    const { texts, sources, places, title, start } = R.meta, found = new Set();
    const given = JSON.stringify([texts, sources, places, title, start]);
    const data = given + " English 简体中文 regard";
    const own =
        ".recipe, .token, .formula, .equation, .title, .facts b, pre, code, #lang, footer a";
    const walk = document.createTreeWalker(document.getElementById("page"), NodeFilter.SHOW_TEXT);
    const look = said => {
        let left = said;
        while (left !== (left = left.replace(/«[^«»]*»/g, " ")));
        for (const word of left.match(/[A-Za-z\u4e00-\u9fff]{3,}/g) || [])
            if (!data.includes(word)) found.add(`${word}: ${said.slice(0, 60)}`);
    };
    for (let node = walk.nextNode(); node; node = walk.nextNode())
        if (!node.parentElement.closest(own)) look(node.data);
    for (const node of document.querySelectorAll("#page *")) {
        for (const name of ["aria-label", "title", "placeholder", "alt"])
            if (node.hasAttribute(name)) look(node.getAttribute(name));
        if (node.ariaLabel) look(node.ariaLabel);
    }
    return [...found];
})()"""


def test_no_view_has_a_sentence_of_its_own(tab: Tab, made: Made) -> None:
    """In a language of marks, every word that is left belongs to the data (a figure's recipe is a
    record), to an equation, or to no catalogue: a fault.
    """
    tab.ready(made.url(f"#L{LAYER}H{HEAD}&v=atlas&i={QUERY}&j={KEY}", "pseudo"))
    for view in VIEWS:
        tab.set(view=view)
        tab.js("new Promise(r => setTimeout(r, 150))")
        assert (view, tab.js(BARE)) == (view, [])
    tab.js("document.querySelector('main').append('A bare sentence.')")
    assert tab.js(BARE) == ["bare: A bare sentence.", "sentence: A bare sentence."]


def luminance(tab: Tab) -> float:
    rgb = tab.js("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    return float(sum(rgb) / 3)


def test_light_and_dark_follow_the_system_and_the_switch(tab: Tab, made: Made) -> None:
    tab.prefers(color_scheme="light")
    tab.ready(made.at("cell"))
    assert luminance(tab) > 200
    tab.prefers(color_scheme="dark")
    tab.settle()
    assert luminance(tab) < 60
    assert tab.js("R.theme()") == "dark"
    tab.choose("theme", "light")
    assert luminance(tab) > 200
    assert "theme=light" in tab.js("location.hash")


@pytest.mark.parametrize("size", [(390, 844), (1280, 800)])
def test_nothing_runs_over_the_side(tab: Tab, made: Made, size: tuple[int, int]) -> None:
    tab.resize(*size, mobile=size[0] < 600)
    tab.ready(made.at("atlas"))
    for view in VIEWS:
        tab.set(view=view)
        tab.js("new Promise(r => setTimeout(r, 60))")
        assert (view, tab.js("document.documentElement.scrollWidth")) == (view, size[0])
        small = tab.js(
            "[...document.querySelectorAll('main section:not([hidden]) *')].filter(x => "
            "x.childElementCount === 0 && x.textContent.trim() && x.offsetParent && "
            "parseFloat(getComputedStyle(x).fontSize) < 10).length"
        )
        assert (view, small) == (view, 0)  # readable: no text below 10 px


# ---- what tokens may try


def test_hostile_tokens_are_text_and_nothing_else(tab: Tab, made: Made) -> None:
    tab.ready(made.url(f"#L{LAYER}H{HEAD}&v=atlas", "hostile"))
    for view in VIEWS:
        tab.set(view=view)
        tab.js("new Promise(r => setTimeout(r, 60))")
    assert tab.js("window.hit") is None
    assert tab.count("#page img, #page script, #page style, #page a[href]") == 0
    assert tab.js("document.scripts.length") == 3
    tab.set(view="text")
    shown = tab.texts(".word")
    assert shown[:2] == list(HOSTILE[:2])
    assert shown[3:6] == ["‹202E›tfel ot thgir", "zero‹200B›width", "nul‹00›byte"]
    assert shown[8:11] == list(HOSTILE[8:11])
    assert tab.js("({}).hit === undefined && Object.prototype.hit === undefined")


def test_the_page_lives_without_the_data_of_later_versions(tab: Tab, made: Made) -> None:
    """Cost, audit, rotary and explanation may all be missing: each step says what is not there."""
    tab.ready(made.at("cell"))
    tab.key("0")  # all steps
    tab.js(
        "(() => { for (const x of R.meta.places) x.cost = x.audit = x.rotary = null; "
        "R.meta.explanation = null; R.set({ j: 4 }); })()"
    )
    tab.settle()
    assert tab.count(".step") == 10
    assert catalogue("en")["cell.no_audit"] in tab.text("#cell-step-9")
