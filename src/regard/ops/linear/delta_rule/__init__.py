"""The delta rule, with a decay and without."""

from regard.ops.linear.delta_rule.call import delta_rule, gated_delta_rule

__all__ = ["delta_rule", "gated_delta_rule"]
