"""Attention on a GPU in Triton, where the mask is data and not code.

`kernel` is the entry of dispatch, without triton. `call_data` turns masks and biases into data;
`forward_kernel` and `backward_kernels` contain the loops, `scores` what they share, `block_sizes` a
reviewed table, and `launch` the arguments, imported when a call runs.
"""
