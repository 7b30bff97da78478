"""regard: the attention mechanisms of the language-model literature, exact, fast and visible.

Names are imported when they are first used, so that `import regard` does not import torch.

>>> import torch, regard
>>> q = k = v = torch.eye(2)[None, None]
>>> regard.attend(q, k, v).shape
torch.Size([1, 1, 2, 2])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard import (
        biases,
        caches,
        inspect,
        linear,
        masks,
        memory,
        models,
        nn,
        parallel,
        positions,
        scores,
        tracing,
        view,
    )
    from regard.errors import (
        ArgumentError,
        ArgumentTypeError,
        FileError,
        KernelRefusal,
        ParallelError,
        RegardError,
    )
    from regard.integrations.pytorch import accelerate
    from regard.models.load import load
    from regard.ops.softmax.attend import attend, attend_partial, attention_weights
    from regard.ops.softmax.call import Partial
    from regard.ops.softmax.dispatch import Plan, plan, register_kernel
    from regard.ops.softmax.merge import merge
    from regard.process_state import checks
    from regard.span import EMPTY, Span
    from regard.tracing import Trace

__version__ = "0.1.0"
"""The version of the package."""

_NAMES = {
    "regard.errors": (
        "ArgumentError",
        "ArgumentTypeError",
        "FileError",
        "KernelRefusal",
        "ParallelError",
        "RegardError",
    ),
    "regard.integrations.pytorch": ("accelerate",),
    "regard.models": ("load",),
    "regard.ops.softmax": (
        "Partial",
        "Plan",
        "attend",
        "attend_partial",
        "attention_weights",
        "merge",
        "plan",
        "register_kernel",
    ),
    "regard.process_state": ("checks",),
    "regard.span": ("EMPTY", "Span"),
    "regard.tracing": ("Trace",),
}
_MODULES = (
    "biases",
    "caches",
    "inspect",
    "linear",
    "masks",
    "memory",
    "models",
    "nn",
    "parallel",
    "positions",
    "scores",
    "tracing",
    "view",
)
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "EMPTY",
    "ArgumentError",
    "ArgumentTypeError",
    "FileError",
    "KernelRefusal",
    "ParallelError",
    "Partial",
    "Plan",
    "RegardError",
    "Span",
    "Trace",
    "__version__",
    "accelerate",
    "attend",
    "attend_partial",
    "attention_weights",
    "biases",
    "caches",
    "checks",
    "inspect",
    "linear",
    "load",
    "masks",
    "memory",
    "merge",
    "models",
    "nn",
    "parallel",
    "plan",
    "positions",
    "register_kernel",
    "scores",
    "tracing",
    "view",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"regard.{name}")
    else:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    globals()[name] = value  # the next access finds the value directly
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
