"""Products of matrices by oneDNN on a CPU, also with a weight that is reordered once.

For fp32 it reaches 300 to 430 GFLOP/s on processors of AMD where torch's MKL reaches 150 to 190.
With a reordered weight, products of 1,024 rows ran two to three times faster (LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_device, check_tensor
from regard.errors import ArgumentError, ArgumentTypeError
from regard.ops.tokenwise import check_linear_map
from regard.process_state import is_compiling, is_transformed
from regard.units import plural

MIN_ROWS = 64
"""The fewest rows of x, as rounding depends on their number: short prompts stay with torch."""

MIN_WEIGHTS = 1 << 16
"""The least number of weights for which oneDNN is used: smaller products take microseconds."""

_SCHEMA = (
    "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, "
    "str? algorithm) -> Tensor Y"
)
"""The undocumented operator of torch 2.13; another declaration means `Tensor.to_mkldnn`."""


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Compute W x + b in fp32 by oneDNN, or return None where torch's own product must run."""
    # first, because a graph cannot hold the questions below
    if is_compiling() or why_not_onednn(x, weight, bias):
        return None
    flat = x.reshape(-1, x.shape[-1])
    y = _product()(flat, weight.contiguous(), bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def why_not_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> list[str]:
    """Return the reasons why oneDNN does not multiply these tensors; [] if it does."""
    tensors = [y for y in (x, weight, bias) if y is not None]
    rows = x.numel() // max(1, x.shape[-1])
    checks: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("torch.compile is active", is_compiling),
        ("a tensor is not a plain tensor on a CPU", lambda: not all(map(_is_plain, tensors))),
        ("a tensor is not float32", lambda: any(y.dtype != torch.float32 for y in tensors)),
        ("this torch has no oneDNN", lambda: not torch.backends.mkldnn.is_available()),
        (f"x has {plural(rows, 'row')}; at least {MIN_ROWS} are needed", lambda: rows < MIN_ROWS),
        (
            f"W has {plural(weight.numel(), 'weight')}; at least {MIN_WEIGHTS:,} are needed",
            lambda: weight.numel() < MIN_WEIGHTS,
        ),
        (
            "a gradient is needed",
            lambda: torch.is_grad_enabled() and any(y.requires_grad for y in tensors),
        ),
        ("autocast is active", lambda: torch.is_autocast_enabled("cpu")),
        ("a transform of torch.func is active", is_transformed),
        ("a dispatch mode is active", lambda: torch._C._len_torch_dispatch_stack() > 0),
        ("oneDNN is disabled", lambda: not torch.backends.mkldnn.enabled),
    )
    return next(([reason] for reason, applies in checks if applies()), [])


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu and x.layout == torch.strided


@cache
def has_direct_product() -> bool:
    """Return whether torch has the operator that multiplies ordinary tensors by oneDNN."""
    return any(
        str(schema) == _SCHEMA
        for schema in torch._C._jit_get_schemas_for_operator("mkldnn::_linear_pointwise")
    )


@cache
def _product() -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return the function that multiplies two matrices by oneDNN."""
    return direct_product if has_direct_product() else converted_product


def direct_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute W x + b of ordinary tensors by torch's operator for fused graphs."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def converted_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute W x + b of tensors in oneDNN's layout, by the documented `Tensor.to_mkldnn`."""
    b = None if bias is None else bias.detach().to_mkldnn()
    return F.linear(x.detach().to_mkldnn(), weight.detach().to_mkldnn(), b).to_dense()


PackedActivation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "silu"]
"""The activations that are applied in the same pass as the product."""

