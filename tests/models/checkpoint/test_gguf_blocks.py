"""The block formats of GGUF files against plain loops in fp64, and their stored weights."""

from __future__ import annotations

import pytest
import torch

from regard.models.checkpoint.gguf_blocks import RECORD_FORMS, dequantize_gguf, gguf_record
from regard.ops.stored_linear import stored_linear
from tests.models.checkpoint import gguf_writer as gguf

KINDS = sorted(gguf.BLOCK)
# a value is a product or a difference of two products, rounded to fp32 once or three times
ROUNDINGS = {"Q4_0": 2, "Q4_1": 2, "Q5_0": 1, "Q5_1": 2, "Q8_0": 1, "Q6_K": 2, "Q4_K": 4, "Q5_K": 4}
EPS = 2.0**-24


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_a_block(kind: str) -> None:
    raw = gguf.random_blocks(kind, 6, 512)
    wanted = gguf.numbers_of(kind, raw)
    values = dequantize_gguf(kind, torch.from_numpy(raw))
    assert values.dtype == torch.float32
    assert values.shape == (6, 512)
    bound = ROUNDINGS[kind] * EPS * wanted.abs().max()
    assert (values.double() - wanted).abs().max() <= bound
    assert wanted.std() > 0.05  # the bound is not met by numbers that are all near zero


@pytest.mark.parametrize("kind", sorted(RECORD_FORMS))
def test_a_record_has_the_same_numbers(kind: str) -> None:
    raw = torch.from_numpy(gguf.random_blocks(kind, 40, 512))
    wanted = gguf.numbers_of(kind, raw)
    record = gguf_record(kind, raw, torch.float32)
    assert record.form == RECORD_FORMS[kind]
    # a scale and a zero point in fp32 cost as many roundings again
    bound = 2 * ROUNDINGS[kind] * EPS * wanted.abs().max()
    assert (record.dequantize().double() - wanted).abs().max() <= bound
    bits = {"Q8_0": 8.5, "Q5_0": 8.5, "Q4_0": 5.0, "Q4_1": 6.0, "Q4_K": 6.0}[kind]
    assert record.bytes * 8 / wanted.numel() == bits
    x = torch.randn(1, 512, generator=torch.Generator().manual_seed(0))
    y = stored_linear(x, record)
    plain = x @ wanted.float().T
    exact = x.double() @ wanted.T
    torch.testing.assert_close(y.double(), exact, atol=1e-4, rtol=1e-4)
    assert (plain - exact).abs().max() < 1e-3


@pytest.mark.parametrize("kind, place, kept", [("Q4_K", 4, 0b11000000), ("Q4_1", slice(2), 0)])
def test_a_group_without_a_scale_is_constant(kind: str, place: int | slice, kept: int) -> None:
    raw = gguf.random_blocks(kind, 2, 256)
    raw[:, place] &= kept  # the factor of group 0
    wanted = gguf.numbers_of(kind, raw)
    assert wanted[:, :32].std(1).max() == 0
    record = gguf_record(kind, torch.from_numpy(raw), torch.float32)
    torch.testing.assert_close(record.dequantize().double(), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_another_layout_would_be_far(kind: str) -> None:
    """The comparison notices two codes that changed places."""
    raw = gguf.random_blocks(kind, 1, 256)
    wanted = gguf.numbers_of(kind, raw)
    place = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8, "Q8_0": 2, "Q4_K": 16, "Q5_K": 48}
    raw[0, place.get(kind, 0)] ^= 0x11
    changed = dequantize_gguf(kind, torch.from_numpy(raw)).double()
    assert (changed - wanted).abs().max() > 1e-3 * wanted.abs().max()
    assert int((changed != wanted.float()).sum()) <= 4


def test_plain_formats_keep_their_dtype() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    for kind, dtype in (
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
    ):
        raw = torch.frombuffer(bytearray(gguf.encode(kind, x)), dtype=torch.uint8)
        values = dequantize_gguf(kind, raw.view(3, -1))
        assert values.dtype == dtype
        assert torch.equal(values, x.to(dtype))
