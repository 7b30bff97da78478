"""Decoding on a CPU: a few queries against many keys.

`DecodeArgs` holds the arguments as contiguous tensors; `decode` reads keys and values of any
strides, and `decode_quantized` reads those that a cache stores as codes. Each packs an argument
struct (`regard.ops.jit.argument_structs`), takes the entry for the dtype (`decode_loops`,
`decode_quantized_loops`) and runs it in torch's threads (`openmp`); `join_splits` joins the results
of both. Compiled code checks nothing: the caller has checked sizes, dtypes and devices. Numba is
imported at the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from regard.ops.jit import openmp
from regard.ops.jit.argument_structs import DECODE_QUANTIZED_STRUCT, DECODE_STRUCT, StructLayout

TILE_KEYS = 64
"""The number of keys in a tile, as in `decode_loops`."""

ELEMENTS_PER_THREAD = 1 << 17
"""The numbers of keys and values for which one more thread is worth its start."""


@dataclass(frozen=True, eq=False)
class DecodeArgs:
    """The arguments of decoding: the queries, the keys that each sees, and the terms that are added
    to the scores. All tensors are contiguous.

    Args:
        q: `[B, G, R, D]` fp32 with R = H/G * T: row r is query r % T of head g H/G + r // T.
        scale: the factor on q . k.
        T: the number of queries.
        k_positions: the positions of the keys `[b, S]`, or `[1, 0]` for contiguous positions from
            `origin` on.
        origin: the position of key 0 if the positions are contiguous.
        starts: the starts of the ranges of positions that a query sees, `[b, h, t, n]`, or empty.
        stops: the ends of these ranges, in the same shape.
        visible: in place of ranges, which keys a query sees, `[b, h, t, S]`, or `[..., 0]`.
        softcap: the bound on the scores; 0: none.
        symmetric: whether ALiBi is symmetric.
        slopes: the slopes of ALiBi `[H]`, or `[0]`.
        bias: any other bias `[b, h, t, S]`, or `[..., 0]`.
        q_positions: the positions of the queries `[b, T]`.
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
        """Return the arguments for the keys after the first `slots` ones."""
        k_positions, visible, bias = (
            x[..., slots:].contiguous() for x in (self.k_positions, self.visible, self.bias)
        )
        return replace(
            self,
            k_positions=k_positions,
            origin=self.origin + slots,
            visible=visible,
            bias=bias,
        )


class QuantizedCodes(Protocol):
    """Protocol of quantised slots: the codes, and for each group the numbers that decode them,
    x = zero + code * scale.
    """

    @property
    def codes(self) -> Tensor:
        """The codes, uint8 `[B, G, R, lines, bytes]`; several codes share a byte, the first in
        its lowest bits.
        """

    @property
    def scale(self) -> Tensor:
        """The scale of each group `[B, G, R, lines, 1]`, in the dtype of the numbers."""

    @property
    def zero(self) -> Tensor:
        """The number that the code 0 stands for, in the shape of the scale."""


class QuantizedSlots(Protocol):
    """Protocol of the slots of a quantised cache: earlier slots as codes, and recent ones in
    full precision.
    """

    @property
    def groups(self) -> QuantizedCodes:
        """The codes."""

    @property
    def axis(self) -> str:
        """Which numbers share a scale: those of one "channel" or those of one "token"."""

    @property
    def bits(self) -> int:
        """The number of bits of a code: 8, 4 or 2."""

    @property
    def recent(self) -> Tensor:
        """The recent slots `[B, G, l, d]` in full precision."""


class QuantizedSegment(NamedTuple):
    """Keys and values stored as codes, and the recent slots that follow them.

    Args:
        k: the codes of the keys in memory, as a `QuantizedField` takes them.
        v: the codes of the values in memory.
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
    owners: tuple[Tensor, ...]


def quantized_segment(k: Tensor, v: Tensor) -> QuantizedSegment | None:
    """Return the slots of a cache that are stored as codes, if keys have a scale per channel
    and values one per token; None for any other tensors.
    """
    keys: QuantizedSlots | None = getattr(k, "coded", None)
    values: QuantizedSlots | None = getattr(v, "coded", None)
    if keys is None or values is None or keys.axis != "channel" or values.axis != "token":
        return None
    if keys.groups.scale.dtype != values.groups.scale.dtype:
        return None
    slots = k.shape[2] - keys.recent.shape[2]
    if slots != v.shape[2] - values.recent.shape[2]:  # one loop reads the codes of both
        return None
    (k_codes, k_owners), (v_codes, v_owners) = (
        _quantized_argument(keys),
        _quantized_argument(values),
    )
    recent = keys.recent, values.recent
    return QuantizedSegment(
        k_codes, v_codes, keys.groups.scale.dtype, slots, recent, (*k_owners, *v_owners)
    )


def _quantized_argument(x: QuantizedSlots) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Return the numbers of a `QuantizedField`, and the tensors whose memory they describe."""
    codes, scale, zero = x.groups.codes, x.groups.scale, x.groups.zero
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    if zero.stride() != scale.stride():  # the strides of scale and zero must be equal
        scale, zero = scale.contiguous(), zero.contiguous()
    memory = (
        codes.data_ptr(),
        *codes.stride()[:4],
        scale.data_ptr(),
        zero.data_ptr(),
        *scale.stride()[:4],
        codes.shape[-1] * 8 // x.bits,
        x.bits,
    )
    return memory, (codes, scale, zero)


