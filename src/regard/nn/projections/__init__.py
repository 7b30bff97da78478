"""What makes queries, keys and values of tokens, and what follows attention."""
