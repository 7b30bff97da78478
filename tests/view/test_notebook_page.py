"""A recording in a notebook: as a widget, whose script runs in a real browser, and as a frame."""

from __future__ import annotations

import html
import json
import re
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch

from regard.errors import ArgumentError
from regard.inspect import Recording, record
from regard.inspect import widget as page_widget
from regard.inspect.record.export import MAX_PAGE_WEIGHTS
from regard.view.notebook_page import VIEWS
from regard.view.page import ARRAY_SCRIPTS, SHARED
from tests.inspect.small_model import TEXT, model
from tests.view.browser import CHROMIUM, WHY_NOT, chromium

VIEW = "application/vnd.jupyter.widget-view+json"
HOST = """<!doctype html><div id="cell"></div><script type="module">
const state = STATE, follow = {};
const source = new Blob([SCRIPT], { type: "text/javascript" });
const { default: module } = await import(URL.createObjectURL(source));
window.model = {
  get: name => state[name], on: (name, f) => { follow[name] = f; },
  off: name => { delete follow[name]; },
  set(name, value) { state[name] = value; follow[`change:${name}`]?.(); }, follow,
};
window.leave = module.render({ model: window.model, el: document.getElementById("cell") });
</script>"""
"""A page that does for the widget's script what a notebook does."""


def recorded() -> Recording:
    return record(model(), TEXT)


def test_without_anywidget_it_is_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    recording = recorded()
    shown = recording._repr_mimebundle_()
    assert {*shown} == {"text/plain", "text/html"}
    assert shown["text/html"].startswith('<iframe sandbox="allow-scripts"')
    page = html.unescape(shown["text/html"].split('srcdoc="')[1])
    assert page.startswith("<!doctype html>")
    assert "Content-Security-Policy" in page
    assert shown["text/plain"].startswith("Recording of layers.0")
    with pytest.raises(ArgumentError, match=r"a widget needs anywidget, .*regard\[notebook\]"):
        page_widget(recording)


def test_with_anywidget_it_is_a_widget() -> None:
    pytest.importorskip("anywidget")
    recording = recorded()
    shown = recording._repr_mimebundle_()
    assert {*shown} == {"text/plain", VIEW}
    widget = page_widget(recording, height=300)
    assert widget.height == 300
    assert widget.page.startswith("<!doctype html>")
    widget.show("layers.2", 1, query=3, key=0)
    assert widget.address == "L2H1&v=map&i=3&j=0"
    with pytest.raises(ArgumentError, match=r"there is no layer 'layers\.7'"):
        widget.show("layers.7")
    for wrong, message in (
        ({"head": 9}, r"layers\.0 has no head 9; it has the heads 0, 1, 2, 3"),
        ({"query": 99}, "query is 99; on the page it is from 0 to"),
        ({"key": -1}, "key is -1; on the page it is from 0 to"),
        ({"view": "maps"}, "did you mean 'map'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            widget.show(0, **wrong)
    assert widget.address == "L2H1&v=map&i=3&j=0", "a refused call moves nothing"


def test_the_views_are_those_of_the_page() -> None:
    folder = resources.files("regard.view.page")
    scripts = (*SHARED, *ARRAY_SCRIPTS)
    texts = "".join(folder.joinpath(name).read_text("utf-8") for name in scripts)
    found = re.findall(r"R\.view\(\{\s*name: \"(\w+)\"", texts)
    assert {*found} == {*VIEWS}


def test_a_large_recording_is_a_table() -> None:
    T = int((MAX_PAGE_WEIGHTS / (3 * 4)) ** 0.5) + 1
    long = record(model(max_position_embeddings=T), torch.ones(1, T, dtype=torch.int64))
    shown = long._repr_mimebundle_()
    assert {*shown} == {"text/plain", "text/html"}
    assert shown["text/html"].startswith("<table>")


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)
def test_the_script_of_the_widget_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("anywidget")
    widget = page_widget(recorded(), height=420)
    widget.show(1, 2, view="row")
    state = {"page": widget.page, "address": widget.address, "height": widget.height}
    parts = {"STATE": state, "SCRIPT": str(widget._esm)}
    text = HOST
    for mark, value in parts.items():
        text = text.replace(mark, json.dumps(value).replace("</", "<\\/"))
    (tmp_path / "host.html").write_text(text, "utf-8")

    with chromium() as browser:
        tab = browser.tab()
        tab.open((tmp_path / "host.html").as_uri())
        frame = browser.frame()
        frame.wait("document.documentElement.dataset.ready === 'yes'")
        assert frame.js("[R.state.view, R.state.place, R.state.head]") == ["row", 1, 2]
        assert tab.js("document.querySelector('iframe').clientHeight") == 420
        tab.js("model.set('address', 'L2H3&v=map&i=4&j=1'); model.set('height', 300)")
        frame.wait("R.state.place === 2")
        assert frame.js("[R.state.view, R.state.head, R.state.i, R.state.j]") == ["map", 3, 4, 1]
        assert tab.js("document.querySelector('iframe').clientHeight") == 300
        outside = "(() => { try { return parent.document.title; } catch (e) { return e.name; } })()"
        assert frame.js(outside) == "SecurityError", "the page cannot reach the notebook"
        assert tab.js("leave(), Object.keys(model.follow).length") == 0
        assert tab.errors == frame.errors == []
        assert [
            x for x in tab.requests + frame.requests if not x.startswith(("file:", "blob:"))
        ] == []
