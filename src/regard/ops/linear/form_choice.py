"""Which form of a recurrence runs: token by token, in chunks of torch's operations, or in Triton.

"auto" computes few tokens one by one; more run in Triton on a GPU that serves them, else in chunks.
A form that is named runs or is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from regard.errors import KernelRefusal
from regard.ops.linear.call import MAX_RECURRENT_TOKENS, RecurrenceCall
from regard.ops.linear.triton import kernel
from regard.units import plural


@dataclass(frozen=True)
class FormChoice:
    """The form of a recurrence that would run, and why not in Triton."""

    form: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return self.form + "".join(f"\n  not triton: {reason}" for reason in self.reasons)


def plan_form(call: RecurrenceCall, form: str) -> FormChoice:
    """Return which form runs a call, and why the kernels in Triton do not."""
    if form not in ("auto", "triton"):
        return FormChoice(form, (f'form is "{form}"',))
    reasons = kernel.why_not(call)
    if form == "triton":
        if reasons:
            raise KernelRefusal(
                f'form is "triton", which cannot run this recurrence: {"; ".join(reasons)}; '
                'pass form="auto"'
            )
        return FormChoice("triton", ())
    if call.q.shape[2] <= MAX_RECURRENT_TOKENS:
        few = f"at most {plural(MAX_RECURRENT_TOKENS, 'token')} are computed one by one"
        return FormChoice("recurrent", (*reasons, few))
    if call.q.device.type != "cuda" and not reasons:
        reasons = ["triton only interprets kernels on a CPU"]
    return FormChoice("chunk", tuple(reasons)) if reasons else FormChoice("triton", ())


def choose_form(call: RecurrenceCall, form: str) -> str:
    """Return which form runs a call (`plan_form`); without a GPU, "auto" stays as it is."""
    if form == "triton" or (form == "auto" and call.q.is_cuda):
        return plan_form(call, form).form
    return form


def run_form(
    call: RecurrenceCall,
    form: str,
    chunk: int,
    in_torch: Callable[[RecurrenceCall, str, int], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Compute a call in the form of `choose_form`; `in_torch` has all forms but "triton"."""
    form = choose_form(call, form)
    if form == "triton":
        return kernel.run(call, lambda x: in_torch(x, "chunk", chunk))
    return in_torch(call, form, chunk)
