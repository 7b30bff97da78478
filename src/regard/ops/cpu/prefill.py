"""Prefill on a CPU: attention of many queries, and its gradient.

`PrefillArgs` holds the arguments. `prefill` computes blocks of queries against packed keys and
values (`csrc/prefill.cpp`). `prefill_with_gradient` does the same for autograd; its backward pass
computes the weights of the same blocks again (`csrc/prefill_gradient.cpp`). Compiled code checks no
argument: the caller has checked sizes, dtypes and devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regard.ops.cpu import launch, threads
from regard.ops.cpu.arguments import struct_layout
from regard.ops.cpu.library import entry


@dataclass(frozen=True, eq=False)
class PrefillArgs:
    """The arguments of prefill: queries, keys and values of any strides, which keys each query
    sees, and the terms that are added to the scores. The struct `Prefill` of `csrc/arguments.h`
    says what each of them is, and its shape; `out_dtype` is the dtype of the output, that of q or
    fp32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float
    symmetric: bool
    slopes: Tensor
    q_positions: Tensor
    k_positions: Tensor
    starts: Tensor
    stops: Tensor
    out_dtype: torch.dtype


def prefill(args: PrefillArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention without a gradient.

    Args:
        args: the queries, keys and values, the mask and the terms that are added to the scores.

    Returns:
        The output `[B, H, T, E]` in `args.out_dtype`, and for each query in fp32 `[B, H, T]` the
        largest score m (0 if it sees no key) and the sum of e^(s - m) over its scores s.
    """
    *rows, E = *args.q.shape[:3], args.v.shape[3]
    out = launch.empty(*rows, E, dtype=args.out_dtype)
    max_score, scaled_sum = (launch.empty(*rows, dtype=torch.float32) for _ in range(2))
    results = {"max_score": max_score, "scaled_sum": scaled_sum}
    _run("prefill", "PrefillForward", args, out=launch.address(out, out.dtype), **results)
    return out, max_score, scaled_sum


Gradients: TypeAlias = Callable[
    [tuple[Tensor, ...], Tensor | None, Tensor | None], tuple[Tensor | None, ...]
]
"""(q, k, v), the gradient of the output and that of the lse -> the gradients of q, k and v."""


def prefill_with_gradient(
    args: PrefillArgs, differentiable_gradients: Gradients
) -> tuple[Tensor, Tensor]:
    """Compute the output `[B, H, T, E]` and the lse `[B, H, T]`, which autograd can differentiate
    by q, k and v. No scores are saved.

    Args:
        args: the arguments of `prefill`.
        differentiable_gradients: computes the gradients where they must be differentiable
            themselves (`create_graph=True`), which those of the compiled loops are not.
    """
    results: tuple[Tensor, Tensor] = _PrefillFunction.apply(  # type: ignore[no-untyped-call]
        args, differentiable_gradients, args.q, args.k, args.v
    )
    return results


class _PrefillFunction(torch.autograd.Function):
    """Autograd function of `prefill`, for the gradients of q, k and v."""

    @staticmethod
    def forward(
        ctx: Any,
        args: PrefillArgs,
        differentiable_gradients: Gradients,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Tensor]:
        out, top, total = prefill(args)
        ctx.differentiable_gradients = differentiable_gradients
        ctx.save_for_backward(q, k, v, out, top, total)
        # ctx.save_for_backward holds q, k and v already; these arguments hold their shapes only
        ctx.args = replace(args, **{x: getattr(args, x).detach().to("meta") for x in "qkv"})
        ctx.set_materialize_grads(False)
        return out, top + total.log()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, top, total = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, *ctx.differentiable_gradients((q, k, v), d_out, d_lse)
        args = replace(ctx.args, q=q.detach(), k=k.detach(), v=v.detach())
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_lse = torch.zeros_like(top) if d_lse is None else d_lse
        with torch.autocast("cpu", enabled=False):
            return None, None, *prefill_gradient(args, out, (top, total), d_out, d_lse)


def prefill_gradient(
    args: PrefillArgs,
    out: Tensor,
    saved: tuple[Tensor, Tensor],
    d_out: Tensor,
    d_lse: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v.

    Args:
        args: the arguments of `prefill`.
        out: the output of `prefill`, in the dtype of q or in fp32.
        saved: for each query `[B, H, T]` the largest score, and the sum of e^(score - largest), as
            `prefill` returned them.
        d_out: the gradient of the output, `[B, H, T, E]`, in the dtype of q or in fp32.
        d_lse: the gradient of the lse, `[B, H, T]`.
        dtype: the dtype of the gradients: that of q (None), or fp32.
    """
    dtype = dtype or args.q.dtype
    grads = [launch.empty(*x.shape, dtype=dtype) for x in (args.q, args.k, args.v)]
    d_out = launch.with_rows(d_out)
    top, total, d_lse = (x.detach().contiguous() for x in (*saved, d_lse))
    results = {
        "out": launch.with_rows(out),
        "d_out": d_out,
        "d_out_is_wide": d_out.dtype == torch.float32,
        "max_score": top,
        "scaled_sum": total,
        "d_lse": d_lse,
        "results_are_wide": dtype == torch.float32,
        **{f"d_{x}": launch.address(y, dtype) for x, y in zip("qkv", grads, strict=True)},
    }
    args = replace(args, out_dtype=out.dtype)
    _run("prefill_gradient", "PrefillGradient", args, **results)
    d_q, d_k, d_v = grads
    return d_q, d_k, d_v


def _run(name: str, struct: str, args: PrefillArgs, **results: Any) -> None:
    """Call an entry with the arguments of `args` and of its own, and with the memory it needs."""
    layout, function = struct_layout(struct), entry(name, args.q.dtype)
    (B, H, T, D), (_, G, S, E) = args.q.shape, args.v.shape
    values = {**vars(args), **{x: launch.with_rows(getattr(args, x)) for x in "qkv"}}
    is_wide = values.pop("out_dtype") == torch.float32
    for x in ("slopes", "q_positions", "k_positions", "starts", "stops"):
        values[x] = values[x].contiguous()
    record = layout.pack(
        **values,
        **results,
        **dict(zip("BHGTSDE", (B, H, G, T, S, D, E), strict=True)),
        threads=(workers := threads.thread_count()),
        is_wide=is_wide,
        bytes=0,
        memory=0,
    )
    threads.run_entry(function, record, 1)  # without memory it says how much it needs
    memory = launch.empty(record[layout.place("bytes")], dtype=torch.uint8)
    record[layout.place("memory")] = launch.address(memory, torch.uint8)
    threads.run_entry(function, record, workers)
