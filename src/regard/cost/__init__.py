"""The cost of attention, from sizes alone and without torch: parameters, cached values, FLOPs,
bytes and times.

Each mechanism has one `Spec`, which `regard.nn` modules, `regard describe` and `regard cost` use.
The formulas of softmax attention and of Infini-attention are imported at once, since kernels use
them; the rest is imported when it is first used.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from regard.cost.infini import infini_flops, infini_state
from regard.cost.softmax import attention_flops
from regard.cost.spec import Description, Quantity, Spec

if TYPE_CHECKING:
    from regard.configs.known import model_of
    from regard.cost.report import CostReport, Setting
    from regard.cost.roofline import machine_of

_HOMES = {
    "CostReport": "regard.cost.report",
    "Setting": "regard.cost.report",
    "machine_of": "regard.cost.roofline",
    "model_of": "regard.configs.known",
}
_RENAMED = {"Bill": "CostReport"}

__all__ = [
    "CostReport",
    "Description",
    "Quantity",
    "Setting",
    "Spec",
    "attention_flops",
    "infini_flops",
    "infini_state",
    "machine_of",
    "model_of",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used.

    Raises:
        AttributeError: there is no such name.
    """
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(
            f"regard.cost.{name} is now regard.cost.{new}; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        name = new
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
