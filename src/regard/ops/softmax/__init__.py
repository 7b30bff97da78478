"""Softmax attention: the functions `attend`, `attend_partial`, `merge`, `attention_weights` and
`plan`, the kernels that compute it, and the protocol for registering another kernel.

A call is checked once, as a `Call`. A kernel says which calls it does not support (`why_not`), when
`backend="auto"` tries it (`priority`, the largest first), and whether it never reads masked inputs
(`selects`), so that NaN there needs no check. The reference runs every call. In a graph that
torch.compile traces on a CPU a call is one operator, which chooses its kernel when it is executed;
where Python cannot read values (exported programs, transforms of `torch.func`, fake tensors), only
`sdpa` and `reference` run. Second derivatives are computed by the definition.
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
