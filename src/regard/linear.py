"""Linear recurrences: attention mechanisms with a state of fixed size instead of a cache of tokens.

Each function maps (q, k, v, ..., state) to (output, state), in three forms that give the same
result: token by token, in chunks, and in parallel.
"""

from __future__ import annotations

from regard.ops.linear.delta_rules import (
    delta_product,
    delta_rule,
    gated_delta_rule,
    generalized_delta_rule,
)
from regard.ops.linear.feature_maps import (
    PowerFeatures,
    RandomFeatures,
    TaylorFeatures,
    cosine_features,
)
from regard.ops.linear.linear_attention import (
    FEATURE_MAPS,
    gated_linear,
    gated_slots,
    linear_attention,
    log_sum_exp_gates,
    mlstm,
    retention,
)
from regard.ops.linear.log_linear import log_linear
from regard.ops.linear.regression import mesa, titans_memory
from regard.ops.linear.rwkv import rwkv4, rwkv6
from regard.ops.linear.short_convolution import short_convolution

__all__ = [
    "FEATURE_MAPS",
    "PowerFeatures",
    "RandomFeatures",
    "TaylorFeatures",
    "cosine_features",
    "delta_product",
    "delta_rule",
    "gated_delta_rule",
    "gated_linear",
    "gated_slots",
    "generalized_delta_rule",
    "linear_attention",
    "log_linear",
    "log_sum_exp_gates",
    "mesa",
    "mlstm",
    "retention",
    "rwkv4",
    "rwkv6",
    "short_convolution",
    "titans_memory",
]
