"""The paged cache: pages shared by rows and forks, copied when written, freed when nobody needs
them.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.caches import Paged, PagePool
from regard.caches.paged import LazyPagedTensor
from regard.span import Span, as_tensor

SIZE = 4
PAGE = SIZE * 7 * 8  # bytes: tokens, numbers of a token, float64


def tokens(B: int, T: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return (
        torch.randn(B, 2, T, 2, generator=make).double(),
        torch.randn(B, 1, T, 3, generator=make).double(),
    )


def rows(cache: Paged) -> list[dict[int, list[float]]]:
    """What each row holds: position -> numbers."""
    contents, found = cache.contents(), []
    if not contents:
        return []
    where = as_tensor(contents["positions"]).expand(cache.batch, -1)
    for b in range(cache.batch or 0):
        seen = [j for j in range(where.shape[1]) if where[b, j] >= 0]
        parts = [contents[name] for name in ("memory.0", "memory.1")]
        found.append(
            {
                int(where[b, j]): [v for m in parts for v in m[b, :, j].flatten().tolist()]
                for j in seen
            }
        )
    return found


def assert_counted(pool: PagePool, *caches: Paged) -> None:
    """Every count is the number of rows that refer to the page; pages nobody refers to are free,
    once each.
    """
    refer = [0] * pool.pages
    for cache in caches:
        for row in cache.table:
            for page in row:
                refer[page] += 1
    taken = len(pool.counts)
    assert pool.counts == refer[:taken]
    assert not any(refer[taken:])
    assert sorted(pool._released) == [page for page, n in enumerate(pool.counts) if not n]
    assert pool.free == refer.count(0)


def test_rows_pay_for_their_own_length() -> None:
    """A batch of 9, 1 and 4 tokens, padded to 9: 3 + 1 + 1 pages, and none for padding."""
    p = torch.full((3, 9), -1)
    for b, n in enumerate((9, 1, 4)):
        p[b, 9 - n :] = torch.arange(n)
    cache = Paged(SIZE, 8)
    (k, v), positions = cache.update(tokens(3, 9), p)
    assert [len(row) for row in cache.table] == [3, 1, 1]
    assert (cache.pool.used, cache.bytes, cache.pool.bytes) == (5, 5 * PAGE, 5 * PAGE)
    assert (len(cache), k.shape, v.shape) == (9, (3, 2, 9, 2), (3, 1, 9, 3))
    assert positions.tolist() == [[*range(9)], [0, *[-1] * 8], [*range(4), *[-1] * 5]]
    assert torch.equal(k[1, :, 0], tokens(3, 9)[0][1, :, 8])
    assert k[1, :, 1:].eq(0).all(), "holes are zeros, whatever the pages held"
    assert_counted(cache.pool, cache)


def test_stale_pages_never_show() -> None:
    """NaN in a page that was freed, and in the rest of a page, is not in a hole."""
    cache = Paged(SIZE, 4)
    nan = tuple(torch.full_like(x, float("nan")) for x in tokens(2, 8))
    cache.update(nan, Span(0, 8))
    cache.crop(0)
    p = torch.tensor([[0, 1, 2], [-1, -1, 0]])
    (k, v), positions = cache.update(tokens(2, 3), p)
    assert not k.isnan().any()
    assert not v.isnan().any()
    out = regard.attend(
        k, k, k, k_positions=positions, q_positions=positions, mask=regard.masks.Causal()
    )
    assert not out.isnan().any()


def test_a_span_stays_one() -> None:
    cache = Paged(SIZE, 8)
    assert cache.update(tokens(2, 3), Span(5, 3))[1] == Span(5, 3)
    assert cache.update(tokens(2, 6), Span(8, 6))[1] == Span(5, 9)
    cache.crop(9)
    assert cache.next(2) == Span(9, 2)
    assert [len(row) for row in cache.table] == [1, 1]
    _, gap = cache.update(tokens(2, 1), Span(20, 1))
    assert gap.tolist() == [[5, 6, 7, 8, 20]] * 2
    cache.select(torch.tensor([1]))
    assert cache.update(tokens(1, 1), Span(21, 1))[1].tolist() == [[5, 6, 7, 8, 20, 21]]
    _, below = Paged(SIZE, 8).update(tokens(2, 3), Span(-2, 3))
    assert below.tolist() == [[0]] * 2, "positions below 0 are no tokens"


def test_a_fork_shares_pages_until_it_writes() -> None:
    cache = Paged(SIZE, 12)
    cache.update(tokens(2, 6), Span(0, 6))
    before, bytes_before = rows(cache), cache.pool.bytes
    forks = [cache.fork() for _ in range(5)]
    assert cache.pool.bytes == bytes_before == 4 * PAGE, "bytes do not double"
    assert all(fork.table == cache.table for fork in forks)
    fork = forks[0]
    fork.update(tokens(2, 1, seed=1), Span(6, 1))
    assert [a[0] == b[0] for a, b in zip(fork.table, cache.table, strict=True)] == [True, True]
    assert [a[1] == b[1] for a, b in zip(fork.table, cache.table, strict=True)] == [False, False]
    assert cache.pool.used == 6, "one page for each row that was written"
    assert rows(cache) == before
    cache.update(tokens(2, 1, seed=2), Span(6, 1))
    assert rows(forks[1]) == before
    assert rows(fork)[0][6] != rows(cache)[0][6]
    assert_counted(cache.pool, cache, *forks)
    pool = cache.pool
    del fork, forks, cache
    gc.collect()
    assert pool.used == 0


def test_the_last_to_write_keeps_the_page() -> None:
    """A row repeated three times, in one cache: two copies, and one keeps the page; none if all
    others are gone.
    """
    cache = Paged(SIZE, 5)
    cache.update(tokens(1, 2), Span(0, 2))
    cache.select(torch.tensor([0, 0, 0]))
    assert (cache.table, cache.pool.used, cache.bytes) == ([[0], [0], [0]], 1, PAGE)
    cache.update(tokens(3, 1), Span(2, 1))
    assert cache.pool.used == 3
    assert len({row[0] for row in cache.table}) == 3
    assert_counted(cache.pool, cache)
    fork = cache.fork()
    cache.reset()
    fork.update(tokens(3, 1), Span(3, 1))
    assert fork.pool.used == 3
    assert_counted(fork.pool, cache, fork)


def test_pages_return_to_the_pool() -> None:
    cache = Paged(SIZE, 8)
    cache.update(tokens(2, 10), Span(0, 10))
    assert cache.pool.free == 2
    cache.crop(8)
    assert cache.pool.free == 4
    cache.select(torch.tensor([1]))
    assert cache.pool.free == 6
    cache.reset()
    assert (cache.pool.free, cache.bytes, cache.batch, cache.table) == (8, 0, None, [])
    cache.update((torch.ones(3, 5, 2, 1),), Span(0, 2))  # other memory: the pool was empty
    assert_counted(cache.pool, cache)


def test_a_full_pool_names_its_pages_and_changes_nothing() -> None:
    cache = Paged(SIZE, 5)
    cache.update(tokens(2, 6), Span(0, 6))
    fork = cache.fork()
    held, before = rows(cache), cache.table
    for n, needs in ((1, 2), (3, 4)):  # shared pages must be copied first
        words = f"needs {needs} pages of 4 tokens, but 1 of the pool's 5 are free"
        with pytest.raises(regard.ArgumentError, match=words):
            fork.update(tokens(2, n), Span(6, n))
        assert rows(fork) == rows(cache) == held
        assert fork.table == cache.table == before
        assert_counted(cache.pool, cache, fork)
    empty = Paged(2, 1)
    with pytest.raises(regard.ArgumentError, match="needs 2 pages of 2 tokens, but 1 of the"):
        empty.update(tokens(1, 3), Span(0, 3))
    assert (len(empty), empty.batch, empty.pool.free) == (0, None, 1)
    fork.reset()
    cache.update(tokens(2, 2), Span(6, 2))


def test_memory_that_does_not_fit_the_pool() -> None:
    cache = Paged(SIZE, 8)
    cache.update(tokens(1, 2), Span(0, 2))
    fork = cache.fork()
    fork.reset()
    with pytest.raises(
        regard.ArgumentError, match=r"does not fit the pool's pages, .* 1 are in us"
    ):
        fork.update((torch.ones(1, 3, 2, 2),), Span(0, 2))
    for args in ((0, 3), (3, 0)):
        with pytest.raises(regard.ArgumentError, match="both must be at least 1"):
            Paged(*args)


def test_a_deep_copy_has_a_pool_of_its_own() -> None:
    cache = Paged(SIZE, 8)
    cache.update(tokens(2, 6), torch.tensor([[*range(6)], [-1, -1, *range(4)]]))
    fork = cache.fork()
    other = copy.deepcopy(cache)
    assert other.pool is not cache.pool
    assert rows(other) == rows(cache)
    assert_counted(other.pool, other)
    assert_counted(cache.pool, cache, fork)


def test_a_crop_between_tokens_leaves_holes() -> None:
    """Positions out of order: what is forgotten stands between tokens that stay."""
    cache = Paged(SIZE, 8)
    cache.update(tokens(1, 5), torch.tensor([[7, 0, 8, 1, 9]]))
    cache.crop(7)
    (k, _), positions = cache.update(tokens(1, 1, seed=1), Span(2, 1))
    assert positions.tolist() == [[-1, 0, -1, 1, 2]]
    assert torch.equal(k[0, :, 1], tokens(1, 5)[0][0, :, 1])
    assert k[0, :, 0].eq(0).all()
    again = copy.deepcopy(cache)
    assert torch.equal(again.contents()["positions"], positions)
    cache.crop(0)
    assert (len(cache), cache.pool.used, cache.batch) == (0, 0, 1)


def test_gradients_and_inference_mode() -> None:
    cache, (k, v) = Paged(SIZE, 4), tokens(1, 6)
    k.requires_grad_()
    cache.update((k, v), Span(0, 6))
    (held, _), _ = cache.update(tokens(1, 1), Span(6, 1))
    held.square().sum().backward()
    assert torch.equal(k.grad, 2 * k.detach())
    cache = Paged(SIZE, 4)
    with torch.inference_mode():
        cache.update(tokens(1, 3), Span(0, 3))
    (held, _), _ = cache.update(tokens(1, 3), Span(3, 3))
    assert torch.equal(held, torch.cat([tokens(1, 3)[0]] * 2, 2))


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    names = ("update", "update", "update", "fork", "crop", "select", "reset", "drop")
    return [
        (draw(st.sampled_from(names)), draw(st.integers(0, 5)), draw(st.integers(0, 9)))
        for _ in range(draw(st.integers(3, 14)))
    ]


@given(program=programs(), size=st.integers(1, 5))
def test_any_program_is_lists_of_tokens(program: list[tuple[str, int, int]], size: int) -> None:
    """Several forks over one pool, against plain dictionaries; counts are exact after every
    step.
    """
    # no other name holds a cache: what is dropped must be gone
    caches: list[tuple[Paged, list[dict[int, list[float]]]]] = [(Paged(size, 400), [])]
    for step, (name, which, n) in enumerate(program):
        cache, model = caches[which % len(caches)]
        if name == "update":
            _update(cache, model, n, step)
        elif name == "fork":
            caches.append((cache.fork(), [dict(row) for row in model]))
        elif name == "crop":
            cache.crop(n)
            model[:] = [{p: x for p, x in row.items() if p < n} for row in model]
        elif name == "select" and model:
            keep = [(n + i) % len(model) for i in range(1 + which % 3)]
            cache.select(torch.tensor(keep))
            model[:] = [dict(model[i]) for i in keep]
        elif name == "reset":
            cache.reset()
            model.clear()
        elif name == "drop" and len(caches) > 1:
            caches.pop(which % len(caches))
            del cache
            gc.collect(0)
        assert [rows(c) for c, _ in caches] == [m for _, m in caches]
        assert_counted(caches[0][0].pool, *(c for c, _ in caches))


def _update(cache: Paged, model: list[dict[int, list[float]]], n: int, seed: int) -> None:
    B = len(model) or 2
    if not model:
        model += [{} for _ in range(B)]
    new = tokens(B, n, seed)
    p = torch.full((B, n), -1)
    for b, row in enumerate(model):
        pads = (seed + b) % (n + 1)  # some in front, differing by row
        p[b, pads:] = torch.arange(n - pads) + max(row, default=-1) + 1
        for j in range(pads, n):
            row[int(p[b, j])] = [v for m in new for v in m[b, :, j].flatten().tolist()]
    cache.update(new, p)


def test_the_count_would_find_a_leak() -> None:
    """Negative control: a fork that forgets to say that it refers to the pages."""
    cache = Paged(SIZE, 8)
    cache.update(tokens(1, 6), Span(0, 6))
    fork = cache.fork()
    fork.pool.release(page for row in fork.table for page in row)
    with pytest.raises(AssertionError):
        assert_counted(cache.pool, cache, fork)
    cache.update(tokens(1, 1, seed=5), Span(6, 1))
    assert 6 not in rows(fork)[0]
    fork.update(tokens(1, 1, seed=6), Span(6, 1))  # into a page that the other one has written
    assert rows(fork)[0][6] == rows(cache)[0][6]
    cache.pool.share(page for row in fork.table for page in row)


def lazy(cache: Paged) -> tuple[LazyPagedTensor, Tensor]:
    """The first part that a kernel would read from the pages, and its values."""
    memory = cache.lazy_memory()[0][0]
    assert isinstance(memory, LazyPagedTensor)
    return memory, cache.contents()["memory.0"].clone()


def test_memory_in_pages_is_a_tensor() -> None:
    """Its shape and dtype are known without gathering; every operation sees the numbers."""
    cache = Paged(SIZE, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [-1, -1, 0, 1, 2, 3]])
    (right, _), where = cache.update(tokens(2, 6), positions)
    (keys, values), places = cache.lazy_memory()
    assert (keys.shape, keys.dtype, keys.device) == (right.shape, right.dtype, right.device)
    assert torch.equal(places, where)
    assert repr(keys) == "LazyPagedTensor((2, 2, 6, 2), torch.float64, stored in pages)"
    assert keys.paged.table.tolist() == [[0, 1, 8], [2, 8, 8]]
    assert keys.paged.table is values.paged.table
    assert torch.equal(keys * 2, right * 2)
    assert keys.paged is None
    assert repr(keys).endswith("gathered)")
    keys.mul_(3)
    assert torch.equal(keys[:1], 3 * right[:1])
    with pytest.raises(regard.ArgumentError, match="empty; call update"):
        Paged(SIZE, 8).lazy_memory()


def test_the_table_is_one_tensor_until_pages_change() -> None:
    cache = Paged(SIZE, 8)
    cache.update(tokens(2, 5), Span(0, 5))
    tables = []
    for i in range(5, 10):
        tables.append(lazy(cache)[0].paged.table)
        cache.update(tokens(2, 1, seed=i), Span(i, 1))
    assert tables[0] is tables[1] is tables[2]
    assert tables[3] is tables[2], "slot 8 is the first of a new page, and not yet written"
    assert tables[4] is not tables[3]
    assert tables[4].dtype == torch.int32


@pytest.mark.parametrize("what", ["append", "crop", "reset", "fork", "select", "delete"])
def test_memory_in_pages_keeps_its_values(what: str) -> None:
    """Whoever writes over a slot first lets the tensors gather it that would read it later."""
    cache = Paged(SIZE, 12)
    cache.update(tokens(2, 6), Span(0, 6))
    memory, right = lazy(cache)
    pool = cache.pool
    if what == "append":
        cache.update(tokens(2, 5, seed=1), Span(6, 5))
        assert memory.paged is not None, "later slots are none of its own"
    elif what == "crop":
        cache.crop(3)
        cache.update(tokens(2, 5, seed=1), Span(3, 5))
    elif what == "reset":
        cache.reset()
        cache.update(tokens(2, 12, seed=1), Span(0, 12))
    elif what == "fork":
        fork = cache.fork()
        fork.crop(5)
        fork.update(tokens(2, 4, seed=1), Span(5, 4))
        cache.update(tokens(2, 1, seed=2), Span(6, 1))
    elif what == "select":
        cache.select(torch.tensor([1, 1]))
        cache.update(tokens(2, 7, seed=1), Span(6, 7))
    else:
        del cache
        gc.collect()
        assert pool.used == 0
        for part in pool.parts:
            part.fill_(float("nan"))
    assert torch.equal(memory * 1, right)


def test_values_that_nobody_gathers_would_change() -> None:
    """Negative control: a pool that has forgotten whom it lent its pages."""
    cache = Paged(SIZE, 12)
    cache.update(tokens(2, 6), Span(0, 6))
    memory, right = lazy(cache)
    cache.pool._lazy = []
    cache.crop(3)
    cache.update(tokens(2, 5, seed=1), Span(3, 5))
    assert not torch.equal(memory * 1, right)
