"""Compiled CPU kernels, in C++: loops for which PyTorch has no fast operator.

    decode, decode_quantized       attention of a few queries to many keys, or to their codes
                                   (regard.ops.softmax.cpu)
    prefill, prefill_gradient      attention of many queries, by tiles, and its gradient
                                   (regard.ops.softmax.gemm)
    gemv, rms_norm, gated_product  a linear map, a norm, and silu(gate) up, of a few rows
                                   (regard.ops.tokenwise)
    stored_linear, dequantize      linear maps with weights of few bits (regard.ops.stored_linear)
    step                           one decoded token through all layers of a model
                                   (regard.models.compiled_step)

The path of one call, `regard.attend(q, k, v)` for one query and 1,024 keys:

1. `regard.ops.softmax.dispatch` asks the kernel "cpu", which supports the call and makes a
   `DecodeArgs` of it: plain contiguous tensors.
2. `attention.decode` decides on the number of threads and the splits of the keys, allocates the
   output, and packs addresses and sizes into one struct, both by `arguments`, which reads
   `csrc/arguments.h` and refuses a tensor of another dtype, device or layout.
3. `library.entry("decode", dtype)` is the address of the function in the library of this
   processor's instruction set (`instruction_sets`).
4. `threads.run_entry` lets torch's own OpenMP threads call it, all with the same struct.
5. In each thread the function takes one task after another by a counter in the struct
   (`csrc/tasks.h`): one split of one head. The thread that finishes last joins the splits.

The C++ sources, each with a comment at its head: `numbers.h` and `simd.h` (stored numbers,
vectors), `tasks.h` and `scratch.h` (counters, memory), `arguments.h` and `entry.h` (what Python
sees), then a `.cpp` for each family of kernels, with the headers that it shares with `step`.
`build.py` compiles them.

What a kernel promises: NaN in visible data propagates, and masked data is not read or not used; a
sum has one order for an instruction set, whatever the number of threads; nothing outside of the
given tensors is read or written. It checks no argument: callers and `arguments` do. docs/cpu.md
says how to build, force, debug and test them.
"""
