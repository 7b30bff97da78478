"""C++ that tests compile beside the kernels, and the sanitizers' libraries."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from regard.ops.cpu.instruction_sets import SOURCES, instruction_set
from regard.ops.cpu.library import build_module

BUILD = build_module()


def compiler() -> list[str]:
    """The command of the C++ compiler; a test that needs it is skipped without one."""
    try:
        command: list[str] = BUILD.compiler()
    except BUILD.NoCompilerError as error:
        pytest.skip(str(error))
    return command


def run(*command: object, **options: Any) -> str:
    """What a command prints; its errors are those of the test."""
    done = subprocess.run(
        [str(x) for x in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def load(text: str, folder: Path) -> Any:
    """A library compiled from a C++ text, which can include the kernels' headers."""
    flags = BUILD.INSTRUCTION_SETS[BUILD.machine()].get(instruction_set(), [])
    source, library = folder / "made.cpp", folder / "made.so"
    source.write_text(text)
    options = [*BUILD.FLAGS, "-Wno-invalid-offsetof", *flags, "-I", SOURCES, "-shared"]
    run(*compiler(), *options, source, "-o", library)
    return ctypes.CDLL(str(library))


def tool(*names: str) -> str:
    """The first of some programs that is installed; a test that needs one is skipped without."""
    for name in names:
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip(f"none of these programs is installed: {', '.join(names)}")
