"""Which compiled CPU kernels run here; this module imports no torch.

`csrc/build.py` compiles the C++ sources once for each instruction set, or for those alone that the
processor of an installation has. A process uses the library
of the best set that its processor has. REGARD_CPU_ISA names another one, or "none": then torch's
operations compute everything, as where no library was compiled.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from regard.errors import RegardError

VARIABLE = "REGARD_CPU_ISA"
"""The environment variable that names an instruction set."""

NONE = "none"
"""Its value for no compiled kernels."""

INSTRUCTION_SETS = ("x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "armv8")
"""The instruction sets that libraries are compiled for, the fastest first."""

FOLDER = Path(__file__).parent / "libraries"

SOURCES = Path(__file__).parent / "csrc"


class KernelLibraryError(RegardError):
    """The compiled kernels cannot be used as they are, or as REGARD_CPU_ISA asks."""


@cache
def instruction_set() -> str:
    """Return the instruction set whose kernels run in this process, or "none".

    Raises:
        KernelLibraryError: REGARD_CPU_ISA names a set that is unknown, that this processor lacks,
            or for which no library was compiled.
    """
    asked = os.environ.get(VARIABLE, "").strip()
    if is_none_asked():
        return NONE
    usable = [x for x in INSTRUCTION_SETS if _is_compiled(x) and _processor_has(x)]
    if not asked:
        return usable[0] if usable else NONE
    if asked in usable:
        return asked
    raise KernelLibraryError(
        f"{VARIABLE} is {asked!r}; on this machine it can be {', '.join([*usable, NONE])}"
    )


def is_none_asked() -> bool:
    """Return whether REGARD_CPU_ISA asks for no compiled kernels."""
    return os.environ.get(VARIABLE, "").strip() == NONE


def why_none() -> str | None:
    """Return why no compiled kernels run in this process, or None if they do."""
    return None if instruction_set() != NONE else f"no compiled kernels: {_reason()}"


def describe_kernels() -> str:
    """Return which compiled kernels run in this process, or why none do, as one line."""
    name = instruction_set()
    return f"compiled CPU kernels: {name}{f' ({_reason()})' if name == NONE else ''}"


def _reason() -> str:
    """Return why no compiled kernels run."""
    if is_none_asked():
        return f"{VARIABLE}={NONE}"
    if any(map(_is_compiled, INSTRUCTION_SETS)):
        return "this processor has no instruction set for which kernels were compiled"
    return "regard was installed without compiled kernels, where no C++ compiler worked"


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
