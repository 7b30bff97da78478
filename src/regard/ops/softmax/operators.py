"""Attention as operators of torch, so that a graph and a dispatch mode can hold a call.

A graph has no memory addresses for compiled kernels. An operator is one node, which chooses a
kernel when it is executed, so that one graph serves every length.

    regard::attention                 without gradients: the output and the lse
    regard::attention_with_gradient   the same, and what its gradient needs
    regard::attention_backward        the gradients of q, k, v and the tensors of the bias

`run_call` uses them in a graph and under a dispatch mode, such as `FlopCounterMode`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils.flop_counter import register_flop_formula

from regard.cost import attention_flops
from regard.cost.softmax import training_flops
from regard.ops.cpu.attention import prefill, prefill_gradient
from regard.ops.cpu.library import has_kernels_in_graph
from regard.ops.softmax.call import Call
from regard.ops.softmax.definition import differentiable_gradients
from regard.ops.softmax.dispatch import choose_kernel, run_on_kernel
from regard.ops.softmax.gemm import GemmKernel, prefill_args
from regard.ops.softmax.kernel import KernelResult, gradients_or_none, maximum_and_sum
from regard.ops.softmax.merge import apply_sink
from regard.ops.softmax.packed_call import (
    PackedCall,
    pack,
    trained_bias_tensors,
    unpack,
    unpackable_parts,
)
from regard.process_state import differentiates_forward, is_exporting, is_in_transform
from regard.sequence_scope import current_scope
from regard.tracing import call_observers

COMPILED_KERNELS = ("cpu", "gemm")
"""The kernels that a graph can hold only inside an operator."""

_PACKED_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor[] tensors, Tensor[] bias_tensors, SymInt[] numbers, "
    "str rules, float scale, float? softcap, bool wants_lse, str backend"
)
"""The fields of `PackedCall`."""

_SAVED = 5
"""The number of arguments of `attention_backward` before those of `PackedCall`."""

_AUTOGRAD_KEYS = (
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.AutogradNestedTensor,
    torch._C.DispatchKey.ADInplaceOrView,
)
"""What torch excludes while an operator runs."""

_LIBRARY = torch.library.Library("regard", "FRAGMENT")
_LIBRARY.define(f"attention({_PACKED_SCHEMA}) -> (Tensor out, Tensor lse)")
_LIBRARY.define(
    f"attention_with_gradient({_PACKED_SCHEMA}) "
    "-> (Tensor out, Tensor lse, Tensor max_score, Tensor scaled_sum)"
)
_LIBRARY.define(
    "attention_backward(Tensor? d_out, Tensor? d_lse, Tensor out, Tensor max_score, "
    f"Tensor scaled_sum, {_PACKED_SCHEMA}) -> Tensor[]"
)


def run_call(call: Call, backend: str = "auto") -> KernelResult:
    """Run a call on its kernel, as an operator in a graph, over all ranks if `sequence` is open."""
    if (scope := current_scope()) is not None:
        result: KernelResult = scope.run_attention(call, backend)
        return result
    if (call.compiling or torch._C._len_torch_dispatch_stack()) and _suits_operator(call, backend):
        return _run_operator(call, backend)
    return run_on_kernel(*choose_kernel(call, backend))


def _suits_operator(call: Call, backend: str) -> bool:
    """Return whether a call runs as an operator."""
    if call.dropout or call.needs or call_observers() or not _are_plain(call.q, call.k, call.v):
        return False
    if is_in_transform() or differentiates_forward():  # an operator has no rule for these
        return False
    if call.compiling:
        return _suits_graph(call, backend) and not unpackable_parts(call)
    return call.q.device.type in ("cpu", "meta") and not unpackable_parts(call)


def _suits_graph(call: Call, backend: str) -> bool:
    """Return whether a graph holds the operator: an exported one does only by name."""
    if call.q.device.type != "cpu" or torch._C._get_tracing_state() is not None:
        return False
    if backend == "auto":
        return has_kernels_in_graph() and not is_exporting()
    return backend in COMPILED_KERNELS


def _are_plain(*tensors: Tensor) -> bool:
    """Return whether no tensor is of a class of its own; fake tensors stand for plain ones."""
    plain = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
    return all(type(x) in plain for x in tensors)


def _run_operator(call: Call, backend: str) -> KernelResult:
    """Run a call as an operator, and add the sink by operations of torch."""
    wants_lse = call.wants_lse or call.sink is not None
    packed = pack(replace(call, wants_lse=wants_lse), backend)
    if call.has_gradient:
        out, lse, _, _ = torch.ops.regard.attention_with_gradient(*packed)
    else:
        out, lse = torch.ops.regard.attention(*packed)
    out = out if call.sink is None else apply_sink(out, lse, call.sink)
    return KernelResult(out, lse if wants_lse else None)


def _attention(*args: *PackedCall) -> tuple[Tensor, Tensor]:
    """Compute a call without a gradient."""
    packed = PackedCall(*args)
    out, lse, *_ = run_on_kernel(*choose_kernel(unpack(packed), packed.backend))
    return _own(out, packed), _own_lse(lse, packed)


def _attention_with_gradient(*args: *PackedCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute a call whose gradient is needed; its lse is max_score + ln scaled_sum, for "gemm"."""
    packed = PackedCall(*args)
    with _autograd():
        kernel, call = choose_kernel(_trained_call(packed), packed.backend)
        if isinstance(kernel, GemmKernel):
            with torch.no_grad():
                out, max_score, scaled_sum = prefill(prefill_args(call))
                return out, _own_lse(max_score + scaled_sum.log(), packed), max_score, scaled_sum
        result = run_on_kernel(kernel, call)
    out, lse = _own(result.out, packed), _own_lse(result.lse, packed)
    return out, lse, *_without_maximum(result.lse, call)


