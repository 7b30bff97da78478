"""Additive attention: a score is what a small network says of query and key together."""

from regard.ops.additive.additive import Aligned, additive_attention

__all__ = ["Aligned", "additive_attention"]
