"""The pictures of the documentation can be read: the size of their text where a page shows them,
light and dark, and captions.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from regard.view.plotting import PAGE
from tests.docs.test_site import builder

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = sorted((DOCS / "images").rglob("*.svg"))
SIZE = re.compile(r"font(?:-size)?[:=]\"?(?:600 )?([\d.]+)px")


def smallest_text(svg: str) -> float:
    """The size of the smallest text in pixels, at the width at which a page shows the picture."""
    width = re.search(r'viewBox="0 0 ([\d.]+)', svg)
    assert width is not None
    return min(map(float, SIZE.findall(svg))) * min(1, PAGE / float(width[1]))


@pytest.mark.parametrize("path", PICTURES, ids=lambda p: p.relative_to(DOCS / "images").as_posix())
def test_text_is_large_enough_in_light_and_dark(path: Path) -> None:
    svg = path.read_text("utf-8")
    assert smallest_text(svg) >= 12
    two = path.with_name("reading-dark.svg").exists() and path.stem.startswith("reading")
    assert two or "prefers-color-scheme:dark" in svg


def test_small_text_would_be_found() -> None:
    assert smallest_text('<svg viewBox="0 0 1376 10"><text font-size="20px"/>') == 10
    assert smallest_text('<svg viewBox="0 0 300 10"><style>text{font:600 13px x}</style>') == 13


def test_weights_have_linear_colours() -> None:
    assert [p.name for p in PICTURES if re.search("logarithmic|对数", p.read_text("utf-8"))] == []


def test_every_picture_has_a_caption_that_says_what_it_shows() -> None:
    make = builder()
    for page in DOCS.rglob("*.md"):
        for caption in make.ALONE.findall(page.read_text("utf-8")):
            least = 10 if page.name.endswith("zh-CN.md") else 30
            assert len(caption) >= least, f"{page.name}: {caption}"
    stage = make.ALONE.sub(make._captioned, "![a <b>](x.svg)\n\ntext ![c](y.svg)")
    assert stage.count("caption") == 1
    assert "a &lt;b&gt;</span>" in stage
