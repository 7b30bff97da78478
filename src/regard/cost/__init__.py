"""Compute the cost of attention from sizes alone, without torch: parameters, cached values, FLOPs,
bytes and times, from one `Spec` for each mechanism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.cost.fixed_state import infini_flops, infini_state
from regard.cost.softmax import attention_flops
from regard.cost.spec import Description, Quantity, Spec
from regard.registry import import_when_used

if TYPE_CHECKING:
    from regard.configs.published import model_of
    from regard.cost.report import CostReport, Setting
    from regard.cost.roofline import machine_of

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

__getattr__ = import_when_used(
    __name__,
    {
        "regard.configs.published": "model_of",
        "regard.cost.report": "CostReport Setting",
        "regard.cost.roofline": "machine_of",
    },
)
