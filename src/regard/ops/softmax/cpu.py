"""Decoding on a CPU: compiled loops that read each key and value once, in whatever dtype a cache keeps them."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import masks
from regard.biases import ALiBi
from regard.masks.intervals import FAR
from regard.ops.softmax.call import Call, Result, Work
from regard.ops.softmax.coded import older
from regard.ops.softmax.merge import with_sink
from regard.span import Positions, Span

FEW, ROWS = 16, 64
"""Up to so many queries, and rows of a key/value head (H/G * T): beyond, products of matrices are faster."""

PART = 1 << 18
"""Numbers of keys and values that are worth a thread."""

MUCH = 1 << 17
"""Numbers of keys and values from which on it is the first choice."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Cpu:
    """Split over keys and key/value heads, one pass with the online softmax, fp32 in registers; Numba compiles it once."""

    name = "cpu"
    selects = True

    def why_not(self, call: Call) -> list[str]:
        """Devices but the CPU, gradients, dropout, many queries, learned numbers, dtypes; no Numba; graphs."""
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
        if torch.compiler.is_compiling():
            reasons.append("no part of a compiled graph")
        elif not reasons and not has_numba():
            reasons.append("Numba is not installed: pip install numba")
        return reasons

    def run(self, call: Call) -> Result:
        """Parts of the keys as tasks, joined by lse; slots that are in codes still are read as codes."""
        from regard.ops.jit import decode, quantised

        (B, H, T, D), G, S, E = call.q.shape, call.G, call.S, call.E
        R = H // G * T
        at = _where(call.q_positions)
        q = call.q.float() * call.scale
        if not isinstance(call.q_positions, Span):  # a slot that holds no token may hold NaN
            q = q.masked_fill(torch.from_numpy(at < 0)[:, None, :, None], 0)
        queries = (q.reshape(B, G, R, D).numpy(), T)
        mask, extra, found, slots = _mask(call, at), _extra(call, at), [], 0
        recent = call.k, call.v
        if (held := older(call.k, call.v)) is not None:
            slots, recent = held.slots, held.recent
            given = (queries, held.keys, held.values, mask, extra)
            found.append(_parts_of(quantised.run_tasks, given, slots, E))
            mask, extra = _behind(slots, mask, extra)
        if slots < S:
            keys, values = (_memory(x, S - slots) for x in recent)
            given = (queries, keys, values, mask, extra)
            found.append(_parts_of(decode.run_tasks, given, S - slots, E))
        out, lse = (x[0] if len(x) == 1 else np.concatenate(x, 2) for x in zip(*found, strict=True))
        if out.shape[2] > 1:
            decode.join(out, lse)
        z = torch.from_numpy(out[:, :, 0]).reshape(B, H, T, E)
        sums = torch.from_numpy(lse[:, :, 0]).reshape(B, H, T)
        z = z if call.sink is None else with_sink(z, sums, call.sink)
        return Result(z.to(call.q.dtype), sums if call.wants_lse else None)

    def work(self, call: Call) -> Work:
        """Pairs of the tiles that some query of a key/value head sees; bytes of the parts."""
        B, H, G, S, R = call.B, call.H, call.G, call.S, call.H // call.G * call.T
        row = call.mask.tile_row(call.q_positions, call.k_positions, slice(0, call.T), _TILE)
        seen = (row > 0).expand(B, H, -1).unflatten(1, (G, H // G)).any(2)
        sizes = torch.full((seen.shape[-1],), _TILE)
        sizes[-1:] = S - _TILE * (len(sizes) - 1)
        return Work(R * int((seen * sizes).sum()), 4 * B * G * R * (call.E + 1))


_TILE = 64  # that of ops/jit, which imports Numba


def much(call: Call) -> bool:
    """Whether the keys and values are so many that reading them once pays."""
    return call.k.numel() + call.v.numel() >= MUCH


@cache
def has_numba() -> bool:
    """Whether Numba can be imported; nothing is imported to know it."""
    return importlib.util.find_spec("numba") is not None


def _parts_of(work: Any, given: tuple[Any, ...], S: int, E: int) -> tuple[Any, Any]:
    """The parts of S keys, by all workers that they are worth: out [B,G,P,R,E] and lse [B,G,P,R]."""
    from regard.ops.jit.pool import POOL, threads

    B, G, R, D = given[0][0].shape
    workers = min(threads(), max(1, B * G * S * (D + E) // PART))
    parts = _parts(B * G, S, workers)
    out = np.empty((B, G, parts, R, E), np.float32)
    lse = np.empty((B, G, parts, R), np.float32)
    POOL.run(lambda part, of: work(*given, out, lse, part, of), workers)
    return out, lse


def _parts(pairs: int, S: int, workers: int) -> int:
    """So many parts of the keys that every worker has some tasks, and a part some tiles."""
    if workers == 1:
        return 1
    return max(1, min(-(-8 * workers // pairs), S // (4 * _TILE)))


def _behind(slots: int, mask: tuple[Any, ...], extra: tuple[Any, ...]) -> tuple[Any, Any]:
    """Masks and biases of the keys behind so many slots."""
    (where, origin, starts, stops, dense), (cap, symmetric, slopes, bias, q) = mask, extra
    where, dense, bias = (np.ascontiguousarray(x[..., slots:]) for x in (where, dense, bias))
    return (where, origin + slots, starts, stops, dense), (cap, symmetric, slopes, bias, q)


def _memory(x: Tensor, last: int) -> tuple[Any, ...]:
    """A tensor [B,G,S,d] as its flat memory, its steps, and how its bits are meant; the last dim is contiguous."""
    from regard.ops.jit.bits import BF16, FP16

    x = x.detach()
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    steps = x.stride()
    length = 1 + sum((n - 1) * step for n, step in zip(x.shape[:-1], steps[:-1], strict=True)) + x.shape[-1] - 1  # fmt: skip
    flat = x.as_strided((length,), (1,))
    array = flat.numpy() if x.dtype == torch.float32 else flat.view(torch.uint16).numpy()
    return array, *steps[:3], FP16 if x.dtype == torch.float16 else BF16, last


_NO_POSITIONS = np.empty((1, 0), np.int64)
_NO_DENSE = np.empty((1, 1, 1, 0), np.bool_)
_NO_RANGES = np.empty((1, 1, 1, 0), np.int64)
_NO_BIAS = np.empty((1, 1, 1, 0), np.float32)
_NO_SLOPES = np.empty(0, np.float32)
_ALL = np.zeros((1, 1, 1, 1), np.int64), np.full((1, 1, 1, 1), FAR, np.int64)


def _where(positions: Positions) -> Any:
    """Positions [b,L] as an array."""
    if isinstance(positions, Span):
        return np.arange(positions.start, positions.stop)[None]
    return positions.long().contiguous().numpy()


def _mask(call: Call, q: Any) -> tuple[Any, ...]:
    """Where keys stand, and what a query sees: ranges of positions, or a dense block where a rule has none."""
    k = call.k_positions
    where, origin = (_NO_POSITIONS, k.start) if isinstance(k, Span) else (_where(k), 0)
    if isinstance(call.mask, masks.Full):
        return where, origin, *_ALL, _NO_DENSE
    if isinstance(call.mask, masks.Causal):
        return where, origin, _ALL[0], q[:, None, :, None] + 1, _NO_DENSE
    found = call.mask.intervals(torch.from_numpy(q))
    if found is None:
        dense = call.mask.block(call.q_positions, k, device="cpu")
        return where, origin, _NO_RANGES, _NO_RANGES, dense.contiguous().numpy()
    starts, stops = (x.contiguous().numpy() for x in found)
    return where, origin, starts, stops, _NO_DENSE


def _extra(call: Call, q: Any) -> tuple[Any, ...]:
    """Softcap, ALiBi's slopes, any other bias as numbers, and where the queries stand."""
    cap = np.float32(call.softcap or 0)
    if call.bias is None:
        return cap, False, _NO_SLOPES, _NO_BIAS, q
    if isinstance(call.bias, ALiBi):
        slopes = call.bias.slopes_on(torch.device("cpu"), torch.float32).detach()
        return cap, call.bias.symmetric, slopes.contiguous().numpy(), _NO_BIAS, q
    bias = call.bias.block(call.q_positions, call.k_positions, dtype=torch.float32)
    return cap, False, _NO_SLOPES, bias.detach().contiguous().numpy(), q
