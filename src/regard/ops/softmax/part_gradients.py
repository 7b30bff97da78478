"""`part_gradients`: the gradients of attention over some of the keys, from the output and the lse
over all of them.

Attention over many parts of the keys needs one saved output and one saved lse for its backward
pass, not those of each part. With the joined lse and output O, each part is on its own:

    p = exp(s - lse)    dv = p^T dO    ds = p (dO v^T - dO . O + d_lse)    dq = ds k    dk = ds^T q

Kernels with the method `part_gradients` compute these formulas. For any other kernel the part is
computed again, and its own gradients are used, with the share of the part in each row:

    share = exp(lse_p - lse)    dO_p = share dO    d_lse_p = share (dO . out_p - dO . O + d_lse)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regard.biases import Bias
from regard.ops.softmax.call import Call, Kernel, Partial, make_call
from regard.ops.softmax.dispatch import choose_kernel

GradientMethod: TypeAlias = Callable[
    [Call, Partial, Tensor, Tensor | None], tuple[Tensor | None, ...]
]
"""The method `part_gradients` of a kernel."""


def part_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whole: Partial,
    gradients: tuple[Tensor, Tensor | None],
    *,
    bias: Bias | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of attention over some of the keys, for one of the parts that `merge`
    joins.
    """
    d_out, d_lse = gradients
    with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        if bias is not None:
            bias = bias.with_tensors(
                [x.detach().requires_grad_(x.requires_grad) for x in bias.tensors()]
            )
        call = make_call(q, k, v, bias=bias, wants_lse=True, **options)
        if out_dtype not in (None, call.q.dtype):
            call = replace(call, out_dtype=out_dtype)
        kernel, call = choose_kernel(call, backend)
    method: GradientMethod | None = getattr(kernel, "part_gradients", None)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        if method is None:
            return _gradients_by_share(kernel, call, whole, d_out, d_lse)
        return method(call, whole, d_out, d_lse)


def _gradients_by_share(
    kernel: Kernel, call: Call, whole: Partial, d_out: Tensor, d_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a part from the gradient of its own output and lse."""
    with torch.enable_grad():
        part = kernel.run(call)
    assert part.lse is not None
    sees_nothing = whole.lse.isneginf()
    share = torch.exp(part.lse.detach() - whole.lse.masked_fill(sees_nothing, 0))
    share = share.masked_fill(sees_nothing, 0)
    d_lse_of_part = (d_out * (part.out.detach() - whole.out)).sum(-1)
    d_lse_of_part = share * (d_lse_of_part if d_lse is None else d_lse_of_part + d_lse)
    bias_tensors = () if call.bias is None else call.bias.tensors()
    inputs = (call.q, call.k, call.v, *bias_tensors)
    wanted = [x for x in inputs if x.requires_grad]
    grads = iter(
        torch.autograd.grad(
            (part.out, part.lse),
            wanted,
            ((share[..., None] * d_out).to(part.out.dtype), d_lse_of_part.to(part.lse.dtype)),
            allow_unused=True,
        )
    )
    gradients = (next(grads) if x.requires_grad else None for x in inputs)
    return tuple(None if x is None else x.to(call.result_dtype) for x in gradients)
