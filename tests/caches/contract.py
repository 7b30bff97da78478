"""What every cache owes, as functions that raise AssertionError: a run of chunks is held against
one pass over everything.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.caches import Cache, Parts, rollback_on_error
from regard.span import Positions, Span, as_tensor
from tests.caches.kinds import Kind
from tests.oracles.oracle import softmax_attention

Step = int | list[list[bool]]
"""Tokens of one update: n for every row, at positions that are a `Span`; or for each row which
slots hold a token.
"""

HEADS = 2


@st.composite
def steps(draw: st.DrawFn, rows: int = 2, most: int = 9) -> list[Step]:
    """Chunks of up to two windows, all rows alike, or padded left, right or anywhere; three windows
    and more in all.
    """
    found: list[Step] = []
    alike = draw(st.booleans())
    for n in [*draw(st.lists(st.integers(0, most), min_size=2, max_size=5)), 1, 1]:
        if alike:
            found.append(n)
            continue
        kind = draw(st.sampled_from(("left", "right", "anywhere")))
        slots = []
        for _ in range(rows):
            pads = draw(st.integers(0, n))
            row = [False] * pads + [True] * (n - pads)
            if kind == "anywhere":
                row = draw(st.permutations(row))
            slots.append(row[::-1] if kind == "right" else list(row))
        found.append(slots)
    return found


class Run:
    """A cache that is fed, beside all tokens that its rows have been given."""

    def __init__(self, kind: Kind, rows: int = 2, seed: int = 0, start: int = 0) -> None:
        self.kind, self.cache, self.start = kind, kind.make(), start
        self.make = torch.Generator().manual_seed(seed)
        # for each row its parts [n,S,d]
        self.rows = [[self.randn(n, 0, d) for n, d in kind.shapes] for _ in range(rows)]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.make, dtype=torch.float64)

    def ends(self) -> list[int]:
        """One past the last position of each row."""
        return [(self.start + n) * bool(n) for n in (row[0].shape[1] for row in self.rows)]

    def positions(self, step: Step) -> Positions:
        """Where the tokens of a step stand, by counting."""
        starts = [n or self.start for n in self.ends()]
        if isinstance(step, int) and len(set(starts)) <= 1:
            return Span(starts[0] if starts else 0, step)
        if isinstance(step, int):
            step = [[True] * step] * len(starts)
        found = []
        for start, slots in zip(starts, step, strict=True):
            p = iter(range(start, 10**9))
            found.append([next(p) if real else -1 for real in slots])
        return torch.tensor(found, dtype=torch.int64).reshape(
            len(step), len(step[0]) if step else 0
        )

    def tokens(self, positions: Positions) -> Parts:
        """Random tokens, NaN where there is none."""
        real = (as_tensor(positions) >= 0)[:, None, :, None]
        shape = (len(self.rows), as_tensor(positions).shape[1])
        parts = (self.randn(shape[0], n, shape[1], d) for n, d in self.kind.shapes)
        return tuple(x.masked_fill(~real, float("nan")) for x in parts)

    def feed(self, step: Step, *, attend: bool = True) -> None:
        """Give the cache a step, and hold what it answers against all that it was given."""
        positions = self.positions(step)
        self.poison()
        self.assert_next()
        new = self.tokens(positions)
        memory, where = self.cache.update(tuple(x.clone() for x in new), positions)
        at = as_tensor(positions).expand(len(self.rows), -1)
        for b, row in enumerate(self.rows):
            self.rows[b] = [
                torch.cat([old, x[b][:, at[b] >= 0]], 1) for old, x in zip(row, new, strict=True)
            ]
        self.assert_answer(memory, where, at.tolist())
        if attend:
            self.attend(memory, where, positions)

    def assert_next(self) -> None:
        found = as_tensor(self.cache.next(2)).expand(len(self.rows), -1).tolist()
        ends = self.ends()
        if self.start and not any(ends):
            return  # where a sequence starts is the caller's matter
        assert found == [[n, n + 1] for n in ends], f"next is {found}, rows end at {ends}"

    def assert_answer(self, memory: Parts, where: Positions, at: list[list[int]]) -> None:
        """Each token once, with its own values; every one that a query may see; and nothing that
        was not given.
        """
        p = as_tensor(where).expand(len(self.rows), -1)
        for b, row in enumerate(self.rows):
            held = p[b][p[b] >= 0]
            shown, here = held.tolist(), range(self.start, self.start + row[0].shape[1])
            assert len(set(shown)) == len(shown), f"row {b} answers positions {shown}"
            assert set(shown) <= set(here), f"row {b} answers {shown}"
            needed = {k for q in at[b] if q >= 0 for k in here if self.kind.sees(q, k)}
            assert needed <= set(shown), f"row {b} lacks {needed - set(shown)}"
            if self.kind.bound < 1e-9:
                for i, m in enumerate(memory):
                    right = row[i][:, held - self.start]
                    assert torch.equal(m[b][:, p[b] >= 0], right), f"row {b} answers other values"

    def attend(self, memory: Parts, where: Positions, positions: Positions) -> None:
        """Attention of new queries over the answer is attention over everything."""
        B, n = len(self.rows), as_tensor(positions).shape[1]
        k, v = self.kind.recall(memory)
        q = self.randn(B, HEADS * k.shape[1], n, k.shape[3])
        out = regard.attend(q, k, v, mask=self.kind.mask, q_positions=positions, k_positions=where)
        longest = max((row[0].shape[1] for row in self.rows), default=0)
        everything = tuple(
            torch.stack([F.pad(row[i], (0, 0, 0, longest - row[i].shape[1])) for row in self.rows])
            if B
            else torch.zeros(0, h, 0, d).double()
            for i, (h, d) in enumerate(self.kind.shapes)
        )
        keys, values = self.kind.recall(everything)
        at = as_tensor(positions).expand(B, -1).tolist()

        def visible(b: int, h: int, i: int, j: int) -> bool:
            here = j < self.rows[b][0].shape[1] and at[b][i] >= 0
            return here and self.kind.sees(at[b][i], self.start + j)

        exact = softmax_attention(q, keys, values, visible=visible).out
        assert not out.isnan().any(), "attention is NaN"
        error = (out - exact).abs().max().item() if out.numel() else 0.0
        assert error <= self.kind.bound, f"attention is off by {error:.3g}"

    def poison(self) -> None:
        """NaN into every slot that holds nothing."""
        contents = self.cache.contents()
        where = contents.get("positions")
        for x in contents.values():
            floating = isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 4
            if isinstance(where, Tensor) and floating and x.shape[2] == where.shape[1]:
                x.masked_fill_((where < 0)[:, None, :, None], float("nan"))

    def crop(self, length: int) -> bool:
        """Crop cache and rows, or find that the cache refuses; it may do so only where it says it
        may.
        """
        longest = max(self.ends())
        before = self.seen()
        refused = None
        try:
            self.cache.crop(length)
        except regard.ArgumentError as error:
            refused = str(error)
        if refused is not None:
            rewind = self.kind.rewind
            assert rewind is not None, f"crop to {length} of {longest} is refused: {refused}"
            assert length < longest - rewind, f"crop to {length} of {longest}: {refused}"
            assert self.seen() == before, "a refused crop changes the cache"
            return False
        self.rows = [[x[:, : max(0, length - self.start)] for x in row] for row in self.rows]
        return True

    def twin(self, cache: Cache, rows: Sequence[int] | None = None) -> Run:
        """Another run over a cache that should hold the same, or these rows of it."""
        other = copy.copy(self)
        other.cache = cache
        other.rows = [list(self.rows[i]) for i in (range(len(self.rows)) if rows is None else rows)]
        other.make = torch.Generator().manual_seed(99)
        return other

    def seen(
        self, cache: Cache | None = None, back: int = 0
    ) -> list[tuple[list[int], list[bytes]]]:
        """What a cache would show to the next token, once `back` tokens were taken back: row by row
        positions and values, bit by bit. The cache is not changed."""
        cache = copy.deepcopy(self.cache if cache is None else cache)
        B = cache.batch
        if B is None:
            return []
        if back and B:
            cache.crop(max(0, int(as_tensor(cache.next(1)).max()) - back))
        ones = tuple(torch.ones(B, n, 1, d, dtype=torch.float64) for n, d in self.kind.shapes)
        memory, where = cache.update(ones, cache.next(1))
        found = []
        for b, p in enumerate(as_tensor(where).expand(B, -1)):
            order = p.argsort()[int((p < 0).sum()) :]
            found.append((p[order].tolist(), [m[b][:, order].numpy().tobytes() for m in memory]))
        return found


# the laws


def assert_any_chunks_are_one_pass(kind: Kind, run: list[Step], start: int = 0) -> None:
    """Attention over what the cache answers is attention over everything, in any chunks, with any
    padding.
    """
    driver = Run(kind, start=start)
    for step in run:
        driver.feed(step)


def assert_a_crop_forgets(kind: Kind, run: list[Step], more: list[Step], back: int) -> None:
    """Crop, then go on: as if the rest had never been there."""
    driver = Run(kind)
    for step in run:
        driver.feed(step, attend=False)
    longest = max(driver.ends())
    if driver.crop(max(0, longest - back)):
        for step in more:
            driver.feed(step)


def assert_copies_are_apart(kind: Kind, run: list[Step], more: list[Step]) -> None:
    """What is done to a fork or a deep copy does not change the other, nor the other way round."""
    driver = Run(kind)
    for step in run:
        driver.feed(step, attend=False)
    for make in (lambda: driver.cache.fork(), lambda: copy.deepcopy(driver.cache)):
        copied = make()
        assert type(copied) is type(driver.cache)
        assert copied.settings == driver.cache.settings
        other = driver.twin(copied)
        for step in more:
            before = driver.seen()
            other.feed(step, attend=False)
            assert driver.seen() == before, "an update of the copy changes the original"
            before = other.seen()
            driver.feed(step, attend=False)
            assert other.seen() == before, "an update of the original changes the copy"


def assert_rows_are_selected(
    kind: Kind, run: list[Step], more: list[Step], rows: list[int]
) -> None:
    """Rows in another order, twice, or not at all: each goes on as it was."""
    driver = Run(kind)
    for step in run:
        driver.feed(step, attend=False)
    before = driver.cache.fork()
    before.select(torch.tensor(rows, dtype=torch.int64))
    if len(rows) == len(driver.rows):
        other = driver.cache.fork()
        other.reorder(torch.tensor(rows, dtype=torch.int32))
        assert driver.seen(other) == driver.seen(before)
    chosen = driver.twin(before, rows)
    for step in more:
        if isinstance(step, int):
            chosen.feed([[True] * step for _ in rows] if rows else 0)
        else:
            chosen.feed([step[i % len(step)] for i in rows])


def assert_a_failed_update_is_taken_back(kind: Kind, run: list[Step], n: int) -> None:
    """mark and restore around an update, bit by bit: whether it succeeded or not."""
    driver = Run(kind)
    for step in run:
        driver.feed(step, attend=False)
        back = min(max(driver.ends()), 2 if kind.rewind is None else kind.rewind)
        before, held, where = driver.seen(back=back), len(driver.cache), driver.cache.next(1)
        step = n if isinstance(step, int) else [[True] * n, [i % 2 == 0 for i in range(n)]]
        positions = driver.positions(step)
        mark = driver.cache.mark()
        driver.cache.update(driver.tokens(positions), positions)
        driver.cache.restore(mark)
        assert driver.seen(back=back) == before, "an update taken back has left something"
        assert len(driver.cache) == held
        assert torch.equal(as_tensor(driver.cache.next(1)), as_tensor(where))
        try:
            with rollback_on_error(driver.cache):
                driver.cache.update(driver.tokens(positions), positions)
                driver.cache.update(
                    (*driver.tokens(positions), *driver.tokens(positions)), positions
                )
        except regard.ArgumentError:
            pass
        else:
            raise AssertionError("another number of parts is accepted")
        assert driver.seen(back=back) == before, "a refused update has left something"


def assert_storage_is_bounded(kind: Kind, rows: int = 2) -> None:
    """Bytes held after 1, 10 and 40 tokens are what the formula says, in one chunk or one by
    one.
    """
    assert kind.held is not None
    for chunk in (1, 13):
        driver, n = Run(kind, rows=rows), 0
        while n + chunk <= min(10 * 4, kind.slots):
            driver.feed(chunk, attend=False)
            n += chunk
            assert driver.cache.bytes == kind.held(rows, n), f"{driver.cache.bytes} after {n}"
