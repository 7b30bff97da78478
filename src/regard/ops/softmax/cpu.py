"""The CPU decoding kernel: compiled loops that read each key and value once, also from quantised
caches.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from regard import masks
from regard.biases import ALiBi
from regard.masks.base import is_static
from regard.masks.tiling import FAR
from regard.ops.jit import has_numba
from regard.ops.softmax.call import Call, Result, Work
from regard.ops.softmax.merge import with_sink
from regard.process import is_compiling
from regard.span import Positions, Span, vacant

TILE = 64
"""As in ops/jit, which imports Numba."""

PART = 1 << 17
"""Numbers of keys and values that are worth a thread."""

MEMORY = 27
"""Numbers that say where keys and values are."""


@dataclass(frozen=True, eq=False)
class Given:
    """What a query sees, and what is added to its scores; tensors are contiguous.

    q: [B,G,R,D] fp32. where: positions of the keys [b,S], or [1,0] for a run from `origin` on.
        starts, stops: the ranges of positions that a query sees [b,h,t,n], or `dense` [b,h,t,S];
        the others have no numbers. slopes: [H] of ALiBi, bias: any other [b,h,t,S]. at: positions
        of the queries [b,T].
    """

    q: Tensor
    scale: float
    T: int
    where: Tensor
    origin: int
    starts: Tensor
    stops: Tensor
    dense: Tensor
    softcap: float
    symmetric: bool
    slopes: Tensor
    bias: Tensor
    at: Tensor

    @classmethod
    def of(cls, call: Call) -> Given:
        """A call as it is given."""
        B, H, T, D = call.q.shape
        at, k = _where(call.q_positions), call.k_positions
        where, origin = (_NO_POSITIONS, k.start) if isinstance(k, Span) else (_where(k), 0)
        q = call.q.float()
        if (empty := vacant(call.q_positions)) is not None:  # it may hold NaN
            q = q.masked_fill(empty[:, None, :, None], 0)
        q = q.reshape(B, call.G, H // call.G * T, D).contiguous()
        return cls(
            q,
            call.scale,
            T,
            where,
            origin,
            *_seen(call, at),
            call.softcap or 0.0,
            *_added(call),
            at,
        )

    def behind(self, slots: int) -> Given:
        """The same for the keys behind so many slots."""
        where, dense, bias = (
            x[..., slots:].contiguous() for x in (self.where, self.dense, self.bias)
        )
        return replace(self, where=where, origin=self.origin + slots, dense=dense, bias=bias)

    def run(
        self, kind: str, dtype: torch.dtype, memory: Sequence[int], S: int, E: int
    ) -> tuple[Tensor, Tensor]:
        """Attend to S keys somewhere in memory: out [B,G,R,E] and lse [B,G,R], fp32.

        kind: how keys and values lie there: "plain" or "coded"; dtype: of their numbers, or of the
            codes' scales.
        """
        from regard.ops.jit import entries, pool, team

        B, G, R, D = self.q.shape
        workers = min(pool.threads(), max(1, B * G * S * (D + E) // PART))
        P = _parts(B * G, S, workers)
        out, lse = torch.empty(B * G, P, R, E), torch.empty(B, G, P, R)
        cap, scale = struct.unpack("2q", struct.pack("2d", self.softcap, self.scale))
        arrays = (
            self.q,
            out,
            lse,
            self.where,
            self.starts,
            self.stops,
            self.dense,
            self.slopes,
            self.bias,
            self.at,
        )
        given = [0, self.T, self.origin, cap, int(self.symmetric), scale]
        for x in arrays:
            given += (x.data_ptr(), *(1,) * (4 - x.ndim), *x.shape)
        given += memory
        given += [0] * (MEMORY - len(memory))
        given += [S, 0]
        team.run(getattr(entries, kind)(dtype), given, workers)
        return out[:, 0].view(B, G, R, E), lse[:, :, 0]


def lines(x: Tensor) -> tuple[int, ...]:
    """Where a tensor [B,G,S,d] is, and its steps of B, G and S; the last dim is contiguous."""
    return (x.data_ptr(), *x.stride()[:3])


def near(x: Tensor) -> Tensor:
    """A tensor whose last dim is contiguous."""
    x = x.detach()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _parts(pairs: int, S: int, workers: int) -> int:
    """So many parts of the keys that every worker has some tasks, and a part some tiles."""
    if workers == 1:
        return 1
    return max(1, min(-(-8 * workers // pairs), S // (4 * TILE)))


_NO_POSITIONS = torch.empty(1, 0, dtype=torch.int64)
_NO_DENSE = torch.empty(1, 1, 1, 0, dtype=torch.bool)
_NO_RANGES = torch.empty(1, 1, 1, 0, dtype=torch.int64)
_NO_BIAS = torch.empty(1, 1, 1, 0)
_NO_SLOPES = torch.empty(0)
_FIRST, _EVERY = torch.zeros(1, 1, 1, 1, dtype=torch.int64), torch.full((1, 1, 1, 1), FAR)


def _where(positions: Positions) -> Tensor:
    """Positions [b,L]."""
    if isinstance(positions, Span):
        return _run(positions)[0]
    return positions.long().contiguous()


@lru_cache(maxsize=8)
def _run(positions: Span) -> tuple[Tensor, Tensor]:
    """Positions [1,L], and where what each may see causally ends [1,1,L,1]: every layer of a model
    asks for the same.
    """
    with torch.inference_mode(mode=False):
        at = torch.arange(positions.start, positions.stop)[None]
        return at, (at[:, None, :, None] + 1).contiguous()


@lru_cache(maxsize=16)
def _ranges(mask: masks.Mask, positions: Span) -> tuple[Tensor, ...] | None:
    """The intervals of a mask that only numbers say, likewise the same for every layer."""
    with torch.inference_mode(mode=False):
        found = mask.intervals(positions)
        return None if found is None else tuple(x.contiguous() for x in found)


def _seen(call: Call, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ranges of positions, or a dense block where a rule has none."""
    if isinstance(call.mask, masks.Full):
        empty = vacant(call.q_positions)
        stops = _EVERY if empty is None else torch.where(empty, 0, FAR)[:, None, :, None]
        return _FIRST, stops.contiguous(), _NO_DENSE
    if isinstance(call.mask, masks.Causal):
        if isinstance(call.q_positions, Span):
            return _FIRST, _run(call.q_positions)[1], _NO_DENSE
        return _FIRST, (at[:, None, :, None] + 1).contiguous(), _NO_DENSE
    if isinstance(call.q_positions, Span) and is_static(call.mask):
        found = _ranges(call.mask, call.q_positions)
    else:
        found = call.mask.intervals(call.q_positions)
    if found is None:
        dense = call.mask.block(call.q_positions, call.k_positions, device="cpu")
        return _NO_RANGES, _NO_RANGES, dense.contiguous()
    starts, stops = (x.contiguous() for x in found)
    return starts, stops, _NO_DENSE


