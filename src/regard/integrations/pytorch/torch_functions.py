"""torch's own attention functions, and the `accelerate` contexts that are open in a thread.

The replacements, the observed calls and the operator of compiled graphs all need both: the
originals for what is left to torch, the contexts to count what ran where.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.integrations.pytorch.module_places import open_places
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
