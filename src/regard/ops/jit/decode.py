"""The first door of the compiled CPU kernels: decoding, a few queries against many keys.

`DecodeArgs` holds what a call asks, as contiguous tensors; `decode` reads keys and values of any
strides, and `decode_quantised` those that a cache keeps in codes. Each packs a record
(`regard.ops.jit.records`), takes the entry of the dtype (`decode_loops`, `decode_quantised`) and
lets torch's threads run it (`openmp`); `join_parts` joins what both gave. Compiled code checks
nothing: the caller has checked sizes, dtypes and devices. Numba is imported when the first call
comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from regard.ops.jit import openmp
from regard.ops.jit.records import DECODE, DECODE_QUANTISED, Record

TILE = 64
"""Keys of a tile, as in `decode_loops`."""

PART = 1 << 17
"""Numbers of keys and values that are worth a thread."""


@dataclass(frozen=True, eq=False)
class DecodeArgs:
    """What the queries are, what each sees, and what is added to its scores; tensors are
    contiguous.

    Attributes:
        q: [B,G,R,D] fp32, R = H/G * T: row r is query r % T of head g H/G + r // T.
        scale: of the scores.
        T: queries.
        k_positions: of the keys [b,S], or [1,0] for a run from `origin` on.
        origin: the position of key 0 of such a run.
        starts, stops: the ranges of positions that a query sees [b,h,t,n], or nothing.
        visible: in place of them, which keys it sees [b,h,t,S], or [...,0].
        softcap: 0 is none.
        symmetric: whether ALiBi is.
        slopes: [H] of ALiBi, or [0].
        bias: any other one [b,h,t,S], or [...,0].
        q_positions: of the queries [b,T].
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

    def behind(self, slots: int) -> DecodeArgs:
        """The same for the keys behind so many slots."""
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
    """Codes of a run of slots, and what each group of them means: x = zero + code * scale."""

    @property
    def codes(self) -> Tensor:
        """uint8 [B,G,R,lines,bytes], several codes to a byte, the first in its lowest bits."""

    @property
    def scale(self) -> Tensor:
        """[B,G,R,lines,1], in the dtype of the numbers."""

    @property
    def zero(self) -> Tensor:
        """What the code 0 means, in the shape of the scale."""


class QuantizedSlots(Protocol):
    """What a quantised cache gives beside its numbers: older slots in codes, and recent ones."""

    @property
    def groups(self) -> QuantizedCodes:
        """The codes."""

    @property
    def axis(self) -> str:
        """Which numbers share a scale: of one "channel", or of one "token"."""

    @property
    def bits(self) -> int:
        """The bits of a code: 8, 4 or 2."""

    @property
    def recent(self) -> Tensor:
        """The recent slots [B,G,l,d], as they came."""


class QuantizedSegment(NamedTuple):
    """Keys and values in codes, and what stands behind them.

    Attributes:
        k, v: where they lie, as a `records.Coded` field takes it.
        dtype: of the scales.
        slots: how many are in codes.
        recent: keys and values of the slots behind them.
        owners: what must live as long as k and v are used.
    """

    k: tuple[int, ...]
    v: tuple[int, ...]
    dtype: torch.dtype
    slots: int
    recent: tuple[Tensor, Tensor]
    owners: tuple[Tensor, ...]


def quantized_segment(k: Tensor, v: Tensor) -> QuantizedSegment | None:
    """The older slots of keys with a scale per channel and values with one per token; None for any
    other tensors.
    """
    keys: QuantizedSlots | None = getattr(k, "coded", None)
    values: QuantizedSlots | None = getattr(v, "coded", None)
    if keys is None or values is None or keys.axis != "channel" or values.axis != "token":
        return None
    if keys.groups.scale.dtype != values.groups.scale.dtype:
        return None
    slots = k.shape[2] - keys.recent.shape[2]
    if slots != v.shape[2] - values.recent.shape[2]:  # one loop over codes reads both
        return None
    (of_k, owners), (of_v, more) = _code_memory(keys), _code_memory(values)
    recent = keys.recent, values.recent
    return QuantizedSegment(of_k, of_v, keys.groups.scale.dtype, slots, recent, (*owners, *more))


def _code_memory(x: QuantizedSlots) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """The numbers of a `records.Coded` field, and the tensors that they are of."""
    codes, scale, zero = x.groups.codes, x.groups.scale, x.groups.zero
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    if zero.stride() != scale.stride():  # filled in by hand
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
    """Attend to keys [B,G,S,D] and values [B,G,S,E]: out [B,G,R,E] and lse [B,G,R], fp32.

    Neither is copied, whatever its strides, if its last dimension is contiguous.
    """
    (k, of_k), (v, of_v) = strided(k), strided(v)
    return _run(args, DECODE, _plain(), k.dtype, (of_k, of_v), k.shape[2], v.shape[3])


def strided(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A tensor [B,G,S,d], copied only if its last dimension is not contiguous, and the numbers of
    its `records.Strided` field.
    """
    x = x.detach()
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        x = x.contiguous()
    return x, (x.data_ptr(), *x.stride()[:3])


def parts(heads: int, S: int, workers: int) -> int:
    """Into how many parts the keys of each of so many heads are split: every worker has some tasks,
    and a part some tiles.

    >>> parts(2, 4485, 5), parts(2, 300, 5)
    (17, 1)
    """
    return max(1, min(-(-8 * workers // heads), S // (4 * TILE)))


def decode_quantised(args: DecodeArgs, segment: QuantizedSegment, E: int) -> tuple[Tensor, Tensor]:
    """The same for the slots of a segment that are in codes; E: the dimension of the values."""
    fields = segment.k, segment.v
    return _run(args, DECODE_QUANTISED, _quantised(), segment.dtype, fields, segment.slots, E)


def _run(
    args: DecodeArgs,
    record: Record,
    entry: Callable[[torch.dtype], int],
    dtype: torch.dtype,
    memory: tuple[Sequence[int], Sequence[int]],
    S: int,
    E: int,
) -> tuple[Tensor, Tensor]:
    """Pack the record, run the entry in as many threads as pay, and give out and lse."""
    B, G, R, D = args.q.shape
    workers = min(openmp.threads(), max(1, B * G * S * (D + E) // PART))
    P = parts(B * G, S, workers) if workers > 1 else 1
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
    openmp.run(entry(dtype), packed, workers)
    return out[:, 0].view(B, G, R, E), lse[:, :, 0]


def join_parts(outs: Iterable[Tensor], lses: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Two or more parts out [B,G,R,E] and lse [B,G,R] as one."""
    from regard.ops.jit.decode_loops import join

    out, lse = torch.stack(list(outs), 2), torch.stack(list(lses), 2)
    join(out.numpy(), lse.numpy())
    return out[:, :, 0], lse[:, :, 0]


@cache
def _plain() -> Callable[[torch.dtype], int]:
    from regard.ops.jit import decode_loops

    return decode_loops.entry


@cache
def _quantised() -> Callable[[torch.dtype], int]:
    from regard.ops.jit import decode_quantised

    return decode_quantised.entry
