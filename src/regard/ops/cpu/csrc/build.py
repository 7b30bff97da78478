"""Compile the CPU kernels: `python src/regard/ops/cpu/csrc/build.py`; `pip install` does the same.

Each source is compiled once for each instruction set that this processor has, or with `--all`, as
for published wheels, for each that there is; `regard.ops.cpu.instruction_sets` chooses among the
libraries at run time. Only Python's standard library is imported, because an installer has no more.

Flags: a * b + c is not contracted, so that sums have the same bits on every processor with the
same vectors, and `fma` stands in the source where a product is not rounded. NaN, infinities and the
order of additions are those of IEEE 754 everywhere; nothing of -ffast-math is used but that
operations set neither errno nor floating-point exceptions.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
LIBRARIES = SOURCES.parent / "libraries"
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    # GCC 12 warns of uninitialized variables in its own headers of intrinsics; Clang has no such
    # warning to turn off
    *("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
    "-Wno-unknown-warning-option",
]
V3 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt"]
V4 = [*V3, *(f"-mavx512{x}" for x in ("f", "bw", "cd", "dq", "vl")), "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {
    "x86_64": {
        "x86-64-v3": V3,
        "x86-64-v4": V4,
        "x86-64-v4-bf16": [*V4, "-mavx512vnni", "-mavx512bf16"],
    },
    "aarch64": {"armv8": ["-march=armv8-a"]},
}
"""The flags of each instruction set of a machine; later ones are faster."""

LINK_FLAGS = ["-shared"] if sys.platform == "darwin" else ["-shared", "-Wl,--as-needed"]
"""Linux: without --as-needed the libraries would need libstdc++, of which they use nothing."""

# without optimization and with line numbers alone, it takes less than half as long to compile
SANITIZERS = ["-g1", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


class NoCompilerError(Exception):
    """There is no C++ compiler, or it cannot compile for this machine."""


class CompilationError(Exception):
    """A command of the compiler failed; the message has the command and what it printed."""


def sources_hash() -> str:
    """Return a hash of all sources, which a library of them returns."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def apple_flags() -> list[str]:
    """Return the flags that choose a processor on macOS, as installers give them in ARCHFLAGS."""
    return shlex.split(os.environ.get("ARCHFLAGS", "")) if sys.platform == "darwin" else []


def machine() -> str:
    """Return the name of the processors to compile for, as in `INSTRUCTION_SETS`."""
    name = [platform.machine().lower(), *apple_flags()][-1]
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def compiler() -> list[str]:
    """Return the command of the C++ compiler: CXX, or the first one that is found."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise NoCompilerError("no C++ compiler was found (c++, g++, clang++, or CXX)")


def build(
    *,
    only: tuple[str, ...] = (),
    every: bool = False,
    sanitize: bool = False,
    into: Path = LIBRARIES,
) -> list[Path]:
    """Compile the libraries of this processor's instruction sets, and return their paths.

    Objects are kept in `build/kernels` of the checkout, so that only changed sources are compiled.

    Args:
        only: the sets, instead of those of this processor.
        every: all sets, for other machines.
        sanitize: with ASan and UBSan; all sets, unless `only` names some.
        into: the folder of the libraries.
    """
    line, sets = [*compiler(), *apple_flags(), *FLAGS], INSTRUCTION_SETS.get(machine())
    if sets is None or sys.platform == "win32":
        raise NoCompilerError(f"there are no kernels for {sys.platform} on {machine()}")
    if sanitize:
        line += SANITIZERS
    into.mkdir(parents=True, exist_ok=True)
    with _objects_folder() as objects, ThreadPoolExecutor(os.cpu_count()) as pool:

        def library(name: str, units: list[Path], flags: list[str]) -> Callable[[], Path]:
            """Begin to compile a library, and return what waits for it and links it."""
            full = [*line, *flags]
            parts = [pool.submit(object_of, unit, full, objects) for unit in units]
            return lambda: _link(into / f"{name}.so", full, [x.result() for x in parts])

        processor = library("processor", [SOURCES / "processor.cpp"], [])()
        names = only or (sets if every or sanitize else _sets_of_processor(processor, sets))
        units = sorted(x for x in SOURCES.glob("*.cpp") if x.stem not in ("processor", "stamp"))
        begun = [library(name, units, sets[name]) for name in names]
        return [processor, *(wait() for wait in begun)]


@contextmanager
def _objects_folder() -> Iterator[Path]:
    """Give the folder of objects: of the checkout, or a new one where there is none to write to."""
    root = next((x for x in SOURCES.parents if (x / "pyproject.toml").is_file()), None)
    if root is None or not os.access(root, os.W_OK):
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    objects = root / "build" / "kernels"
    objects.mkdir(parents=True, exist_ok=True)
    yield objects


def _sets_of_processor(library: Path, sets: Iterable[str]) -> list[str]:
    """Return the instruction sets that this processor has; all, where it cannot be asked."""
    try:
        has = ctypes.CDLL(str(library.resolve())).has_instruction_set
    except OSError:  # compiled for another machine
        return list(sets)
    return [name for name in sets if has(name.encode())]


def _link(target: Path, line: list[str], objects: list[Path]) -> Path:
    """Link a library of objects, which knows the hash of its sources."""
    part = target.with_suffix(f".{os.getpid()}.part")
    stamp = [f'-DSOURCES_HASH="{sources_hash()}"', str(SOURCES / "stamp.cpp")]
    _run([*line, *LINK_FLAGS, *stamp, *map(str, objects), "-o", str(part)])
    part.replace(target)
    return target


def object_of(source: Path, line: list[str], folder: Path) -> Path:
    """Compile a source with a command, unless `folder` holds the same object already."""
    headers = b"".join(x.read_bytes() for x in sorted(SOURCES.glob("*.h")))
    key = hashlib.sha256(headers + source.read_bytes() + " ".join(line).encode())
    target = folder / f"{source.stem}-{key.hexdigest()[:16]}.o"
    if not target.exists():
        part = target.with_suffix(f".{os.getpid()}.part")
        _run([*line, "-c", str(source), "-o", str(part)])
        part.replace(target)
    return target


def _run(line: list[str]) -> None:
    done = subprocess.run(line, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise CompilationError(f"{shlex.join(line)}\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile the CPU kernels of regard.")
    sets = [*INSTRUCTION_SETS.get(machine(), {})]
    parser.add_argument("--only", nargs="*", choices=sets, default=(), help="instruction sets")
    parser.add_argument("--all", action="store_true", help="all, not only this processor's")
    parser.add_argument("--sanitize", action="store_true", help="with ASan and UBSan")
    parser.add_argument("--into", type=Path, help="the folder of the libraries")
    chosen = parser.parse_args()
    folder = chosen.into
    if (
        folder is None
    ):  # libraries with sanitizers can only be loaded by a process prepared for them
        folder = Path("build/kernels-sanitized") if chosen.sanitize else LIBRARIES
    for path in build(
        only=tuple(chosen.only), every=chosen.all, sanitize=chosen.sanitize, into=folder
    ):
        print(path)
