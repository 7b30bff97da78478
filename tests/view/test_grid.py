"""Masks drawn as text: glyphs, rulers, counts, pooling, 80 columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import masks
from regard.span import Span
from regard.view import mask_grid


def text(g: mask_grid.Grid, *, ascii_only: bool = False) -> list[str]:
    return [line.plain for line in mask_grid.draw(g, ascii_only=ascii_only)]


def of(mask: masks.Mask, q: Span, k: Span) -> mask_grid.Grid:
    cell = mask_grid.pool(q.length, k.length)
    states, counts = mask.tiles(q, k, cell)[0, 0].numpy(), mask.visible(q, k)[0, 0].numpy()
    return mask_grid.Grid(states, counts, q.start, k.start, cell)


def test_a_mask_in_unicode() -> None:
    mask = masks.Causal() & masks.Window(2) | masks.Sinks(1)
    assert text(of(mask, Span(0, 4), Span(0, 4))) == [
        "  rows are queries, columns are keys: ██ visible, ▓▓ its own, · masked",
        "         0",
        "      0 │▓▓ · · ·│    1  0",
        "      1 │██▓▓ · ·│    2  0–1",
        "      2 │████▓▓ ·│    3  0–2",
        "      3 │██ ·██▓▓│    3  0, 2–3",
    ]


def test_later_queries_are_numbered_by_position() -> None:
    lines = text(of(masks.Causal(), Span(6, 2), Span(4, 4)), ascii_only=True)
    assert lines[1:] == [
        "         4",
        "      6 |####@@ .|    3  4-6",
        "      7 |######@@|    4  4-7",
    ]


@settings(max_examples=12)
@given(
    st.integers(1, 70),
    st.integers(1, 200),
    st.integers(0, 3000),
    st.sampled_from(["causal", "full", "strided(3)", "~causal"]),
)
def test_everything_fits_80_columns(T: int, S: int, start: int, name: str) -> None:
    lines = text(of(masks.parse(name), Span(start, T), Span(start, S)))
    assert max(map(len, lines)) <= 80
    assert len(lines) == 2 + (T if T <= mask_grid.MAX_ROWS else -(-T // mask_grid.pool(T, S)[0]))


def test_long_masks_are_pooled_and_say_so() -> None:
    lines = text(
        of(masks.Causal() & masks.Window(700) | masks.Sinks(64), Span(0, 4096), Span(0, 4096))
    )
    assert (
        lines[0] == "  each cell 128 queries x 128 keys: ██ all, ▒▒ some, · none; right: max keys"
    )
    assert len(lines) == 34
    assert lines[2].startswith("      0 │▒▒ · ·")
    assert lines[2].endswith("│   128")
    assert lines[-1].endswith("▒▒▒▒████████▒▒│   764")
    assert max(map(len, lines)) <= 80
    largest = text(of(masks.Causal(), Span(0, 65536), Span(0, 65536)))
    assert max(map(len, largest)) <= 80
    assert largest[-1].endswith("█▒▒│ 65536")


@pytest.mark.parametrize(
    "size, cell",
    [
        ((64, 56), (1, 1)),
        ((65, 56), (4, 1)),
        ((64, 57), (1, 2)),
        ((1, 65), (1, 4)),
        ((65536, 65536), (2048, 2048)),
    ],
)
def test_pooling_by_powers_of_two(size: tuple[int, int], cell: tuple[int, int]) -> None:
    assert mask_grid.pool(*size) == cell
    for n, by in zip(size, cell, strict=True):
        assert by == 1 or -(-n // by) <= mask_grid.MAX_WIDE_COLUMNS


def test_tiles() -> None:
    states = masks.Causal().tiles(Span(0, 8), Span(0, 8), (4, 4))[0, 0].numpy()
    assert [line.plain for line in mask_grid.draw_tiles(states, (4, 4))] == [
        "  tiles of 4 queries x 4 keys: ██ full, ▒▒ partial, · empty",
        "        │▒▒ ·│",
        "        │██▒▒│",
    ]
    lines = [line.plain for line in mask_grid.draw_tiles(np.zeros((40, 33), np.int8), (1, 1))]
    assert lines[0].endswith("; the first 32 a side")
    assert len(lines) == 33
    assert max(map(len, lines)) <= 80


def test_colours_change_no_character() -> None:
    line = next(iter(list(mask_grid.draw(of(masks.Causal(), Span(0, 3), Span(0, 3))))[3:]))
    colours = {
        span.style.color.name
        for span in line.spans
        if not isinstance(span.style, str) and span.style.color
    }
    assert colours == {mask_grid.TERMINAL["q"], mask_grid.TERMINAL["s"]}


def test_runs() -> None:
    assert mask_grid.runs([]) == []
    assert mask_grid.runs([False, False]) == []
    assert mask_grid.runs([True] * 3, start=5) == ["5-7"]
    assert mask_grid.runs([True, False, True], to="–") == ["0", "2"]
