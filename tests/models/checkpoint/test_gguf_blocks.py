"""The block formats of GGUF files against plain loops in fp64, and their stored weights, those of
other formats against the numbers of the library.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from regard.files.gguf_files import block_formats
from regard.models.checkpoint.gguf_blocks import (
    RECORD_FORMS,
    dequantize_gguf,
    gguf_record,
)
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
    values = torch.from_numpy(dequantize_gguf(kind, raw))
    assert values.dtype == torch.float32
    assert values.shape == (6, 512)
    bound = ROUNDINGS[kind] * EPS * wanted.abs().max()
    assert (values.double() - wanted).abs().max() <= bound
    assert wanted.std() > 0.05  # the bound is not met by numbers that are all near zero


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_0", "Q4_1", "Q4_K"])
def test_a_record_has_the_same_numbers(kind: str) -> None:
    raw = gguf.random_blocks(kind, 40, 512)
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
    record = gguf_record(kind, raw, torch.float32)
    torch.testing.assert_close(record.dequantize().double(), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_another_layout_would_be_far(kind: str) -> None:
    """The comparison notices two codes that changed places."""
    raw = gguf.random_blocks(kind, 1, 256)
    wanted = gguf.numbers_of(kind, raw)
    place = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8, "Q8_0": 2, "Q4_K": 16, "Q5_K": 48}
    raw[0, place.get(kind, 0)] ^= 0x11
    changed = torch.from_numpy(dequantize_gguf(kind, raw)).double()
    assert (changed - wanted).abs().max() > 1e-3 * wanted.abs().max()
    assert int((changed != wanted.float()).sum()) <= 4


FACTORS = {"TQ1_0": 52, "TQ2_0": 64}
"""Format -> the place of the factor of a block; 0 in the others."""


@pytest.mark.parametrize("kind", sorted(RECORD_FORMS.keys() - gguf.BLOCK.keys()))
def test_codes_of_other_formats_have_the_numbers_of_the_library(kind: str) -> None:
    number = GGMLQuantizationType[kind]
    chooser = np.random.default_rng(0)
    blocks = chooser.integers(0, 256, (9, 5, GGML_QUANT_SIZES[number][1]), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = chooser.integers(100, 140, (9, 5))
    else:
        place = FACTORS.get(kind, 0)
        factors = chooser.normal(size=(9, 5)).astype(np.float16)
        blocks[..., place : place + 2] = factors[..., None].view(np.uint8)
    raw = blocks.reshape(9, -1)
    wanted = dequantize(raw, number)
    record = gguf_record(kind, raw, torch.float32)
    assert record.form == "int8"
    assert np.array_equal(record.dequantize().numpy(), wanted)
    assert np.unique(wanted).size > 60
    raw[0, -1] ^= 255  # a changed byte changes the numbers
    assert not np.array_equal(gguf_record(kind, raw, torch.float32).dequantize().numpy(), wanted)


def test_every_format_of_the_library_is_read_or_named() -> None:
    read = {block.name for block in block_formats().values()}
    assert {kind.name for kind in GGML_QUANT_SIZES} - read == {
        *("Q1_0", "Q8_1", "Q8_K", "I8", "I16", "I64", "F64")
    }
    for block in block_formats().values():
        if block.elements > 1:
            raw = np.ones((2, 3 * block.bytes), np.uint8)
            assert dequantize_gguf(block.name, raw).shape == (2, 3 * block.elements)
