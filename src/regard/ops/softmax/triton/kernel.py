"""The kernel "triton": flash attention on a GPU where masks and biases are data.

This file imports no triton; `launch` does, when the first call runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.ops.softmax.call import Call, Partial
from regard.ops.softmax.definition import differentiable_gradients
from regard.ops.softmax.kernel import Kernel, KernelResult, WorkEstimate, gradients_or_none
from regard.ops.softmax.merge import apply_sink
from regard.ops.softmax.triton.block_sizes import (
    MAX_DECODED_KEY_DIM,
    MAX_DECODED_VALUE_DIM,
    MAX_HEAD_DIM,
    KernelKind,
    LaunchSizes,
    block_sizes,
)
from regard.ops.softmax.triton.call_data import (
    LARGEST,
    BiasData,
    bias_data,
    count_pairs,
    describe_stored_form,
    mask_bytes,
    mask_data,
    stored_form,
    tile_lists,
    why_no_bias_data,
)
from regard.ops.triton_support import capability_of, has_triton, interprets, why_not_device
from regard.span import Span
from regard.units import plural

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernel supports."""

MAX_BIT_BYTES = 2**31
"""The largest mask that is stored as bits."""


class TritonKernel(Kernel):
    """The kernel "triton": any mask, bias, softcap, sink and positions on a CUDA device."""

    name = "triton"
    selects = True
    wide_output = True

    def why_not(self, call: Call) -> list[str]:
        """Refuse other devices, dropout, taps, fp64, long heads, graphs and large tables."""
        if call.compiling:  # a question about sizes would specialize the graph
            return ["not inside a compiled graph"]
        reasons = [f"does not expose {sorted(call.needs)}"] if call.needs else []
        device = call.q.device.type
        reasons += why_not_device(device, installed=has_triton(), interpreted=interprets())
        if call.dropout:
            reasons.append("no dropout")
        if not call.readable:
            reasons.append("not inside a transform of torch.func, nor without values")
        if call.q.dtype not in DTYPES:
            reasons.append(f"no {str(call.q.dtype).removeprefix('torch.')}")
        if max(call.D, call.E) > MAX_HEAD_DIM and not is_wide_decoding(call):
            reasons.append(
                f"head dimensions above {MAX_HEAD_DIM} (D {call.D}, E {call.E}), unless few "
                f"queries decode with D up to {MAX_DECODED_KEY_DIM} and E up to "
                f"{MAX_DECODED_VALUE_DIM}"
            )
        if 0 in (call.B, call.T, call.S, call.E):
            reasons.append(f"nothing to compute (B {call.B}, T {call.T}, S {call.S}, E {call.E})")
        positions = call.q_positions, call.k_positions
        if any(isinstance(x, Span) and x.stop > LARGEST for x in positions):
            reasons.append(f"positions above {LARGEST - 1}")
        return [*reasons, *why_no_bias_data(call), *_why_no_bits(call)]

    def priority(self, call: Call) -> float | None:
        """Return 75 on a GPU, behind flash attention; 85 for codes or pages; 5 on other devices."""
        if call.q.device.type != "cuda":
            return 5
        return 85 if is_decoding(call) and stored_form(call) is not None else 75

    def describe(self, call: Call) -> str:
        """Return in one sentence how the kernel reads the mask, and its blocks."""
        data = mask_data(call)
        sizes = _sizes(call)
        rows, keys = plural(sizes.rows, "query", "queries"), plural(sizes.keys, "key")
        form = f"{data.ranges} ranges of positions for each query" if data.ranges else "positions"
        form = "one bit for each pair" if data.bits is not None else form
        stored = describe_stored_form(call) if is_decoding(call) else ""
        return (
            f"triton reads the mask as {form}, in blocks of {rows} and {keys}, "
            f"and compiles nothing for a new mask{stored and '; '}{stored}"
        )

    def run(self, call: Call) -> KernelResult:
        """Run the forward kernel, and apply the sink."""
        bias_tensors = call.bias_tensors
        if call.has_gradient:
            out, lse = TritonFunction.apply(  # type: ignore[no-untyped-call]
                call, call.q, call.k, call.v, *bias_tensors
            )
        else:
            from regard.ops.softmax.triton.launch import run_decode, run_forward

            run = run_decode if is_decoding(call) else run_forward
            out, lse = run(call, bias_data(call, call.bias))[:2]
        return KernelResult(out if call.sink is None else apply_sink(out, lse, call.sink), lse)

    def part_gradients(
        self, call: Call, whole: Partial, d_out: Tensor, d_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of some of the keys; see `attend.part_gradients`."""
        from regard.ops.softmax.triton.launch import saved_of_whole

        needs = [x.requires_grad for x in call.bias_tensors]
        return gradients(
            call, saved_of_whole(call, whole), d_out.to(call.q.dtype), d_lse, needs, of_part=True
        )

    def work(self, call: Call) -> WorkEstimate:
        """Return the pairs of non-empty tiles, and the bytes of mask, lse and table."""
        sizes, data = _sizes(call), mask_data(call)
        lists = tile_lists(call, data, sizes.rows, sizes.keys)
        size = 3 * call.B * call.H * call.T * 4 + mask_bytes(data, lists)
        table = bias_data(call, call.bias).table
        size += 0 if table is None else table.nbytes
        return WorkEstimate(count_pairs(call, lists, sizes.rows, sizes.keys), size)


class TritonFunction(torch.autograd.Function):
    """Autograd function for output and lse, which saves no scores."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, *bias_tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the output, and save what the backward pass needs."""
        from regard.ops.softmax.triton.launch import run_forward

        result = run_forward(call, bias_data(call, call.bias))
        out, lse, max_score, scaled_sum = result
        ctx.save_for_backward(q, k, v, out, lse, max_score, scaled_sum, *bias_tensors)
        # autograd saves q, k and v already; the saved call holds their shapes only
        shapes = {name: getattr(call, name).detach().to("meta") for name in "qkv"}
        ctx.call = replace(call, sink=None, **shapes)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients from scores computed again, by the definition if differentiable."""
        from regard.ops.softmax.triton.launch import ForwardResult

        q, k, v, out, lse, max_score, scaled_sum, *learned = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return None, *differentiable_gradients(ctx.call, (q, k, v, *learned), d_out, d_lse)
        bias = None if ctx.call.bias is None else ctx.call.bias.with_tensors(learned)
        call = replace(ctx.call, q=q, k=k, v=v, bias=bias)
        d_out = torch.zeros_like(out) if d_out is None else d_out.to(q.dtype)
        saved = ForwardResult(out, lse, max_score, scaled_sum)
        with torch.autocast(q.device.type, enabled=False):
            matching = gradients(call, saved, d_out, d_lse, ctx.needs_input_grad[4:])
        return None, *(None if x is None else x.to(q.dtype) for x in matching[:3]), *matching[3:]


def gradients(
    call: Call,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    d_out: Tensor,
    d_lse: Tensor | None,
    needs: list[bool] | tuple[bool, ...],
    *,
    of_part: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v and, through its form as data, of the bias."""
    from regard.ops.softmax.triton.launch import ForwardResult, WantedGradients, run_backward

    bias, leaves = call.bias, []
    data = BiasData()
    if bias is not None:
        with torch.enable_grad():
            leaves = [
                x.detach().requires_grad_(needed)
                for x, needed in zip(bias.tensors(), needs, strict=True)
            ]
            data = bias_data(call, bias.with_tensors(leaves))
    wanted = WantedGradients(*(x is not None and x.requires_grad for x in data.parts))
    with torch.no_grad():
        *d_qkv, d_data = run_backward(
            call, data, ForwardResult(*saved), d_out, d_lse, wanted, of_part=of_part
        )
    pairs = [
        (x, d)
        for x, d in zip(data.parts, d_data.parts, strict=True)
        if x is not None and d is not None
    ]
    if not pairs or not any(x.requires_grad for x in leaves):
        return *d_qkv, *(None for _ in leaves)
    outputs, d_outputs = zip(*pairs, strict=True)
    return *d_qkv, *gradients_or_none(outputs, leaves, d_outputs)


MAX_PACKED_ROWS = 32
"""The most queries of a group of heads, all together, that the decoding kernel takes."""
MAX_WIDE_QUERIES = 16
"""The most queries of a head that it takes where the other kernels have no room for a head."""


def is_decoding(call: Call) -> bool:
    """Return whether the decoding kernel runs a call: few queries, more keys, and no gradient."""
    rows = call.H // call.G * call.T
    few = rows <= MAX_PACKED_ROWS and call.S > call.T and not call.has_gradient
    return few or is_wide_decoding(call)


def is_wide_decoding(call: Call) -> bool:
    """Return whether only the decoding kernel has room for the heads of a call, as in MLA."""
    small = call.D <= MAX_DECODED_KEY_DIM and call.E <= MAX_DECODED_VALUE_DIM
    wide = max(call.D, call.E) > MAX_HEAD_DIM
    return wide and small and call.T <= MAX_WIDE_QUERIES and not call.has_gradient


def _sizes(call: Call) -> LaunchSizes:
    """Return the blocks of a forward pass, or of a decoding step."""
    capability = capability_of(call.q.device) if torch.cuda.is_available() else 90
    kind: KernelKind = "decode" if is_decoding(call) else "forward"
    return block_sizes(kind, call.q.dtype, call.D, call.E, capability=capability)


def _why_no_bits(call: Call) -> list[str]:
    """Return why a mask without ranges cannot be stored as bits, without reading a tensor."""
    size = call.B * call.H * call.T * -(-call.S // 8)
    if size <= MAX_BIT_BYTES:
        return []
    probe = call.mask.intervals(Span(0, 1))
    if probe is None:
        return [f"the bits of {call.mask} may take {size / 2**30:.3g} GiB; limit 2.00 GiB"]
    return []
