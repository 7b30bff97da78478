"""The compiled CPU kernels: loops that PyTorch has no fast form of, in Python, compiled by Numba.

There are two doors, and two small side doors:

- `decode`: a few queries against many keys; each key and value is read once, at the speed of the
  memory, also from the codes of a quantised cache. `regard.ops.softmax.cpu` comes in here.
- `prefill`: many queries, as products of small matrices over the tiles that a mask shows, and their
  gradient. `regard.ops.softmax.gemm` comes in here.
- `gemv` and `norm`: a linear map and an RMS norm of a few rows. `regard.ops.gemv` and
  `regard.ops.rms_norm` come in here.

One call, from door to loop. `regard.attend(q, k, v)` decodes one token against 1,024 keys:

1. `regard.ops.softmax.dispatch` asks the kernel `cpu` (`regard.ops.softmax.cpu.CpuKernel`) first, because
   keys and values are many. It has no reason against the call, so its `run` writes the call down as
   plain contiguous tensors, a `DecodeArgs`: which ranges of positions each query sees, what is
   added to its scores.
2. `decode.decode(args, k, v)`, the door, decides how many threads pay and into how many parts the
   keys are split, makes the output, and packs all addresses and sizes into one C struct: the record
   `records.DECODE`, whose list of fields is written once and read by both sides.
3. `decode_loops.entry(dtype)` gives the address of the compiled code for this dtype. The first call
   of a process loads it from disk, the first one of all compiles it (`compile.py` says when).
4. `openmp.run(entry, record, workers)` has torch's own OpenMP threads call that address, all with
   the same record. Where no OpenMP is found, plain Python threads do.
5. In each thread the entry turns the record into arrays (`entries.record_at`, `array_at`) and calls
   `decode_loops.run_tasks`. It takes one task after the other (`entries.take` counts them up in the
   record): a part of the keys of one key/value head. For each tile of 64 keys it finds out which
   queries see which (`covers`, `_look`), and computes scores (`score`), weights (`soften`) and the
   weighted values (`mix`). Who finishes last joins the parts (`join`).
6. The door hands out and lse back; `Cpu.run` applies the sink and gives the caller's dtype.

The files, from the doors inwards:

    decode.py prefill.py    the doors: plain Python, no Numba until a call comes
    records.py              the C structs of arguments: one list of fields each
    openmp.py               torch's OpenMP threads, and Python threads where there are none
    decode_loops.py         decoding: tiles of keys, masks, tasks, the entry
    decode_quantised.py     the same from codes of few bits
    int_dot.py              its sums over codes of 8 bits, by 16-bit integers
    prefill_loops.py        prefill: blocks of queries against tiles of keys
    gradient_loops.py       its gradient
    product.py              the matrix products of both, and the panels that they read
    gemv.py norm.py         the loops behind the side doors
    entries.py              what an entry makes of a record, and its address
    vectors.py              loops in LLVM's own vectors
    half_precision.py       bfloat16 and float16 in registers
    elementary.py           exp and tanh
    compile.py              the decorators, the stamps of compiled code, processor features

Compiled code checks nothing. Who comes in has checked every size, dtype, device and stride that is
read. To change a loop, edit it: what was compiled from it, or from a file built upon it, is
compiled anew by itself. `NUMBA_DISABLE_JIT=1` does not work here, because some loops are written in
LLVM's own words (`numba.extending.intrinsic`); `tests/ops/softmax/test_cpu.py` and its neighbours
run every loop against fp64.
"""

from __future__ import annotations

import importlib.util
from functools import cache


@cache
def has_numba() -> bool:
    """Whether Numba can be imported; nothing is imported to know it."""
    return importlib.util.find_spec("numba") is not None
