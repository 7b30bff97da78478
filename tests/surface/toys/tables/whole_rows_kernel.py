"""The kernel "whole-rows": the definition, all rows at once, for calls with few scores."""

from __future__ import annotations

from regard.ops.softmax.call import Call
from regard.ops.softmax.definition import EVERYTHING, attend_rows
from regard.ops.softmax.kernel import Kernel, KernelResult, WorkEstimate

MAX_SCORES = 2**20
"""The largest number of scores."""


class WholeRowsKernel(Kernel):
    """The kernel "whole-rows": softmax attention whose scores are all in memory at once."""

    name = "whole-rows"

    def why_not(self, call: Call) -> list[str]:
        """Refuse calls with many scores."""
        scores = call.B * call.H * call.T * call.S
        return [f"{scores} scores, more than {MAX_SCORES}"] if scores > MAX_SCORES else []

    def priority(self, call: Call) -> float | None:
        """Return None: this kernel runs by name only."""
        return None

    def run(self, call: Call) -> KernelResult:
        """Compute the attention of all queries at once."""
        return attend_rows(call, EVERYTHING)

    def work(self, call: Call) -> WorkEstimate:
        """Return the number of all pairs, and the bytes of their scores and weights."""
        pairs = call.B * call.H * call.T * call.S
        return WorkEstimate(pairs, 2 * pairs * call.score_dtype.itemsize)
