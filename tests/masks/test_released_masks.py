"""Masks of released models that are combinations of the masks of the package, by loops over their
rule.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from regard.masks import BlockDiffusion, Causal, Document, Mask, Neighborhood, Window
from regard.span import Span

N = 12
IMAGES = (range(2, 6), range(7, 10))
BOUNDS = (0, 1, 2, 6, 7, 10, 11, 12)
"""Each image is a document, and each text token is one of its own."""


def image_of(i: int) -> int | None:
    return next((n for n, image in enumerate(IMAGES) if i in image), None)


def sees_its_image(i: int, j: int) -> bool:
    return j <= i or (image_of(i) is not None and image_of(i) == image_of(j))


def sees_the_canvas(i: int, j: int) -> bool:
    """Diffusion Gemma: the last block, here of 4 tokens, is written as a whole."""
    return j <= i or min(i, j) >= N - 4


CASES: dict[str, tuple[Mask, Callable[[int, int], bool]]] = {
    "images both ways, Gemma 3": (Causal() | Document(BOUNDS), sees_its_image),
    "in a window": (
        (Causal() & Window(3)) | Document(BOUNDS),
        lambda i, j: (i - 3 < j <= i) or (image_of(i) is not None and image_of(i) == image_of(j)),
    ),
    "a canvas": (Causal() | Document((*range(N - 3), N)), sees_the_canvas),
    "the query stream of XLNet": (Causal() & ~Window(1), lambda i, j: j < i),
}


@pytest.mark.parametrize("name", CASES)
def test_by_loops(name: str) -> None:
    mask, rule = CASES[name]
    found = mask.block(Span(0, N), Span(0, N))[0, 0].tolist()
    for i in range(N):
        for j in range(N):
            seen = rule(i, j) or (i == j and name == "in a window")
            assert found[i][j] == seen, (i, j)
    assert mask.visible(Span(0, N), Span(0, N))[0].tolist() == [[sum(row) for row in found]]


def test_an_image_token_sees_the_rest_of_its_image() -> None:
    """Negative control: under the causal mask alone it does not."""
    assert bool((Causal() | Document(BOUNDS)).block(Span(2, 1), Span(5, 1)))
    assert not bool(Causal().block(Span(2, 1), Span(5, 1)))


def test_block_diffusion_sees_48_pairs() -> None:
    """6 tokens in blocks of 2: 12 noisy pairs in blocks, 12 from noisy to clean, 24 clean."""
    mask = BlockDiffusion(2, 6)
    assert int(mask.visible(Span(0, 12), Span(0, 12)).sum()) == 12 + 12 + 24


def test_neighborhoods_are_clamped_at_borders() -> None:
    """As in NATTEN: a border token sees as many keys as any other."""
    visible = Neighborhood((7,), (3,)).visible(Span(0, 7), Span(0, 7))
    assert visible.flatten().tolist() == [3] * 7
