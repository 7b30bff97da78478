"""The implementations that are compared: ours, and other people's, one file for each library, which
it imports inside.

A new one is a `Peer` and an entry in `regard.bench.cases`.
"""
