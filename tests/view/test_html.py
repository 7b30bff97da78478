"""Pages of findings: texts are escaped, no script runs, and charts and tables stand in them."""

from __future__ import annotations

import base64
import hashlib
import re

from regard.view.charts import Axis, Line, Picture, Scatter, ScatterPoint
from regard.view.html_page import CaptionedChart, Section, page

EVIL = "<script>alert(1)</script>\x1b[31m\u202e"


def drawn(words: str = "t") -> Picture:
    return Picture(words, words, words, (Line(words, ((1, 1), (2, 2))),))


def test_words_are_escaped_and_the_page_runs_nothing() -> None:
    scatter = Scatter(
        [ScatterPoint(EVIL, 8.0, 0.5, (0.4, 0.6), on_pareto_front=True)],
        Axis(EVIL, "bytes"),
        Axis(EVIL, "share"),
        EVIL,
        EVIL,
    )
    section = Section(
        EVIL,
        EVIL,
        good=False,
        texts={EVIL: EVIL},
        heads=(EVIL,),
        rows=((EVIL,),),
        pictures=(drawn(EVIL),),
        more=((EVIL,), (EVIL,)),
        caption=EVIL,
        figures=(CaptionedChart(scatter, EVIL, good=True),),
    )
    text = page(EVIL, EVIL, {EVIL: EVIL}, EVIL, [section], [EVIL])
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "default-src 'none'" in text
    assert text.count("<svg") == 2


def test_the_style_is_known_by_its_hash() -> None:
    text = page("a", "b", {}, "", [Section("x", pictures=[drawn()])])
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    sha = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"style-src 'sha256-{sha}'" in text
    assert not re.search(r"\sstyle=", text), "the policy would refuse an attribute"
    assert text.count("<style") == 1


def test_a_badge_has_the_tone_of_its_verdict() -> None:
    tones = [page("", "", {}, "", [Section("x", "word", good)]) for good in (True, False, None)]
    for text, tone in zip(tones, ("good", "bad", "soft"), strict=True):
        assert f"class='badge {tone}'" in text


def test_what_cannot_be_drawn_and_what_is_empty_is_left_out() -> None:
    nothing = Picture("t", "x", "y", (Line("a", ((0.0, 1.0),)),), "x")
    text = page("a", "b", {}, "", [Section("x", pictures=[nothing])])
    assert "<svg" not in text
    assert "<table" not in text
    assert "<pre>" not in text
    assert "<pre>regard</pre>" in page("a", "b", {}, "regard", [])


def test_tables_of_numbers_and_columns_of_a_tone() -> None:
    numbers = Section("x", heads=("", "n"), rows=(("a", "1"),), numbers=True).html()
    assert "<table class='numbers'>" in numbers
    toned = Section("x", heads=("said", "right"), rows=(("a", "b"),), tones={0: "bad"}).html()
    assert "<td class='bad'>a</td><td>b</td>" in toned
    assert "numbers" not in toned
