"""How far rotary positions reach. Numbers: computed in float64 from the formulas."""

from __future__ import annotations

import math

import pytest
import torch

from regard.errors import ArgumentError
from regard.positions import (
    base_reaches,
    critical_base,
    critical_dimension,
    extrapolation_length,
    long_term_decay,
    pair_index,
    small_bases,
)


@pytest.mark.parametrize(
    "dim, base, length, critical",
    [
        (128, 1e4, 2048, 82),
        (128, 1e4, 4096, 92),
        (128, 5e5, 8192, 70),
        (128, 1e6, 32768, 80),
        (64, 1e4, 256, 26),
        (32, 1e4, 128, 12),
        (64, 1e4, 512, 32),
        (128, 1e4, 2, 0),
        (32, 10.0, 10**6, 32),
    ],
)
def test_critical_dimension(dim, base, length, critical):
    assert critical_dimension(dim, base, length) == critical
    if 0 < critical < dim:  # the same index where YaRN stops interpolating
        assert critical == 2 * math.ceil(pair_index(1, dim, base, length))


def test_how_far_a_base_reaches():
    for base, length in (
        (1e4, 4711.7243),
        (4e4, 12761.7575),
        (8e4, 21002.7323),
        (5e5, 78399.7285),
        (1e6, 129026.7827),
    ):
        assert extrapolation_length(128, base, 92) == pytest.approx(length, abs=1e-4)
    for tuned, base in ((16384, 71738.436200), (32768, 192144.455986), (131072, 1378414.279698)):
        assert critical_base(4096, tuned) == pytest.approx(base, rel=1e-11)
    assert small_bases(4096) == pytest.approx((2607.59, 1303.80, 651.90), abs=0.005)


def test_long_term_decay():
    decay = long_term_decay(128, 1e4, range(4096))
    for m, b in {
        0: 64,
        1: 62.09368381,
        10: 42.82002290,
        100: 30.54345470,
        1000: 10.17772813,
        4095: -4.25239181,
    }.items():
        assert float(decay[m]) == pytest.approx(b, abs=1e-8)
    assert int(decay.argmin()) == 4060
    assert float(decay.min()) == pytest.approx(-8.362928472125216, rel=1e-11)
    llama3 = long_term_decay(128, 5e5, range(8193))
    assert int(llama3.argmin()) == 8140
    assert float(llama3.min()) == pytest.approx(5.9719779705794975, rel=1e-11)
    some = long_term_decay(128, 1e4, torch.tensor([10.0, 1.0], dtype=torch.float64))
    assert torch.equal(some, decay[[10, 1]])


def test_the_bases_that_reach_are_not_an_interval():
    def reaches(first, last, length):
        inside = all(base_reaches(128, float(b), length) for b in (first, last))
        outside = any(base_reaches(128, float(b), length) for b in (first - 1, last + 1))
        return inside and not outside

    assert reaches(4294, 4330, 1024)
    assert reaches(5603, 5644, 1024)
    assert not base_reaches(128, 6018.0, 1024)
    assert base_reaches(128, 6019.0, 1024)
    assert [base_reaches(128, float(b), 4096) for b in (26952, 26954, 26972, 26974)] == [
        False,
        True,
        True,
        False,
    ]
    assert not any(base_reaches(128, float(b), 1024) for b in range(2500, 4294, 97))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: critical_dimension(0, 1e4, 8), "dim is 0; it must be above 0"),
        (lambda: critical_dimension(8, 1.0, 8), "base is 1.0; it must be above 1"),
        (lambda: critical_dimension(8, 1e4, 0), "length is 0"),
        (lambda: extrapolation_length(8, 0.5, 4), "base is 0.5"),
        (lambda: critical_base(6, 100), "length is 6; it must be above 6"),
        (lambda: critical_base(100, 3), "tuned is 3"),
        (lambda: small_bases(0), "length is 0"),
        (lambda: long_term_decay(7, 1e4, range(3)), "dim is 7; rotary pairs need an even dim"),
        (lambda: base_reaches(8, 1.0, 3), "base is 1.0"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
