"""Block formats against loops over bits, and against transformers' own unpacking."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.models.checkpoint.float_quantized import look_up, unpack_fp8, unpack_mxfp4
from tests.oracles import moe as oracle

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def bytes_(*shape: int, seed: int = 0, low: int = 0, high: int = 256) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=make, dtype=torch.uint8)


def assert_same(mine: Tensor, rows: Any) -> None:
    """Bit for bit, the sign of zero too."""
    want = torch.tensor(rows, dtype=torch.float64).reshape(mine.shape)
    assert torch.equal(mine.double().nan_to_num(nan=math.pi), want.nan_to_num(nan=math.pi))
    assert torch.equal(mine.signbit()[~want.isnan()], want.signbit()[~want.isnan()])


def assert_mxfp4(blocks: Tensor, scales: Tensor, *, turned: bool = False) -> None:
    """The numbers of the format, with one sign of zero, whichever the code says."""
    mine = unpack_mxfp4(blocks, scales, turned=turned).dequantize()
    assert mine.dtype == (torch.bfloat16 if turned else torch.float32)
    flat = zip(blocks.flatten(0, -3).tolist(), scales.flatten(0, -2).tolist(), strict=True)
    want = torch.tensor([oracle.mxfp4_row(b, s) for b, s in flat], dtype=torch.float64)
    want = want.view(*blocks.shape[:-2], -1) + 0.0
    assert_same(mine.mT if turned else mine, want.tolist())


@pytest.mark.parametrize("turned", [False, True])
def test_mxfp4_is_exact(turned: bool) -> None:
    """Every byte, and scales from end to end of what the dtype holds."""
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16).repeat(3, 1, 1)
    scales = torch.stack(
        [
            bytes_(16, seed=2, low=1, high=253),
            bytes_(16, seed=3, low=1, high=253),
            torch.tensor([255, 252, 1, 2, *[127] * 12], dtype=torch.uint8),
        ]
    )
    assert_mxfp4(blocks, scales, turned=turned)
    assert int(unpack_mxfp4(blocks, scales).dequantize().isnan().sum()) == 32


def test_mxfp4_of_many_shapes_and_in_pieces() -> None:
    blocks, scales = bytes_(2, 3, 5, 16), bytes_(2, 3, 5, low=100, high=140)
    assert_mxfp4(blocks, scales)
    assert_mxfp4(blocks.transpose(0, 1), scales.transpose(0, 1))
    assert unpack_mxfp4(blocks[:0], scales[:0]).dequantize().shape == (0, 3, 160)
    values = torch.arange(16.0)
    for piece in (7, 16, 48):
        assert torch.equal(look_up(blocks, values, piece=piece), look_up(blocks, values))


def test_mxfp4_as_transformers_reads_it() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = bytes_(4, 6, 3, 16), bytes_(4, 6, 3, low=100, high=140)
    theirs = mxfp4._convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(unpack_mxfp4(blocks, scales, turned=True).dequantize(), theirs)


def test_a_wrong_order_of_nibbles_is_seen() -> None:
    blocks, scales = bytes_(1, 3, 16), bytes_(1, 3, low=120, high=130)
    mine = unpack_mxfp4(blocks, scales).dequantize()
    swapped = (blocks >> 4) | (blocks << 4)
    assert not torch.equal(unpack_mxfp4(swapped, scales).dequantize(), mine)
    assert not torch.equal(unpack_mxfp4(blocks, scales + 1).dequantize(), mine)


@pytest.mark.parametrize("shape", [(4, 4), (1, 1), (5, 7), (8, 3), (3, 9)])
def test_fp8_is_rounded_once(shape: tuple[int, int]) -> None:
    N, K = shape
    raw = bytes_(N, K, seed=N)
    scale = torch.randn(-(-N // 4), -(-K // 4), generator=torch.Generator().manual_seed(K)) * 10
    want = torch.tensor(oracle.fp8(raw.tolist(), scale.double().tolist(), 4), dtype=torch.float64)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        mine = unpack_fp8(raw.view(torch.float8_e4m3fn), scale, dtype, block=(4, 4))
        assert mine.shape == shape
        # float64 too is float32's product: the format's own
        assert_same(mine, want.float().to(dtype).double().tolist())


def test_fp8_of_every_byte_and_its_usual_block() -> None:
    raw = torch.arange(256, dtype=torch.uint8).repeat(130, 2)[:, :300]
    scale = torch.tensor([[1.0, 2.0, -0.5], [0.25, 1e-3, 7.0]])
    mine = unpack_fp8(raw.view(torch.float8_e4m3fn), scale)
    want = torch.tensor(oracle.fp8(raw.tolist(), scale.double().tolist(), 128))
    assert_same(mine, want.float().double().tolist())
    assert unpack_fp8(raw[:0].view(torch.float8_e4m3fn), torch.zeros(0, 3)).shape == (0, 300)


def test_fp8_as_transformers_reads_it() -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    raw = bytes_(256, 384).view(torch.float8_e4m3fn)
    scale = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    theirs = fp8._dequantize_fp8_weight(raw, scale, [128, 128], torch.float32)
    torch.testing.assert_close(unpack_fp8(raw, scale), theirs, rtol=0, atol=0, equal_nan=True)


def test_factors_of_other_blocks_are_seen() -> None:
    raw, scale = bytes_(8, 8, high=100).view(torch.float8_e4m3fn), torch.arange(1.0, 5.0).view(2, 2)
    want = oracle.fp8(raw.view(torch.uint8).tolist(), scale.double().tolist(), 4)
    assert_same(unpack_fp8(raw, scale, block=(4, 4)), want)
    with pytest.raises(AssertionError):
        assert_same(unpack_fp8(raw, scale.T.contiguous(), block=(4, 4)), want)
    with pytest.raises(AssertionError):
        assert_same(unpack_fp8(raw, 1 / scale, block=(4, 4)), want)


B, S, F8 = bytes_(2, 3, 16), bytes_(2, 3), torch.ones(4, 4).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: unpack_mxfp4(B[..., :8], S),
            ArgumentError,
            r"blocks are \(2, 3, 8\) and scales \(2, 3\)",
        ),
        (
            lambda: unpack_mxfp4(B, S[:, :2]),
            ArgumentError,
            r"must be \[..., G, 16\] and \[..., G\]",
        ),
        (lambda: unpack_mxfp4(B[0, 0], S[0, 0]), ArgumentError, r"blocks are \(16,\)"),
        (lambda: unpack_mxfp4(B.int(), S), ArgumentTypeError, "blocks are torch.int32; they must"),
        (lambda: unpack_mxfp4(B, S.float()), ArgumentTypeError, "scales are torch.float32"),
        (
            lambda: unpack_fp8(F8, torch.ones(1, 1), block=(0, 4)),
            ArgumentError,
            r"block is \(0, 4\)",
        ),
        (
            lambda: unpack_fp8(F8, torch.ones(2, 1), block=(4, 4)),
            ArgumentError,
            r"scales are \(2, 1\); a weight of \(4, 4\) in blocks of 4 x 4 has \(1, 1\)",
        ),
        (
            lambda: unpack_fp8(F8.float(), torch.ones(1, 1)),
            ArgumentTypeError,
            "weight is torch.float32",
        ),
        (
            lambda: unpack_fp8(F8, torch.ones(1, 1).double()),
            ArgumentTypeError,
            "scales torch.float64",
        ),
        (
            lambda: unpack_fp8(F8, torch.ones(1, 1), torch.int32),
            ArgumentTypeError,
            "dtype is torch.int32",
        ),
    ],
)
def test_it_refuses(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
