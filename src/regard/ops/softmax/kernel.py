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
        lse: the log-sum-exp `[B, H, T]` without the sink; it may be None if the call does not
            request it (`Call.wants_lse`).
        scores: `[B, H, T, S]` if an open trace edited them, or if the call has a score rule and an
            open trace needs them, because the lse does not give the weights then; else None.
        pattern: the weights `[B, H, T, S]` in the same cases; else None.
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

    A kernel states which calls it supports (`why_not`) and when `backend="auto"` tries it
    (`priority`). `regard.register_kernel` accepts an instance of any class that extends this one.

    Attributes:
        name: the name that `backend=` and `regard.plan` use.
        selects: True if the kernel never reads a masked key or value, so that a NaN there has no
            effect; False if it multiplies masked values by a weight of 0.
        wide_output: whether it returns the output in `call.result_dtype`, which may be that of the
            scores; otherwise it is given no call that asks for another dtype than that of q.
    """

    name: str = ""
    selects: bool = False
    wide_output: bool = False

    @abstractmethod
    def why_not(self, call: Call) -> list[str]:
        """Return the reasons why this kernel cannot run a call on this machine: a missing device or
        package, or an unsupported option.

        Args:
            call: the checked call.

        Returns:
            The reasons, each in a few words; an empty list if the kernel can run the call.
        """

    def why_not_score(self, call: Call) -> list[str] | None:
        """Return the reasons against the score rule of a call, which `why_not` does not look at.

        Args:
            call: a checked call with a rule, `call.score`.

        Returns:
            The reasons, or an empty list if the kernel computes the rule. None: it knows no rules,
            and is given the call without one that means the same, if there is such a call.
        """
        return None

    @abstractmethod
    def priority(self, call: Call) -> float | None:
        """Return when `backend="auto"` tries this kernel; it must not read a tensor, because it is
        computed for every call.

        The kernels of this package return 100 or 90 where they were measured to be faster than
        torch's fused kernel, 80 for torch's fused kernel, 75 to 60 where they are the next choice
        if torch's kernel refuses the call, 50 to 20 where they were measured to be slower, and 10
        for the reference, which supports every call.

        Args:
            call: the checked call.

        Returns:
            A number; the kernel with the largest one is tried first, and among equal numbers the
            one that was registered first. None: the kernel runs only if it is requested by name.
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
        """Compute the gradients of attention over some of the keys, from the output and the lse
        over all of them (`regard.ops.softmax.attend.part_gradients`).

        A kernel that does not compute them itself runs the part again, and uses the part's own
        gradients with its share in each row:

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
    """Return the gradients of the inputs, None for those that require none; outputs whose gradient
    is None are left out.
    """
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
    """Return an lse as m and l with lse = m + ln l, which the backward passes of kernels read: m is
    the lse and l is 1, and both are 0 for a row that sees no key.

    >>> maximum_and_sum(torch.tensor([2.0, float("-inf")]))
    (tensor([2., 0.]), tensor([1., 0.]))
    """
    sees_nothing = lse.isneginf()
    return lse.masked_fill(sees_nothing, 0), (~sees_nothing).to(lse.dtype)
