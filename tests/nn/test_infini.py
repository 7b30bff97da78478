"""Infini-attention as a module: any chunks are one pass, padding, what a cache keeps, what it
costs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import regard
from regard.caches import Growing, Memory, State
from regard.cost import infini_flops, infini_state
from regard.nn import HeadProjection, InfiniAttention, SeparateQKV
from regard.nn.variants import infini, infini_delta
from regard.positions import DynamicNTK, Rotary
from regard.span import Span
from tests.nn.catalogue import in_chunks, random
from tests.oracles import infini as oracle
from tests.oracles.heads import turned
from tests.rules import assert_refused

UPDATES = ["linear", "delta"]


def build(H: int = 4, G: int = 2, D: int = 6, E: int = 5, **options: Any) -> Any:
    """Random weights, a random gate, segments of 4."""
    project = SeparateQKV(
        HeadProjection(12, H, D), HeadProjection(12, G, D), HeadProjection(12, G, E)
    )
    module = InfiniAttention(
        project, nn.Linear(H * E, 12), **{"segment": 4, "rotary": Rotary(D), **options}
    ).double()
    return random(module).requires_grad_(False)


def tokens(B: int = 2, T: int = 19) -> Tensor:
    return torch.randn(B, T, 12, dtype=torch.float64)


def with_its_cache(
    module: Any, x: Tensor, chunks: list[int], positions: Tensor | None = None
) -> tuple[Tensor, Memory]:
    cache = module.new_cache()
    return in_chunks(module, x[:, : sum(chunks)], chunks, cache, positions), cache


def near(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) < 1e-11  # sums of some dozen products of weights of size 1


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("rotary", [Rotary(6), None])
def test_is_the_loop(update: str, rotary: Rotary | None) -> None:
    """From the weights alone, rotated by hand; the memory gets what is not rotated."""
    module, x = build(update=update, rotary=rotary, empty="skip"), tokens()
    q, k, v = (
        (x @ part.linear.weight.T).unflatten(-1, (n, d)).transpose(1, 2)
        for part, n, d in (
            (module.project.q, 4, 6),
            (module.project.k, 2, 6),
            (module.project.v, 2, 5),
        )
    )
    rotated = [_turned(q), _turned(k)] if rotary else [None, None]
    z = oracle.infini(
        q,
        k,
        v,
        module.gate,
        4,
        update=update,
        empty="skip",
        q_rotated=rotated[0],
        k_rotated=rotated[1],
    )
    exact = z.transpose(1, 2).flatten(2) @ module.output.weight.T + module.output.bias
    assert near(module(x), exact)


def _turned(x: Tensor) -> Tensor:
    return torch.tensor(
        [[[turned(row, p) for p, row in enumerate(head)] for head in rows] for rows in x.tolist()],
        dtype=torch.float64,
    )


@settings(max_examples=10)
@given(
    chunks=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    left=st.integers(0, 6),
    right=st.integers(0, 6),
    update=st.sampled_from(UPDATES),
)
def test_padding_on_any_side_in_any_chunks(
    chunks: list[int], left: int, right: int, update: str
) -> None:
    """Three rows: padded left, padded right, whole; each is what it is alone."""
    T = sum(chunks)
    left, right = min(left, T - 1), min(right, T - 1)
    positions = torch.stack(
        [
            torch.arange(T) - left,
            torch.arange(T).masked_fill(torch.arange(T) >= T - right, -1),
            torch.arange(T),
        ]
    ).clamp(min=-1)
    module, x = build(update=update), tokens(3, T)
    x[positions < 0] = float("nan")
    out, cache = with_its_cache(module, x, chunks, positions)
    used = positions >= 0
    for b in range(3):
        assert near(out[b, used[b]], module(x[b : b + 1, used[b]])[0])
    lengths = used.sum(1)
    assert cache.next(1).flatten().tolist() == lengths.tolist()
    assert len(cache) == int((lengths % 4).max()), "the open segments alone are held"
    assert cache.bytes == (3 * 2 * 6 * 6 + len(cache) * 3 * 2 * 11) * 8


def test_crop_inside_the_open_segment() -> None:
    module, x = build(), tokens()
    for padded in (False, True):
        positions = torch.tensor([[-1, *range(18)], [*range(19)]]) if padded else None
        lengths = (15, 14) if padded else (15,)
        for length in (*lengths, 18 if not padded else 17):
            _, cache = with_its_cache(module, x, [15], positions)
            end = int(cache.next(1)[0, 0]) if padded else 15
            cache.crop(length)
            want = [min(length, end), min(length, 15)]
            rest = torch.tensor([[p, p + 1, p + 2] for p in want])
            after = module(x[:, 5:8], rest, cache)
            for b, n in enumerate(want):
                first = 1 if padded and b == 0 else 0
                again = torch.cat([x[b, first : first + n], x[b, 5:8]])[None]
                assert near(after[b], module(again)[0, -3:])
    _, cache = with_its_cache(module, x, [15])
    with pytest.raises(regard.ArgumentError, match=r"crop to 11, but the tokens before position"):
        cache.crop(11)
    assert (len(cache), cache.next(1)) == (3, Span(15, 1))
    cache.crop(12)
    assert (len(cache), cache.next(1)) == (0, Span(12, 1))
    cache.crop(0)
    assert (len(cache), cache.next(1), cache.contents()) == (0, Span(0, 1), {})
    cache.crop(0)
    with pytest.raises(regard.ArgumentError, match="crop length is -1"):
        cache.crop(-1)
    positions = torch.tensor([[-1, -1, -1, *range(12)], [*range(15)]])
    _, cache = with_its_cache(module, x, [15], positions)
    with pytest.raises(regard.ArgumentError, match="crop to 11, but the tokens before position 12"):
        cache.crop(11)


def test_what_it_costs() -> None:
    assert infini_state(groups=8, D=128, E=128, layers=12) == 1_585_152, (
        "table 2 of the paper: 1.6M"
    )
    told = infini(1024, 8, segment=2048).describe(100_000)
    assert told.state.value * 12 == 1_585_152
    assert told.kv_per_token.value == 2 * 8 * 128
    assert told.kv_tokens.value == 100_000 % 2048
    for make, reads in ((infini, 8), (infini_delta, 8 + 2)):
        module = make(64, 8, segment=16, groups=2)
        seen = 4  # the token at position 99 is the fourth of its segment
        matrices = 64 * 64 * 2 + 64 * 16 * 2
        by_hand = 2 * matrices + 8 * seen * 2 * (8 + 8) + reads * 2 * 8 * 9 + 2 * (2 * 64 + 8)
        assert module.describe(100).flops_per_token.value == by_hand
        assert module.describe(16_000_008).cached_values == module.describe(1608).cached_values
    assert infini_flops(2, 1, 10, 4, 4, delta=True) - infini_flops(2, 1, 10, 4, 4) == 40
    x = torch.randn(1, 100, 64)
    module = infini(64, 8, segment=16, groups=2)
    cache = module.new_cache()
    module(x, cache=cache)
    told = module.describe(100)
    assert cache.bytes == 4 * (told.state.value + told.kv_per_token.value * 4)
    with pytest.raises(regard.ArgumentError, match="context is 0"):
        module.describe(0)


def test_errors() -> None:
    project = SeparateQKV(
        HeadProjection(12, 4, 6), HeadProjection(12, 2, 6), HeadProjection(12, 2, 5)
    )
    rotated = SeparateQKV(
        HeadProjection(12, 4, 6), HeadProjection(12, 2, 6, Rotary(6)), HeadProjection(12, 2, 5)
    )
    follows = Rotary(6, scaling=DynamicNTK(2.0, 8), length="current")
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: build(segment=0), regard.ArgumentError, "segment is 0; it must be 1 or more"),
        (lambda: build(update="x"), regard.ArgumentError, r"update is 'x'; it must be 'linear' or"),
        (lambda: build(empty="x"), regard.ArgumentError, "empty is 'x'; it must be 'zero' or"),
        (lambda: build(rotary=Rotary(8)), regard.ArgumentError, "rotary has dim 8; it must be the"),
        (lambda: build(rotary=follows), regard.ArgumentError, "give it a fixed length=<number>"),
        (
            lambda: InfiniAttention(rotated, nn.Linear(20, 12), segment=4),
            regard.ArgumentError,
            "project.k.steps.0 is Rotary(6, base=10000.0, layout='half'), but the",
        ),
        (lambda: build()(tokens(), cache=Growing()), regard.ArgumentTypeError, "the cache is"),
        (lambda: build()(tokens(), cache=State()), regard.ArgumentTypeError, "the cache is State"),
        (lambda: build()(tokens(), cache=Memory(8)), regard.ArgumentError, "the cache has"),
        (lambda: Memory(0), regard.ArgumentError, "segment is 0; it must be at least 1"),
        (lambda: Memory(True), regard.ArgumentTypeError, "segment is bool; it must be an int"),
    ]
    assert_refused(cases)
    InfiniAttention(project, nn.Linear(20, 12), segment=4)
    _, cache = with_its_cache(build(), tokens(), [14])
    with pytest.raises(regard.ArgumentError, match="include one that is not after the last"):
        build()(tokens(T=2), Span(13, 2), cache)
