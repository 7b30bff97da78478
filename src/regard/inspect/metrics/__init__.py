"""Metrics of attention heads: from dense patterns, and streamed over recordings of any length."""

from regard.inspect.metrics.head_metrics import (
    NUM_SINKS,
    duplicate_score,
    entropy,
    induction_score,
    previous_token_score,
    repeated_ids,
    sink_share,
)
from regard.inspect.metrics.measure import (
    Measures,
    Sampled,
    compare,
    head_scores,
    keys_for,
    measure,
    redundancy,
    retrieval_score,
)
from regard.inspect.metrics.text_fit import TextFit, measure_text_fit, warn_about_text

__all__ = [
    "NUM_SINKS",
    "Measures",
    "Sampled",
    "TextFit",
    "compare",
    "duplicate_score",
    "entropy",
    "head_scores",
    "induction_score",
    "keys_for",
    "measure",
    "measure_text_fit",
    "previous_token_score",
    "redundancy",
    "repeated_ids",
    "retrieval_score",
    "sink_share",
    "warn_about_text",
]
