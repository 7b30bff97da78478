"""The ring: what it answers and holds, what a step costs, how far it goes back, which masks get
it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.caches import Growing, Ring, Streaming, for_reach
from regard.masks import Reach
from regard.span import Positions, Span, as_tensor
from tests.caches.kinds import GrowingRing
from tests.caches.test_fixed import Allocated


def tokens(positions: Positions) -> tuple[Tensor]:
    """A token that says where it stands."""
    return (as_tensor(positions).double()[:, None, :, None],)


def feed(cache: Any, positions: Positions) -> tuple[list[Any], Positions]:
    """What the answer holds, slot by slot."""
    (held,), where = cache.update(tokens(positions), positions)
    for b, row in enumerate(as_tensor(where).expand(held.shape[0], -1).tolist()):
        for j, p in enumerate(row):
            assert p < 0 or held[b, 0, j, 0] == p, f"slot {j} of row {b} holds {held[b, 0, j, 0]}"
    return as_tensor(where).tolist(), where


def test_the_answer_is_the_window_and_the_chunk() -> None:
    cache = Ring(4)
    assert feed(cache, Span(0, 3))[1] == Span(0, 3)
    assert feed(cache, Span(3, 1))[1] == Span(0, 4)
    assert feed(cache, Span(4, 1))[0] == [[4, 1, 2, 3]], "slot = position % 4"
    assert feed(cache, Span(5, 1))[0] == [[4, 5, 2, 3]]
    # a chunk: the 3 old keys that its first query sees, in order, and itself
    assert feed(cache, Span(6, 11))[1] == Span(3, 14)
    assert feed(cache, Span(17, 2))[1] == Span(14, 5)
    assert len(cache) == 4
    assert cache.next(2) == Span(19, 2)
    late = Ring(4)
    assert feed(late, Span(9, 2))[1] == Span(9, 2), "a sequence may start anywhere"
    assert feed(late, Span(11, 1))[0] == [[-1, 9, 10, 11]]
    assert feed(late, Span(12, 3))[1] == Span(9, 6)
    gap = Ring(4)
    feed(gap, Span(0, 4))
    assert feed(gap, Span(6, 1))[0] == [[0, 1, 6, 3]], "a gap: what it jumps over is not there"


@pytest.mark.parametrize("make", [lambda W: Ring(W), lambda W: Streaming(4, W)])
@pytest.mark.parametrize("rows", [False, True])
def test_a_step_of_one_token_copies_no_keys(make: Any, rows: bool) -> None:
    """It writes into the ring and answers the ring itself; the positions of the slots are all that
    grows with W.
    """
    W, D = 512, 256
    cache = make(W)
    memory = torch.randn(2, 2, 2 * W, D)
    cache.update((memory,), Span(0, 2 * W).tensor().repeat(2, 1) if rows else Span(0, 2 * W))
    buffer = cache.contents()["memory.0"]
    for t in (2 * W, 2 * W + 1):
        at = cache.next(1)
        with Allocated() as counted:
            (held,), _ = cache.update((memory[:, :, :1],), at)
        assert held.data_ptr() == buffer.data_ptr()
        assert counted.bytes < 0.1 * cache.bytes, f"step {t} allocates {counted.bytes} bytes"
    with Allocated() as counted:
        cache.update((memory[:, :, :2],), cache.next(2))
    assert counted.bytes > cache.bytes, "two tokens overwrite what the first one sees: a copy"


def test_how_far_it_goes_back() -> None:
    for rewind in (0, 1, 3):
        cache = Ring(4, rewind=rewind)
        feed(cache, Span(0, 30))
        for length in range(30 - rewind - 1):
            message = (
                rf"^crop to {length}, but the tokens that a window of 4 needs before this position "
                rf"are overwritten; crop to "
                rf"{29 - rewind} or more, or to 0 or less, or give the cache a larger rewind than "
                rf"{rewind}$"
            )
            if length:
                with pytest.raises(regard.ArgumentError, match=message):
                    cache.crop(length)
        other = cache.fork()
        cache.crop(29 - rewind)
        assert cache.next(1) == Span(29 - rewind, 1)
        shown = {p for p in feed(cache, Span(29 - rewind, 1))[0][0] if p >= 0}
        assert shown >= set(range(26 - rewind, 30 - rewind))
        with pytest.raises(regard.ArgumentError, match="are overwritten"):
            other.crop(29 - rewind - 1)
        other.crop(0)
        assert other.next(1) == Span(0, 1)
        assert feed(other, Span(0, 3))[0] == [[0, 1, 2]]
    short = Ring(4)
    feed(short, Span(0, 4))
    short.crop(1)  # nothing was overwritten yet
    assert feed(short, Span(1, 2))[1] == Span(0, 3)


def test_crops_do_not_add_up_beyond_what_is_held() -> None:
    for rows in (False, True):
        cache = Ring(4, rewind=3)
        cache.update(tokens(Span(0, 30)), Span(0, 30).tensor() if rows else Span(0, 30))
        cache.crop(28)
        cache.crop(26)
        with pytest.raises(regard.ArgumentError, match=r"crop to 25, .* crop to 26 or more"):
            cache.crop(25)
        shown = {
            p for p in feed(cache, torch.tensor([[26]]) if rows else Span(26, 1))[0][0] if p >= 0
        }
        assert shown == {23, 24, 25, 26}


def test_steps_of_rows_remember_what_they_overwrite() -> None:
    cache = Ring(3)
    for p in range(4):
        feed(cache, torch.tensor([[p], [p]]))
    with pytest.raises(regard.ArgumentError, match=r"crop to 2, .* crop to 3 or more, or to 0"):
        cache.crop(2)


def test_speculative_decoding() -> None:
    """Draft 4 tokens, keep 0 to 4 of them, for ten windows: as one pass over what was kept."""
    W, made = 5, torch.Generator().manual_seed(0)
    cache, length = Ring(W, rewind=3), 0
    feed(cache, Span(0, 7))
    length = 7
    for _ in range(25):
        shown, _ = feed(cache, Span(length, 4))
        assert set(range(max(0, length - W + 1), length + 4)) <= set(shown[0])
        keep = int(torch.randint(0, 5, (), generator=made))
        cache.crop(length + keep)
        length += keep
    assert length > 4 * W


def test_which_cache_suits_a_reach() -> None:
    cases = [
        (Reach(None), Growing, {}),
        (Reach(8), Ring, {"window": 8, "rewind": 0}),
        (Reach(8, 4), Streaming, {"sinks": 4, "recent": 8, "rewind": 0}),
        (Reach(0, 3), Streaming, {"sinks": 3, "recent": 1, "rewind": 0}),
        (masks.reach(masks.Causal()), Growing, {}),
        (masks.reach(masks.Causal() & masks.Chunk(7)), Ring, {"window": 7, "rewind": 0}),
        (masks.reach(masks.Causal() & masks.Dilated(3, 2)), Ring, {"window": 6, "rewind": 0}),
        (masks.reach(None), Growing, {}),
    ]
    for reach, kind, settings in cases:
        cache = for_reach(reach)
        assert type(cache) is kind
        assert cache.settings == settings


@pytest.mark.parametrize(
    "mask",
    [
        masks.Causal() & masks.Chunk(4),
        masks.Causal() & masks.Dilated(3, 2),
        masks.Causal() & masks.Window(6) & masks.Window(4),
        masks.Causal() & (masks.Window(3) | masks.Dilated(2, 4) | masks.Sinks(2)),
        masks.Causal() & masks.Sinks(3),
    ],
    ids=str,
)
def test_the_cache_for_a_mask_holds_what_it_shows(mask: masks.Mask) -> None:
    cache, make = for_reach(masks.reach(mask)), torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 40, 4, generator=make, dtype=torch.float64)
    whole = regard.attend(q, k, v, mask=mask)
    start = 0
    for n in (1, 6, 2, 1, 1, 11, 1, 3, 1, 13):
        part, at = slice(start, start + n), Span(start, n)
        (keys, values), where = cache.update((k[:, :, part], v[:, :, part]), at)
        out = regard.attend(
            q[:, :, part], keys, values, mask=mask, q_positions=at, k_positions=where
        )
        assert float((out - whole[:, :, part]).abs().max()) < 1e-13
        start += n
    assert start == 40


@pytest.mark.parametrize("make", [Ring, lambda W: Streaming(4, W)])
@pytest.mark.parametrize("rows", [False, True])
def test_a_short_text_takes_little_of_a_wide_window(make: Any, rows: bool) -> None:
    """A window of 2^31 positions, as a file may have it, costs what the text needs."""
    cache = make(1 << 31)
    for stop in (300, 301, 900):
        new = Span(len(cache), stop - len(cache))
        feed(cache, new.tensor().repeat(2, 1) if rows else new)
        assert len(cache) == stop
        assert cache.bytes < (2 * stop + 8) * 8 * (1 + rows)
    saved, other = cache.contents(), make(1 << 31)
    other.fill(saved)
    assert feed(other, other.next(1))[0] == feed(cache, cache.next(1))[0]


def test_a_step_in_which_a_ring_grows_and_wraps_is_taken_back() -> None:
    cache = GrowingRing(4, rewind=3)
    feed(cache, Span(0, 4))
    mark = cache.mark()
    feed(cache, Span(4, 4))
    assert cache.contents()["memory.0"].flatten().tolist() == [7, 1, 2, 3, 4, 5, 6]
    cache.restore(mark)
    assert cache.contents()["memory.0"].flatten().tolist() == [0, 1, 2, 3]
    assert feed(cache, Span(4, 4))[0] == [[7, 1, 2, 3, 4, 5, 6]]


def test_a_short_ring_is_filled_with_tokens_in_their_own_slots_only() -> None:
    x = torch.zeros(1, 1, 6, 2)
    for positions, lost in ((Span(1, 6), -1), (Span(0, 6), 0)):
        with pytest.raises(regard.ArgumentError, match=r"^memory\.0 has 6 slots, and .* make 8$"):
            Ring(8).fill({"memory.0": x, "positions": positions, "lost": lost})
    for positions, lost in (([[0, 1, 2, 3, 5, 4]], -1), ([[0, -1, 2, 3, -1, 5]], 0)):
        with pytest.raises(regard.ArgumentError, match=r"^memory\.0 has 6 slots, and .* make 8$"):
            Ring(8).fill(
                {
                    "memory.0": x,
                    "positions": torch.tensor(positions),
                    "lost": torch.tensor([[lost]]),
                }
            )


def test_settings_are_checked() -> None:
    for window, rewind in ((0, 0), (-1, 2), (3, -1)):
        with pytest.raises(regard.ArgumentError, match="window must be at least 1 and rewind at"):
            Ring(window, rewind=rewind)
