"""The compiled step with caches whose rows lie in pages of a pool."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regard import masks
from regard.caches import Cache, Paged
from regard.errors import ArgumentError
from regard.models.decoder import Decoder
from regard.models.generation.decode_session import pad_left
from regard.span import Span
from tests.kernels import require_kernels
from tests.models.step_models import (
    DTYPES,
    V,
    assert_same_bits,
    assert_same_contents,
    decode,
    llama,
    prompted,
    step,
    why_not,
)
from tests.rules import assert_close_rule

require_kernels()

IDS = torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.full(keep=["bfloat16-12"])
@pytest.mark.parametrize("prompt", [3, 12])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))
def test_all_bits_are_those_of_the_modules(dtype: torch.dtype, prompt: int) -> None:
    """Several pages; both rows have pages of their own, in turns. A window hides keys of a tile."""
    parts = {"H": 8, "G": 4, "activation": nn.ReLU(), "bias": True}
    mask = masks.Causal() & masks.Window(9)
    decoder = llama(mask=mask, **parts).to(dtype)  # type: ignore[arg-type]
    caches, plain_caches = assert_same_bits(decoder, IDS, prompt, kind="paged")
    for one, other in zip(caches, plain_caches, strict=True):
        assert isinstance(one, Paged)
        assert isinstance(other, Paged)
        assert one.table == other.table
        assert one.pool.free == other.pool.free
        assert one.next(1) == Span(40, 1)


def test_many_keys_are_divided_into_splits(steps: list[int]) -> None:
    """Pages in another order than that of the tokens."""
    decoder = llama(H=8, G=4, activation=nn.ReLU(), bias=True).to(torch.bfloat16)  # type: ignore[arg-type]
    ids = torch.randint(V, (2, 1204), generator=torch.Generator().manual_seed(4))
    logits = []
    for backend in ("auto", "cpu"):
        caches: list[Cache] = [Paged(16, 200) for _ in decoder.layers]
        for cache in caches:
            assert isinstance(cache, Paged)
            held = cache.pool.take(120)
            cache.pool.release(held[::2] + held[1::2][::-1])
        with torch.inference_mode():
            step(decoder, ids[:, :1200], caches)
            for t in range(1200, 1204):
                logits.append(step(decoder, ids[:, t : t + 1], caches, backend))
        table = caches[0].table[0]  # type: ignore[attr-defined]
        assert table != sorted(table)
    assert len(steps) == 4
    assert all(torch.equal(x, y) for x, y in zip(logits[:4], logits[4:], strict=True))


def test_rows_of_different_lengths(steps: list[int]) -> None:
    decoder = llama(seed=2)
    rows = [[5, 6, 7, 8, 9, 10, 3, 4, 5, 6, 7, 8], [11, 12], [13, 14, 15]]
    ids, positions = pad_left(rows)
    assert isinstance(positions, Tensor)
    ids = torch.cat([ids, torch.randint(V, (3, 9), generator=torch.Generator().manual_seed(3))], 1)
    found, caches = decode(decoder, ids, 12, kind="paged", positions=positions)
    assert len(steps) == 9
    plain, plain_caches = decode(
        decoder, ids, 12, kind="paged", positions=positions, backend="reference"
    )
    exact, exact_caches = decode(
        llama(seed=2).double(), ids, 12, kind="paged", positions=positions, backend="reference"
    )
    assert_close_rule(found, plain, exact)
    for one, other in zip(caches, plain_caches, strict=True):
        assert isinstance(one, Paged)
        assert one.table == other.table  # type: ignore[attr-defined]
        assert torch.equal(
            one.contents()["positions"],  # type: ignore[arg-type]
            other.contents()["positions"],  # type: ignore[arg-type]
        )
    keys = [x[1].contents()["memory.0"] for x in (caches, plain_caches, exact_caches)]
    assert_close_rule(*keys)  # type: ignore[arg-type]


def test_forks_and_repeated_rows_write_pages_of_their_own(steps: list[int]) -> None:
    """Also where a slot was opened, and not filled, before the fork."""
    decoder = llama(seed=3)
    for first in (14, 16):  # in a page, and at the end of one
        caches: list[Cache] = [Paged(4, 64) for _ in decoder.layers]
        with torch.inference_mode():
            step(decoder, IDS[:1, : first - 1], caches)
            step(decoder, IDS[:1, first - 1 : first], caches)
            assert why_not(decoder, caches) == []
            forks = [cache.fork() for cache in caches]
            for cache in caches:
                cache.select(torch.tensor([0, 0]))
            tokens = torch.tensor([[5], [6], [7]])
            both = step(decoder, tokens[:2], caches)
            third = step(decoder, tokens[2:], forks)
            both = torch.cat([both, step(decoder, tokens[:2], caches)], 1)
            third = torch.cat([third, step(decoder, tokens[2:], forks)], 1)
            for row, (token, found) in enumerate(zip((5, 6, 7), (*both, *third), strict=True)):
                text = torch.cat([IDS[:1, :first], torch.full((1, 2), token)], 1)
                whole = decoder(text, last=2)[0]
                torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4, msg=str(row))
    assert len(steps) == 10


def test_a_step_is_undone_and_cropped(steps: list[int]) -> None:
    decoder = llama(seed=4)
    _, caches = decode(decoder, IDS, 12, kind="paged")
    _, untouched = decode(decoder, IDS, 12, kind="paged")
    count, token = len(steps), torch.tensor([[1], [2]])
    marks = [cache.mark() for cache in caches]
    with torch.inference_mode():
        assert why_not(decoder, caches, 2) == []
        assert_same_contents(caches, untouched)
        first = step(decoder, token, caches)
        for cache, mark in zip(caches, marks, strict=True):
            cache.restore(mark)
        assert_same_contents(caches, untouched)
        for cache in caches:
            cache.crop(37)
        for t in (37, 38, 39):
            step(decoder, IDS[:, t : t + 1], caches)
        assert torch.equal(step(decoder, token, caches), first)
    assert len(steps) == count + 5


def test_a_full_pool_is_reported_by_the_cache(steps: list[int]) -> None:
    decoder = llama(seed=5)
    caches = prompted_in(decoder, 1)
    with torch.inference_mode():
        step(decoder, torch.tensor([[4]]), caches)
        (said,) = why_not(decoder, caches)
        with pytest.raises(ArgumentError, match="1 page of 4 tokens, but 0 of the pool's 1"):
            step(decoder, torch.tensor([[5]]), caches)
    assert "the Paged cache of layer 0 opens no slot" in said
    assert [len(cache) for cache in caches] == [4, 4]
    assert len(steps) == 1


def prompted_in(decoder: Decoder, pages: int) -> list[Cache]:
    caches: list[Cache] = [Paged(4, pages) for _ in decoder.layers]
    with torch.inference_mode():
        step(decoder, torch.tensor([[1, 2, 3]]), caches)
    return caches


def test_a_pool_whose_tensors_another_thread_replaced() -> None:
    """The new token is written to the pool as it is now."""
    cache = Paged(4, 8)
    cache.update((torch.zeros(2, 1, 3, 2), torch.zeros(2, 1, 3, 2)), Span(0, 3))
    opened = cache.open_slot(Span(3, 1))
    assert opened is not None
    assert opened.pages is not None
    pages = opened.pages[:, 0] * opened.page_size + opened.slot
    for x in opened.buffers:
        for row in range(2):
            x[row, :, pages[row]] = row + 1.0
    cache.pool.parts = tuple(torch.zeros_like(x) for x in cache.pool.parts)
    cache.close_slot(opened, Span(0, 4))
    for name in ("memory.0", "memory.1"):
        numbers = cache.contents()[name]
        assert isinstance(numbers, Tensor)
        assert numbers[:, 0, :, 0].tolist() == [[0, 0, 0, 1], [0, 0, 0, 2]]


def test_another_page_fails(steps: list[int]) -> None:
    """Negative control: a table in which one page stands twice, and another one not at all."""
    decoder, logits = llama(seed=6), []
    for wrong in (False, True):
        caches = prompted(decoder, "paged")
        with torch.inference_mode():
            for t in range(9):
                step(decoder, torch.tensor([[t]]), caches)
            table = caches[0]._table  # type: ignore[attr-defined]
            if wrong:
                table.rows[0][0] = table.rows[0][1]
                table._numbers = None
            logits.append(step(decoder, torch.tensor([[9]]), caches))
    assert len(steps) == 20
    assert not torch.allclose(*logits, rtol=1e-3, atol=1e-3)
