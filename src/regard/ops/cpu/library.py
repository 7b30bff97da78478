"""The libraries of compiled CPU kernels: which one runs here, and the addresses of its entries.

`csrc/build.py` compiles the C++ sources once for each instruction set. The first call of `entry`
loads the library of the best set that this processor has. REGARD_CPU_ISA names another one, or
"none": then torch's operations compute everything, as where no library was compiled.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from regard.errors import RegardError
from regard.process_state import constant_in_graphs

VARIABLE = "REGARD_CPU_ISA"
"""The environment variable that names an instruction set."""

NONE = "none"
"""Its value for no compiled kernels."""

INSTRUCTION_SETS = ("x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "armv8")
"""The instruction sets that libraries are compiled for, the fastest first."""

FOLDER = Path(__file__).parent / "libraries"

SOURCES = Path(__file__).parent / "csrc"

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The dtypes of the numbers that kernels read, and the ends of their entries' names."""


class KernelLibraryError(RegardError):
    """The compiled kernels cannot be used as they are, or as REGARD_CPU_ISA asks."""


def why_not_dtype(dtype: torch.dtype) -> str | None:
    """Return why compiled kernels do not support a dtype, or None if they do."""
    return None if dtype in DTYPES else f"no {str(dtype).removeprefix('torch.')}"


@cache
def instruction_set() -> str:
    """Return the instruction set whose kernels run in this process, or "none".

    Raises:
        KernelLibraryError: REGARD_CPU_ISA names a set that is unknown, that this processor lacks,
            or for which no library was compiled.
    """
    asked = os.environ.get(VARIABLE, "").strip()
    if asked == NONE:
        return NONE
    usable = [x for x in INSTRUCTION_SETS if _is_compiled(x) and _processor_has(x)]
    if not asked:
        return usable[0] if usable else NONE
    if asked in usable:
        return asked
    raise KernelLibraryError(
        f"{VARIABLE} is {asked!r}; on this machine it can be {', '.join([*usable, NONE])}"
    )


def why_none() -> str | None:
    """Return why no compiled kernels run in this process, or None if they do."""
    if instruction_set() != NONE:
        return None
    if os.environ.get(VARIABLE, "").strip() == NONE:
        return f"{VARIABLE}={NONE}"
    if any(map(_is_compiled, INSTRUCTION_SETS)):
        return "this processor has no instruction set for which kernels were compiled"
    return "regard was installed without compiled kernels (a C++ compiler was missing)"


@cache
def has_kernels() -> bool:
    """Return whether compiled kernels run in this process."""
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
    if loaded.sources_hash().decode() != _build().sources_hash():
        raise KernelLibraryError(
            "the compiled CPU kernels are not of the C++ sources beside them: compile them again "
            "with `make kernels`, or install regard again"
        )
    return loaded


def _is_compiled(name: str) -> bool:
    return (FOLDER / f"{name}.so").is_file()


@cache
def _processor_has(name: str) -> bool:
    """Return whether this processor has an instruction set."""
    path = FOLDER / "processor.so"
    if not path.is_file():
        return False
    try:
        return bool(ctypes.CDLL(str(path)).has_instruction_set(name.encode()))
    except OSError:  # compiled for another machine
        return False


def _build() -> Any:
    """Return `csrc/build.py` as a module."""
    spec = importlib.util.spec_from_file_location("regard_kernel_build", SOURCES / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
