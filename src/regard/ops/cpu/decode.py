"""Decoding on a CPU: attention of a few queries to many keys.

`DecodeArgs` holds the arguments as contiguous tensors. `decode` attends to keys and values in full
precision, of any strides; `decode_quantized` attends to keys and values that a cache stores as
codes. `join_splits` joins the results of the two functions, and `apply_sinks` adds attention sinks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.cpu import launch, threads
from regard.ops.cpu.arguments import struct_layout
from regard.ops.cpu.library import DTYPES, entry
from regard.ops.stored_slots import QuantizedSlots, coded_memory

TILE_KEYS = 64
"""A multiple of the number of keys in a tile, `kTile` of `csrc/decode.cpp`."""

ELEMENTS_PER_THREAD = 1 << 17
"""The number of elements of keys and values from which on a thread saves more than it costs."""


@dataclass(frozen=True, eq=False)
class DecodeArgs:
    """The arguments of decoding except keys and values: the queries, which keys each query sees,
    and the terms that are added to the scores. All tensors are contiguous; the struct `Decode` of
    `csrc/arguments.h` says what each of them is, and its shape.
    """

    q: Tensor
    scale: float
    T: int
    k_positions: Tensor
    origin: int
    starts: Tensor
    stops: Tensor
    visible: Tensor
    softcap: float
    symmetric: bool
    slopes: Tensor
    bias: Tensor
    q_positions: Tensor

    def after_slots(self, slots: int) -> DecodeArgs:
        """Return the arguments for all keys except the first `slots` ones."""
        rest = {x: getattr(self, x)[..., slots:] for x in ("k_positions", "visible", "bias")}
        rest = {name: x.contiguous() for name, x in rest.items()}
        return replace(self, origin=self.origin + slots, **rest)


class QuantizedSegment(NamedTuple):
    """The keys and values of a quantized cache, as compiled code reads them: the slots that are
    stored as codes, and the recent slots that follow them.

    Args:
        k: the codes of the keys: addresses, strides and sizes, as a field `Quantized` takes them.
        v: the same for the values.
        dtype: the dtype of the scales.
        slots: the number of slots that are stored as codes.
        recent: keys and values of the slots after them, in full precision.
        owners: the tensors that must live as long as `k` and `v` are used.
    """

    k: tuple[int, ...]
    v: tuple[int, ...]
    dtype: torch.dtype
    slots: int
    recent: tuple[Tensor, Tensor]
    owners: Sequence[Tensor]


def quantized_segment(k: Tensor, v: Tensor) -> QuantizedSegment | None:
    """Return the slots of a quantized cache that are stored as codes, if compiled code supports
    them.

    Args:
        k: the keys `[B, G, S, D]` that a cache returned.
        v: the values `[B, G, S, E]` that a cache returned.

    Returns:
        The segment, or None if k and v are not from a quantized cache, or if their format is not
        supported: keys must have one scale per channel, values one per token.
    """
    coded = coded_memory(k, v)
    if coded is None:
        return None
    keys, values, slots = coded
    if keys.groups.scale.dtype not in DTYPES:
        return None
    parts: list[tuple[int, ...]] = []
    owners: list[Tensor] = []
    for x in (keys, values):
        codes, scale, zero = x.groups.codes, x.groups.scale, x.groups.zero
        if not is_readable(x):
            codes, scale, zero = codes.contiguous(), scale.contiguous(), zero.contiguous()
        parts.append(quantized_numbers(codes, scale, zero, x.bits))
        owners += codes, scale, zero
    dtype, recent = keys.groups.scale.dtype, (keys.recent, values.recent)
    return QuantizedSegment(parts[0], parts[1], dtype, slots, recent, owners)


def is_readable(x: QuantizedSlots) -> bool:
    """Return whether compiled code can read codes where they are: their last dimension is
    contiguous, and the strides of scales and zeros are equal.
    """
    groups = x.groups
    return groups.codes.stride(-1) == 1 and groups.zero.stride() == groups.scale.stride()


def quantized_numbers(codes: Tensor, scale: Tensor, zero: Tensor, bits: int) -> tuple[int, ...]:
    """Return the numbers of a field `Quantized`.

    Args:
        codes, scale, zero: the codes, their scales and zeros, as in `QuantizedCodes`.
        bits: the number of bits of a code.
    """
    return (
        launch.row_address(codes, torch.uint8),
        *codes.stride()[:4],
        launch.row_address(scale, scale.dtype),
        launch.row_address(zero, scale.dtype),
        *scale.stride()[:4],
        codes.shape[-1] * 8 // bits,
        bits,
    )


def decode(args: DecodeArgs, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to keys `[B, G, S, D]` and values `[B, G, S, E]`; return the output `[B, G, R, E]` and
    the lse `[B, G, R]` in fp32.

    Keys and values of any strides are read without a copy if their last dimension is contiguous.

    Args:
        args: the queries, the mask and the terms that are added to the scores.
        k: keys `[B, G, S, D]`.
        v: values `[B, G, S, E]`.
    """
    k, v = launch.with_rows(k), launch.with_rows(v)
    fields = {"k": k, "v": v, "pages": launch.NO_POSITIONS, "page_size": 1}
    return _run_decode(
        args, "DecodePlain", entry("decode", k.dtype), k.shape[2], v.shape[3], fields
    )