_POINTWISE: dict[str | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}
"""Activation -> the attribute and the algorithm of torch's operator."""
_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
"""The private operators of torch that are used here, which torch.compile emits."""


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """A linear map with a reordered copy of its weight, as `pack_linear` returns it."""

    weight: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int
    dtype: torch.dtype

    def __call__(
        self,
        x: Float[Tensor, "*L M"],
        *,
        activation: PackedActivation | None = None,
        add: Float[Tensor, "*L N"] | None = None,
    ) -> Float[Tensor, "*L N"]:
        """Compute f(W x + b), or W x + b + add."""
        self._check(x, activation, add)
        rows = x.reshape(-1, self.in_features)
        operators = torch.ops.mkldnn
        if add is None:
            name, algorithm = _POINTWISE[activation]
            y = operators._linear_pointwise(rows, self.weight, self.bias, name, [], algorithm)
        else:
            z = add.reshape(-1, self.out_features)
            y = operators._linear_pointwise.binary(rows, z, self.weight, self.bias, "add")
        result: Float[Tensor, "*L N"] = y.view(*x.shape[:-1], self.out_features)
        return result

    def _check(self, x: Tensor, activation: str | None, add: Tensor | None) -> None:
        """Raise unless the arguments of a call fit the weight and one another."""
        if activation not in _POINTWISE:
            raise ArgumentError(
                f"activation is {activation!r}; it is one of "
                f"{', '.join(str(name) for name in _POINTWISE)}"
            )
        if add is not None and activation is not None:
            raise ArgumentError(
                f"both activation {activation!r} and add are given; give one of them, and compute "
                "the other one separately"
            )
        sizes = (("x", x, self.in_features), ("add", add, self.out_features))
        for name, tensor, size in sizes:
            if tensor is None:
                continue
            check_tensor(name, tensor)
            check_device(
                name, tensor, torch.empty(0, dtype=torch.float32, device="cpu"), "the packed weight"
            )
            if tensor.dtype != self.dtype:
                raise ArgumentTypeError(
                    f"{name} is {tensor.dtype} and the packed weight is {self.dtype}; convert one "
                    "with .to()"
                )
            if tensor.shape[-1:] != (size,) or tensor.shape[:-1] != x.shape[:-1]:
                raise ArgumentError(
                    f"{name} is {tuple(tensor.shape)}; with a packed weight "
                    f"({self.out_features}, {self.in_features}), x is [..., {self.in_features}] "
                    f"and add is [..., {self.out_features}], with the same first dimensions"
                )
            if torch.is_grad_enabled() and tensor.requires_grad:
                raise ArgumentError(
                    f"{name} requires a gradient, and a packed weight has none: use "
                    "regard.nn.weights.linear, or torch.no_grad()"
                )


def why_not_packed(weight: Tensor, bias: Tensor | None = None) -> str | None:
    """Return why `pack_linear` cannot reorder a weight, or None if it can."""
    backend = torch.backends.mkldnn
    if not (backend.is_available() and backend.enabled):
        return "torch has no oneDNN here, or it is turned off (torch.backends.mkldnn)"
    absent = [name for name in _OPERATORS if not hasattr(torch.ops.mkldnn, name)]
    if absent:
        return f"torch {torch.__version__} has no mkldnn::{absent[0]}"
    if any(type(x) not in (Tensor, torch.nn.Parameter) for x in (weight, bias) if x is not None):
        return f"the weight is a {type(weight).__name__}, whose memory may hold something else"
    if not weight.is_cpu or weight.layout != torch.strided:
        return f"the weight is on {weight.device} ({weight.layout}); it must be strided on a CPU"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"the weight is {weight.dtype}; oneDNN packs float32 and bfloat16"
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no instructions for bfloat16 that oneDNN uses"
    if weight.numel() == 0:
        return "the weight is empty"
    if is_compiling() or is_transformed():
        return "a graph or a transform of torch.func is open"
    return None


def pack_linear(
    weight: Float[Tensor, "N M"], bias: Float[Tensor, " N"] | None = None
) -> PackedLinear:
    """Reorder a weight, y = W x + b; pack again after each change of it.

    Source: oneDNN developer guide, "Memory format propagation".
    """
    check_linear_map(weight.new_empty(1, *weight.shape[1:]), weight, bias)
    reason = why_not_packed(weight, bias)
    if reason is not None:
        raise ArgumentError(f"pack_linear: {reason}; use regard.nn.weights.linear")
    N, M = weight.shape
    with torch.no_grad():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        own = None if bias is None else bias.detach().clone()
    return PackedLinear(packed, own, M, N, weight.dtype)