def _added(call: Call) -> tuple[bool, Tensor, Tensor]:
    """Whether ALiBi is symmetric, its slopes, and any other bias as numbers."""
    if call.bias is None:
        return False, _NO_SLOPES, _NO_BIAS
    if isinstance(call.bias, ALiBi):
        slopes = call.bias.slopes_on(torch.device("cpu"), torch.float32).detach()
        return call.bias.symmetric, slopes.contiguous(), _NO_BIAS
    bias = call.bias.block(call.q_positions, call.k_positions, dtype=torch.float32)
    return False, _NO_SLOPES, bias.detach().contiguous()


def joined(outs: Iterable[Tensor], lses: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Two or more parts out [B,G,R,E] and lse [B,G,R] as one."""
    from regard.ops.jit import decode

    out, lse = torch.stack(list(outs), 2), torch.stack(list(lses), 2)
    decode.join(out.numpy(), lse.numpy())
    return out[:, :, 0], lse[:, :, 0]


class Made(Protocol):
    """Codes of a run of slots, and what each group of them means: x = zero + code * scale."""

    @property
    def codes(self) -> Tensor:
        """uint8 [B,G,R,lines,bytes], several codes to a byte, the first in its lowest bits."""

    @property
    def scale(self) -> Tensor:
        """[B,G,R,lines,1], in the dtype of the numbers."""

    @property
    def zero(self) -> Tensor:
        """As the scale."""


class Coded(Protocol):
    """Older slots in codes, and recent ones behind them."""

    @property
    def made(self) -> Made:
        """The codes."""

    @property
    def axis(self) -> str:
        """Which numbers share a scale: of one "channel", or of one "token"."""

    @property
    def bits(self) -> int:
        """Of a code: 8, 4 or 2."""

    @property
    def recent(self) -> Tensor:
        """The recent slots [B,G,l,d], as they came."""


class Older(NamedTuple):
    """Keys and values in codes, and what stands behind them.

    memory: as a compiled entry takes it: for keys and for values the address of their codes and its
        steps of B, G, rows and lines, the addresses of scales and zeros and their steps, columns of
        a group, bits. dtype: of the scales. slots: how many.
    held: what must live as long as the addresses are used.
    """

    memory: tuple[int, ...]
    dtype: torch.dtype
    slots: int
    recent: tuple[Tensor, Tensor]
    held: tuple[Tensor, ...]


def older(k: Tensor, v: Tensor) -> Older | None:
    """The older slots of keys with a scale per channel and values with one per token; None for any
    other tensors.
    """
    keys, values = (_coded(x, axis) for x, axis in ((k, "channel"), (v, "token")))
    if keys is None or values is None or keys.made.scale.dtype != values.made.scale.dtype:
        return None
    slots = k.shape[2] - keys.recent.shape[2]
    if (
        slots != v.shape[2] - values.recent.shape[2]
    ):  # of two memories: one loop over codes reads both
        return None
    (first, held), (second, more) = _memory(keys), _memory(values)
    recent = keys.recent, values.recent
    return Older((*first, *second), keys.made.scale.dtype, slots, recent, (*held, *more))


def _coded(x: Tensor, axis: str) -> Coded | None:
    found: Coded | None = getattr(x, "coded", None)
    return found if found is not None and found.axis == axis else None


def _memory(x: Coded) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Addresses and steps of codes, scales and zeros; and what they are of."""
    codes, scale, zero = x.made.codes, x.made.scale, x.made.zero
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    if zero.stride() != scale.stride():  # filled in by hand
        scale, zero = scale.contiguous(), zero.contiguous()
    group = codes.shape[-1] * 8 // x.bits
    at = (
        codes.data_ptr(),
        *codes.stride()[:4],
        scale.data_ptr(),
        zero.data_ptr(),
        *scale.stride()[:4],
    )
    return (*at, group, x.bits), (codes, scale, zero)


FEW, ROWS = 16, 64
"""Up to so many queries, and rows of a key/value head (H/G * T): beyond, products of matrices are
faster.
"""

MUCH = 1 << 17
"""Numbers of keys and values from which on it is the first choice."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Cpu:
    """Split over keys and key/value heads, one pass with the online softmax, fp32 in registers;
    Numba compiles it once.
    """

    name = "cpu"
    selects = True

    def why_not(self, call: Call) -> list[str]:
        """Devices but the CPU, gradients, dropout, many queries, learned numbers, dtypes; no Numba;
        graphs.
        """
        reasons = [
            *(["runs on a CPU only"] if call.q.device.type != "cpu" else []),
            *(["has no gradient"] if call.has_gradient else []),
            *(["no dropout"] if call.dropout else []),
            *([f"does not expose {sorted(call.needs)}"] if call.needs else []),
            *([f"no {call.q.dtype}"] if call.q.dtype not in _DTYPES else []),
        ]
        rows = call.H // call.G * call.T
        if call.T > FEW or rows > ROWS:
            reasons.append(
                f"{call.T} queries, {rows} rows of a key/value head; made for {FEW} and {ROWS}"
            )
        if 0 in (call.B, call.T, call.S, call.D, call.E):
            reasons.append("nothing to do")
        if is_compiling():
            reasons.append("no part of a compiled graph")
        elif not reasons and not has_numba():
            reasons.append("Numba is not installed: pip install numba")
        return reasons

    def run(self, call: Call) -> Result:
        """Parts of the keys as tasks, joined by lse; slots that are in codes still are read as
        codes.
        """
        (B, H, T, _), S, E = call.q.shape, call.S, call.E
        given, found, slots = Given.of(call), [], 0
        k, v, dtype = call.k, call.v, call.k.dtype
        if (held := older(k, v)) is not None:
            slots, (k, v) = held.slots, held.recent
            found.append(given.run("coded", held.dtype, held.memory, slots, E))
            given = given.behind(slots)
        if slots < S:
            k, v = near(k), near(v)
            found.append(given.run("plain", dtype, (*lines(k), *lines(v)), S - slots, E))
        out, lse = found[0] if len(found) == 1 else joined(*zip(*found, strict=True))
        z, sums = out.reshape(B, H, T, E), lse.reshape(B, H, T)
        z = z if call.sink is None else with_sink(z, sums, call.sink)
        return Result(z.to(call.q.dtype), sums if call.wants_lse else None)

    def work(self, call: Call) -> Work:
        """Pairs of the tiles that some query of a key/value head sees; bytes of the parts."""
        B, H, G, S, R = call.B, call.H, call.G, call.S, call.H // call.G * call.T
        row = call.mask.tile_row(call.q_positions, call.k_positions, slice(0, call.T), TILE)
        seen = torch.unflatten((row > 0).expand(B, H, -1), 1, (G, H // G)).any(2)
        sizes = torch.full((seen.shape[-1],), TILE)
        sizes[-1:] = S - TILE * (len(sizes) - 1)
        return Work(R * int((seen * sizes).sum()), 4 * B * G * R * (call.E + 1))


def much(call: Call) -> bool:
    """Whether the keys and values are so many that reading them once pays."""
    return call.k.numel() + call.v.numel() >= MUCH