def decode(args: DecodeArgs, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to keys `[B, G, S, D]` and values `[B, G, S, E]`; return the output `[B, G, R, E]` and
    the lse `[B, G, R]` in fp32.

    Keys and values of any strides are read without a copy if their last dimension is contiguous.
    """
    (k, k_argument), (v, v_argument) = strided_argument(k), strided_argument(v)
    return _run_decode(
        args,
        DECODE_STRUCT,
        _plain_entry(),
        k.dtype,
        (k_argument, v_argument),
        k.shape[2],
        v.shape[3],
    )


def strided_argument(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a tensor `[B, G, S, d]`, copied only if its last dimension is not contiguous, and
    the numbers of its `StridedField`.
    """
    x = x.detach()
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        x = x.contiguous()
    return x, (x.data_ptr(), *x.stride()[:3])


def split_count(heads: int, S: int, workers: int) -> int:
    """Return into how many splits the keys of each head are divided, so that every worker gets
    several tasks and every split several tiles.

    Args:
        heads: the number of key/value heads, over the batch.
        S: the number of keys.
        workers: the number of threads.

    >>> split_count(2, 4485, 5), split_count(2, 300, 5)
    (17, 1)
    """
    return max(1, min(-(-8 * workers // heads), S // (4 * TILE_KEYS)))


def decode_quantized(args: DecodeArgs, segment: QuantizedSegment, E: int) -> tuple[Tensor, Tensor]:
    """Attend to the slots of a segment that are stored as codes; return the output and the lse
    as `decode` does. E is the dimension of the values.
    """
    fields = segment.k, segment.v
    return _run_decode(
        args, DECODE_QUANTIZED_STRUCT, _quantized_entry(), segment.dtype, fields, segment.slots, E
    )


def _run_decode(
    args: DecodeArgs,
    record: StructLayout,
    entry: Callable[[torch.dtype], int],
    dtype: torch.dtype,
    memory: tuple[Sequence[int], Sequence[int]],
    S: int,
    E: int,
) -> tuple[Tensor, Tensor]:
    """Pack the argument struct, run the entry in as many threads as are worth starting, and
    return the output and the lse.
    """
    B, G, R, D = args.q.shape
    workers = min(openmp.thread_count(), max(1, B * G * S * (D + E) // ELEMENTS_PER_THREAD))
    P = split_count(B * G, S, workers) if workers > 1 else 1
    out, lse = torch.empty(B * G, P, R, E), torch.empty(B, G, P, R)
    packed = record.pack(
        T=args.T,
        origin=args.origin,
        softcap=args.softcap,
        symmetric=args.symmetric,
        scale=args.scale,
        q=args.q,
        out=out,
        lse=lse,
        k_positions=args.k_positions,
        starts=args.starts,
        stops=args.stops,
        visible=args.visible,
        slopes=args.slopes,
        bias=args.bias,
        q_positions=args.q_positions,
        S=S,
        k=memory[0],
        v=memory[1],
    )
    openmp.run_entry(entry(dtype), packed, workers)
    return out[:, 0].view(B, G, R, E), lse[:, :, 0]


def join_splits(outs: Iterable[Tensor], lses: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Join two or more results, out `[B, G, R, E]` and lse `[B, G, R]`, into one."""
    from regard.ops.jit.decode_loops import join_splits

    out, lse = torch.stack(list(outs), 2), torch.stack(list(lses), 2)
    join_splits(out.numpy(), lse.numpy())
    return out[:, :, 0], lse[:, :, 0]


@cache
def _plain_entry() -> Callable[[torch.dtype], int]:
    """Import the loops for full-precision keys and values, and return the function that gives
    their entry for a dtype.
    """
    from regard.ops.jit import decode_loops as loops

    return loops.entry_address


@cache
def _quantized_entry() -> Callable[[torch.dtype], int]:
    """Import the loops for quantised keys and values, and return the function that gives their
    entry for a dtype.
    """
    from regard.ops.jit import decode_quantized_loops as loops

    return loops.entry_address
