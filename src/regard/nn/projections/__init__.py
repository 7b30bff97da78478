"""What makes queries, keys and values of tokens: heads, latents, factors, the steps of a head, and
what follows attention.
"""
