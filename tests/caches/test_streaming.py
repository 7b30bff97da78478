"""The cache of attention sinks: what is pinned, what slides, and the mask that it serves."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import masks
from regard.caches import Streaming
from regard.span import Span
from tests.caches.test_ring import feed


def test_the_first_stay_and_the_last_slide() -> None:
    cache = Streaming(sinks=2, recent=3)
    assert feed(cache, Span(0, 1))[1] == Span(0, 1)
    assert feed(cache, Span(1, 4))[1] == Span(0, 5)
    assert feed(cache, Span(5, 1))[0] == [[0, 1, 5, 3, 4]]
    assert feed(cache, Span(6, 1))[0] == [[0, 1, 5, 6, 4]]
    assert feed(cache, Span(7, 4))[0] == [[0, 1, 5, 6, 7, 8, 9, 10]], (
        "2 sinks, 2 old ones, the chunk"
    )
    for t in range(11, 60):
        shown, _ = feed(cache, Span(t, 1))
        assert sorted(shown[0]) == [0, 1, t - 2, t - 1, t]
    assert len(cache) == 5


def test_a_sequence_that_starts_late_has_fewer_sinks() -> None:
    cache = Streaming(sinks=3, recent=2)
    assert feed(cache, Span(2, 2))[1] == Span(2, 2)
    assert feed(cache, Span(4, 2))[1] == Span(2, 4)
    assert feed(cache, Span(6, 1))[0] == [[-1, -1, 2, 5, 6]]
    assert feed(cache, Span(7, 3))[0] == [[2, 6, 7, 8, 9]]


def test_crop_goes_back_to_the_sinks_or_within_the_rewind() -> None:
    for length, allowed in (
        (0, True),
        (1, True),
        (2, True),
        (3, False),
        (17, False),
        (18, True),
        (25, True),
    ):
        cache = Streaming(2, 4, rewind=1)
        feed(cache, Span(0, 20))
        if not allowed:
            with pytest.raises(regard.ArgumentError, match=r"crop to 18 or more, or to 2 or less"):
                cache.crop(length)
            continue
        cache.crop(length)
        stop = min(length, 20)
        assert cache.next(1) == Span(stop, 1)
        shown = {p for p in feed(cache, Span(stop, 1))[0][0] if p >= 0}
        needed = {k for k in range(stop + 1) if k < 2 or stop - k < 4}
        assert needed <= shown
        # and on, far past the window
        feed(cache, Span(stop + 1, 9))
        shown = {p for p in feed(cache, Span(stop + 10, 1))[0][0] if p >= 0}
        assert shown >= {0, 1, *range(stop + 7, stop + 11)}


def test_it_serves_its_mask_and_not_a_wider_one() -> None:
    make = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 50, 4, generator=make, dtype=torch.float64)
    errors = {}
    for sinks, recent in ((3, 5), (4, 5), (3, 6)):
        mask = masks.Causal() & (masks.Window(recent) | masks.Sinks(sinks))
        whole, cache, start, worst = regard.attend(q, k, v, mask=mask), Streaming(3, 5), 0, 0.0
        for n in (20, 1, 1, 7, 1, 20):
            part = slice(start, start + n)
            (keys, values), where = cache.update((k[:, :, part], v[:, :, part]), Span(start, n))
            out = regard.attend(
                q[:, :, part],
                keys,
                values,
                mask=mask,
                q_positions=Span(start, n),
                k_positions=where,
            )
            worst, start = max(worst, float((out - whole[:, :, part]).abs().max())), start + n
        errors[sinks, recent] = worst
    assert errors[3, 5] < 1e-13
    assert min(errors[4, 5], errors[3, 6]) > 1e-3, "negative control"


def test_settings_are_checked() -> None:
    for sinks, recent, rewind in ((-1, 4, 0), (0, 0, 0), (1, 1, -1)):
        with pytest.raises(regard.ArgumentError, match="at least 0 and recent at least 1"):
            Streaming(sinks, recent, rewind=rewind)
