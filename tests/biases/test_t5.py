"""T5's relative bias. Numbers: computed from the formula in whole numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.biases import T5Relative, t5_bucket
from regard.biases.distance import bucket_starts
from regard.errors import ArgumentError, ArgumentTypeError
from regard.span import Span

F64 = torch.float64


@given(
    buckets=st.integers(2, 32).map(lambda n: 2 * n),
    max_distance=st.integers(40, 300),
    bidirectional=st.booleans(),
    relative=st.integers(-500, 500),
)
def test_the_definition(buckets, max_distance, bidirectional, relative):
    found = int(
        t5_bucket(
            torch.tensor([relative]),
            buckets=buckets,
            bidirectional=bidirectional,
            max_distance=max_distance,
        )
    )
    n = buckets // 2 if bidirectional else buckets
    upper = n if bidirectional and relative > 0 else 0
    d = abs(relative) if bidirectional else max(-relative, 0)
    e = n // 2
    if d < e:
        assert found == upper + d
        return
    exact = e + (n - e) * math.log(d / e) / math.log(max_distance / e)
    near = {min(n - 1, math.floor(exact + nudge)) for nudge in (-1e-9, 1e-9)}
    assert found - upper in near  # on a bound the logarithm cannot tell; the next test can


def test_exactly_on_a_bound():
    # max_distance / e is a power of (n - e), so that bounds are whole numbers
    assert t5_bucket(torch.tensor([-15, -16, -63, -64])).tolist() == [9, 10, 13, 14]
    fine = t5_bucket(
        -torch.tensor([15, 16, 31, 32, 63, 64, 127, 128]),
        buckets=8,
        bidirectional=False,
        max_distance=64,
    )
    assert fine.tolist() == [5, 6, 6, 7, 7, 7, 7, 7]
    for power in range(1, 9):  # bucket e + m starts at e 2^m: e = 8, 8 steps up to 8 * 2^8
        d = 8 * 2**power
        edge = t5_bucket(
            -torch.tensor([d - 1, d]), buckets=16, bidirectional=False, max_distance=8 * 2**8
        )
        assert edge.tolist() == [7 + power, min(8 + power, 15)]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (16, 64), (64, 500)])
def test_the_buckets_of_transformers(bidirectional, buckets, max_distance):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.t5.modeling_t5 import T5Attention

    relative = torch.arange(-2000, 2001)
    theirs = T5Attention._relative_position_bucket(relative, bidirectional, buckets, max_distance)
    ours = t5_bucket(
        relative, buckets=buckets, bidirectional=bidirectional, max_distance=max_distance
    )
    assert torch.equal(ours, theirs)
    wrong = t5_bucket(
        -relative, buckets=buckets, bidirectional=bidirectional, max_distance=max_distance
    )
    assert not torch.equal(wrong, theirs)  # negative control: query minus key


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_bias_looks_up_its_table(bidirectional):
    table = torch.randn(8, 3)
    bias = T5Relative(table, bidirectional, max_distance=10)
    q, k = torch.tensor([[4, 5], [-1, 9]]), torch.tensor([[0, 4, 7], [-1, -1, 30]])
    found = bias.block(q, k, dtype=F64)
    assert found.shape == (2, 3, 2, 3)
    assert found.dtype == F64
    for b in range(2):
        for i in range(2):
            for j in range(3):
                bucket = t5_bucket(
                    (k[b, j] - q[b, i])[None],
                    buckets=8,
                    bidirectional=bidirectional,
                    max_distance=10,
                )
                assert torch.equal(found[b, :, i, j], table[int(bucket)].double())
    part = bias.block(q, k, slice(1, 2), slice(0, 2))
    assert torch.equal(part.double(), found[:, :, 1:2, :2])
    assert torch.equal(
        bias.block(Span(2, 3), Span(0, 5)),
        bias.block(torch.arange(2, 5)[None], torch.arange(5)[None]),
    )


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: T5Relative(torch.zeros(32)), ArgumentError, r"table is \(32,\); it must be"),
        (lambda: T5Relative(torch.zeros(32, 2).long()), ArgumentTypeError, "table is int64"),
        (lambda: T5Relative(torch.zeros(31, 2)), ArgumentError, "buckets is 31; with"),
        (
            lambda: T5Relative(torch.zeros(1, 2), bidirectional=False),
            ArgumentError,
            "buckets is 1; it must be at least 2",
        ),
        (lambda: T5Relative(torch.zeros(32, 2), max_distance=8), ArgumentError, "max_distance"),
        (
            lambda: T5Relative(torch.zeros(32, 2)).require(1, 4, 3, 3),
            ArgumentError,
            r"t5_relative\(32 buckets, bidirectional\) has 2 heads and the query has 4",
        ),
        (lambda: t5_bucket(torch.zeros(3)), ArgumentTypeError, "relative must be a tensor of"),
        (lambda: t5_bucket(3), ArgumentTypeError, "relative must be a tensor of integers"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def _counted(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The definition, one distance after the other."""
    e = buckets // 2
    starts, d = list(range(e)), e
    for m in range(buckets - e):
        while d ** (buckets - e) * e**m < max_distance**m * e ** (buckets - e):
            d += 1
        starts.append(d)
    return tuple(starts)


@pytest.mark.parametrize("buckets", [2, 3, 4, 7, 16, 32])
def test_bounds_of_buckets_are_those_of_the_definition(buckets: int) -> None:
    for distance in (*range(buckets // 2 + 1, buckets // 2 + 40), 128, 1000, 6561):
        assert bucket_starts(buckets, distance) == _counted(buckets, distance), distance


@pytest.mark.parametrize("distance", [2**31, 2**53])
def test_bounds_of_far_buckets_are_found_without_counting(distance: int) -> None:
    """Counting to them took hours: a config.json of 300 bytes, or a recording, stood still with
    it.
    """
    starts = bucket_starts(16, distance)
    for m, d in enumerate(starts[8:]):
        assert d**8 >= distance**m * 8 ** (8 - m) > (d - 1) ** 8


def test_numbers_beyond_reason_are_refused() -> None:
    relative = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="buckets is 1026; it must be at most 1024"):
        t5_bucket(relative, buckets=1026, max_distance=10**6)
    with pytest.raises(
        ArgumentError, match=f"max_distance is {2**53 + 1}; it must be at most {2**53}"
    ):
        t5_bucket(relative, max_distance=2**53 + 1)
