"""The reference kernel: the definition of softmax attention, for every call."""

from __future__ import annotations

import torch
from torch import Tensor

from regard import units
from regard.ops.softmax.call import Call, Partial
from regard.ops.softmax.definition import (
    EVERYTHING,
    MAX_SCORE_BYTES,
    attend_rows,
    part_gradients_by_definition,
)
from regard.ops.softmax.kernel import Kernel, KernelResult, WorkEstimate
from regard.process_state import is_exporting

BLOCK_BYTES = 2**28
"""The bytes of scores in memory at a time, unless a trace or autograd needs all of them."""
MAX_TRAINING_PRODUCTS = 2**24
"""Up to so many products B H T S (D + E), training is faster than with the tiled kernel."""


class ReferenceKernel(Kernel):
    """The kernel "reference": the definition, with all of T S in memory for gradients and taps."""

    name = "reference"
    wide_output = True

    def why_not(self, call: Call) -> list[str]:
        """Refuse traced calls and calls with a gradient whose scores need more than 4 GiB."""
        if call.compiling or not (call.needs or call.has_gradient):
            return []
        size = call.B * call.H * call.T * call.S * call.score_dtype.itemsize
        if size > MAX_SCORE_BYTES:
            shape = (call.B, call.H, call.T, call.S)
            need = f"would allocate {units.size(size)} for scores {shape}"
            limit = f"limit {units.size(MAX_SCORE_BYTES)}"
            return [f"{need}; {limit}: regard.attention_weights gives any block of them"]
        return []

    def why_not_score(self, call: Call) -> list[str]:
        """Return no reason: the definition computes every score rule."""
        return []

    def priority(self, call: Call) -> float | None:
        """Return 10, the last choice; 75 for small training calls on a CPU."""
        trains_on_cpu = call.has_gradient and call.q.is_cpu and not call.compiling
        few = (
            trains_on_cpu
            and call.B * call.H * call.T * call.S * (call.D + call.E) < MAX_TRAINING_PRODUCTS
        )
        return 75 if few else 10

    def run(self, call: Call) -> KernelResult:
        """Compute all rows at once for a traced, trained or exported call, else block by block."""
        row_bytes = max(1, call.B * call.H * call.S * call.score_dtype.itemsize)
        block = max(1, BLOCK_BYTES // row_bytes)
        # an exported program serves every length, so that nothing may depend on T
        if call.needs or call.has_gradient or is_exporting() or block >= call.T:
            return attend_rows(call, EVERYTHING)
        parts = [attend_rows(call, slice(i, i + block)) for i in range(0, call.T, block)]
        outs, lses, *_ = zip(*parts, strict=True)
        return KernelResult(torch.cat(outs, 2), torch.cat(lses, 2))

    def part_gradients(
        self, call: Call, whole: Partial, d_out: Tensor, d_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of some of the keys; see `attend.part_gradients`."""
        return part_gradients_by_definition(call, whole, d_out, d_lse)

    def work(self, call: Call) -> WorkEstimate:
        """Return the number of all pairs, and the bytes of scores and weights at a time."""
        pairs = call.B * call.H * call.T * call.S
        all_bytes = 2 * pairs * call.score_dtype.itemsize
        bounded = all_bytes if call.needs or call.has_gradient else min(all_bytes, 2 * BLOCK_BYTES)
        return WorkEstimate(pairs, bounded)
