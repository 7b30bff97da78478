"""The CPU prefill kernel: a call in the words of the compiled matrix products over the tiles that a
mask shows, with their gradient (`regard.ops.jit.prefill`).
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from regard import masks
from regard.biases import ALiBi
from regard.masks import Causal, Full, Mask, Padding
from regard.masks.tiling import UNBOUNDED
from regard.ops.jit import has_numba
from regard.ops.jit.prefill import PrefillArgs, prefill, prefill_with_gradient, up
from regard.ops.jit.records import DTYPES
from regard.ops.softmax.call import Call, Result, Work
from regard.ops.softmax.merge import with_sink
from regard.span import as_tensor, slice_positions

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
                if call.q.dtype not in DTYPES
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
        if call.compiling:
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

    def priority(self, call: Call) -> float | None:
        """Before torch's kernel where it was measured to be faster; behind it with a gradient,
        which torch's may refuse for large scores.
        """
        if not call.q.is_cpu:
            return None
        return 90 if prefer_gemm(call) else 70 if call.has_gradient else 30

    def run(self, call: Call) -> Result:
        """The output, and what its gradient needs if something wants one."""
        args = prefill_args(call)
        if call.has_gradient:
            out, lse = prefill_with_gradient(args)
        else:
            out, top, total = prefill(args)
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


def prefer_gemm(call: Call) -> bool:
    """Whether it is faster than torch's kernel: measured with AVX-512 and without tiles of matrices
    (AMX), which torch uses.
    """
    rows = call.H // call.G * call.T
    if rows < ROWS or call.compiling:
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


def ranges(call: Call, rows: slice) -> tuple[Tensor, Tensor] | None:
    """Starts and stops [b,h,t,n] of the ranges of positions that queries see, or None."""
    q, first = slice_positions(call.q_positions, rows), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    if call.sees_everything:
        return first, torch.full((1, 1, 1, 1), UNBOUNDED)
    if isinstance(call.mask, masks.Causal):
        return first, as_tensor(q).long()[:, None, :, None] + 1
    return call.mask.intervals(q)


def prefill_args(call: Call) -> PrefillArgs:
    """A call in the words of the compiled loops."""
    found = ranges(call, slice(0, call.T))
    assert found is not None, "why_not refuses these"
    symmetric, slopes = False, torch.empty(0)
    if isinstance(call.bias, ALiBi):
        symmetric = call.bias.symmetric
        slopes = call.bias.slopes_on(torch.device("cpu"), torch.float32).detach()
    return PrefillArgs(
        call.q,
        call.k,
        call.v,
        call.scale,
        call.softcap or 0.0,
        symmetric,
        slopes,
        as_tensor(call.q_positions).long(),
        as_tensor(call.k_positions).long(),
        *found,
    )
