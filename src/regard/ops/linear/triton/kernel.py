"""The recurrences in Triton: which calls they serve, and their gradient; no triton is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.ops.linear.call import RecurrenceCall
from regard.ops.linear.triton.block_sizes import MAX_KEY_CHANNELS
from regard.ops.softmax.kernel import gradients_or_none
from regard.ops.triton_support import has_triton, interprets, why_not_device
from regard.process_state import is_compiling, values_are_readable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of q, k and v that the kernels read."""


Definition = Callable[[RecurrenceCall], tuple[Tensor, Tensor]]
"""The same recurrence in differentiable operations, for second derivatives."""


def why_not(call: RecurrenceCall) -> list[str]:
    """Return why the kernels cannot run a recurrence; empty if they can."""
    device = call.q.device.type
    reasons = why_not_device(device, installed=has_triton(), interpreted=interprets())
    if is_compiling():
        return [*reasons, "not inside a compiled graph"]
    present = [x for x in call.tensors if x is not None]
    if not values_are_readable(*present):
        reasons.append("not inside a transform of torch.func, nor without values")
    wrong = {x.dtype for x in present} | {call.dtype}
    reasons += [f"no {str(x).removeprefix('torch.')}" for x in wrong if x not in DTYPES]
    D = call.k.shape[3]
    if D > MAX_KEY_CHANNELS:
        reasons.append(f"more than {MAX_KEY_CHANNELS} key channels or features (D {D})")
    B, N, T, E = call.v.shape
    if 0 in (B, N, T, E, D):
        reasons.append(f"nothing to compute (B {B}, T {T}, D {D}, E {E})")
    return reasons


def run(call: RecurrenceCall, definition: Definition) -> tuple[Tensor, Tensor]:
    """Run the kernels, and return the outputs `[B, O, T, E]` and the last state."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call.tensors):
        return RecurrenceFunction.apply(  # type: ignore[no-any-return, no-untyped-call]
            call.with_tensors(_detached(call.tensors)), definition, *call.tensors
        )
    from regard.ops.linear.triton.launch import run_forward

    return run_forward(call)[:2]


def _detached(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return the tensors without their graph."""
    return tuple(None if x is None else x.detach() for x in tensors)


class RecurrenceFunction(torch.autograd.Function):
    """Autograd function of a recurrence, which saves its inputs only."""

    @staticmethod
    def forward(
        ctx: Any, call: RecurrenceCall, definition: Definition, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute the outputs and the last state."""
        from regard.ops.linear.triton.launch import run_forward

        ctx.save_for_backward(*tensors)
        # autograd saves the tensors; the saved call holds their shapes only
        shapes = tuple(None if x is None else x.detach().to("meta") for x in tensors)
        ctx.call, ctx.definition = call.with_tensors(shapes), definition
        ctx.set_materialize_grads(False)
        return run_forward(call)[:2]

    @staticmethod
    def backward(
        ctx: Any, d_out: Tensor | None, d_last: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients; where they must be differentiable, the definition computes them."""
        from regard.ops.linear.triton.launch import run_backward

        tensors, call = ctx.saved_tensors, ctx.call
        if torch.is_grad_enabled():  # create_graph=True
            results = ctx.definition(call.with_tensors(tensors))
            learned = gradients_or_none(results, tensors, (d_out, d_last), create_graph=True)
            return None, None, *learned
        if d_out is None:
            B, _, T, E = call.v.shape
            assert d_last is not None
            d_out = d_last.new_zeros(B, call.outputs, T, E)
        if d_last is None:
            d_last = d_out.new_zeros(call.state.shape, dtype=call.state.dtype)
        call = call.with_tensors(_detached(tensors))
        with torch.autocast(d_out.device.type, enabled=False):
            results = run_backward(call, d_out, d_last)
        return (
            None,
            None,
            *(
                None if d is None or x is None or not needed else d.to(x.dtype)
                for x, d, needed in zip(tensors, results, ctx.needs_input_grad[2:], strict=True)
            ),
        )
