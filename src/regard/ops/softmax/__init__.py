"""Softmax attention: `attend`, its parts and their `merge`, any block of its weights, and the
`plan` of a call.
"""

from regard.ops.softmax.attend import attend, attend_partial, attention_weights
from regard.ops.softmax.call import (
    AttentionOptions,
    Call,
    Kernel,
    KernelResult,
    Partial,
    WorkEstimate,
)
from regard.ops.softmax.dispatch import register_kernel
from regard.ops.softmax.merge import merge
from regard.ops.softmax.plan import Plan, plan

__all__ = [
    "AttentionOptions",
    "Call",
    "Kernel",
    "KernelResult",
    "Partial",
    "Plan",
    "WorkEstimate",
    "attend",
    "attend_partial",
    "attention_weights",
    "merge",
    "plan",
    "register_kernel",
]
