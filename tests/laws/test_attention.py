"""Laws of softmax attention: relations between calls that hold for any numbers, on the kernel that
auto chooses.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard import masks
from regard.span import Span
from tests.kernels import require_backend
from tests.oracles.plain import plain_attention, several_plains
from tests.rules import assert_close_rule

KERNELS = ("auto", "reference", "tiled")
sizes = st.integers(1, 24)
seeds = st.integers(0, 10**6)
kernels = st.sampled_from(KERNELS)


def draw(seed: int, *shapes: tuple[int, ...], size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator, dtype=torch.float64) * size for s in shapes]


def qkv(seed: int, T: int, S: int, H: int = 4, G: int = 2) -> list[Tensor]:
    return draw(seed, (2, H, T, 8), (2, G, S, 8), (2, G, S, 5), size=2.0)


def assert_same(x: Tensor, y: Tensor) -> None:
    """Equal to rounding in float64, thousands of times less than any of these laws broken."""
    torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def attend(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return regard.attend_partial(*tensors, **options)


@given(seeds, sizes, sizes, kernels)
def test_queries_permute(seed: int, T: int, S: int, backend: str) -> None:
    q, k, v = qkv(seed, T, S)
    order = torch.randperm(T)
    one, two = attend(q, k, v, backend=backend), attend(q[:, :, order], k, v, backend=backend)
    assert_same(one[0][:, :, order], two[0])
    assert_same(one[1][:, :, order], two[1])


@given(seeds, sizes, sizes, kernels)
def test_keys_permute_with_their_positions(seed: int, T: int, S: int, backend: str) -> None:
    q, k, v = qkv(seed, T, S)
    order = torch.randperm(S)
    options: dict[str, Any] = {"mask": masks.Causal() & masks.Window(6), "backend": backend}
    one = attend(q, k, v, q_positions=Span(S - T, T), **options)
    two = attend(
        q,
        k[:, :, order],
        v[:, :, order],
        q_positions=Span(S - T, T),
        k_positions=order[None],
        **options,
    )
    assert_same(one[0], two[0])
    assert_same(one[1], two[1])


@given(seeds, sizes, sizes, st.sampled_from([(6, 1), (6, 2), (6, 3), (6, 6)]), kernels)
def test_groups_are_repeated_heads(
    seed: int, T: int, S: int, heads: tuple[int, int], backend: str
) -> None:
    H, G = heads
    q, k, v = qkv(seed, T, S, H, G)
    one = attend(q, k, v, mask=masks.Causal(), backend=backend)
    repeated = (x.repeat_interleave(H // G, 1) for x in (k, v))
    two = attend(q, *repeated, mask=masks.Causal(), backend=backend)
    assert_same(one[0], two[0])
    if 1 < G < H:
        wrong = attend(
            q, *(x.repeat(1, H // G, 1, 1) for x in (k, v)), mask=masks.Causal(), backend=backend
        )
        assert (one[0] - wrong[0]).abs().max() > 1e-6 or T > S + 1


@given(seeds, sizes, sizes, st.lists(st.integers(0, 24), max_size=5), st.booleans(), kernels)
def test_any_split_of_the_keys_merges_to_the_whole(
    seed: int, T: int, S: int, cuts: list[int], with_sink: bool, backend: str
) -> None:
    q, k, v = qkv(seed, T, S)
    (sink,) = draw(seed + 1, (4,))
    options: dict[str, Any] = {"mask": masks.Causal(), "q_positions": Span(S - T, T)}
    edges = [0, *sorted(min(c, S) for c in cuts), S]  # parts may be empty
    spans = [*itertools.pairwise(edges)]
    parts = [
        regard.attend_partial(q, k[:, :, a:b], v[:, :, a:b], k_positions=Span(a, b - a), **options)
        for a, b in spans
    ]
    whole = attend(q, k, v, backend=backend, **options)
    merged = regard.merge(parts[::-1], sink=sink if with_sink else None)
    assert_same(merged.lse, whole[1])
    out = regard.attend(q, k, v, sink=sink if with_sink else None, backend=backend, **options)
    assert_same(merged.out, out)
    nothing = regard.Partial(torch.zeros_like(merged.out), torch.full_like(merged.lse, -math.inf))
    assert_same(regard.merge([nothing, *parts]).out, regard.merge(parts).out)
    pairwise = parts[0]
    for part in parts[1:]:
        pairwise = regard.merge([pairwise, part])
    assert_same(pairwise.out, regard.merge(parts).out)


@given(seeds, sizes, st.integers(0, 24), kernels)
def test_a_causal_prefix_knows_nothing_of_the_rest(seed: int, T: int, t: int, backend: str) -> None:
    q, k, v = qkv(seed, T, T)
    t = min(t, T)
    whole = attend(q, k, v, mask=masks.Causal(), backend=backend)
    first = attend(q[:, :, :t], k[:, :, :t], v[:, :, :t], mask=masks.Causal())
    assert_same(whole[0][:, :, :t], first[0])
    k, v = k.clone(), v.clone()
    k[:, :, t:], v[:, :, t:] = math.nan, math.inf
    assert torch.equal(
        attend(q[:, :, :t], k, v, mask=masks.Causal(), q_positions=Span(0, t), backend="reference")[
            0
        ],
        attend(
            q[:, :, :t],
            k.nan_to_num(0),
            v.nan_to_num(0, 0),
            mask=masks.Causal(),
            q_positions=Span(0, t),
            backend="reference",
        )[0],
    )


@given(seeds, sizes, sizes, kernels)
def test_a_constant_added_to_all_keys_shifts_the_lse_only(
    seed: int, T: int, S: int, backend: str
) -> None:
    q, k, v = qkv(seed, T, S)
    (shift,) = draw(seed + 1, (1, 1, 1, 8))
    one, two = attend(q, k, v, backend=backend), attend(q, k + shift, v, backend=backend)
    assert_same(one[0], two[0])
    assert_same(one[1] + (q * shift).sum(-1) * 8**-0.5, two[1])


@given(seeds, sizes, st.integers(0, 5), kernels)
def test_a_window_of_everything_is_causal_and_of_one_is_itself(
    seed: int, T: int, more: int, backend: str
) -> None:
    q, k, v = qkv(seed, T, T)
    causal = masks.Causal()
    assert_same(
        attend(q, k, v, mask=causal & masks.Window(T + more), backend=backend)[0],
        attend(q, k, v, mask=causal, backend=backend)[0],
    )
    own = attend(q, k, v, mask=causal & masks.Window(1), backend=backend)
    assert_same(own[0], v.repeat_interleave(2, 1))


@given(seeds, sizes, st.integers(0, 6), st.integers(0, 6), kernels)
def test_padding_left_and_right_changes_nothing(
    seed: int, T: int, left: int, right: int, backend: str
) -> None:
    q, k, v = qkv(seed, T, T)
    alone = attend(q, k, v, mask=masks.Causal())
    padded = [torch.nn.functional.pad(x, (0, 0, left, right), value=7.0) for x in (q, k, v)]
    positions = torch.nn.functional.pad(torch.arange(T), (left, right), value=-1)[None]
    out, lse = attend(
        *padded, mask=masks.Causal(), q_positions=positions, k_positions=positions, backend=backend
    )
    assert_same(out[:, :, left : left + T], alone[0])
    assert_same(lse[:, :, left : left + T], alone[1])


@given(seeds, sizes, sizes, st.floats(-3, 3), st.floats(-3, 3), kernels)
def test_it_is_linear_in_the_values(
    seed: int, T: int, S: int, a: float, b: float, backend: str
) -> None:
    q, k, v = qkv(seed, T, S)
    (w,) = draw(seed + 1, v.shape)
    mix = attend(q, k, a * v + b * w, backend=backend)[0]
    assert_same(
        mix, a * attend(q, k, v, backend=backend)[0] + b * attend(q, k, w, backend=backend)[0]
    )


@given(seeds, sizes, sizes, kernels)
def test_a_zero_query_gives_the_mean_of_what_it_sees(
    seed: int, T: int, S: int, backend: str
) -> None:
    q, k, v = qkv(seed, T, S)
    mask = masks.Causal() & masks.Window(5)
    out, lse = attend(torch.zeros_like(q), k, v, mask=mask, backend=backend)
    see = mask.block(Span(S - T, T), Span(0, S)).double()[0, 0]
    n = see.sum(-1)
    mean = (see / n.clamp(min=1)[:, None]) @ v.repeat_interleave(2, 1)
    assert_same(out, mean)
    assert_same(lse, n.log().expand(2, 4, T))


@given(seeds, sizes, sizes, kernels)
def test_out_is_inside_the_values(seed: int, T: int, S: int, backend: str) -> None:
    q, k, v = qkv(seed, T, S)
    out = attend(q, k, v, backend=backend)[0].unflatten(1, (2, 2))
    assert (out <= v.amax(2)[:, :, None, None] + 1e-12).all()
    assert (out >= v.amin(2)[:, :, None, None] - 1e-12).all()


@given(seeds, sizes, sizes, st.floats(0.25, 4.0), kernels)
def test_scale_and_query_trade(seed: int, T: int, S: int, c: float, backend: str) -> None:
    q, k, v = qkv(seed, T, S)
    assert_same(
        attend(q / c, k, v, scale=c * 8**-0.5, backend=backend)[0],
        attend(q, k, v, backend=backend)[0],
    )


@given(seeds, sizes, sizes, kernels)
def test_every_key_twice_adds_ln_2(seed: int, T: int, S: int, backend: str) -> None:
    q, k, v = qkv(seed, T, S)
    one = attend(q, k, v, backend=backend)
    two = attend(q, torch.cat([k, k], 2), torch.cat([v, v], 2), backend=backend)
    assert_same(one[0], two[0])
    assert_same(one[1] + math.log(2), two[1])


@given(seeds, sizes, sizes, kernels)
def test_bool_and_additive_and_dropping_keys_agree(seed: int, T: int, S: int, backend: str) -> None:
    q, k, v = qkv(seed, T, S)
    keep = torch.rand(S) < 0.7
    one = attend(q, k, v, mask=keep.expand(T, S), backend=backend)
    additive = torch.zeros(T, S, dtype=torch.float64).masked_fill(~keep, -math.inf)
    assert_same(one[0], attend(q, k, v, bias=additive, backend=backend)[0])
    dropped = attend(q, k[:, :, keep], v[:, :, keep], q_positions=Span(0, T))
    assert_same(one[0], dropped[0])
    assert_same(one[1], dropped[1])


@given(seeds, sizes, sizes, kernels)
def test_limits_of_softcap_and_sink(seed: int, T: int, S: int, backend: str) -> None:
    q, k, v = qkv(seed, T, S)
    plain = regard.attend(q, k, v, backend=backend)
    assert_same(
        regard.attend(q, k, v, sink=torch.full((4,), -1e4, dtype=torch.float64), backend=backend),
        plain,
    )
    gone = regard.attend(q, k, v, sink=torch.full((4,), 1e4, dtype=torch.float64), backend=backend)
    assert torch.equal(gone, torch.zeros_like(gone))
    if backend != "sdpa":
        wide = regard.attend(q, k, v, softcap=1e7, backend=backend)
        torch.testing.assert_close(wide, plain, rtol=1e-8, atol=1e-8)


@given(seeds, sizes, sizes)
def test_rows_of_a_batch_do_not_meet(seed: int, T: int, S: int) -> None:
    q, k, v = qkv(seed, T, S)
    whole = attend(q, k, v, mask=masks.Causal())[0]
    for b in range(2):
        assert_same(
            whole[b : b + 1],
            attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], mask=masks.Causal())[0],
        )


@given(seeds, sizes, st.integers(1, 30), kernels)
def test_only_differences_of_positions_matter(seed: int, T: int, shift: int, backend: str) -> None:
    q, k, v = qkv(seed, T, T)
    mask, bias = masks.Causal() & masks.Window(5), regard.biases.ALiBi(4)
    one = attend(q, k, v, mask=mask, bias=bias, backend=backend)
    moved = attend(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        q_positions=Span(shift, T),
        k_positions=Span(shift, T),
        backend=backend,
    )
    assert_same(one[0], moved[0])


@pytest.mark.parametrize("backend", KERNELS)
def test_a_chunked_prefill_is_one_pass(backend: str) -> None:
    q, k, v = qkv(0, 24, 24)
    mask = masks.Causal() & (masks.Window(7) | masks.Sinks(2))
    whole = attend(q, k, v, mask=mask, backend=backend)[0]
    for step in (1, 2, 5, 23):
        parts = [
            attend(
                q[:, :, i : i + step],
                k[:, :, : i + step],
                v[:, :, : i + step],
                mask=mask,
                backend=backend,
            )[0]
            for i in range(0, 24, step)
        ]
        assert_same(torch.cat(parts, 2), whole)


ALL = ("reference", "tiled", "sdpa", "gemm", "cpu", "auto")


@pytest.mark.parametrize("backend", ALL)
def test_powers_of_two_from_subnormal_to_1e30_change_no_digit(backend: str) -> None:
    """Values times 2^n give outputs times 2^n; keys times 2^n and queries times 2^-n the same."""
    require_backend(backend)
    q, k, v = (x.float() for x in qkv(0, 1 if backend == "cpu" else 24, 24))
    plain = attend(q, k, v, backend=backend)[0]
    # the tiles refuse numbers near the end of float32, as they refuse infinity behind a mask
    for n in (30, -30) if backend == "tiled" else (66, 100, -66):
        assert torch.equal(attend(q, k, v * 2.0**n, backend=backend)[0], plain * 2.0**n)
        assert torch.equal(attend(q * 2.0**-n, k * 2.0**n, v, backend=backend)[0], plain)
    # a subnormal number has 2^-149 as its last digit: each of 24 products is rounded there
    small = attend(q, k, v * 2.0**-140, backend=backend)[0].double()
    assert (small - plain.double() * 2.0**-140).abs().max() <= 25 * 2.0**-149
    assert small.count_nonzero() > 0.9 * small.numel(), "nothing was flushed to zero"


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_over_65536_keys(dtype: torch.dtype) -> None:
    """Whole, and in four parts that are merged, by the error rule; one part left out is far."""
    S, where = 65_536, {"q_positions": Span(65_532, 4)}
    q, k, v = (x.to(dtype) for x in draw(0, (1, 2, 4, 16), (1, 1, S, 16), (1, 1, S, 16)))
    visible = masks.Causal().block(Span(S - 4, 4), Span(0, S))
    options: dict[str, Any] = {"visible": visible}
    exact = plain_attention(q.double(), k.double(), v.double(), **options)[0]
    plains = [x[0] for x in several_plains(q, k, v, **options)]
    parts = [
        regard.attend_partial(
            q,
            k[:, :, i : i + S // 4],
            v[:, :, i : i + S // 4],
            mask=masks.Causal(),
            k_positions=Span(i, S // 4),
            **where,
        )
        for i in range(0, S, S // 4)
    ]
    for backend in ("auto", "tiled", "sdpa"):
        found = regard.attend(q, k, v, mask=masks.Causal(), backend=backend)
        assert_close_rule(found, plains, exact, what=backend)
    assert_close_rule(regard.merge(parts).out.to(dtype), plains, exact, what="merged")
    with pytest.raises(AssertionError):
        assert_close_rule(regard.merge(parts[:3]).out.to(dtype), plains, exact)
