"""The library of compiled CPU kernels: the dtypes that it reads, and the addresses of its entries.

`regard.ops.cpu.instruction_sets` says which library that is. The first call of `entry` loads it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import warnings
from functools import cache
from typing import Any

import torch

from regard.ops.cpu.instruction_sets import (
    FOLDER,
    NONE,
    SOURCES,
    KernelLibraryError,
    instruction_set,
    is_none_asked,
    why_none,
)
from regard.process_state import constant_in_graphs

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The dtypes of the numbers that kernels read, and the ends of their entries' names."""


def why_not_dtype(dtype: torch.dtype) -> str | None:
    """Return why compiled kernels do not support a dtype, or None if they do."""
    return None if dtype in DTYPES else f"no {str(dtype).removeprefix('torch.')}"


@cache
def has_kernels() -> bool:
    """Return whether compiled kernels run in this process, and warn once if none can."""
    if instruction_set() == NONE and not is_none_asked():
        warnings.warn(f"{why_none()}; torch's operations run, see docs/cpu.md", stacklevel=2)
    return instruction_set() != NONE


@constant_in_graphs
def has_kernels_in_graph() -> bool:
    """Return `has_kernels()`; a graph that torch compiles holds the answer as a constant."""
    return has_kernels()


@cache
def entry(name: str, dtype: torch.dtype | None = None) -> int:
    """Return the address of a kernel's entry, such as "gemv", for numbers of a dtype."""
    symbol = name if dtype is None else f"{name}_{DTYPES[dtype]}"
    function = getattr(library(), symbol)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


@cache
def library() -> Any:
    """Return the library of this process's instruction set, which must be of these sources."""
    path = FOLDER / f"{instruction_set()}.so"
    loaded = ctypes.CDLL(str(path))
    loaded.sources_hash.restype = ctypes.c_char_p
    if loaded.sources_hash().decode() != build_module().sources_hash():
        raise KernelLibraryError(
            "the compiled CPU kernels are not of the C++ sources beside them: compile them again "
            "with `make kernels`, or install regard again"
        )
    return loaded


def build_module() -> Any:
    """Return `csrc/build.py` as a module."""
    spec = importlib.util.spec_from_file_location("regard_kernel_build", SOURCES / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
