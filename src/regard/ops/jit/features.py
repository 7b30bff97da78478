"""What instructions compiled loops may name: those of this processor, unless Numba is told to
compile for another.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding
from numba.core import config


def has(feature: str) -> bool:
    """Whether LLVM knows the processor to have a feature; naming what is compiled without ends the
    process.

    >>> has("no such feature")
    False
    """
    given: Any = config
    if {given.CPU_NAME, given.CPU_FEATURES} - {None, "", "host"} or not given.ENABLE_AVX:
        return False
    return bool(binding.get_host_cpu_features().get(feature))
