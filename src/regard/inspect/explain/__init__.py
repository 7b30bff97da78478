"""Explain one query and one key in one head, number by number."""

from regard.inspect.explain.explain import MOST_TOKENS, explain
from regard.inspect.explain.explanation import Explanation, Step

__all__ = ["MOST_TOKENS", "Explanation", "Step", "explain"]
