"""Products of fp32 matrices by oneDNN on a CPU.

It reaches 300 to 430 GFLOP/s on processors of AMD where torch's MKL reaches 150 to 190 (LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

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
        (
            f"x has {plural(rows, 'row')}; at least {MIN_ROWS} are needed",
            lambda: rows < MIN_ROWS,
        ),
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
