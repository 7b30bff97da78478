"""Explain one query and one key in one head, number by number."""
