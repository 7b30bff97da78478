"""Weights as bytes: a header of 24 bytes, the peaks, the visible keys of each block row, and planes
of fp32 numbers, all little-endian. Tiles, overviews, rows and columns have this one encoding.

    header   "RGT1", u8 kind (0 empty, 1 blocks, 2 a row or a column), u8 level, u16 rows,
             u16 columns, u8 number of peaks, u8 planes, u32 sampled rows of a block row,
             f32 computed share, u32 bytes that follow
    peaks    u32 row, u32 column, f32 weight, f32 keys that the row sees, of each
    keys     f32 for each block row
    planes   mass, max, visible share; at level 0, where a block is one cell, its weight alone

A number below 0 is a masked block, and NaN is a weight that is not a number.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from regard.inspect.tile_server.exact_tiles import TileData
from regard.inspect.tile_server.head_overviews import HeadOverview

HEADER = struct.Struct("<4sBBHHBBIfI")
MAGIC = b"RGT1"
EMPTY, BLOCKS, LINE = range(3)
"""Kinds of answers."""


def encode_tile(tile: TileData | None, level: int) -> bytes:
    """Return a tile as bytes; None is a tile in which the mask allows no pair.

    >>> len(encode_tile(None, 3))
    24
    """
    if tile is None:
        return HEADER.pack(MAGIC, EMPTY, level, 0, 0, 0, 0, 0, 1.0, 0)
    if level == 0:
        return _blocks(tile, level, [tile.max])
    return _blocks(tile, level, [tile.mass, tile.max, tile.visible])


def encode_overview(overview: HeadOverview) -> bytes:
    """Return an overview as bytes: its metrics as fp32, then its blocks."""
    metrics = _numbers(torch.tensor(overview.metrics))
    return metrics + _blocks(overview.blocks, 0, [overview.blocks.mass, overview.blocks.max])


def encode_weights(weights: Tensor) -> bytes:
    """Return the weights of a row or a column."""
    body = _numbers(weights)
    return HEADER.pack(MAGIC, LINE, 0, 1, min(len(weights), 65535), 0, 1, 0, 1.0, len(body)) + body


def _blocks(tile: TileData, level: int, planes: list[Tensor | None]) -> bytes:
    """Return the header, the peaks and the keys of blocks, and those planes that there are."""
    bodies = [_numbers(plane) for plane in planes if plane is not None]
    peaks = b"".join(struct.pack("<IIff", *peak) for peak in tile.peaks)
    body = b"".join([peaks, _numbers(tile.keys), *bodies])
    return (
        HEADER.pack(
            MAGIC,
            BLOCKS,
            level,
            *tile.max.shape,
            len(tile.peaks),
            len(bodies),
            tile.sampled,
            tile.computed,
            len(body),
        )
        + body
    )


def _numbers(x: Tensor) -> bytes:
    """Return the numbers of a tensor as bytes of little-endian fp32."""
    return x.numpy().astype("<f4").tobytes()
