"""Writing GGUF files in plain numbers, Q8_0 or Q4_0, for benchmarks against llama.cpp."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regard.errors import ArgumentError
from regard.files.gguf_files import MAGIC, MetadataValue, block_formats

_ALIGNMENT = 32
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK = 32
WRITTEN = (*_PLAIN, "Q8_0", "Q4_0")
"""The formats that are written."""


class TensorToWrite(NamedTuple):
    """A tensor, and the format in which it is written."""

    name: str
    values: Tensor
    format: str


def write_gguf(
    path: Path, metadata: Mapping[str, MetadataValue], tensors: Sequence[TensorToWrite]
) -> None:
    """Write a GGUF file of version 3."""
    head = MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    offset, numbers = 0, {block.name: number for number, block in block_formats().items()}
    for name, values, kind in tensors:
        size = _bytes_of(name, values, kind)
        head += _string(name) + struct.pack("<I", values.ndim)
        head += struct.pack(f"<{values.ndim}Q", *reversed(values.shape))
        head += struct.pack("<IQ", numbers[kind], offset)
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    with path.open("wb") as file:
        file.write(_padded(head))
        for _, values, kind in tensors:
            file.write(_padded(_encode(values.detach(), kind)))


def _bytes_of(name: str, values: Tensor, kind: str) -> int:
    if kind not in WRITTEN:
        raise ArgumentError(f"the format of {name!r} is {kind!r}; written are {', '.join(WRITTEN)}")
    block = next(x for x in block_formats().values() if x.name == kind)
    if not values.ndim or values.shape[-1] % block.elements:
        raise ArgumentError(
            f"{name!r} is {tuple(values.shape)}; rows of {kind} have whole blocks of "
            f"{block.elements}"
        )
    return values.numel() // block.elements * block.bytes


def _encode(values: Tensor, kind: str) -> bytes:
    if kind in _PLAIN:
        return bytes(values.to(_PLAIN[kind]).contiguous().view(torch.uint8).numpy().data)
    blocks = quantize_q8_0(values) if kind == "Q8_0" else quantize_q4_0(values)
    return bytes(blocks.numpy().data)


def quantize_q8_0(weight: Float[Tensor, "N M"]) -> UInt8[Tensor, "N bytes"]:
    """Return the blocks of a matrix: d = max |w| / 127 in fp16, codes round(w / d)."""
    x = torch.unflatten(weight.float(), 1, (-1, _BLOCK))
    d = (x.abs().amax(-1, keepdim=True) / 127).half()
    codes = (x / _safe(d)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((d.view(torch.uint8), codes.view(torch.uint8)), -1).flatten(1)


def quantize_q4_0(weight: Float[Tensor, "N M"]) -> UInt8[Tensor, "N bytes"]:
    """Return the blocks of a matrix: d = w* / -8 in fp16, where w* is the signed number of the
    largest size, and codes round(w / d) + 8 of at most 15.
    """
    x = torch.unflatten(weight.float(), 1, (-1, _BLOCK))
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    d = (largest / -8).half()
    codes = ((x / _safe(d)).round() + 8).clamp(0, 15).to(torch.uint8)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return torch.cat((d.view(torch.uint8), packed), -1).flatten(1)


def _safe(d: Tensor) -> Tensor:
    """Return factors in fp32 with 1 in place of 0, whose codes are 0 then."""
    return d.float().masked_fill(d == 0, 1.0)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: MetadataValue) -> bytes:
    """Return the type and the value of a key."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    items = [_value(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 8)
    return (
        struct.pack("<I", 9)
        + kind
        + struct.pack("<Q", len(items))
        + b"".join(item[4:] for item in items)
    )


def _padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % _ALIGNMENT)
