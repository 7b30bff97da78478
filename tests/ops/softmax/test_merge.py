"""merge: exact on any split, associative, commutative, with an identity; the sink once; NaN stays;
gradients; errors.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard import Partial
from regard.ops.softmax.merge import merge
from tests.rules import assert_close_rule, assert_refused

NAN = float("nan")


def partials(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Partial]:
    """Parts as a kernel would give them; in each, one row sees nothing."""
    make = torch.Generator().manual_seed(seed)
    parts = []
    for i in range(n):
        out = torch.randn(2, 3, 5, 4, generator=make, dtype=torch.float64).to(dtype)
        lse = 4 * torch.randn(2, 3, 5, generator=make, dtype=torch.float64)
        out[0, 0, i % 5], lse[0, 0, i % 5] = 0, -math.inf
        parts.append(
            Partial(out, lse.to(torch.float64 if dtype == torch.float64 else torch.float32))
        )
    return parts


def by_definition(parts: list[Partial], sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The two sums of the definition, in fp64, without a maximum taken out."""
    weights = [part.lse.double().exp() for part in parts]
    total = sum(weights, torch.zeros(()))
    mixed = sum(
        (w[..., None] * part.out.double() for w, part in zip(weights, parts, strict=True)),
        torch.zeros(()),
    )
    with_sink = total if sink is None else total + sink.double().exp()[:, None]
    return mixed / with_sink[..., None].masked_fill(with_sink[..., None] == 0, 1), total.log()


def assert_same(x: Partial, y: Partial) -> None:
    """Equal to a few roundings: every number here is of the order of 1 to 10."""
    for a, b in zip(x, y, strict=True):
        assert torch.equal(a.isneginf(), b.isneginf())
        assert torch.equal(a.isnan(), b.isnan())
        seen = a.isfinite()
        assert float((a[seen] - b[seen]).abs().max()) <= 8 * 8 * torch.finfo(a.dtype).eps


def test_is_the_two_sums_of_its_definition() -> None:
    for n in (1, 2, 5):
        parts = partials(n)
        sink = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
        assert_same(merge(parts), Partial(*by_definition(parts)))
        assert_same(merge(parts, sink=sink), Partial(*by_definition(parts, sink)))


def test_half_types_are_joined_in_fp32() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        parts = partials(4, dtype)
        out, lse = merge(parts)
        exact = by_definition(parts)
        shares = [(part.lse - exact[1].float()).exp().to(dtype) for part in parts]
        plain = sum(
            (s[..., None] * part.out for s, part in zip(shares, parts, strict=True)),
            torch.zeros((), dtype=dtype),
        )
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        assert_close_rule(out, plain, exact[0])
        assert_close_rule(lse, torch.logsumexp(torch.stack([p.lse for p in parts]), 0), exact[1])


def test_of_one_part_is_that_part() -> None:
    (part,) = partials(1)
    assert torch.equal(merge([part]).lse, part.lse)
    assert torch.equal(merge([part]).out, part.out)


def test_identity_is_bitwise() -> None:
    part = merge(partials(2))
    nothing = Partial(torch.zeros_like(part.out), torch.full_like(part.lse, -math.inf))
    for joined in (merge([part, nothing]), merge([nothing, part]), merge([nothing, nothing, part])):
        assert torch.equal(joined.out, part.out)
        assert torch.equal(joined.lse, part.lse)
    empty = merge([nothing, nothing])
    assert empty.out.eq(0).all()
    assert empty.lse.isneginf().all()


@given(seed=st.integers(0, 10**6), n=st.integers(2, 6))
def test_associative_and_commutative(seed: int, n: int) -> None:
    parts = partials(n, seed=seed)
    whole = merge(parts)
    shuffled = random.Random(seed).sample(parts, n)
    cut = seed % (n - 1) + 1
    assert_same(merge(shuffled), whole)
    assert_same(merge([merge(parts[:cut]), merge(parts[cut:])]), whole)


