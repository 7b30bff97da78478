"""What a kernel of softmax attention is (`Kernel`), and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.ops.softmax.call import Call, Partial


class WorkEstimate(NamedTuple):
    """The work of a kernel for one call.

    Args:
        pairs: the query-key pairs that it computes, summed over B and H.
        bytes: the peak memory that it allocates in addition to the inputs and the output.
    """

    pairs: int
    bytes: int


class KernelResult(NamedTuple):
    """The result of a kernel.

    Args:
        out: the output `[B, H, T, E]`, with the sink included.
        lse: the log-sum-exp `[B, H, T]` without the sink; None if the call needs none.
        scores, pattern: scores and weights `[B, H, T, S]` if an open trace edited them, or needs
            them of a score rule; else None.
    """

    out: Tensor
    lse: Tensor | None
    scores: Tensor | None = None
    pattern: Tensor | None = None


UNREADABLE = (
    "needs memory addresses, which compiled graphs, transforms of torch.func and tensors without "
    "values do not have"
)
"""The reason of the compiled kernels against a call that is not `readable`."""


class Kernel(ABC):
    """A kernel: one way to compute an attention call.

    Attributes:
        name: the name that `backend=` and `regard.plan` use.
        selects: whether it never reads a masked key or value, so that a NaN there has no effect.
        wide_output: whether it returns the output in `call.result_dtype`.
    """

    name: str = ""
    selects: bool = False
    wide_output: bool = False

    @abstractmethod
    def why_not(self, call: Call) -> list[str]:
        """Return the reasons why this kernel cannot run a call on this machine.

        Args:
            call: the checked call.

        Returns:
            The reasons, each in a few words; empty if the kernel can run the call.
        """

    def why_not_score(self, call: Call) -> list[str] | None:
        """Return the reasons against the score rule of a call, which `why_not` does not look at.

        Args:
            call: a checked call with a rule, `call.score`.

        Returns:
            The reasons. None: it knows no rules, and gets a call without one that means the same.
        """
        return None

    @abstractmethod
    def priority(self, call: Call) -> float | None:
        """Return when "auto" tries this kernel, without reading a tensor.

        The package's own: 100 or 90 where measured to be faster than torch's fused kernel, which
        has 80; 75 to 60 if that refuses; 50 to 20 where slower; 10 for the reference.

        Args:
            call: the checked call.

        Returns:
            A number; the largest is tried first. None: the kernel runs only by name.
        """

    @abstractmethod
    def run(self, call: Call) -> KernelResult:
        """Compute the call.

        Args:
            call: the checked call, for which `why_not` returned no reason.

        Returns:
            The output, and the lse if `call.wants_lse`.
        """

    @abstractmethod
    def work(self, call: Call) -> WorkEstimate:
        """Estimate the work of a call without computing it.

        Args:
            call: the checked call.

        Returns:
            The query-key pairs that would be computed, and the extra memory.
        """

    def describe(self, call: Call) -> str:
        """Say in one sentence how the kernel would run a call, for `regard.plan`.

        Args:
            call: the checked call.

        Returns:
            The sentence, or "".
        """
        return ""

    def part_gradients(
        self, call: Call, whole: Partial, d_out: Tensor, d_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients over some of the keys, from output and lse over all of them.

        By default the kernel runs the part again, and weighs its gradients by its share:

        share = exp(lse_p - lse)    dO_p = share dO    d_lse_p = share (dO . out_p - dO . O + d_lse)

        Args:
            call: the checked call of the part; its inputs are leaves.
            whole: the output and the lse over all keys.
            d_out: the gradient of the output over all keys, `[B, H, T, E]`.
            d_lse: that of the lse, `[B, H, T]`, or None.

        Returns:
            The gradients of q, k, v and the tensors of the bias, None where none is required.
        """
        with torch.enable_grad():
            part = self.run(call)
        assert part.lse is not None
        sees_nothing = whole.lse.isneginf()
        share = torch.exp(part.lse.detach() - whole.lse.masked_fill(sees_nothing, 0))
        share = share.masked_fill(sees_nothing, 0)
        d_lse_of_part = (d_out * (part.out.detach() - whole.out)).sum(-1)
        d_lse_of_part = share * (d_lse_of_part if d_lse is None else d_lse_of_part + d_lse)
        inputs = (call.q, call.k, call.v, *call.bias_tensors)
        d_out_of_part = (share[..., None] * d_out).to(part.out.dtype)
        gradients = gradients_or_none(
            (part.out, part.lse), inputs, (d_out_of_part, d_lse_of_part.to(part.lse.dtype))
        )
        return tuple(None if x is None else x.to(call.result_dtype) for x in gradients)


def gradients_or_none(
    outputs: tuple[Tensor | None, ...],
    inputs: Sequence[Tensor | None],
    d_outputs: tuple[Tensor | None, ...],
    *,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs, None for those that require none."""
    pairs = [(x, d) for x, d in zip(outputs, d_outputs, strict=True) if x is not None]
    pairs = [(x, d) for x, d in pairs if d is not None]
    trained = [x for x in inputs if x is not None and x.requires_grad]
    gradients = iter(
        torch.autograd.grad(
            [x for x, _ in pairs],
            trained,
            [d for _, d in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    )
    return tuple(next(gradients) if x is not None and x.requires_grad else None for x in inputs)


def maximum_and_sum(lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return an lse as m and l with lse = m + ln l: the lse and 1, or 0 and 0 for -inf."""
    sees_nothing = lse.isneginf()
    return lse.masked_fill(sees_nothing, 0), (~sees_nothing).to(lse.dtype)
