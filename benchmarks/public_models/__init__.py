"""Architectures of public libraries with random weights, one file for each library.

Each file imports its library inside its functions. A builder takes `PublicModelSizes` and returns
a `BuiltModel` in fp32. Widths are those of published models, and layers are few, so that one step
takes at most some seconds.
"""
