"""What attention costs, from sizes alone: no torch here. Formulas of one layer, and models added up from them.

The formulas are imported at once, since kernels use them; models, settings and machines when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from regard.cost.description import Description, Figure
from regard.cost.flops import attention_flops
from regard.cost.infini import infini_flops, infini_state

if TYPE_CHECKING:
    from regard.cost.bill import Bill, Setting
    from regard.cost.machines import machine_of
    from regard.cost.source import model_of

_HOMES = {"Bill": "bill", "Setting": "bill", "machine_of": "machines", "model_of": "source"}

__all__ = [
    "Bill", "Description", "Figure", "Setting", "attention_flops", "infini_flops", "infini_state", "machine_of",
    "model_of",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names that are imported when they are first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
