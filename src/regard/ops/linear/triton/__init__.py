"""Recurrences with a linear state on a GPU in Triton, in chunks of tokens, with gradients.

`kernel` is the entry, without triton. `forward_kernels` and `backward_kernels` compute the parts of
a chunk, `delta_kernels` triangular systems, with shared `decays`; `block_sizes` is a reviewed
table, and `launch` has the arguments.
"""
