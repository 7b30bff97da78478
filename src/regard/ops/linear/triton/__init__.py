"""Recurrences with a linear state on a GPU in Triton: linear attention, retention, gated linear
attention and the delta rules, in chunks of tokens, with gradients.

`kernel` is the entry; it imports no triton. `decays` contains what the kernels share: decays
between tokens of a chunk, and products after a decay. `forward_kernels` and `backward_kernels`
compute the parts of a chunk, `delta_kernels` the triangular systems of the delta rules,
`odd_numbers` what is not finite; `block_sizes` is a reviewed table, and `launch` has the arguments
of a launch. All but `kernel` and `block_sizes` import triton, and only `kernel` imports them, when
a call runs.
"""
