"""Linear maps whose weight is stored in fewer bits, against decoders written from the formulas and
fp64 products, and products by oneDNN.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from regard.errors import ArgumentError, ArgumentTypeError
from regard.ops import onednn
from regard.ops.cpu import threads
from regard.ops.cpu.library import instruction_set
from regard.ops.stored_linear import MAX_VECTORS, _dequantize_rows, plan_linear, stored_linear
from regard.ops.stored_weights import (
    GROUPS,
    HalfWeight,
    Int4Weight,
    Int8Weight,
    StoredWeight,
    fitting_form,
)
from tests.kernels import require_kernels
from tests.rules import assert_close_rule, in_orders

require_kernels()

HAS_BYTE_DOT = instruction_set() == "x86-64-v4-bf16"
"""Whether the loops of digits run; elsewhere those in fp32 do."""

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["int8", "int4", "float16", "bfloat16"]
GROUPED = [(form, x, group) for form in FORMS[:2] for x in DTYPES for group in (None, *GROUPS)]
CASES = [*GROUPED, ("float16", torch.float32, None), ("bfloat16", torch.float32, None)]


def store(form: str, w: Tensor, group: int | None, dtype: torch.dtype) -> StoredWeight:
    if form == "int8":
        return Int8Weight.quantize(w, group=group, dtype=dtype)
    if form == "int4":
        return Int4Weight.quantize(w, group=group, dtype=dtype)
    return HalfWeight.round(w, getattr(torch, form))


def decoded(record: StoredWeight) -> Tensor:
    """The matrix in fp64, number by number from the bytes."""
    N, M = record.shape
    out = torch.empty(N, M, dtype=torch.float64)
    for i in range(N):
        for m in range(M):
            if isinstance(record, HalfWeight):
                out[i, m] = float(record.values[i, m])
            elif isinstance(record, Int8Weight):
                g = m // record.group
                out[i, m] = int(record.codes[i, m]) * float(record.scales[i, g])
            elif isinstance(record, Int4Weight):
                block, c = divmod(m, 128)
                bit = 4 * (c // 16)
                byte = int(record.codes[i, 64 * block + 4 * (c % 16) + bit // 8])
                code, g = (byte >> bit % 8) & 15, m // record.group
                zero = float(record.scales[i, 1, g])
                out[i, m] = (code - zero) * float(record.scales[i, 0, g])
    return out


@pytest.mark.full(keep=10)
@pytest.mark.parametrize("rows", [1, 3, 4, 6, MAX_VECTORS + 1])
@pytest.mark.parametrize(("form", "dtype", "group"), CASES)
@pytest.mark.parametrize("workers", [1, 3])
def test_products(
    form: str,
    dtype: torch.dtype,
    group: int | None,
    rows: int,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "thread_count", lambda: workers)
    make = torch.Generator().manual_seed(rows)
    N, M = 37, 290
    w = torch.randn(N, M, generator=make) * torch.linspace(0.01, 3, M)
    x, b = (torch.randn(s, generator=make).to(dtype) for s in ((rows, M), (N,)))
    record = store(form, w, group, dtype)
    exact = record.dequantize(torch.float64)
    assert record.layout is not None
    for bias in (None, b):
        exact_y = F.linear(x.double(), exact, None if bias is None else bias.double())
        plain = in_orders(partial(F.linear, x, exact.to(dtype), bias))
        assert_close_rule(stored_linear(x, record, bias), plain, exact_y)
    runs = plan_linear(x, record, b)
    assert runs.startswith("compiled" if rows <= MAX_VECTORS else "dequantized panels: x has 13")


@pytest.mark.parametrize("form", FORMS)
def test_the_definition_is_the_formula(form: str) -> None:
    w = torch.randn(3, 140, generator=torch.Generator().manual_seed(1))
    w[0, :64] = 0
    record = store(form, w, None if "float" in form else 32, torch.float32)
    exact = decoded(record)
    assert torch.equal(record.dequantize(torch.float64), exact)
    half = 0.5 if form == "int8" else 1.0  # a zero point is rounded, too
    if isinstance(record, (Int8Weight, Int4Weight)):
        scales = record.scales if form == "int8" else record.scales[:, 0]
        steps = scales.double().repeat_interleave(32, 1)[:, :140]
        # a code is half a step from its number; fp16 scales are rounded by 2^-11
        assert ((exact - w).abs() <= half * steps + 16 * 2**-11 * steps * 8).all()
        assert torch.equal(exact[0, :64], torch.zeros(64, dtype=torch.float64))
    assert torch.equal(record.rows(1, 3).dequantize(torch.float64), exact[1:3])
    ids = torch.tensor([[2, 0], [1, 1]])
    assert torch.equal(record.gather(ids), exact[ids].float())


@pytest.mark.full
def test_scales_of_other_dtypes_and_huge_values() -> None:
    w = torch.randn(20, 128, generator=torch.Generator().manual_seed(2))
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(3))
    for dtype in (torch.float32, torch.bfloat16):
        for record in (Int8Weight.quantize(w), Int4Weight.quantize(w)):
            changed = type(record)(record.codes, record.scales.to(dtype), 128)
            exact = F.linear(x.double(), decoded(changed))
            plain = F.linear(x, changed.dequantize())
            assert_close_rule(stored_linear(x, changed), plain, exact)
    with pytest.raises(ArgumentError, match="fp16 scales cannot represent"):
        Int8Weight.quantize(torch.full((1, 32), 1e9))
    with pytest.raises(ArgumentError, match="fp16 scales cannot represent"):
        Int4Weight.quantize(torch.full((1, 32), torch.nan))
    with pytest.raises(ArgumentError, match=r"too large for torch\.float16"):
        HalfWeight.round(torch.full((1, 32), 1e6), torch.float16)


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_vectors_and_zeros_of_4_bit_codes(dtype: torch.dtype, rows: int) -> None:
    """Zeros that are integers in 0 ... 15 are subtracted as integers; others are not."""
    make = torch.Generator().manual_seed(7)
    w, x = torch.randn(23, 300, generator=make), torch.randn(rows, 300, generator=make).to(dtype)
    record = Int4Weight.quantize(w, group=128, dtype=dtype)
    shifted, half = record.scales.clone(), record.scales.clone()
    shifted[:, 1] = torch.arange(23)[:, None].clamp(max=15)
    half[:, 1] += 0.25
    for scales in (record.scales, shifted, half):
        changed = replace(record, scales=scales)
        chosen = fitting_form("int4", dtype, scales, changed.group, 384)
        assert chosen == ("int4" if scales is half else "int4-digits")
        exact = F.linear(x.double(), decoded(changed))
        plain = F.linear(x, changed.dequantize())
        found = stored_linear(x, changed)
        assert_close_rule(found, plain, exact)
        wrong = replace(record, scales=scales.roll(1, 0))
        with pytest.raises(AssertionError):
            assert_close_rule(stored_linear(x, wrong), plain, exact)
    assert fitting_form("int4", torch.float32, record.scales, 128, 384) == "int4"
    assert fitting_form("int4", dtype, record.scales, 64, 384) == "int4"


def test_codes_that_equal_their_zero_give_nothing() -> None:
    """The sums of codes and of their zeros are subtracted exactly."""
    codes = torch.arange(16).repeat_interleave(128).view(16, 128).to(torch.uint8)
    scales = torch.full((16, 1), 0.37).half()
    record = Int4Weight.pack(codes, scales, codes[:, :1].float(), 128, torch.bfloat16)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(9)).bfloat16()
    assert torch.equal(stored_linear(x, record), torch.zeros(3, 16, dtype=torch.bfloat16))


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_vectors_and_all_8_bit_codes(dtype: torch.dtype, group: int, rows: int) -> None:
    """Every code, -128 too, is multiplied as it is, with every mantissa and sign."""
    make = torch.Generator().manual_seed(8)
    all_codes = torch.arange(-128, 128).to(torch.int8)
    codes = torch.stack([all_codes.roll(n) for n in (0, 3, 50, 77, 128, 200)])
    scales = torch.rand(6, 256 // group, generator=make).half() + 0.1
    record = Int8Weight(codes, scales, 256, dtype)
    assert fitting_form("int8", dtype, scales, group, 256) == "int8-digits"
    below_two = 2 - float(torch.finfo(dtype).eps)
    numbers = (1.0, -1.0, below_two, -below_two, below_two - 1 / 64, 100.0, 1e-5)
    for i, place in enumerate(range(0, 256, 37)):  # one number alone gives an exact product
        x = torch.zeros(1, 256, dtype=dtype)
        x[0, place] = numbers[i]
        expected = (x[0, place].double() * codes[:, place] * scales[:, place // group]).float()
        assert torch.equal(stored_linear(x, record)[0], expected.to(dtype))
    x = torch.randn(rows, 256, generator=make).to(dtype)
    exact, plain = F.linear(x.double(), decoded(record)), F.linear(x, record.dequantize())
    assert_close_rule(stored_linear(x, record), plain, exact)
    wrong = replace(record, codes=codes.roll(1, 1))
    with pytest.raises(AssertionError):
        assert_close_rule(stored_linear(x, wrong), plain, exact)
    assert fitting_form("int8", dtype, scales, 32, 96) == "int8"
    assert fitting_form("int8", torch.float32, scales, group, 256) == "int8"


def digits_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """The digits of a block of numbers, found by division, and the factor."""
    factor = 2.0 ** (int(torch.frexp(x.abs().max().double() * 1.01)[1]) - 23)
    whole, digits = torch.round(x.double() / factor), []
    for _ in range(3):
        digit = torch.remainder(whole + 128, 256) - 128
        digits.append(digit)
        whole = (whole - digit) / 256
    assert not whole.any()
    return digits[2], digits[1], digits[0], factor


@pytest.mark.full(keep=["int8-128-bfloat16", "int4-128-float16"])
@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6, 1e30])
@pytest.mark.parametrize("dtype", HALVES, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize(
    ("form", "group"), [("int8", 32), ("int8", 64), ("int8", 128), ("int4", 128)]
)
def test_numbers_beside_a_much_larger_one(
    form: str, group: int, dtype: torch.dtype, ratio: float
) -> None:
    """The largest number of a block meets codes that stand for 0, so that the others are seen."""
    make = torch.Generator().manual_seed(10)
    w, x = torch.randn(21, 256, generator=make), torch.randn(3, 256, generator=make)
    w[:, 70] = 0
    x = (x / min(ratio, 100) if dtype == torch.float16 else x).to(dtype)
    alone = x.clone()
    x[1, 70] = min(ratio, 6e4) if dtype == torch.float16 else ratio
    x[2, 128:] = 0
    record = store(form, w, group, dtype)
    exact = F.linear(x.double(), decoded(record))
    assert torch.equal(exact[0], F.linear(alone.double(), decoded(record))[0])
    plain, found = F.linear(x, record.dequantize()), stored_linear(x, record)
    assert_close_rule(found, plain, exact)
    if HAS_BYTE_DOT:  # in fp32 the number of vectors changes the order of a sum
        for r in range(3):
            assert torch.equal(stored_linear(x[r : r + 1], record)[0], found[r])
    if form == "int8" and ratio == 1e4 and dtype == torch.bfloat16:
        blocks = list(zip(x[1].split(128), decoded(record).split(128, 1), strict=True))
        parts = [(digits_of(numbers), matrix) for numbers, matrix in blocks]
        sums = [
            sum((f * (a * d[0] + b * d[1] + c * d[2]) @ m.T) for (*d, f), m in parts)
            for a, b, c in ((65536, 256, 1), (65536, 256, 0), (65536, 0, 1), (0, 256, 1))
        ]
        assert_close_rule(sums[0].to(dtype)[None], plain[1:2], exact[1:2])
        sums.append(
            exact[1]
            + sum((128 * record.scales[:, :1] * n.double().sum()).sum(1) for n, _ in blocks)
        )
        for n, wrong in enumerate(sums[1:]):
            with pytest.raises(AssertionError):
                assert_close_rule(wrong.to(dtype)[None], plain[1:2], exact[1:2], what=str(n))


def fp32_vectors(kind: str) -> Tensor:
    """Vectors [3, 300] whose numbers are of one size, of very different sizes, or hard to scale."""
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(13))
    if kind == "one larger":
        x[0, 70], x[1, 70], x[2, [70, 200]] = 30.0, -1e4, 1e30
    if kind == "near a power of two":
        x = torch.sign(x) * (2.0 - 2.0**-23 * torch.arange(300))
    if kind == "tails":
        x = x**9
    return x


@pytest.mark.full(keep=["one larger", "near a power of two-32"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", ["one size", "one larger", "near a power of two", "tails"])
def test_fp32_vectors_and_4_bit_codes(kind: str, group: int) -> None:
    """The largest numbers of a block meet codes that stand for 0, so that the others are seen."""
    w = torch.randn(21, 300, generator=torch.Generator().manual_seed(14))
    w[:, [70, 200]] = 0
    record, x = Int4Weight.quantize(w, group=group), fp32_vectors(kind)
    exact, plain = F.linear(x.double(), decoded(record)), F.linear(x, record.dequantize())
    found = stored_linear(x, record)
    assert_close_rule(found, plain, exact)
    if kind == "one larger":
        assert float(found.abs().max()) < 1e3
    for r in range(3):
        assert torch.equal(stored_linear(x[r : r + 1], record)[0], found[r])
    for power in (-120.0, -70.0, 90.0):  # in each size of the numbers
        y = stored_linear(x * 2.0**power, record) * 2.0**-power
        if kind != "one larger":
            assert_close_rule(y, plain, exact)
    moved = replace(record, scales=record.scales.roll(1, -1))
    with pytest.raises(AssertionError):
        assert_close_rule(stored_linear(x, moved), plain, exact)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_numbers_that_are_not_finite_stay_in_their_vector(form: str, bad: float) -> None:
    make = torch.Generator().manual_seed(11)
    w, x = torch.randn(9, 256, generator=make) + 4, torch.randn(4, 256, generator=make).bfloat16()
    record = store(form, w, 128, torch.bfloat16)
    before = stored_linear(x, record)
    x[2, 131] = bad
    found = stored_linear(x, record)
    assert torch.equal(found[[0, 1, 3]], before[[0, 1, 3]])
    assert torch.equal(found[2].isnan(), torch.full((9,), bool(torch.tensor(bad).isnan())))
    assert not found[2].isfinite().any()
    x[2] = 0
    assert torch.equal(stored_linear(x, record)[2], torch.zeros(9, dtype=torch.bfloat16))


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("scales", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "group"), [("int8", 32), ("int8", 128), ("int4", 64)])
def test_many_vectors_meet_the_numbers_of_the_definition(
    form: str, group: int, dtype: torch.dtype, scales: torch.dtype
) -> None:
    """The product with the identity gives all bits of the matrix, NaN and large numbers too."""
    w = torch.randn(21, 290, generator=torch.Generator().manual_seed(12)) * 100
    w[3] = 0
    record = store(form, w, group, dtype)
    stored = record.scales.to(scales)  # type: ignore[attr-defined]
    stored[5], stored[6, ..., 1] = torch.nan, torch.finfo(scales).max / 128
    record = replace(record, scales=stored)
    x = torch.eye(290).to(dtype)
    finite = [n for n in range(21) if n not in {5, 6}]
    found, expected = stored_linear(x, record).T, record.dequantize()
    assert torch.equal(found[finite], expected[finite])
    assert found[5].isnan().all()
    for n in (5, 6):  # without products, as 0 times infinity is NaN
        one = _dequantize_rows(record, n, n + 1, dtype)
        assert torch.equal(one.nan_to_num(-1), expected[n : n + 1].nan_to_num(-1))
    wrong = replace(record, scales=stored.roll(1, -1))
    assert not torch.equal(stored_linear(x, wrong).T[finite], expected[finite])


def test_a_wrong_layout_is_noticed() -> None:
    """Negative controls: nibbles in another order, and scales of the next group, fail the rule."""
    w = torch.randn(16, 256, generator=torch.Generator().manual_seed(4))
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(5))
    record = Int4Weight.quantize(w, group=64)
    plain, exact = F.linear(x, record.dequantize()), F.linear(x.double(), decoded(record))
    swapped = ((record.codes & 15) << 4) | (record.codes >> 4)
    wrong = [
        Int4Weight(swapped, record.scales, 256),
        Int4Weight(record.codes, record.scales.roll(1, -1), 256),
    ]
    assert_close_rule(stored_linear(x, record), plain, exact)
    for other in wrong:
        with pytest.raises(AssertionError):
            assert_close_rule(stored_linear(x, other), plain, exact)


def test_where_compiled_code_does_not_run() -> None:
    record = Int8Weight.quantize(torch.randn(8, 64))
    x = torch.randn(1, 64)
    assert plan_linear(x, record) == "compiled int8"
    learned = x.clone().requires_grad_()
    assert "gradient" in plan_linear(learned, record)
    stored_linear(learned, record).sum().backward()
    assert torch.allclose(learned.grad, record.dequantize().sum(0)[None])  # type: ignore[arg-type]
    with FlopCounterMode(display=False) as counter:
        assert "dispatch mode" in plan_linear(x, record)
        stored_linear(x, record)
    assert counter.get_total_flops() == 2 * 8 * 64
    batch = torch.func.vmap(lambda row: stored_linear(row, record))(x)
    torch.testing.assert_close(batch, stored_linear(x, record))
    assert stored_linear(x[:0], record).shape == (0, 8)
    strided = record.map(lambda y: y[::2])
    assert "contiguous" in plan_linear(x, strided)
    torch.testing.assert_close(stored_linear(x, strided), stored_linear(x, record)[:, ::2])


def test_what_does_not_fit_is_refused() -> None:
    record = Int4Weight.quantize(torch.randn(8, 64))
    for x, bias, kind, words in (
        (torch.ones(1, 63), None, ArgumentError, "must be 64"),
        (torch.ones(1, 64).half(), None, ArgumentTypeError, "computes in torch.float32"),
        (torch.ones(1, 64), torch.ones(7), ArgumentError, "bias is"),
        ([1.0], None, ArgumentTypeError, "x is list"),
        (torch.ones(1, 64, device="meta"), None, ArgumentError, "on meta"),
    ):
        with pytest.raises(kind, match=words):
            stored_linear(x, record, bias)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="group is 48"):
        Int8Weight.quantize(torch.ones(1, 96), group=48)
    with pytest.raises(ArgumentTypeError, match="must be a matrix"):
        Int4Weight.quantize(torch.ones(3))
    with pytest.raises(ArgumentError, match="float16 or bfloat16"):
        HalfWeight.round(torch.ones(1, 3), torch.float64)


def test_large_matrices_are_quantized_in_panels_and_shared_by_copies() -> None:
    w = torch.randn(1 << 14, 96, generator=torch.Generator().manual_seed(6))  # several panels
    record = Int8Weight.quantize(w)
    part = Int8Weight.quantize(w[-5:])
    assert torch.equal(record.codes[-5:], part.codes)
    assert torch.equal(record.scales[-5:], part.scales)
    assert copy.deepcopy(record) is record
    assert record.bytes == w.numel() + 2 * w.numel() // 32


@pytest.mark.parametrize("shape", [(5, 33, 7), (70, 96, 300), (129, 600, 120)])
def test_onednn(shape: tuple[int, int, int]) -> None:
    R, M, N = shape
    make = torch.Generator().manual_seed(R)
    x, w, b = (torch.randn(s, generator=make) for s in ((R, M), (N, M), (N,)))
    for bias in (None, b):
        exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
        ordered = torch.zeros(R, N) if bias is None else bias.expand(R, N).clone()
        for i in range(M):  # oneDNN adds one product after the other
            ordered += x[:, i, None] * w[:, i]
        plain = [F.linear(x, w, bias), ordered]
        for run in (onednn.direct_product, onednn.converted_product):
            if run is onednn.direct_product and not onednn.has_direct_product():
                continue
            assert_close_rule(run(x, w, bias), plain, exact)
        y = onednn.onednn_linear(x[None], w, bias)
        large = R >= onednn.MIN_ROWS and w.numel() >= onednn.MIN_WEIGHTS
        if large and torch.backends.mkldnn.is_available():
            assert y is not None
            assert y.shape == (1, R, N)


def test_when_onednn_does_not_run() -> None:
    x, w = torch.randn(70, 256), torch.randn(256, 256)
    assert onednn.why_not_onednn(x, w, None) == [] or not torch.backends.mkldnn.is_available()
    for other, words in (
        (x.half(), "not float32"),
        (x[:1], "x has 1 row"),
        (x.clone().requires_grad_(), "gradient"),
        (x.to("meta"), "plain tensor"),
    ):
        assert words in onednn.why_not_onednn(other, w, None)[0]
        assert onednn.onednn_linear(other, w, None) is None
    assert "W has 65,280 weights" in onednn.why_not_onednn(x, w[:-1], None)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the context sets TF32, whose name torch deprecates
        with torch.backends.mkldnn.flags(enabled=False):
            reasons = onednn.why_not_onednn(x, w, None)
    assert reasons == ["oneDNN is disabled"]
