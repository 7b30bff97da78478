"""The CPU prefill kernel: compiled matrix products over the tiles that a mask shows, with their
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard import masks
from regard.biases import ALiBi
from regard.masks import Causal, Full, Mask, Padding
from regard.masks.tiling import FAR
from regard.ops.jit import has_numba
from regard.ops.softmax.call import Call, Result, Work
from regard.ops.softmax.merge import with_sink
from regard.process import is_compiling
from regard.span import Positions, as_tensor, part


def up(n: int, step: int) -> int:
    """The least multiple of a step that is not below n.

    >>> up(70, 64)
    128
    """
    return -(-n // step) * step


def together(call: Call) -> int:
    """How many factors stand together: two bfloat16s, where the processor multiplies those."""
    from regard.ops.jit.product import PAIRS

    return 2 if call.q.dtype == torch.bfloat16 and PAIRS else 1


def numbers(x: Tensor) -> Any:
    """The memory of a contiguous tensor as a flat array, of the bits if they are 16."""
    flat = x.detach().view(-1)
    return flat.numpy() if x.dtype == torch.float32 else flat.view(torch.uint16).numpy()


def memory(x: Tensor) -> tuple[Any, ...]:
    """A tensor [B,a,b,d] as its flat memory, its first three steps, and how its bits are meant; d
    is contiguous.
    """
    from regard.ops.jit.bits import BF16, FP16

    x = x.detach()
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    steps = x.stride()
    length = x.shape[-1] + sum(
        (n - 1) * step for n, step in zip(x.shape[:-1], steps[:-1], strict=True)
    )
    tag = FP16 if x.dtype == torch.float16 else BF16
    return numbers(x.as_strided((length,), (1,))), *steps[:3], tag


def where(positions: Positions) -> Tensor:
    """Positions [b,L], int64."""
    return as_tensor(positions).long()


def ranges(call: Call, rows: slice) -> tuple[Tensor, Tensor] | None:
    """Starts and stops [b,h,t,n] of the ranges of positions that queries see, or None."""
    q, first = part(call.q_positions, rows), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    if call.sees_everything:
        return first, torch.full((1, 1, 1, 1), FAR)
    if isinstance(call.mask, masks.Causal):
        return first, where(q)[:, None, :, None] + 1
    return call.mask.intervals(q)


def mask_of(call: Call) -> tuple[Any, ...]:
    """Positions of the keys; least, largest and whether all are there, of each panel; ranges of the
    queries.
    """
    from regard.ops.jit.product import PANEL

    keys = where(call.k_positions)
    padded = torch.full((keys.shape[0], up(call.S, PANEL)), -1)
    padded[:, : call.S] = keys
    panels = torch.unflatten(padded, 1, (-1, PANEL))
    there = panels >= 0
    least = panels.masked_fill(~there, FAR).amin(-1)
    bounds = torch.stack([least, panels.amax(-1), there.all(-1).long()], -1)
    found = ranges(call, slice(0, call.T))
    assert found is not None, "why_not refuses these"
    starts, stops = (x.expand(*(max(n, 1) for n in x.shape)).contiguous().numpy() for x in found)
    return padded.numpy(), bounds.numpy(), starts, stops


def extra_of(call: Call) -> tuple[Any, ...]:
    """Scale, softcap, ALiBi's slopes, and where the queries stand."""
    q = where(call.q_positions).contiguous().numpy()
    cap, symmetric, slopes = np.float32(call.softcap or 0), False, torch.empty(0)
    if isinstance(call.bias, ALiBi):
        symmetric = call.bias.symmetric
        slopes = call.bias.slopes_on(torch.device("cpu"), torch.float32).detach()
    return np.float32(call.scale), cap, symmetric, slopes.contiguous().numpy(), q


Forward = Callable[[Call], tuple[Tensor, Tensor, Tensor]]


class WithGradient(torch.autograd.Function):
    """(out, lse), with gradients for q, k and v. It saves no scores."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, run: Forward, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `run`, which gives out, m and l."""
        out, top, total = run(call)
        ctx.save_for_backward(q, k, v, out, top, total)
        # what autograd keeps for us is not kept a second time
        shapes = {name: getattr(call, name).detach().to("meta") for name in "qkv"}
        ctx.call = replace(call, sink=None, **shapes)
        ctx.set_materialize_grads(False)
        return out, top + total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        """The same blocks again."""
        q, k, v, out, top, total = ctx.saved_tensors
        call = replace(ctx.call, q=q.detach(), k=k.detach(), v=v.detach())
        d_out = torch.zeros_like(out) if d_out is None else d_out
        with torch.autocast("cpu", enabled=False):
            d_lse = torch.zeros_like(top) if d_lse is None else d_lse
            return None, None, *backward(call, out, (top, total), d_out, d_lse)


