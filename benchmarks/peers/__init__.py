"""The implementations that are compared: regard, and other libraries, with one file for each.

Each file imports its library inside its functions. A new implementation is a `Peer` in a file here
and an entry in `benchmarks.cases`.
"""
