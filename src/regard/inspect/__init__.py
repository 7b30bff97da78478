"""Looking inside a model: explain one query token, choose a head, score what heads do."""

from regard.inspect.choose import (
    Choice,
    check_index,
    find_query,
    strongest_head,
    strongest_keys,
)
from regard.inspect.explain import MOST_TOKENS, explain
from regard.inspect.explanation import Explanation, Step
from regard.inspect.metrics import (
    duplicate_score,
    entropy,
    head_scores,
    induction_score,
    previous_token_score,
    repeated_ids,
    sink_share,
)

__all__ = [
    "MOST_TOKENS",
    "Choice",
    "Explanation",
    "Step",
    "check_index",
    "duplicate_score",
    "entropy",
    "explain",
    "find_query",
    "head_scores",
    "induction_score",
    "previous_token_score",
    "repeated_ids",
    "sink_share",
    "strongest_head",
    "strongest_keys",
]
