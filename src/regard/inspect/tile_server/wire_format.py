"""Tiles as bytes: a header of 32 bytes, the peaks, the visible keys of each block row, and planes
of fp16 numbers, all little-endian.

    header   "RGT1", u8 kind (0 empty, 1 tile), u8 level, u16 rows, u16 columns, u8 number of peaks,
             u8 planes (2, or 3 with the visible share), u32 sampled rows of a block row,
             f32 computed share, f32 factor of mass, f32 factor of max, u32 bytes that follow
    peaks    u32 row, u32 column, f32 weight, f32 keys that the row sees, of each
    keys     f32 for each block row
    planes   fp16: mass x factor, max x factor, visible share; a number below 0 is a masked block

A factor is the power of two that brings the largest number of a plane near the largest fp16 number:
weights at 131,072 keys are about 7.6e-6, where fp16 without a factor has few digits left.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from torch import Tensor

from regard.inspect.tile_server.exact_tiles import TileData

HEADER = struct.Struct("<4sBBHHBBIfffI")
MAGIC = b"RGT1"
LARGEST = 32768.0
"""The size to which the largest number of a plane is brought at most."""


def encode_tile(tile: TileData | None, level: int) -> bytes:
    """Return a tile as bytes; None is a tile in which the mask allows no pair.

    Args:
        tile: the tile.
        level: its level.

    >>> len(encode_tile(None, 3))
    32
    """
    if tile is None:
        return HEADER.pack(MAGIC, 0, level, 0, 0, 0, 0, 0, 1.0, 1.0, 1.0, 0)
    mass, mass_factor = _plane(tile.mass)
    most, max_factor = _plane(tile.max)
    peaks = b"".join(struct.pack("<IIff", *peak) for peak in tile.peaks)
    body = peaks + tile.keys.numpy().astype("<f4").tobytes() + mass + most
    planes = 2
    if tile.visible is not None:
        planes = 3
        body += tile.visible.numpy().astype("<f2").tobytes()
    rows, columns = tile.mass.shape
    head = HEADER.pack(
        MAGIC,
        1,
        level,
        rows,
        columns,
        len(tile.peaks),
        planes,
        tile.sampled,
        tile.computed,
        mass_factor,
        max_factor,
        len(body),
    )
    return head + body


def encode_weights(weights: Tensor) -> bytes:
    """Return the weights of a row or a column in the same form: one block row, one plane.

    Args:
        weights: `[n]`; -1 where masked.
    """
    plane, factor = _plane(weights.float())
    n = len(weights)
    head = HEADER.pack(MAGIC, 2, 0, 1, min(n, 65535), 0, 1, 0, 1.0, factor, factor, len(plane))
    return head + plane


def _plane(x: Tensor) -> tuple[bytes, float]:
    """Return numbers as fp16 times a factor, and the factor."""
    finite = x[x.isfinite()]
    most = float(finite.max()) if finite.numel() else 1.0
    exponent = math.floor(math.log2(LARGEST / most)) if most > 0 else 0
    factor = 2.0 ** min(max(exponent, -100), 100)
    scaled = torch.where(x < 0, -1.0, x * factor)
    return scaled.numpy().astype(np.dtype("<f2")).tobytes(), factor
