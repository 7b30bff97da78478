"""The CPU decoding kernel: a call in the words of the compiled loops that read each key and value
once, also from quantised caches (`regard.ops.jit.decode`).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from regard import masks
from regard.biases import ALiBi, Bias
from regard.masks.tiling import UNBOUNDED
from regard.ops.jit import has_numba
from regard.ops.jit.decode import (
    TILE,
    DecodeArgs,
    decode,
    decode_quantised,
    join_parts,
    quantized_segment,
)
from regard.ops.jit.records import DTYPES
from regard.ops.softmax.call import Call, Result, Work
from regard.ops.softmax.merge import with_sink
from regard.span import Span, find_empty_slots

_NO_POSITIONS = torch.empty(1, 0, dtype=torch.int64)
_NO_TABLE = torch.empty(1, 1, 1, 0, dtype=torch.bool)
_NO_RANGES = torch.empty(1, 1, 1, 0, dtype=torch.int64)
_NO_BIAS = torch.empty(1, 1, 1, 0)
_NO_SLOPES = torch.empty(0)
_FIRST, _EVERY = torch.zeros(1, 1, 1, 1, dtype=torch.int64), torch.full((1, 1, 1, 1), UNBOUNDED)


def decode_args(call: Call) -> DecodeArgs:
    """A call in the words of the compiled loops."""
    q_positions, k_positions = call.q_positions, call.k_positions
    if isinstance(q_positions, Span):
        at, causal_stops = _run(q_positions)
    else:
        at = q_positions.long().contiguous()
        causal_stops = (at[:, None, :, None] + 1).contiguous()
    where, origin = _NO_POSITIONS, 0
    if isinstance(k_positions, Span):
        origin = k_positions.start
    else:
        where = k_positions.long().contiguous()
    q = call.q.float()
    tokens = isinstance(q_positions, Span) and q_positions.start >= 0
    empty = None if tokens else find_empty_slots(q_positions)
    if empty is not None:  # it may hold NaN
        q = q.masked_fill(empty[:, None, :, None], 0)
    q = q.reshape(call.B, call.G, call.H // call.G * call.T, call.D).contiguous()
    if isinstance(call.mask, masks.Causal):
        starts, stops, visible = _FIRST, causal_stops, _NO_TABLE
    else:
        starts, stops, visible = _seen(call, empty)
    symmetric, slopes, bias = _NOTHING_ADDED if call.bias is None else _added(call, call.bias)
    return DecodeArgs(
        q,
        call.scale,
        call.T,
        where,
        origin,
        starts,
        stops,
        visible,
        call.softcap or 0.0,
        symmetric,
        slopes,
        bias,
        at,
    )


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


def _seen(call: Call, empty: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Ranges of positions, or a dense block where a rule has none; empty: queries that are no
    tokens.
    """
    if isinstance(call.mask, masks.Full):
        stops = _EVERY if empty is None else torch.where(empty, 0, UNBOUNDED)[:, None, :, None]
        return _FIRST, stops.contiguous(), _NO_TABLE
    if isinstance(call.q_positions, Span) and call.mask.is_static:
        found = _ranges(call.mask, call.q_positions)
    else:
        found = call.mask.intervals(call.q_positions)
    if found is None:
        dense = call.mask.block(call.q_positions, call.k_positions, device="cpu")
        return _NO_RANGES, _NO_RANGES, dense.contiguous()
    starts, stops = (x.contiguous() for x in found)
    return starts, stops, _NO_TABLE


_NOTHING_ADDED = False, _NO_SLOPES, _NO_BIAS


def _added(call: Call, bias: Bias) -> tuple[bool, Tensor, Tensor]:
    """Whether ALiBi is symmetric, its slopes, and any other bias as numbers."""
    if isinstance(bias, ALiBi):
        slopes = bias.slopes_on(torch.device("cpu"), torch.float32).detach()
        return bias.symmetric, slopes.contiguous(), _NO_BIAS
    table = bias.block(call.q_positions, call.k_positions, dtype=torch.float32)
    return False, _NO_SLOPES, table.detach().contiguous()


FEW, ROWS = 16, 64
"""Up to so many queries, and rows of a key/value head (H/G * T): beyond, products of matrices are
faster.
"""

MUCH = 1 << 17
"""Numbers of keys and values from which on it is the first choice."""


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
            *([f"no {call.q.dtype}"] if call.q.dtype not in DTYPES else []),
        ]
        rows = call.H // call.G * call.T
        if call.T > FEW or rows > ROWS:
            reasons.append(
                f"{call.T} queries, {rows} rows of a key/value head; made for {FEW} and {ROWS}"
            )
        if 0 in (call.B, call.T, call.S, call.D, call.E):
            reasons.append("nothing to do")
        if call.compiling:
            reasons.append("no part of a compiled graph")
        elif not reasons and not has_numba():
            reasons.append("Numba is not installed: pip install numba")
        return reasons

    def priority(self, call: Call) -> float | None:
        """First where keys and values are so many that reading them once pays; for less, Numba
        takes a second to import, and need not be.
        """
        if not call.q.is_cpu:
            return None
        is_large = call.k.numel() + call.v.numel() >= MUCH and not call.has_gradient
        return 100 if is_large else 50

    def run(self, call: Call) -> Result:
        """Parts of the keys as tasks, joined by lse; slots that are in codes still are read as
        codes.
        """
        args, found, slots = decode_args(call), [], 0
        k, v = call.k, call.v
        if (segment := quantized_segment(k, v)) is not None:
            slots, (k, v) = segment.slots, segment.recent
            found.append(decode_quantised(args, segment, call.E))
            args = args.behind(slots)
        if slots < call.S:
            found.append(decode(args, k, v))
        out, lse = found[0] if len(found) == 1 else join_parts(*zip(*found, strict=True))
        z = out.reshape(call.B, call.H, call.T, call.E)
        sums = lse.reshape(call.B, call.H, call.T)
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