def _without_maximum(lse: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    """Return the lse of a kernel as max_score and scaled_sum; NaN if it returned none."""
    if lse is None:
        none = torch.full((call.B, call.H, call.T), math.nan, dtype=call.score_dtype, device="cpu")
        return none, none.clone()
    return maximum_and_sum(lse.detach())


def _attention_backward(
    d_out: Tensor | None,
    d_lse: Tensor | None,
    out: Tensor,
    max_score: Tensor,
    scaled_sum: Tensor,
    *args: *PackedCall,
) -> list[Tensor]:
    """Compute the gradients of a call; all kernels but "gemm" compute it again for that."""
    packed = PackedCall(*args)
    with _autograd():
        original = _trained_call(packed)
        kernel, call = choose_kernel(original, packed.backend)
        if isinstance(kernel, GemmKernel):
            d_out = torch.zeros_like(out) if d_out is None else d_out
            d_lse = torch.zeros_like(max_score) if d_lse is None else d_lse
            saved = max_score, scaled_sum
            with torch.no_grad():
                return list(prefill_gradient(prefill_args(call), out, saved, d_out, d_lse))
        result = run_on_kernel(kernel, call)
        trained_biases = (x for x in original.bias_tensors if x.requires_grad)
        inputs = [original.q, original.k, original.v, *trained_biases]
        grads = gradients_or_none((result.out, result.lse), inputs, (d_out, d_lse))
    # an operator returns new tensors only
    return [
        torch.zeros_like(x, memory_format=torch.contiguous_format)
        if g is None
        else g.clone(memory_format=torch.contiguous_format)
        for g, x in zip(grads, inputs, strict=True)
    ]


@contextmanager
def _autograd() -> Iterator[None]:
    """Record a graph inside an operator, where torch switched recording off."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    with (
        torch.enable_grad(),
        torch._C._ForceDispatchKeyGuard(included, excluded),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _trained_call(packed: PackedCall) -> Call:
    """Return the call with inputs that require gradients, and that are no part of another graph."""
    q, k, v = (x.detach().requires_grad_() for x in (packed.q, packed.k, packed.v))
    bias_tensors = [x.detach() for x in packed.bias_tensors]
    for i in trained_bias_tensors(packed):
        bias_tensors[i].requires_grad_()
    return unpack(packed._replace(q=q, k=k, v=v, bias_tensors=bias_tensors))


def _own(out: Tensor, packed: PackedCall) -> Tensor:
    """Return an output as a contiguous tensor that is none of the inputs."""
    out = out.detach().contiguous()
    inputs = {x.data_ptr() for x in (packed.q, packed.k, packed.v)}
    return out.clone() if out.data_ptr() in inputs else out


def _own_lse(lse: Tensor | None, packed: PackedCall) -> Tensor:
    """Return the lse as a contiguous tensor, which is empty if the call does not need it."""
    if packed.wants_lse:
        assert lse is not None, "the kernel returned no lse although the call requested one"
        return lse.detach().contiguous()
    return packed.q.new_empty(0, dtype=_score_dtype(packed.q))


def _score_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of the lse."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _attention_shapes(*args: *PackedCall) -> tuple[Tensor, Tensor]:
    """Return outputs of the right shapes and dtypes, without values."""
    packed = PackedCall(*args)
    rows = packed.q.shape[:3]
    lse = packed.q.new_empty(rows if packed.wants_lse else (0,), dtype=_score_dtype(packed.q))
    return packed.q.new_empty(*rows, packed.v.shape[3]), lse


def _attention_with_gradient_shapes(*args: *PackedCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs of the right shapes and dtypes, without values."""
    q, dtype = PackedCall(*args).q, _score_dtype(PackedCall(*args).q)
    sums = q.new_empty(q.shape[:3], dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)
    return *_attention_shapes(*args), *sums


def _attention_backward_shapes(*args: Any) -> list[Tensor]:
    """Return gradients of the right shapes and dtypes, without values."""
    packed = PackedCall(*args[_SAVED:])
    trained = [packed.bias_tensors[i] for i in trained_bias_tensors(packed)]
    return [x.new_empty(x.shape) for x in (packed.q, packed.k, packed.v, *trained)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what the gradient of `attention_with_gradient` needs."""
    packed, (out, _, max_score, scaled_sum) = PackedCall(*inputs), output
    ctx.mark_non_differentiable(max_score, scaled_sum)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        out,
        max_score,
        scaled_sum,
        packed.q,
        packed.k,
        packed.v,
        *packed.tensors,
        *packed.bias_tensors,
    )
    ctx.tensors = len(packed.tensors)
    ctx.others = packed[5:]


def _backward(
    ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: Tensor | None
) -> tuple[object, ...]:
    """Return the gradients of `attention_with_gradient`, by definition if differentiable."""
    out, max_score, scaled_sum, q, k, v, *others = ctx.saved_tensors
    tensors, bias_tensors = others[: ctx.tensors], others[ctx.tensors :]
    packed = PackedCall(q, k, v, tensors, bias_tensors, *ctx.others)
    d_lse = d_lse if packed.wants_lse else None  # of the empty tensor in its place
    trained = trained_bias_tensors(packed)
    d_bias: list[Tensor | None] = [None] * len(bias_tensors)
    if torch.is_grad_enabled():  # create_graph=True
        grads = differentiable_gradients(unpack(packed), (q, k, v, *bias_tensors), d_out, d_lse)
        d_bias = list(grads[3:])
    else:
        grads = tuple(
            torch.ops.regard.attention_backward(d_out, d_lse, out, max_score, scaled_sum, *packed)
        )
        for i, g in zip(trained, grads[3:], strict=True):
            d_bias[i] = g
    # torch takes an empty list of numbers for one of tensors
    d_numbers: list[None] | None = None if packed.numbers else []
    return *grads[:3], [None] * len(tensors), d_bias, d_numbers, None, None, None, None, None


def _count_flops(*args: *PackedCall, **_: object) -> int:
    """Return the FLOPs that `plan` counts for a call without a gradient."""
    packed = PackedCall(*args)
    kernel, call = choose_kernel(unpack(packed), packed.backend)
    return attention_flops(kernel.work(call).pairs, call.D, call.E)


def _count_flops_with_gradient(*args: *PackedCall, **_: object) -> int:
    """Return the FLOPs that `plan` counts for a call with a gradient."""
    pairs, D, E = _trained_pairs(PackedCall(*args))
    return attention_flops(pairs, D, E)


def _count_backward_flops(*args: Any, **_: object) -> int:
    """Return the FLOPs of the gradient: the scores again, and four products."""
    pairs, D, E = _trained_pairs(PackedCall(*args[_SAVED:]))
    return training_flops(pairs, D, E) - attention_flops(pairs, D, E)


def _trained_pairs(packed: PackedCall) -> tuple[int, int, int]:
    """Return the query-key pairs that the kernel of a call with a gradient computes, D and E."""
    with torch.enable_grad():
        kernel, call = choose_kernel(_trained_call(packed), packed.backend)
    return kernel.work(call).pairs, call.D, call.E


def _register(
    name: str,
    function: Callable[..., object],
    shapes: Callable[..., object],
    flops: Callable[..., int],
) -> None:
    """Register what an operator computes, its shapes, and its FLOPs."""
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"regard::{name}", shapes, lib=_LIBRARY)
    register_flop_formula(getattr(torch.ops.regard, name), get_raw=True)(flops)


_register("attention", _attention, _attention_shapes, _count_flops)
_register(
    "attention_with_gradient",
    _attention_with_gradient,
    _attention_with_gradient_shapes,
    _count_flops_with_gradient,
)
_register(
    "attention_backward", _attention_backward, _attention_backward_shapes, _count_backward_flops
)
torch.library.register_autograd(
    "regard::attention_with_gradient", _backward, setup_context=_save_for_backward, lib=_LIBRARY
)
