"""Launching the kernels of a recurrence, imported only where triton is installed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, float32

from regard.ops.linear.call import RecurrenceCall
from regard.ops.linear.triton.backward_kernels import (
    gradients_of_inputs,
    gradients_of_states,
    gradients_of_updates,
)
from regard.ops.linear.triton.block_sizes import (
    INTERPRETED,
    ChunkSizes,
    RecurrenceKernelKind,
    chunk_sizes,
)
from regard.ops.linear.triton.delta_kernels import (
    gradients_of_corrections,
    gradients_of_system,
    solve_chunk,
)
from regard.ops.linear.triton.forward_kernels import chunk_outputs, chunk_states, write_nans
from regard.ops.triton_support import Launch, capability_of, interprets


class ForwardBuffers(NamedTuple):
    """What the forward kernels write.

    Args:
        out, last, states: `[B, O, T, E]`, `[B, N, D, E]`, and before n chunks `[B, N, n, D, E]`.
        updates: what the tokens write `[B, N, T, E]`: v, or corrections.
        written, erased, inverse: of the delta rules: what is written where the state is 0, `[B, N,
            T, D]`, and `[B, N, n, C, C]`.
    """

    out: Tensor
    last: Tensor
    states: Tensor
    updates: Tensor
    written: Tensor
    erased: Tensor
    inverse: Tensor


class RecurrenceGradients(NamedTuple):
    """What the backward kernels write, in fp32.

    Args:
        q, k, v: `[B, O, T, D]` by output, `[B, N, T, D]` by value head, and `[B, N, T, E]`.
        beta, g: in parts, `[n, B, N, T, 1]` and `[n, B, N, T, 1 or D]`, or unused.
        first: of the first state `[B, N, D, E]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    g: Tensor
    first: Tensor


def forward_launches(call: RecurrenceCall) -> tuple[list[Launch], ForwardBuffers]:
    """Return the launches of the forward pass, in their order, and what they will write."""
    B, N, T, E, D = *call.v.shape, call.k.shape[3]
    shared = SharedArguments(call)
    q, k, v, g, beta, chunks = shared.q, shared.k, shared.v, shared.g, shared.beta, shared.chunks
    first, delta = call.state.contiguous(), call.beta is not None
    states, parallel = shared.options("states"), shared.options("parallel")
    columns = triton.cdiv(E, states["BE"])
    # the interpreter rounds to bf16 wrongly: `run_forward` does it there
    out_dtype = float32 if interprets() else call.out_dtype
    out = q.new_empty(B, call.outputs, T, E, dtype=out_dtype)
    last, before = torch.empty_like(first), shared.empty(B, N, chunks, D, E)
    updates, written, erased, inverse = v, v, v, v
    counts = 1 if delta else columns
    odd = torch.empty(B, N, chunks, counts, dtype=torch.int32, device=q.device)
    launches = []
    if delta:
        updates, written = shared.empty(B, N, T, E), shared.empty(B, N, T, E)
        C = states["C"]
        erased, inverse = shared.empty(B, N, T, D), shared.empty(B, N, chunks, C, C)
        args = (
            k, v, beta, g, written, erased, inverse, odd, *_strides(k, v, beta, g),
            N, *shared.lengths,
        )  # fmt: skip
        solve = shared.options("solve")
        launches.append(Launch(solve_chunk, (chunks * B * N, 1), args, solve))
    args = (
        k, written, erased, g, first, before, updates, last, odd,
        *_strides(k, written, g), N, *shared.lengths,
    )  # fmt: skip
    options = {**_without(states, "LEVELS", "BD", "EXACT"), "DELTA": delta}
    launches.append(Launch(chunk_states, (B * N, columns), args, options))
    args = (
        q, k, updates, g, before, out, *_strides(q, k, updates, g),
        call.outputs, N, *shared.lengths, shared.shared_queries, call.scale,
    )  # fmt: skip
    grid = (chunks * B * call.outputs, triton.cdiv(E, parallel["BE"]))
    options = {**_without(parallel, "BLOCK_D"), "DELTA": delta}
    launches.append(Launch(chunk_outputs, grid, args, options))
    args = (
        k, v, beta, g, out, last, odd, *_strides(k, v, beta, g), call.outputs, N, *shared.lengths,
    )  # fmt: skip
    options = {**_without(states, "LEVELS", "BD", "PRECISION", "EXACT"), "DELTA": delta}
    launches.append(Launch(write_nans, (B * N, columns), args, {**options, "COUNTS": counts}))
    return launches, ForwardBuffers(out, last, before, updates, written, erased, inverse)


def backward_launches(
    call: RecurrenceCall, forward: ForwardBuffers, d_out: Tensor, d_last: Tensor
) -> tuple[list[Launch], RecurrenceGradients]:
    """Return the launches of the backward pass, in their order, and what they will write."""
    B, N, T, E, D = *call.v.shape, call.k.shape[3]
    shared, delta = SharedArguments(call), call.beta is not None
    q, k, g, chunks = shared.q, shared.k, shared.g, shared.chunks
    states, parallel = shared.options("states"), shared.options("parallel")
    gradients = shared.options("gradients")
    d_out, d_last = _dense(d_out), d_last.to(float32).contiguous()
    d_q, d_k = shared.empty(B, call.outputs, T, D), shared.empty(B, N, T, D)
    d_updates, d_states = shared.empty(B, N, T, E), torch.empty_like(forward.states)
    d_first, blocks = torch.empty_like(d_last), triton.cdiv(D, gradients["BD"])
    d_g = shared.empty(1, B, N, T, D) if call.decay_form == 2 else shared.empty(blocks, B, N, T, 1)
    heads = (call.outputs, N, *shared.lengths, shared.shared_queries)
    args: tuple[Any, ...] = (
        q, k, g, d_out, d_updates, *_strides(q, k, g, d_out), *heads, call.scale,
    )  # fmt: skip
    grid = (chunks * B * N, triton.cdiv(E, parallel["BE"]))
    launches = [Launch(gradients_of_updates, grid, args, _without(parallel, "BLOCK_D"))]
    args = (
        q, k, g, forward.erased, d_out, d_last, d_updates, d_states, d_first,
        *_strides(q, k, g, d_out), *heads, call.scale,
    )  # fmt: skip
    options = {**_without(states, "LEVELS", "BD", "EXACT"), "DELTA": delta}
    launches.append(
        Launch(gradients_of_states, (B * N, triton.cdiv(E, states["BE"])), args, options)
    )
    args = (
        q, k, forward.updates, g, d_out, forward.states, d_states, d_q, d_k, d_g,
        *_strides(q, k, forward.updates, g, d_out), *heads, B * N * T, call.scale,
    )  # fmt: skip
    grid, options = (chunks * B * N, blocks), _without(gradients, "BLOCK_D")
    launches.append(Launch(gradients_of_inputs, grid, args, {**options, "DELTA": delta}))
    if not delta:
        results = RecurrenceGradients(d_q, d_k, d_updates, None, d_g, d_first)
        return launches, results
    d_v, d_beta = shared.empty(B, N, T, E), shared.empty(blocks + 1, B, N, T, 1)
    d_right, d_matrix = torch.empty_like(forward.erased), torch.empty_like(forward.inverse)
    args = (
        shared.v, shared.beta, forward.inverse, forward.written, forward.erased, forward.states,
        d_updates, d_v, d_beta[blocks], d_right, d_matrix, *_strides(shared.v, shared.beta),
        N, T, chunks,
    )  # fmt: skip
    options = _without(gradients, "BLOCK_D", "DECAY", "LEVELS", "EXACT")
    launches.append(Launch(gradients_of_corrections, (chunks * B * N, 1), args, options))
    args = (
        k, shared.beta, g, d_right, d_matrix, d_k, d_beta, d_g, *_strides(k, shared.beta, g),
        N, *shared.lengths, B * N * T,
    )  # fmt: skip
    options = _without(gradients, "BLOCK_D", "BE", "E")
    launches.append(Launch(gradients_of_system, (chunks * B * N, blocks), args, options))
    return launches, RecurrenceGradients(d_q, d_k, d_v, d_beta, d_g, d_first)


def run_forward(call: RecurrenceCall) -> ForwardBuffers:
    """Run the forward kernels, and return what they wrote."""
    launches, buffers = forward_launches(call)
    for launch in launches:
        launch.run()
    return buffers._replace(out=buffers.out.to(call.out_dtype))


def run_backward(
    call: RecurrenceCall, d_out: Tensor, d_last: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Compute the states again, run the backward kernels, and return all gradients in fp32."""
    launches, forward = forward_launches(call)
    for launch in launches:
        if launch.kernel in (solve_chunk, chunk_states):
            launch.run()
    if call.beta is not None:
        # a token that overflows has no gradient, and its 0 times infinity must reach no other
        for x in (forward.updates, forward.written, forward.erased, forward.inverse):
            x.masked_fill_(~x.isfinite(), 0)
    launches, results = backward_launches(call, forward, d_out, d_last)
    for launch in launches:
        launch.run()
    H, G = call.q.shape[1], call.k.shape[1]
    d_q = results.q.unflatten(1, (H, -1)).sum(2)
    d_k = results.k.unflatten(1, (G, -1)).sum(2)
    d_g = None if call.log_decay is None else results.g.sum(0).sum_to_size(call.log_decay.shape)
    d_beta = None if results.beta is None else results.beta.sum(0)
    return d_q, d_k, results.v, d_beta, d_g, results.first


class SharedArguments:
    """What all kernels of a call share."""

    def __init__(self, call: RecurrenceCall) -> None:
        self.call = call
        self.q, self.k, self.v = (_dense(x) for x in (call.q, call.k, call.v))
        # v stands for a gate that is not there
        self.g = self.v if call.log_decay is None else _dense(call.log_decay)
        self.beta = self.v if call.beta is None else _dense(call.beta)
        T = call.v.shape[2]
        self.chunks = triton.cdiv(T, self._sizes("states").chunk)
        self.lengths = (T, self.chunks, call.v.shape[1] // call.k.shape[1])
        self.shared_queries = call.outputs // call.q.shape[1]

    def empty(self, *shape: int) -> Tensor:
        """Return a buffer in fp32."""
        return self.q.new_empty(*shape, dtype=float32)

    def options(self, kind: RecurrenceKernelKind) -> dict[str, Any]:
        """Return the arguments for which a kernel is compiled, warps and stages."""
        call, sizes = self.call, self._sizes(kind)
        D, E = call.k.shape[3], call.v.shape[3]
        widths = [max(16, triton.next_power_of_2(x)) for x in (D, E)]
        return {
            "D": D, "E": E, "BLOCK_D": widths[0], "BD": min(sizes.channels, widths[0]),
            "BE": min(sizes.columns, widths[1]), "C": sizes.chunk, "DECAY": call.decay_form,
            "LEVELS": sizes.chunk.bit_length() - 1,
            "PRECISION": "ieee" if call.exact else "tf32",
            "EXACT": "ieee" if call.exact else "tf32x3",
            "num_warps": sizes.warps, "num_stages": sizes.stages,
        }  # fmt: skip

    def _sizes(self, kind: RecurrenceKernelKind) -> ChunkSizes:
        """Return the sizes of a kernel; chunks are the same for all kernels."""
        if interprets():
            return INTERPRETED
        call = self.call
        by_channel, D = call.decay_form == 2, call.k.shape[3]
        capability = capability_of(self.q.device)
        return chunk_sizes(
            kind, by_channel=by_channel, exact=call.exact, D=D, capability=capability
        )


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return options without those that a kernel does not have."""
    return {name: x for name, x in options.items() if name not in names}


def _dense(x: Tensor) -> Tensor:
    """Return x, copied if the numbers of a token are not beside each other."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, head and token; 0 where all share one."""
    return tuple(0 if x.shape[i] == 1 else x.stride(i) for x in tensors for i in range(3))
