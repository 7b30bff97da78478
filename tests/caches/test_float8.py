"""The fp8 cache: its codes against the formats' definition, its scales, what has no code, chunks
and rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard.caches import Float8
from regard.caches.float8 import Float8Vectors, LazyFloat8Tensor, from_float8, to_float8
from regard.span import Span

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FORMATS = {"e4m3": (4, 3, 448.0), "e5m2": (5, 2, 57344.0)}
"""Name -> bits of exponent, bits of fraction, the largest number."""


def value_of(code: int, format: str) -> float:
    """The number of a byte, by the definition of the format."""
    exponent_bits, fraction_bits, _ = FORMATS[format]
    sign = -1.0 if code & 128 else 1.0
    exponent, fraction = (code & 127) >> fraction_bits, code & (2**fraction_bits - 1)
    bias = 2 ** (exponent_bits - 1) - 1
    if format == "e4m3" and code & 127 == 127:
        return math.nan
    if format == "e5m2" and exponent == 31:
        return math.nan if fraction else sign * math.inf
    if not exponent:
        return sign * fraction * 2.0 ** (1 - bias - fraction_bits)
    return sign * (1 + fraction / 2**fraction_bits) * 2.0 ** (exponent - bias)


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_is_the_number_of_the_definition(format: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    right = torch.tensor([value_of(i, format) for i in range(256)], dtype=torch.float64)
    for dtype in FLOATS:
        got = from_float8(codes, torch.ones(256, 1, dtype=dtype), format).flatten().double()
        assert torch.equal(got.nan_to_num(nan=7.0), right.nan_to_num(nan=7.0))
        assert torch.equal(got.isnan(), right.isnan())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_are_rounded_to_the_nearest_code(format: str, dtype: torch.dtype) -> None:
    """The scale is the smallest power of two that fits, and no other code is nearer."""
    make = torch.Generator().manual_seed(0)
    size = torch.tensor([1e-3, 1.0, 7.0, 300.0, 1e4])[:, None]
    x = (size * torch.randn(5, 24, generator=make)).to(dtype)
    x[1, :2] = 0.0
    x[3] *= 1e-3 * torch.rand(24, generator=make).to(dtype)
    codes, scale = to_float8(x, format)
    every = sorted(v for v in (value_of(i, format) for i in range(256)) if math.isfinite(v))
    for row, got, s in zip(x.double(), from_float8(codes, scale, format), scale, strict=True):
        power, most = float(s), float(row.abs().max())
        assert math.frexp(power)[0] == 0.5
        assert most <= FORMATS[format][2] * power
        assert most > FORMATS[format][2] * power / 2 or power == torch.finfo(dtype).tiny
        for number, near in zip(row.tolist(), got.tolist(), strict=True):
            best = min(abs(number - power * v) for v in every)
            assert abs(number - near) <= best + 2 * torch.finfo(dtype).tiny
            relative = 2.0 ** -(FORMATS[format][1] + 1)
            assert abs(number - near) <= max(relative * abs(number), power * every_step(format))


def every_step(format: str) -> float:
    """Half of the smallest number."""
    return value_of(1, format) / 2


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_and_smallest_numbers(format: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    x = torch.tensor([[info.max, -info.max], [info.tiny, 0.0], [0.0, 0.0]], dtype=dtype)
    got = from_float8(*to_float8(x, format), format).double()
    assert got.isfinite().all()
    relative = 2.0 ** -(FORMATS[format][1] + 1)
    assert ((got - x.double()).abs() <= relative * x.double().abs()).all()


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_changes_nothing_else(format: str) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    bad = x.clone()
    bad[0, 1], bad[1, 2], bad[2, 3] = math.nan, math.inf, -math.inf
    got, clean = (
        from_float8(*to_float8(y, format), format) for y in (bad, x.where(bad.isfinite(), 0.0))
    )
    assert torch.equal(got[bad.isfinite()], clean[bad.isfinite()])
    assert math.isnan(got[0, 1])
    lost = [float(got[1, 2]), float(got[2, 3])]
    assert lost == [math.inf, -math.inf] if format == "e5m2" else all(map(math.isnan, lost))


def tokens(T: int, B: int = 2, d: int = 8) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    k, v = (torch.randn(B, 3, T, d, generator=make) for _ in range(2))
    return k, v


def test_bits_per_number_and_no_copy() -> None:
    """8 bits and a scale of 16 for each vector of 128; a step writes one slot."""
    k = v = torch.randn(1, 2, 64, 128).to(torch.bfloat16)
    cache = Float8()
    cache.update((k, v), Span(0, 64))
    assert 8 * cache.bytes / (2 * k.numel()) == 8 + 16 / 128
    cache.update((k[:, :, :1], v[:, :, :1]), Span(64, 1))
    before = cache._parts[0].codes.buffer.data_ptr()
    cache.update((k[:, :, :1], v[:, :, :1]), Span(65, 1))
    assert cache._parts[0].codes.buffer.data_ptr() == before


def test_memory_is_a_tensor_that_computes_its_numbers_once() -> None:
    k, v = tokens(6)
    (keys, _), _ = Float8().update((k, v), Span(0, 6))
    assert isinstance(keys, LazyFloat8Tensor)
    assert repr(keys) == "LazyFloat8Tensor((2, 3, 6, 8), torch.float32, stored as e4m3)"
    assert keys.float8 is not None
    numbers = keys + 0
    assert keys.float8 is None
    assert "computed" in repr(keys)
    assert type(numbers) is Tensor
    assert torch.equal(numbers, from_float8(*to_float8(k), "e4m3"))


def test_attention_reads_what_is_stored() -> None:
    """Against attention over the numbers that codes stand for; a cache in full precision is far."""
    k, v = tokens(20)
    q = torch.randn(2, 3, 1, 8, generator=torch.Generator().manual_seed(2))
    memory, _ = Float8().update((k, v), Span(0, 20))
    stored = [from_float8(*to_float8(x), "e4m3") for x in (k, v)]
    right = regard.attend(q, *stored)
    assert torch.equal(regard.attend(q, *memory), right)
    assert float((regard.attend(q, k, v) - right).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: Float8("e3m4"), regard.ArgumentError, "format is 'e3m4'; it must be e4m3 or e5m2"),
        (
            lambda: Float8().update((torch.zeros(1, 1, 2, 4).long(),), Span(0, 2)),
            regard.ArgumentTypeError,
            "memory 0 is torch.int64; only floating dtypes can be stored as fp8",
        ),
        (
            lambda: Float8().update((torch.zeros(1, 1, 2, 0),), Span(0, 2)),
            regard.ArgumentError,
            r"memory 0 is \(1, 1, 2, 0\), of which no vector has a scale",
        ),
        (
            lambda: Float8().update((torch.zeros(1, 1, 2, 4, requires_grad=True),), Span(0, 2)),
            regard.ArgumentError,
            "memory 0 requires a gradient, which fp8 does not have",
        ),
        (
            lambda: LazyFloat8Tensor.of(
                Float8Vectors(torch.zeros(1, 1, 2, 4).byte(), torch.ones(1, 1, 2, 2), "e4m3")
            ),
            regard.ArgumentError,
            r"codes of the memory are \(1, 1, 2, 4\) with scales \(1, 1, 2, 2\); codes must be",
        ),
        (
            lambda: LazyFloat8Tensor.of(
                Float8Vectors(torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 1), "e4m3")
            ),
            regard.ArgumentError,
            "codes of the memory are torch.float32 with scales torch.float32; codes must be",
        ),
        (
            lambda: LazyFloat8Tensor.of(
                Float8Vectors(
                    torch.zeros(1, 1, 2, 4).byte(), torch.ones(1, 1, 2, 1, device="meta"), "e4m3"
                )
            ),
            regard.ArgumentError,
            "codes of the memory are on cpu, and their scales on meta; move them",
        ),
        (
            lambda: Float8().fill(
                {"codes.0": torch.zeros(1, 1, 2, 4).byte(), "positions": Span(0, 2)}
            ),
            regard.ArgumentError,
            r"contents have codes \[\(1, 1, 2, 4\)\] and scales \[\] for 2 slots; there must",
        ),
    ],
)
def test_errors(wrong: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wrong()


def test_a_refused_update_changes_nothing() -> None:
    k, v = tokens(3)
    cache = Float8()
    cache.update((k, v), Span(0, 3))
    with pytest.raises(regard.ArgumentError, match="does not fit the contents of the cache"):
        cache.update((k.half(), v), Span(3, 3))
    assert len(cache) == 3