def test_a_sink_counted_in_every_part_is_caught() -> None:
    """Negative control: the sink belongs to the merge, once."""
    parts = partials(2)
    sink = torch.zeros(3, dtype=torch.float64)
    right = merge(parts, sink=sink).out
    twice = merge([merge([part], sink=sink) for part in parts]).out
    assert float((right - twice).abs().max()) > 0.1


def test_nan_that_counts_stays_and_nan_that_does_not_is_left_out() -> None:
    parts = partials(2)
    unseen, seen = (0, 0, 0), (1, 1, 1)
    parts[0].out[unseen] = NAN  # its lse is -inf
    assert merge(parts).out.isfinite().all()
    parts[1].out[seen] = NAN
    joined = merge(parts)
    assert joined.out[seen].isnan().all()
    assert int(joined.out.isnan().sum()) == 4
    parts[1].lse[seen] = NAN
    joined = merge(parts)
    assert joined.out[seen].isnan().all()
    assert joined.lse[seen].isnan()
    assert int(joined.lse.isnan().sum()) == 1


def test_far_apart_parts_do_not_overflow() -> None:
    for far in (-1e4, 1e4):
        parts = partials(2)
        joined = merge(
            [Partial(parts[0].out, parts[0].lse * 0 + far), Partial(parts[1].out, parts[1].lse * 0)]
        )
        winner = parts[0] if far > 0 else parts[1]
        rows = (slice(None), slice(1, None))  # head 0 has rows of -inf, here NaN
        assert torch.equal(joined.out[rows], winner.out[rows])


def test_gradients() -> None:
    parts = [Partial(p.out[:1, :2, 2:4].clone(), p.lse[:1, :2, 2:4].clone()) for p in partials(3)]
    sink = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    tensors = [x.requires_grad_() for part in parts for x in part]

    def joined(sink: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        halves = zip(tensors[::2], tensors[1::2], strict=True)
        return merge([Partial(*half) for half in halves], sink=sink)

    tensors[5].data[0, 0, 0] = 2.0  # finite everywhere: numbers cannot be pushed around -inf
    tensors[1].data.nan_to_num_(neginf=0.0)
    tensors[3].data.nan_to_num_(neginf=0.0)
    assert torch.autograd.gradcheck(joined, (sink, *tensors))


@pytest.mark.parametrize("sink", [None, 0.0, -math.inf])
def test_gradients_of_rows_that_see_nothing_are_zero(sink: float | None) -> None:
    parts = [Partial(torch.zeros(1, 1, 2, 4), torch.tensor([[[-math.inf, 1.0]]])) for _ in range(2)]
    tensors = [x.requires_grad_() for part in parts for x in part]
    logit = None if sink is None else torch.tensor([sink], requires_grad=True)
    joined = merge(parts, sink=logit)
    assert joined.out[0, 0, 0].eq(0).all()
    (joined.out.sum() + joined.lse[0, 0, 1]).backward()
    for x in tensors:
        assert x.grad is not None
        assert x.grad.isfinite().all()
    for _, lse in parts:
        assert lse.grad is not None
        assert lse.grad[0, 0, 0] == 0
    if logit is not None:
        assert logit.grad is not None
        assert logit.grad.isfinite().all()


def test_errors() -> None:
    first, second = partials(2)
    short = Partial(second.out[:, :, :4], second.lse[:, :, :4])
    wide = Partial(first.out, first.lse[..., None])
    ids = torch.zeros(3, dtype=torch.int64)
    cases: list[tuple[Any, ...]] = [
        (lambda: merge([]), "merge got no partials; pass at least one result of"),
        (lambda: merge([first, short]), "partial 1 has out (2, 3, 4, 4) and lse (2, 3, 4); all"),
        (lambda: merge([wide]), "partial 0 has out (2, 3, 5, 4) and lse (2, 3, 5, 1); all must"),
        (lambda: merge([first], sink=torch.zeros(2)), "sink is (2,); it holds one logit per query"),
        (lambda: merge([first], sink=ids), regard.ArgumentTypeError, "sink is int64; it must be"),
    ]
    assert_refused(cases)
