"""Explain one query and one key in one head, number by number."""

from regard.inspect.explain.explain import MAX_PATTERN_TOKENS, explain
from regard.inspect.explain.explanation import ComputationStep, Explanation

__all__ = ["MAX_PATTERN_TOKENS", "ComputationStep", "Explanation", "explain"]
