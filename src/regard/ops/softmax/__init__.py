"""Softmax attention: the functions `attend`, `attend_partial`, `merge`, `attention_weights` and
`plan`, the kernels that compute it, and the protocol for registering another kernel.
"""

from regard.ops.softmax.attend import attend, attend_partial, attention_weights
from regard.ops.softmax.call import AttentionOptions, Call, Partial
from regard.ops.softmax.dispatch import register_kernel
from regard.ops.softmax.kernel import Kernel, KernelResult, WorkEstimate
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