def split_count(heads: int, S: int, sizes: int, workers: int) -> tuple[int, int]:
    """Return the number of threads that decode, and the number of splits into which the keys of
    each head are divided, so that each thread gets several tasks of several tiles.

    Args:
        heads: the number of key/value heads, over the batch.
        S: the number of keys.
        sizes: the size of a key and a value of a head, in numbers.
        workers: the number of threads that there are.

    >>> split_count(2, 4485, 128, 5), split_count(2, 300, 128, 5)
    ((5, 17), (1, 1))
    """
    workers = min(workers, max(1, heads * S * sizes // ELEMENTS_PER_THREAD))
    splits = min(-(-8 * workers // heads), S // (4 * TILE_KEYS))
    return workers, max(1, splits) if workers > 1 else 1


def decode_quantized(args: DecodeArgs, segment: QuantizedSegment, E: int) -> tuple[Tensor, Tensor]:
    """Attend to the slots of a segment that are stored as codes; return the output `[B, G, R, E]`
    and the lse `[B, G, R]` in fp32, where E is the dimension of the values.
    """
    function = entry("decode_quantized", segment.dtype)
    fields = {"k": segment.k, "v": segment.v}
    return _run_decode(args, "DecodeQuantized", function, segment.slots, E, fields)


def _run_decode(
    args: DecodeArgs, struct: str, function: int, S: int, E: int, fields: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Run a kernel in one or more threads, and return the output and the lse.

    Args:
        args: the queries, the mask and the terms that are added to the scores.
        struct, function: the name of the struct, and the address of the kernel.
        S: the number of keys.
        E: the dimension of the values.
        fields: the other fields of the struct.
    """
    B, G, R, D = args.q.shape
    workers, P = split_count(B * G, S, D + E, threads.thread_count())
    out = launch.empty(B * G, P, R, E, dtype=torch.float32)
    lse = launch.empty(B, G, P, R, dtype=torch.float32)
    packed = struct_layout(struct).pack(**vars(args), S=S, out=out, lse=lse, **fields)
    threads.run_entry(function, packed, workers)
    return out[:, 0].view(B, G, R, E), lse[:, :, 0]


def join_splits(outs: Iterable[Tensor], lses: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Join two or more results over disjoint keys, out `[B, G, R, E]` and lse `[B, G, R]`, into
    one, in fp64.
    """
    out, lse = torch.stack(list(outs)).double(), torch.stack(list(lses)).double()
    joined = lse.logsumexp(0)
    share = (lse - joined.masked_fill(joined == -math.inf, 0)).exp()[..., None]
    # a part that adds nothing may hold NaN
    return torch.where(share == 0, 0, out * share).sum(0).float(), joined.float()


def apply_sinks(out: Tensor, lse: Tensor, sink: Tensor, T: int) -> Tensor:
    """Return the output `[B, G, R, E]` with exp(sink) added to each softmax denominator: times
    sigmoid(lse - sink), in fp64; a row that sees no key keeps its output of 0.

    Args:
        out: the output without the sink `[B, G, R, E]` in fp32.
        lse: its log-sum-exp without the sink `[B, G, R]` in fp32.
        sink: one logit per head `[H]`.
        T: the number of queries; row r of key/value head g belongs to head g H/G + r // T.
    """
    logits = sink.detach().double().view(1, out.shape[1], -1, 1)  # [1,G,H/G,1]
    share = (lse.double().view(*lse.shape[:2], -1, T) - logits).sigmoid().view(lse.shape)
    share = share.masked_fill(lse == -math.inf, 1)
    return out * share.float()[..., None]
