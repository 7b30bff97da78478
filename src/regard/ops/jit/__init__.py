"""Compiled CPU kernels: loops for which PyTorch has no fast operator, written in Python and
compiled by Numba.

There are six entry points:

- `decode`: attention of a few queries to many keys. Each key and value is read once, as fast as the
memory allows, also from the codes of a quantized cache. Its caller is `regard.ops.softmax.cpu`.
- `prefill`: attention of many queries, computed as products of small matrices over the tiles that
the mask does not hide, and its gradient. Its caller is `regard.ops.softmax.gemm`.
- `gemv_loops` and `rms_norm_loops`: a linear map and an RMS norm of a few rows. Their callers are
`regard.ops.gemv` and `regard.ops.rms_norm`.
- `step_loops`: one decoded token through all layers of a model, with the loops of the others in one
call. Its caller is `regard.ops.decode_step`.

The steps of one call, from the entry point to the loop, where `regard.attend(q, k, v)` decodes one
token with 1,024 keys:

1. `regard.ops.softmax.dispatch` tries the kernel "cpu" (`regard.ops.softmax.cpu.CpuKernel`) first,
because keys and values are large. It supports the call, so its `run` converts the call to plain
contiguous tensors, a `DecodeArgs`: the ranges of positions that each query sees, the terms that are
added to its scores, and so on.
2. `decode.decode(args, k, v)` decides on the number of threads and into how many splits the keys
are divided, allocates the output, and packs all addresses and sizes into one C struct:
`argument_structs.DECODE_STRUCT`, whose list of fields is written once and used by both sides.
3. `code_files.compiled_entry("decode_loops", "entry_address", dtype)` returns the address of the
compiled code for this dtype. The first call in a process loads the code from a file, without Numba;
the first call on a machine imports the loops, and Numba compiles them (`source_stamps` documents
when it is done again).
4. `openmp.run_entry(entry, record, workers)` lets torch's own OpenMP threads call that address, all
with the same struct. Where no OpenMP library is found, Python threads call it.
5. In each thread the entry reads the arrays of the struct (`entry_points.struct_at`, `array_4d_at`)
and calls `decode_loops.run_tasks`, which takes one task after another (`entry_points.take_task`
increments a counter in the struct). A task is one split of the keys of one key/value head. For each
tile of 64 keys it determines which queries see which keys (`tile_coverage`,
`_gather_visible_keys`), and computes scores (`compute_scores`), weights (`online_softmax`) and
weighted values (`add_values`). The thread that finishes last joins the splits (`join_splits`).
6. `decode` returns the output and the lse; `apply_sinks` applies the sinks, and `CpuKernel.run`
converts to the dtype of the call.

The files, from the entry points inwards:

    decode.py prefill.py        entry points in plain Python; prefill imports Numba at once
    code_files.py               the files of compiled entries, which are loaded without Numba
    object_code.py              the loader of such a file
    source_stamps.py            hashes of the sources, for which compiled code is valid
    launch.py                   the only allocations for compiled code, and the only addresses
    argument_structs.py         the C structs of arguments: one list of fields each
    openmp.py                   torch's OpenMP threads, or Python threads where there are none
    decode_loops.py             decoding: tiles of keys, masks, tasks, the entry
    decode_quantized_loops.py   decoding over keys and values that are stored as quantized codes
    int_dot.py                  the sums over 8-bit codes, with 16-bit integer products
    prefill_loops.py            prefill: blocks of queries against tiles of keys
    prefill_gradient_loops.py   the gradient of prefill
    matmul.py                   the matrix products of prefill, and the packing of their factors
    amx.py                      products of bfloat16 tiles on processors with AMX
    gemv_loops.py               a linear map of a few rows
    rms_norm_loops.py           an RMS norm of a few rows
    step_loops.py               a decoded token through all layers of a model
    step_network_loops.py       its feed-forward layers: one network, or a mixture of experts
    step_parts.py               what its phases are made of: waiting, norms, rows of linear maps
    entry_points.py             compiled functions that take the address of a struct
    llvm_vectors.py             loops written in LLVM's vector instructions
    half_precision.py           bfloat16 and float16 in registers
    exp_tanh.py                 exponential and hyperbolic tangent, without calls to libm
    compile.py                  decorators, Numba's on-disk cache, processor features
    linked_functions.py         functions that are compiled as parts of their callers

Compiled code checks no argument: the caller has checked every size, dtype, device and stride. To
change a loop, edit its file; everything compiled from that file, or from a file that uses it, is
compiled again automatically. `NUMBA_DISABLE_JIT=1` does not work here, because some loops are
written as LLVM code (`numba.extending.intrinsic`); `tests/ops/softmax/test_cpu.py` and its
neighbours compare every loop with fp64.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from functools import cache
from pathlib import Path

from regard.process_state import constant_in_graphs


@cache
def has_numba() -> bool:
    """Return whether Numba is installed, without importing it."""
    return importlib.util.find_spec("numba") is not None


CPU_FILE, CPU_BYTES = Path("/proc/cpuinfo"), 1 << 14
"""The file in which Linux describes the processors, and the size of the part that has the first."""


@cache
def converts_float16() -> bool:
    """Return whether compiled code may convert float16 numbers: on x86-64 that needs F16C, without
    which LLVM calls a function that is not there. Other processors of NUMBA_CPU_NAME count as
    without it, unless NUMBA_CPU_FEATURES names it.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    features = os.environ.get("NUMBA_CPU_FEATURES", "").replace(" ", "").split(",")
    if os.environ.get("NUMBA_ENABLE_AVX") == "0" or "-f16c" in features:
        return False
    if os.environ.get("NUMBA_CPU_NAME", "") not in ("", "host"):
        return "+f16c" in features
    if not CPU_FILE.is_file():
        return True
    with CPU_FILE.open(encoding="utf-8", errors="replace") as file:
        return " f16c " in f"{file.read(CPU_BYTES)} "


@constant_in_graphs
def has_numba_in_graph() -> bool:
    """Return `has_numba()`; a graph that torch compiles holds the answer as a constant."""
    return has_numba()
