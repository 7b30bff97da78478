"""Importing this module does once what each process does before its first compiled kernel runs: it
imports Numba and the kernels' modules, and gives Numba the tables of what it can compile.

`regard.parallel.spawn` has it imported by the process from which it forks the ranks, where it saves
each rank half a second of processor time.
"""

from numba.core.registry import cpu_target

import regard.ops.jit.decode_loops
import regard.ops.jit.prefill  # noqa: F401

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
