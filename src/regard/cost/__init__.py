"""What attention costs, from sizes alone. It imports nothing but the standard library, so anybody may import it."""

from regard.cost.flops import attention_flops

__all__ = ["attention_flops"]
