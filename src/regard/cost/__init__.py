"""What attention costs, from sizes alone: no torch here."""

from regard.cost.description import Description, Figure
from regard.cost.flops import attention_flops
from regard.cost.infini import infini_flops, infini_state

__all__ = ["Description", "Figure", "attention_flops", "infini_flops", "infini_state"]
