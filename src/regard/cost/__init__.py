"""Compute the cost of attention from sizes alone, without torch: parameters, cached values, FLOPs,
bytes and times, from one `Spec` for each mechanism.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from regard.cost.fixed_state import infini_flops, infini_state
from regard.cost.softmax import attention_flops
from regard.cost.spec import Description, Quantity, Spec

if TYPE_CHECKING:
    from regard.configs.published import model_of
    from regard.cost.report import CostReport, Setting
    from regard.cost.roofline import machine_of

_LAZY_IMPORTS = {
    "CostReport": "regard.cost.report",
    "Setting": "regard.cost.report",
    "machine_of": "regard.cost.roofline",
    "model_of": "regard.configs.published",
}
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


def _load(name: str) -> Any:
    """Import a name when it is first used."""
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY_IMPORTS[name]), name)


__getattr__ = _load
