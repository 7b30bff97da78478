"""The recurrence of linear attention, retention and gated linear attention: S <- diag(exp(g)) S + k v^T, read by S^T q."""

from regard.ops.linear.decayed_sum.chunk import chunked
from regard.ops.linear.decayed_sum.recurrent import recurrent
from regard.ops.linear.decayed_sum.run import decayed_sum

__all__ = ["chunked", "decayed_sum", "recurrent"]
