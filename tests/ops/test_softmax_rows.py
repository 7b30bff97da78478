"""The vector loops of a row of prefill against numpy in fp64."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from regard.ops.jit import softmax_rows as rows
from regard.ops.jit.compile import FASTMATH_FLAGS
from regard.ops.jit.matmul import PANEL_COLUMNS

UNBOUNDED = 1 << 62

compiled = njit(fastmath={*FASTMATH_FLAGS})
"""Compile as the callers of these loops are compiled: Numba then allows reordering in them, too."""


@compiled
def largest_score(s):
    """Call the loop from compiled code."""
    return rows.largest_score(s, s.shape[0])


@compiled
def weigh_scores(s, scale, base):
    """Call the loop from compiled code."""
    return rows.weigh_scores(s, s, s.shape[0], scale, base)


@compiled
def hide_outside(s, positions, start, stop):
    """Call the loop from compiled code."""
    rows.hide_outside(s, positions, s.shape[0], start, stop)


@compiled
def weigh_with_gradient(s, d, numbers):
    """Call the loop from compiled code; numbers: scale, top, share, shift, alone."""
    rows.weigh_with_gradient(
        s, d, s.shape[0], numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    )


def row(panels: int, seed: int = 0) -> np.ndarray:
    """Return a row of random scores."""
    return np.random.default_rng(seed).normal(size=panels * PANEL_COLUMNS).astype(np.float32)


@pytest.mark.parametrize("panels", [1, 3, 4])
def test_the_largest_score_is_found_in_every_place(panels: int) -> None:
    s = row(panels)
    for place in range(s.size):
        here = s.copy()
        here[place] = 9
        assert largest_score(here) == 9
        here[place] = np.nan  # ignored
        assert largest_score(here) == np.delete(s, place).max()
    assert largest_score(np.full_like(s, -np.inf)) == -np.inf
    assert largest_score(np.full_like(s, np.nan)) == -np.inf


def test_weights_are_accurate_to_one_rounding_over_their_whole_range() -> None:
    s = -np.linspace(0, 86.9, 64 * PANEL_COLUMNS).astype(np.float32)
    exact = np.exp(s.astype(np.float64))
    total = weigh_scores(s, np.float32(1), np.float32(0))
    assert (np.abs(s - exact) / np.spacing(exact.astype(np.float32))).max() < 1.5
    assert abs(total - exact.sum()) < 1e-6 * exact.sum()


def test_small_weights_are_zero_and_nan_stays() -> None:
    s = np.full(PANEL_COLUMNS, -np.inf, np.float32)
    s[1], s[2], s[3] = -87.5, np.nan, -3
    total = weigh_scores(s, np.float32(1), np.float32(0))
    assert np.isnan(total)
    assert np.isnan(s[2])
    assert s[3] == pytest.approx(np.exp(-3), rel=1e-6)
    assert not s[[0, 1]].any()
    assert not s[4:].any()


@pytest.mark.parametrize("scale", [0.125, 0.1, 1 / 3, 7.3])
def test_the_weight_of_the_largest_score_is_exactly_one(scale: float) -> None:
    for seed in range(50):
        s, factor = row(1, seed) * np.float32(30), np.float32(scale)
        top = s.argmax()
        weigh_scores(s, factor, factor * s[top])
        assert s[top] == 1


@pytest.mark.parametrize(
    ("start", "stop"), [(0, UNBOUNDED), (3, 20), (-5, 4), (7, 7), (9, 2), (500, 900)]
)
def test_what_lies_outside_of_a_range_is_hidden(start: int, stop: int) -> None:
    positions = np.arange(2 * PANEL_COLUMNS)
    positions[::7] = -1  # empty slots
    s = row(2)
    inside = (start <= positions) & (positions < stop)
    wanted = np.where(inside, s, -np.inf)
    hide_outside(s, positions, start, stop)
    np.testing.assert_array_equal(s, wanted)


def test_the_gradient_of_a_row() -> None:
    s, d = row(2), row(2, 1)
    s[5], d[5] = -np.inf, np.nan  # a masked key with a value that is not finite
    numbers = np.array([0.3, 1.1, 0.02, 0.4, 0.7], np.float32)
    scale, top, share, shift, _ = numbers.astype(np.float64)
    p = np.exp(scale * s.astype(np.float64) - top) * share
    with np.errstate(invalid="ignore"):
        wanted = np.where(p == 0, 0, p * (d.astype(np.float64) - shift))
    weigh_with_gradient(s, d, numbers)
    np.testing.assert_allclose(s, p, rtol=1e-6)
    np.testing.assert_allclose(d, wanted, rtol=2e-6, atol=1e-9)


def test_a_weight_of_one_leaves_the_gradient_of_the_lse() -> None:
    s, d = np.full(PANEL_COLUMNS, -np.inf, np.float32), row(1)
    s[3], scale, alone = 2.7, np.float32(1 / 3), np.float32(0.7)
    top = scale * s[3]
    weigh_with_gradient(s, d, np.array([scale, top, 1, 0.4, alone], np.float32))
    assert s[3] == 1
    assert d[3] == alone
    assert not np.delete(d, 3).any()
