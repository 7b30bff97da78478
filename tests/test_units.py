"""Numbers with their units: three digits, and no number that looks like the next unit's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import units


@pytest.mark.parametrize(
    ("n", "words"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (33792, "33.0 KiB"),
        (3 << 20, "3.00 MiB"),
        (1 << 30, "1.00 GiB"),
        (143771 << 20, "140 GiB"),
        (1 << 60, "1,024 PiB"),
        (None, "-"),
    ],
)
def test_memory_is_in_binary_units(n: int | None, words: str) -> None:
    assert units.size(n) == words


@pytest.mark.parametrize(
    ("n", "unit", "words"),
    [
        (0, "FLOP", "0 FLOP"),
        (999, "FLOP", "999 FLOP"),
        (999.6, "FLOP", "1.00 kFLOP"),
        (284.8e6, "FLOP", "285 MFLOP"),
        (1.513e15, "FLOP/s", "1.51 PFLOP/s"),
        (5e21, "FLOP", "5,000 EFLOP"),
        (262144, "", "262 k"),
        (None, "FLOP", "-"),
    ],
)
def test_counts_are_in_decimal_units(n: float | None, unit: str, words: str) -> None:
    assert units.count(n, unit) == words


@pytest.mark.parametrize(
    ("t", "words"),
    [
        (90.0, "90.0 s"),
        (0.9999, "1.00 s"),
        (0.0123, "12.3 ms"),
        (1.5e-3, "1.50 ms"),
        (2e-6, "2.00 µs"),
        (5e-9, "5.00 ns"),
        (5e-12, "0.00500 ns"),
        (0.0, "0 s"),
        (None, "-"),
    ],
)
def test_durations(t: float | None, words: str) -> None:
    assert units.seconds(t) == words


@pytest.mark.parametrize(
    ("n", "words"),
    [(512, "512"), (1024, "1k"), (1536, "1,536"), (3 << 20, "3M"), ((1 << 20) + 1, "1,048,577")],
)
def test_counts_of_tokens(n: int, words: str) -> None:
    assert units.tokens(n) == words


def test_a_span_has_one_unit() -> None:
    assert units.span(0.0012, 0.0345) == "1.20..34.5 ms"
    assert units.span(0.0009, 0.0011) == "0.90..1.10 ms"
    assert units.span(0.2, 2.5) == "0.20..2.50 s"


def test_bandwidth_is_decimal_and_memory_is_not() -> None:
    """A card of 80 GB of data sheet has 74.5 GiB: the two must never look alike."""
    assert units.rate(80e9) == "80.0 GB/s"
    assert units.size(80e9) == "74.5 GiB"


SCALES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}


@given(st.integers(0, 1 << 58))
def test_what_is_written_is_the_number_to_three_digits(n: int) -> None:
    number, unit = units.size(n).replace(",", "").split()
    assert float(number) * SCALES[unit] == pytest.approx(n, rel=5.1e-3)
    assert len(number.replace(".", "")) <= 4


@given(st.floats(1e-9, 1e6))
def test_durations_can_be_read_back(t: float) -> None:
    number, unit = units.seconds(t).replace(",", "").split()
    scale = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]
    assert float(number) * scale == pytest.approx(t, rel=5.1e-3)
    assert float(number) >= 1


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (0.98765, "0.9877"),
        (30.333, "30.33"),
        (1645.4, "1,645"),
        (9999.6, "10,000"),
        (147612, "147,612"),
    ],
)
def test_rates_have_no_exponent(x: float, words: str) -> None:
    assert units.per_second(x) == words
