"""Decoding on a CPU: compiled loops that read each key and value once, in whatever dtype a cache keeps them."""

from __future__ import annotations

import torch

from regard.ops.jit import has_numba
from regard.ops.softmax.call import Call, Result, Work
from regard.ops.softmax.coded import older
from regard.ops.softmax.entry import TILE, Given, joined, lines, near
from regard.ops.softmax.merge import with_sink
from regard.process import is_compiling

FEW, ROWS = 16, 64
"""Up to so many queries, and rows of a key/value head (H/G * T): beyond, products of matrices are faster."""

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
        if is_compiling():
            reasons.append("no part of a compiled graph")
        elif not reasons and not has_numba():
            reasons.append("Numba is not installed: pip install numba")
        return reasons

    def run(self, call: Call) -> Result:
        """Parts of the keys as tasks, joined by lse; slots that are in codes still are read as codes."""
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
        seen = (row > 0).expand(B, H, -1).unflatten(1, (G, H // G)).any(2)
        sizes = torch.full((seen.shape[-1],), TILE)
        sizes[-1:] = S - TILE * (len(sizes) - 1)
        return Work(R * int((seen * sizes).sum()), 4 * B * G * R * (call.E + 1))


def much(call: Call) -> bool:
    """Whether the keys and values are so many that reading them once pays."""
    return call.k.numel() + call.v.numel() >= MUCH
