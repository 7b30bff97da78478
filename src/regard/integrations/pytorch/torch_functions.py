"""torch's own attention functions, and the `accelerate` contexts that are open in a thread.

The replacements, the observed calls and the operator of compiled graphs all need both: the
originals for what is left to torch, the contexts to count what ran where.

`F.scaled_dot_product_attention` of an accelerated model in a compiled graph is the operator
`regard::torch_attention`. A graph cannot read a mask or choose by sizes; the operator is one node
of it, and does what `regard.accelerate` does outside of a graph, when it is executed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from regard.cost import attention_flops
from regard.integrations.pytorch.module_places import open_places
from regard.ops.cpu.library import has_kernels_in_graph
from regard.process_state import is_exporting, is_in_transform
from regard.tracing import is_tracing

FLEX_MODULE = "torch.nn.attention.flex_attention"
"""The module of `flex_attention`, which torch imports late."""


class Originals(NamedTuple):
    """The functions of torch before any was replaced, where no replacement looks for names."""

    attention: Callable[..., Tensor]
    multi_head: Callable[..., tuple[Tensor, Tensor | None]]
    multi_head_forward: Callable[..., tuple[Tensor, Tensor | None]]
    encoder_layer: Callable[..., Tensor]


TORCH = Originals(
    F.scaled_dot_product_attention,
    torch._native_multi_head_attention,
    F.multi_head_attention_forward,
    torch._transformer_encoder_layer_fwd,
)


@dataclass(eq=False)
class CallCounts:
    """The numbers of attention calls that regard and torch ran; printing it shows them.

    Args:
        always: whether regard also runs the calls for which torch is as fast.
        taken: the number of calls that each kernel of regard ran, by its name.
        left: the number of calls that torch ran, by the reason.
    """

    always: bool = False
    taken: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        here, left = sum(self.taken.values()), sum(self.left.values())
        lines = [f"calls that ran in regard: {here}; in torch: {left}"]
        lines += [f"  {n:>8}  {name}" for name, n in self.taken.most_common()]
        lines += [f"  {n:>8}  torch: {why}" for why, n in self.left.most_common()]
        return "\n".join(lines)


class OpenContexts(threading.local):
    """The `accelerate` contexts that are open in this thread, the innermost last."""

    def __init__(self) -> None:
        self.open: list[CallCounts] = []

    @property
    def always(self) -> bool:
        """Whether the innermost context takes every call that it can."""
        return self.open[-1].always

    def count_kernel(self, kernel: str) -> None:
        """Count a call that a kernel of this package runs."""
        for calls in self.open:
            calls.taken[kernel] += 1

    def count_torch(self, why: str) -> None:
        """Count a call that torch runs."""
        for calls in self.open:
            calls.left[why] += 1


contexts = OpenContexts()


def is_observed() -> bool:
    """Whether an open trace of this thread captures, edits or records the calls of torch."""
    return is_tracing() and bool(contexts.open or open_places() is not None)


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
