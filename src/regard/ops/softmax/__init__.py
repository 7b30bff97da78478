"""Softmax attention: `attend`, `attend_partial`, `merge`, `attention_weights` and `plan`, the
kernels that compute it, and the protocol for registering another kernel.

A kernel says which calls it refuses (`why_not`), when `backend="auto"` tries it (`priority`, the
largest first), and whether it never reads masked inputs (`selects`). The reference runs every call.
In a graph of torch.compile on a CPU a call is one operator, which chooses its kernel when it runs;
where Python cannot read values, only `sdpa` and `reference` run. Second derivatives are computed by
the definition.
"""

from regard.ops.softmax.attend import attend, attend_partial, attention_weights
from regard.ops.softmax.call import AttentionOptions, Call, Partial
from regard.ops.softmax.dispatch import Plan, plan, register_kernel
from regard.ops.softmax.kernel import Kernel, KernelResult, WorkEstimate
from regard.ops.softmax.merge import merge

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
