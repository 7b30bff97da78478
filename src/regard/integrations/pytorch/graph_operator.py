"""`F.scaled_dot_product_attention` of an accelerated model in a graph that torch compiles: the
operator `regard::torch_attention`.

A graph cannot read a mask or choose by sizes. The operator is one node of it, and does what
`regard.accelerate` does outside of a graph, when it is executed: it recognizes the mask, chooses a
kernel or leaves the call to torch, and counts the call.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from regard.cost import attention_flops
from regard.ops.cpu.library import has_kernels_in_graph
from regard.process_state import is_exporting, is_in_transform

LIBRARY = torch.library.Library("regard", "FRAGMENT")
"""The operators of `regard`; `override` gives this one its implementation."""
LIBRARY.define(
    "torch_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, "
    "float? scale, bool enable_gqa, bool always) -> Tensor"
)


def suits_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    *,
    grouped: bool,
) -> bool:
    """Return whether a graph holds the operator for these arguments; exports do not."""
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    if dropout > 0 or is_exporting() or is_in_transform() or not has_kernels_in_graph():
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    if any(type(x) not in (Tensor, nn.Parameter) or x.device.type != "cpu" for x in tensors):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    if any(x.ndim != 4 for x in (query, key, value)):
        return False
    return query.shape[0] == key.shape[0] and (grouped or query.shape[1] == key.shape[1])


def torch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
    always: bool,
) -> Tensor:
    """Put the operator into the graph that torch traces."""
    out: Tensor = torch.ops.regard.torch_attention(
        query, key, value, mask, is_causal, scale, grouped, always
    )
    return out


def _shape(query: Tensor, _key: Tensor, value: Tensor, *_others: object) -> Tensor:
    """Return the output of the operator without values."""
    return query.new_empty(*query.shape[:3], value.shape[3])


def _flops(query: Tensor, key: Tensor, value: Tensor, *_others: object, **_: object) -> int:
    """Return the FLOPs of every query-key pair, which torch's function may compute."""
    B, H, T, D = query.shape
    return attention_flops(B * H * T * key.shape[2], D, value.shape[3])


torch.library.register_fake("regard::torch_attention", _shape, lib=LIBRARY)
register_flop_formula(torch.ops.regard.torch_attention, get_raw=True)(_flops)
