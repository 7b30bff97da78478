"""Attention on a GPU in Triton, where the mask is data and not code.

`kernel` is the entry that dispatch asks; it imports no triton. `mask_data` turns a mask into ranges
of positions or bits, and into lists of tiles; `bias_data` turns a bias into slopes, weights of
buckets or a table. `forward_kernel` and `backward_kernels` contain the loops, `scores` what they
share, `block_sizes` a reviewed table, and `launch` the arguments of a launch. The last four import
triton, and only `kernel` imports them, when a call runs.
"""
