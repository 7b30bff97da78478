"""Linear recurrences with a state of fixed size: linear attention, retention, gated linear
attention, and the delta rules; each is computed token by token or in chunks.
"""

from regard.ops.linear.delta_product import delta_product
from regard.ops.linear.delta_rule import delta_rule, gated_delta_rule
from regard.ops.linear.feature_maps import (
    PowerFeatures,
    RandomFeatures,
    TaylorFeatures,
    cosine_features,
)
from regard.ops.linear.gated_slots import gated_slots, log_sum_exp_gates
from regard.ops.linear.generalised_delta_rule import generalised_delta_rule
from regard.ops.linear.linear_attention import (
    FEATURE_MAPS,
    gated_linear,
    linear_attention,
    retention,
)
from regard.ops.linear.mesa import mesa
from regard.ops.linear.mlstm import mlstm
from regard.ops.linear.rwkv import rwkv4, rwkv6
from regard.ops.linear.short_convolution import short_convolution
from regard.ops.linear.titans import titans_memory

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
    "generalised_delta_rule",
    "linear_attention",
    "log_sum_exp_gates",
    "mesa",
    "mlstm",
    "retention",
    "rwkv4",
    "rwkv6",
    "short_convolution",
    "titans_memory",
]