def backward(
    call: Call, out: Tensor, saved: tuple[Tensor, Tensor], d_out: Tensor, d_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v.

    saved: of each row [B,H,T] the largest score, and the sum of e^(score - largest).
    """
    from regard.ops.jit import gradient
    from regard.ops.jit.pool import POOL, threads
    from regard.ops.jit.prefill import ROWS
    from regard.ops.jit.product import PANEL, STEP

    workers, n = threads(), call.H // call.G
    step = min(ROWS, up(call.T * n, STEP))
    splits = min(workers // math.gcd(call.B * call.G, workers), max(4, n), -(-call.T * n // step))
    packed = _pack_gemm_gradient(call, workers)
    d_q = torch.empty(call.q.shape, dtype=call.q.dtype)
    panels = (splits, call.B * call.G, up(call.S, PANEL) // PANEL)
    d_k, d_v = (torch.zeros(*panels, up(size, STEP), PANEL) for size in (call.D, call.E))
    given = ((*memory(call.q), call.D), (*memory(d_out), call.E), (*memory(out), call.E))
    sizes = (call.B, call.H, call.G, call.T, step, splits)
    rest = mask_of(call), extra_of(call), tuple(numbers(x.contiguous()) for x in (*saved, d_lse))
    results = tuple(numbers(x) for x in (d_q, d_k, d_v))

    def work(part: int, of: int) -> None:
        scratch = _scratch_gemm_gradient(call, step)
        gradient.run_tasks(given, packed, sizes, *rest, scratch, results, part, of)

    POOL.run(work, workers)
    return d_q, _whole(d_k, call.k, call.scale), _whole(d_v, call.v, 1.0)


def _whole(sums: Tensor, like: Tensor, scale: float) -> Tensor:
    """[splits,B G,panels,D,PANEL] -> [B,G,S,D], in the dtype of `like`."""
    B, G, S, D = like.shape
    sums = sums.sum(0) if sums.shape[0] > 1 else sums[0]
    rows = sums[:, :, :D].mT.reshape(B, G, -1, D)[:, :, :S]
    return (rows if scale == 1 else rows * scale).to(like.dtype).contiguous()


def _pack_gemm_gradient(call: Call, workers: int) -> tuple[Any, ...]:
    """Keys and values by dims, and keys by tokens, in panels."""
    from regard.ops.jit import gradient
    from regard.ops.jit.pool import POOL
    from regard.ops.jit.product import PANEL

    each, (B, G, S, D), E = together(call), call.k.shape, call.E
    length = up(S, PANEL)
    dtype = torch.bfloat16 if each == 2 else torch.float32
    widths = up(D, each), up(E, each), up(D, PANEL)
    fits = (length, *widths) == (S, D, E, D)  # else what is missing must be zeros
    make = torch.empty if fits else torch.zeros
    packed = tuple(numbers(make(B * G * length * width, dtype=dtype)) for width in widths)
    sizes, keys, values = (B, G, S, D, E, each), memory(call.k), memory(call.v)
    POOL.run(lambda part, of: gradient.pack(keys, values, sizes, packed, part, of), workers)
    return packed


def _scratch_gemm_gradient(call: Call, step: int) -> tuple[Any, ...]:
    """Rows as they are and turned; scores, their gradients and the lanes of a slope; the same as
    factors; sums.
    """
    from regard.ops.jit.bits import BF16
    from regard.ops.jit.product import PANEL, STEP

    each = together(call)
    kind = torch.bfloat16 if each == 2 else torch.float32
    left = tuple(
        numbers(torch.zeros(step * width, dtype=kind))
        for size in (call.D, call.E)
        for width in (up(size, each), up(size, STEP))
    )
    scores = tuple(torch.empty(length).numpy() for length in (step * PANEL, step * PANEL, PANEL))
    if each == 2:
        weights, slopes, rows = (numbers(torch.empty(step * PANEL, dtype=kind)) for _ in range(3))
    else:
        weights, slopes, rows = scores[0], scores[1], scores[1]
    factors = weights, weights.view("uint32"), slopes, slopes.view("uint32"), rows, BF16
    return left, scores, factors, torch.empty(step * up(call.D, PANEL)).numpy()


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LEAST = {torch.float32: 2**31, torch.bfloat16: 2**28, torch.float16: 2**28}
"""From so many products B H T S (D + E) on it is the first choice; below, torch's kernel takes a
few milliseconds as well.
"""

LEARNS = {torch.float32: 2**28, torch.bfloat16: 2**28, torch.float16: 2**26}
"""The same with a gradient, where torch's kernel is further behind."""

LARGE_SCORES = 500.0
"""Up to this bound on |scale q k| it serves gradients. Its weights are right at any size; but dp
and rowsum(dout out) cancel to their rounding only, which breaks the error rule where every row of a
call has one weight of nearly 1: measured from 6,000 on."""

ROWS = 64
"""And from so many queries of a key/value head, H/G T: keys and values are packed for them."""

LONG = {torch.float32: 512, torch.bfloat16: 128, torch.float16: 128}
"""With a gradient, from so many of those queries, and of keys: both are packed, three times."""

WIDE = {torch.float32: 128, torch.bfloat16: 64, torch.float16: 0}
"""And from so many dims D + E where torch's kernel computes no more pairs: softmax is slower here,
products are faster.
"""


class Gemm:
    """Blocks of queries against packed keys and values, the heads of a group as rows; Numba
    compiles it once.

    bfloat16 is multiplied as it is where the processor can (AVX512-BF16), with sums, scores and
    softmax in fp32, and weights rounded to bfloat16 before they meet the values, as in torch's
    kernel. Otherwise halves are widened. Gradients of q, k and v are computed in the same way, and
    so over what the mask leaves.
    """

    name = "gemm"
    selects = False

    def why_not(self, call: Call) -> list[str]:
        """Devices but the CPU, dropout, taps, dtypes, biases but ALiBi, learned ones, masks without
        ranges; no Numba; graphs.
        """
        reasons = [
            *(["runs on a CPU only"] if call.q.device.type != "cpu" else []),
            *(["no dropout"] if call.dropout else []),
            *([f"does not expose {sorted(call.needs)}"] if call.needs else []),
            *(
                [f"no {str(call.q.dtype).removeprefix('torch.')}"]
                if call.q.dtype not in _DTYPES
                else []
            ),
            *(
                [f"no bias but ALiBi ({call.bias})"]
                if not isinstance(call.bias, ALiBi | None)
                else []
            ),
            *(["no gradient for a bias"] if _learns_bias(call) else []),
        ]
        if 0 in (call.B, call.T, call.S, call.D, call.E):
            reasons.append(f"nothing to do (B {call.B}, T {call.T}, S {call.S}, E {call.E})")
        if is_compiling():
            reasons.append("no part of a compiled graph")
        elif not reasons and not has_numba():
            reasons.append("Numba is not installed: pip install numba")
        elif not reasons and ranges(call, slice(0, 1)) is None:
            reasons.append(f"the mask has no ranges of positions ({call.mask})")
        elif not reasons and not call.sees_everything and not call.all_finite(*_multiplied(call)):
            reasons.append("a NaN or infinity behind a mask would leak through 0 x NaN")
        elif not reasons and call.has_gradient and call.score_bound > LARGE_SCORES:
            reasons.append(
                f"its gradient is right for scores up to {LARGE_SCORES:.0f}; here they may reach "
                f"{call.score_bound:.3g}"
            )
        return reasons

    def run(self, call: Call) -> Result:
        """The output, and what its gradient needs if something wants one."""
        if call.has_gradient:
            out, lse = WithGradient.apply(  # type: ignore[no-untyped-call]
                call, forward, call.q, call.k, call.v
            )
        else:
            out, top, total = forward(call)
            lse = top + total.log()
        z = out if call.sink is None else with_sink(out, lse, call.sink)
        return Result(z, lse if call.wants_lse else None)

    def work(self, call: Call) -> Work:
        """Pairs of the panels that some query of a block sees; bytes of the packed keys and values,
        and of a block's work.
        """
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
        memories, length, wide = call.B * call.G, up(call.S, panel), call.D + call.E
        packed = memories * length * (call.D + up(call.E, panel)) * each
        held = rows * (call.D + 2 * 256 + up(call.E, panel)) * 4
        if call.has_gradient:  # keys twice, values, and sums of the gradients of both
            packed = memories * length * ((wide + up(call.D, panel)) * each + wide * 4)
            held = rows * (2 * wide * each + up(call.D, panel) * 4 + 2 * panel * 4)
        return Work(pairs, packed + held + 2 * call.B * call.H * call.T * 4)


def pays(call: Call) -> bool:
    """Whether it is faster than torch's kernel: measured with AVX-512 and without tiles of matrices
    (AMX), which torch uses.
    """
    rows = call.H // call.G * call.T
    if rows < ROWS or is_compiling():
        return False
    learns, kind = call.has_gradient, call.q.dtype
    products = call.B * call.H * call.T * call.S * (call.D + call.E)
    if products < (LEARNS if learns else LEAST).get(kind, math.inf):
        return False
    if learns and min(rows, call.S) < LONG[kind]:
        return False
    return (_leaves_out(call.mask) or _fits(call)) and _suits()


def _leaves_out(mask: Mask) -> bool:
    """Whether it leaves out what torch's kernel would compute, flag of the triangle and all."""
    return not all(isinstance(term, Full | Causal | Padding) for term in mask.terms())


def _fits(call: Call) -> bool:
    """Whether the heads are wide enough, and in fp32 fill their panels."""
    wide, full = call.D + call.E, call.q.dtype != torch.float32 or call.E % 64 == 0
    return full and wide >= WIDE[call.q.dtype]


def _learns_bias(call: Call) -> bool:
    learned = () if call.bias is None else call.bias.tensors()
    return torch.is_grad_enabled() and any(x.requires_grad for x in learned)


def _multiplied(call: Call) -> str:
    """The inputs that are multiplied with weights, or their gradients, of 0: a NaN in them would
    leak.
    """
    return "kvq" if call.has_gradient else "v"


@cache
def _suits() -> bool:
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not amx()


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """out [B,H,T,E]; of each row the largest score m, or 0 if it sees nothing, and sum e^(s - m),
    [B,H,T].

    Keys and values are packed, then blocks of queries are tasks.
    """
    from regard.ops.jit import prefill
    from regard.ops.jit.pool import POOL, threads
    from regard.ops.jit.product import STEP

    workers = threads()
    out = torch.empty(call.B, call.H, call.T, call.E, dtype=call.q.dtype)
    top, total = torch.empty(call.B, call.H, call.T), torch.empty(call.B, call.H, call.T)
    packed, depth = _pack(call, workers)
    rows = call.T * (call.H // call.G)
    share = math.ceil(call.B * call.G * rows / workers)
    step = min(prefill.ROWS, up(share, STEP))
    sizes = (call.B, call.H, call.G, call.T, call.E, step, depth)
    mask, extra, queries = mask_of(call), extra_of(call), (*memory(call.q), call.D)
    results = numbers(out), numbers(top), numbers(total)

    def work(part: int, of: int) -> None:
        scratch = _scratch(call, step, depth)
        prefill.run_tasks(queries, packed, sizes, mask, extra, scratch, results, part, of)

    POOL.run(work, workers)
    return out, top, total


def _pack(call: Call, workers: int) -> tuple[tuple[Any, ...], int]:
    """(packed keys and values, steps of a head in both and of a panel of values), and D as it is
    packed.
    """
    from regard.ops.jit import pack
    from regard.ops.jit.pool import POOL
    from regard.ops.jit.product import PANEL

    each, (B, G, S, D), E = together(call), call.k.shape, call.E
    length, depth, width = up(S, PANEL), up(D, each), up(E, PANEL)
    dtype = torch.bfloat16 if each == 2 else torch.float32
    fits = (length, depth, width) == (S, D, E)  # else what is missing must be zeros
    make = torch.empty if fits else torch.zeros
    packed = tuple(numbers(make(B * G * length * size, dtype=dtype)) for size in (depth, width))
    sizes, keys, values = (B, G, S, D, E, each), memory(call.k), memory(call.v)
    POOL.run(lambda part, of: pack.pack(keys, values, sizes, packed, part, of), workers)
    return (*packed, length * depth, length * width, length * PANEL), depth


def _scratch(call: Call, rows: int, depth: int) -> tuple[Any, ...]:
    """Queries, scores, weights, sums and the lanes of a maximum, for one worker."""
    from regard.ops.jit import prefill
    from regard.ops.jit.product import PANEL

    pairs = together(call) == 2
    q = numbers(torch.zeros(rows * depth, dtype=torch.bfloat16 if pairs else torch.float32))
    scores = torch.empty(rows * prefill.TILE).numpy()
    weights = numbers(torch.empty(rows * prefill.TILE, dtype=torch.bfloat16)) if pairs else scores
    sums = torch.empty(rows * up(call.E, PANEL)).numpy()
    return q, scores, weights, sums, torch.empty(PANEL).numpy()
