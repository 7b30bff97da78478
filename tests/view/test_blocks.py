"""The block diagram: steps in their order, several heads joined, the file in the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from docs.block_diagrams import block_svg, svg, two_forms_svg

IMAGE = Path(__file__).parents[2] / "docs" / "images" / "blocks.svg"


def words(text: str) -> list[tuple[str, float, float]]:
    """Each word with where it stands."""
    return [
        (name, float(x), float(y))
        for x, y, name in re.findall(
            r'<text class="\w+" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)<', text
        )
    ]


def test_one_head_has_every_step_in_order() -> None:
    found = [(name, y) for name, x, y in words(svg()) if x < 240]
    wanted = [
        "one head",
        "weights times v",
        "softmax",
        "mask",
        "/ sqrt(d)",
        "q · k",
        "q",
        "k",
        "v",
        "three projections of x",
    ]
    assert [name for name, _ in sorted(found, key=lambda one: one[1])] == wanted


@pytest.mark.parametrize("heads", [1, 3, 4])
def test_several_heads_are_joined(heads: int) -> None:
    text = svg(heads)
    ET.fromstring(text)
    found = words(text)
    for step in ("weights times v", "softmax", "mask", "/ sqrt(d)", "q · k", "q", "k", "v"):
        assert len([1 for name, *_ in found if name == step]) == heads + 1
    (top,) = [y for name, _, y in found if name == "concat, output projection"]
    assert all(
        y > top
        for name, _, y in found
        if "head" not in name and name != "concat, output projection"
    )


def test_a_block_has_two_sublayers_each_behind_a_norm() -> None:
    ET.fromstring(block_svg())
    found = sorted(words(block_svg()), key=lambda one: -one[2])
    order = [name for name, *_ in found if name in ("norm", "attention", "feed-forward", "+ added")]
    assert order == ["norm", "attention", "+ added", "norm", "feed-forward", "+ added"]


def test_the_two_forms_say_what_differs() -> None:
    ET.fromstring(two_forms_svg())
    left, right = (
        [name for name, x, _ in words(two_forms_svg()) if (x < 360) == side]
        for side in (True, False)
    )
    assert "concat: 4 numbers" in left
    assert "concat, output projection" in right
    assert (left.count("2 numbers"), right.count("1 number")) == (2, 2)


def test_the_images_of_the_documentation_are_what_is_drawn() -> None:
    assert IMAGE.read_text("utf-8") == svg()
    assert (IMAGE.parent / "transformer-block.svg").read_text("utf-8") == block_svg()
    assert (IMAGE.parent / "two-forms.svg").read_text("utf-8") == two_forms_svg()
