"""Prefill on a CPU: compiled products of blocks, scores in fp32, over the keys that a mask leaves."""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import masks
from regard.biases import ALiBi
from regard.masks.intervals import FAR
from regard.ops.softmax.call import Call, Result, Work
from regard.ops.softmax.merge import with_sink
from regard.span import Positions, as_tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LEAST = {torch.float32: 2**31, torch.bfloat16: 2**28, torch.float16: 2**28}
"""From so many products B H T S (D + E) on it is the first choice; below, torch's kernel takes a few milliseconds as well."""

ROWS = 64
"""And from so many queries of a key/value head, H/G T: keys and values are packed for them."""


class Gemm:
    """Blocks of queries against packed keys and values, the heads of a group as rows; Numba compiles it once.

    bfloat16 is multiplied as it is where the processor can (AVX512-BF16), with sums, scores and softmax in fp32, and
    weights rounded to bfloat16 before they meet the values, as in torch's kernel. Otherwise halves are widened.
    """

    name = "gemm"
    selects = False

    def why_not(self, call: Call) -> list[str]:
        """Devices but the CPU, gradients, dropout, taps, dtypes, biases but ALiBi, masks without ranges; no Numba; graphs."""
        reasons = [
            *(["runs on a CPU only"] if call.q.device.type != "cpu" else []),
            *(["has no gradient"] if call.has_gradient else []),
            *(["no dropout"] if call.dropout else []),
            *([f"does not expose {sorted(call.needs)}"] if call.needs else []),
            *([f"no {str(call.q.dtype).removeprefix('torch.')}"] if call.q.dtype not in _DTYPES else []),
            *([f"no bias but ALiBi ({call.bias})"] if not isinstance(call.bias, ALiBi | None) else []),
        ]  # fmt: skip
        if 0 in (call.B, call.T, call.S, call.D, call.E):
            reasons.append(f"nothing to do (B {call.B}, T {call.T}, S {call.S}, E {call.E})")
        if torch.compiler.is_compiling():
            reasons.append("no part of a compiled graph")
        elif not reasons and not has_numba():
            reasons.append("Numba is not installed: pip install numba")
        elif not reasons and _ranges(call, slice(0, 1)) is None:
            reasons.append(f"the mask has no ranges of positions ({call.mask})")
        elif not reasons and not call.sees_everything and not call.all_finite("v"):
            reasons.append("a NaN or infinity behind a mask would leak through 0 x NaN")
        return reasons

    def run(self, call: Call) -> Result:
        """Keys and values are packed, then blocks of queries are tasks."""
        from regard.ops.jit import prefill
        from regard.ops.jit.pool import POOL, threads

        workers = threads()
        out = torch.empty(call.B, call.H, call.T, call.E, dtype=call.q.dtype)
        lse = torch.empty(call.B, call.H, call.T)
        packed, depth = _pack(call, workers)
        rows = call.T * (call.H // call.G)
        share = math.ceil(call.B * call.G * rows / workers)
        step = min(prefill.ROWS, _up(share, prefill.STEP))
        sizes = (call.B, call.H, call.G, call.T, call.E, step, depth)
        mask, extra, queries = _mask(call), _extra(call), (*_memory(call.q), call.D)
        results = _numbers(out), lse.view(-1).numpy()

        def work(part: int, of: int) -> None:
            scratch = _scratch(call, step, depth)
            prefill.run_tasks(queries, packed, sizes, mask, extra, scratch, *results, part, of)

        POOL.run(work, workers)
        z = out if call.sink is None else with_sink(out, lse, call.sink)
        return Result(z, lse if call.wants_lse else None)

    def work(self, call: Call) -> Work:
        """Pairs of the panels that some query of a block sees; bytes of the packed keys and values, and of a block's work."""
        rows, panel, n = 258, 64, call.H // call.G  # as in ops/jit, which imports Numba
        step, pairs = max(1, rows // n), 0
        for start in range(0, call.T, step):
            block = slice(start, min(start + step, call.T))
            seen = call.mask.tile_row(call.q_positions, call.k_positions, block, panel) > 0
            sizes = torch.full((seen.shape[-1],), panel)
            sizes[-1:] = call.S - panel * (len(sizes) - 1)
            heads = (seen * sizes).sum(-1).expand(call.B, call.H).sum()
            pairs += (block.stop - block.start) * int(heads)
        each = 2 if call.q.dtype == torch.bfloat16 else 4
        packed = call.B * call.G * _up(call.S, panel) * (call.D + _up(call.E, panel)) * each
        held = rows * (call.D + 2 * 256 + _up(call.E, panel)) * 4
        return Work(pairs, packed + held + (call.B * call.H * call.T * 4))


def pays(call: Call) -> bool:
    """Whether it is faster than torch's kernel: measured with AVX-512 and without tiles of matrices (AMX), which torch uses."""
    if torch.compiler.is_compiling():
        return False
    products = call.B * call.H * call.T * call.S * (call.D + call.E)
    rows = call.H // call.G * call.T
    return products >= LEAST.get(call.q.dtype, math.inf) and rows >= ROWS and _suits()


@cache
def _suits() -> bool:
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not amx()


@cache
def has_numba() -> bool:
    """Whether Numba can be imported; nothing is imported to know it."""
    return importlib.util.find_spec("numba") is not None


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def _each(call: Call) -> int:
    """How many factors stand together: two bfloat16s, where the processor multiplies those."""
    from regard.ops.jit.product import PAIRS

    return 2 if call.q.dtype == torch.bfloat16 and PAIRS else 1


def _pack(call: Call, workers: int) -> tuple[tuple[Any, ...], int]:
    """(packed keys and values, steps of a head in both and of a panel of values), and D as it is packed."""
    from regard.ops.jit import pack
    from regard.ops.jit.pool import POOL
    from regard.ops.jit.product import PANEL

    each, (B, G, S, D), E = _each(call), call.k.shape, call.E
    length, depth, width = _up(S, PANEL), _up(D, each), _up(E, PANEL)
    dtype = torch.bfloat16 if each == 2 else torch.float32
    fits = (length, depth, width) == (S, D, E)  # else what is missing must be zeros
    make = torch.empty if fits else torch.zeros
    packed = tuple(_numbers(make(B * G * length * size, dtype=dtype)) for size in (depth, width))
    sizes, keys, values = (B, G, S, D, E, each), _memory(call.k), _memory(call.v)
    POOL.run(lambda part, of: pack.pack(keys, values, sizes, packed, part, of), workers)
    return (*packed, length * depth, length * width, length * PANEL), depth


def _scratch(call: Call, rows: int, depth: int) -> tuple[Any, ...]:
    """Queries, scores, weights, sums and the lanes of a maximum, for one worker."""
    from regard.ops.jit import prefill

    pairs = _each(call) == 2
    q = _numbers(torch.zeros(rows * depth, dtype=torch.bfloat16 if pairs else torch.float32))
    scores = torch.empty(rows * prefill.TILE).numpy()
    weights = _numbers(torch.empty(rows * prefill.TILE, dtype=torch.bfloat16)) if pairs else scores
    sums = torch.empty(rows * _up(call.E, prefill.PANEL)).numpy()
    return q, scores, weights, sums, torch.empty(prefill.PANEL).numpy()


def _numbers(x: Tensor) -> Any:
    """The memory of a contiguous tensor as a flat array, of the bits if they are 16."""
    flat = x.detach().view(-1)
    return flat.numpy() if x.dtype == torch.float32 else flat.view(torch.uint16).numpy()


def _memory(x: Tensor) -> tuple[Any, ...]:
    """A tensor [B,a,b,d] as its flat memory, its first three steps, and how its bits are meant; d is contiguous."""
    from regard.ops.jit.bits import BF16, FP16

    x = x.detach()
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    steps = x.stride()
    length = x.shape[-1] + sum((n - 1) * step for n, step in zip(x.shape[:-1], steps[:-1], strict=True))  # fmt: skip
    tag = FP16 if x.dtype == torch.float16 else BF16
    return _numbers(x.as_strided((length,), (1,))), *steps[:3], tag


def _where(positions: Positions) -> Tensor:
    """Positions [b,L], int64."""
    return as_tensor(positions).long()


def _ranges(call: Call, rows: slice) -> tuple[Tensor, Tensor] | None:
    """Starts and stops [b,h,t,n] of the ranges of positions that queries see, or None."""
    q = _where(call.q_positions)[:, rows]
    if isinstance(call.mask, masks.Full):
        return torch.zeros(1, 1, 1, 1, dtype=torch.int64), torch.full((1, 1, 1, 1), FAR)
    if isinstance(call.mask, masks.Causal):
        return torch.zeros(1, 1, 1, 1, dtype=torch.int64), q[:, None, :, None] + 1
    return call.mask.intervals(q)


def _mask(call: Call) -> tuple[Any, ...]:
    """Positions of the keys; least, largest and whether all are there, of each panel; ranges of the queries."""
    from regard.ops.jit.product import PANEL

    where = _where(call.k_positions)
    padded = torch.full((where.shape[0], _up(call.S, PANEL)), -1)
    padded[:, : call.S] = where
    panels = padded.unflatten(1, (-1, PANEL))
    there = panels >= 0
    least = panels.masked_fill(~there, FAR).amin(-1)
    bounds = torch.stack([least, panels.amax(-1), there.all(-1).long()], -1)
    found = _ranges(call, slice(0, call.T))
    assert found is not None, "why_not refuses these"
    starts, stops = (x.expand(*(max(n, 1) for n in x.shape)).contiguous().numpy() for x in found)
    return padded.numpy(), bounds.numpy(), starts, stops


def _extra(call: Call) -> tuple[Any, ...]:
    """Scale, softcap, ALiBi's slopes, and where the queries stand."""
    q = _where(call.q_positions).contiguous().numpy()
    cap, symmetric, slopes = np.float32(call.softcap or 0), False, torch.empty(0)
    if isinstance(call.bias, ALiBi):
        symmetric = call.bias.symmetric
        slopes = call.bias.slopes_on(torch.device("cpu"), torch.float32).detach()
    return np.float32(call.scale), cap, symmetric, slopes.contiguous().numpy(), q
