"""A decoding call as the line of numbers that a compiled entry takes (`regard.ops.jit.entries` reads it)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import Tensor

from regard import masks
from regard.biases import ALiBi
from regard.masks.intervals import FAR
from regard.ops.softmax.call import Call
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

    q: [B,G,R,D] fp32. where: positions of the keys [b,S], or [1,0] for a run from `origin` on. starts, stops: the ranges
    of positions that a query sees [b,h,t,n], or `dense` [b,h,t,S]; the others have no numbers. slopes: [H] of ALiBi, bias: any
    other [b,h,t,S]. at: positions of the queries [b,T].
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
        where, dense, bias = (x[..., slots:].contiguous() for x in (self.where, self.dense, self.bias))  # fmt: skip
        return replace(self, where=where, origin=self.origin + slots, dense=dense, bias=bias)

    def run(self, kind: str, dtype: torch.dtype, memory: Sequence[int], S: int, E: int) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attend to S keys somewhere in memory: out [B,G,R,E] and lse [B,G,R], fp32.

        kind: how keys and values lie there: "plain" or "coded"; dtype: of their numbers, or of the codes' scales.
        """
        from regard.ops.jit import entries, pool, team

        B, G, R, D = self.q.shape
        workers = min(pool.threads(), max(1, B * G * S * (D + E) // PART))
        P = _parts(B * G, S, workers)
        out, lse = torch.empty(B * G, P, R, E), torch.empty(B, G, P, R)
        cap, scale = struct.unpack("2q", struct.pack("2d", self.softcap, self.scale))
        arrays = (self.q, out, lse, self.where, self.starts, self.stops, self.dense, self.slopes, self.bias, self.at)  # fmt: skip
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
    """Positions [1,L], and where what each may see causally ends [1,1,L,1]: every layer of a model asks for the same."""
    with torch.inference_mode(mode=False):
        at = torch.arange(positions.start, positions.stop)[None]
        return at, (at[:, None, :, None] + 1).contiguous()


@lru_cache(maxsize=16)
def _ranges(mask: masks.Mask, positions: Span) -> tuple[Tensor, ...] | None:
    """The intervals of a mask that only numbers say, likewise the same for every layer."""
    with torch.inference_mode(mode=False):
        found = mask.intervals(positions)
        return None if found is None else tuple(x.contiguous() for x in found)


@lru_cache(maxsize=64)
def of_numbers(mask: masks.Mask) -> bool:
    """Whether a mask is one of ours and has no field that could change: a tensor, or a function."""
    ours = type(mask).__module__.startswith(f"{masks.__name__}.")
    return ours and all(_is_number(getattr(mask, x.name)) for x in fields(mask))


def _is_number(x: object) -> bool:
    if isinstance(x, tuple):
        return all(map(_is_number, x))
    return of_numbers(x) if isinstance(x, masks.Mask) else isinstance(x, int | None)


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
    if isinstance(call.q_positions, Span) and of_numbers(call.mask):
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
