"""Linear recurrences with a state of fixed size: linear attention, retention, gated linear
attention, and the delta rules; each is computed token by token or in chunks. `regard.linear` has
the public names.
"""
