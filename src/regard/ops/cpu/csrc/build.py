"""Compile the CPU kernels: `python src/regard/ops/cpu/csrc/build.py`; `pip install` does the same.

Each source is compiled once for each instruction set; `regard.ops.cpu.library` chooses among the
libraries at run time. Only Python's standard library is imported, because an installer has no more.

Flags: a * b + c is not contracted, so that sums have the same bits on every processor with the
same vectors, and `fma` stands in the source where a product is not rounded. NaN, infinities and the
order of additions are those of IEEE 754 everywhere; nothing of -ffast-math is used but that
operations set neither errno nor floating-point exceptions.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
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
V4 = [
    *V3,
    *(f"-mavx512{x}" for x in ("f", "bw", "cd", "dq", "vl")),
    "-mprefer-vector-width=512",
]
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

SANITIZERS = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


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
    *, only: tuple[str, ...] = (), sanitize: bool = False, into: Path = LIBRARIES
) -> list[Path]:
    """Compile all libraries, or those of some instruction sets, and return their paths.

    Objects are kept in `build/kernels` of the checkout, so that only changed sources are compiled.
    """
    command, sets = [*compiler(), *apple_flags()], INSTRUCTION_SETS.get(machine())
    if sets is None or sys.platform == "win32":
        raise NoCompilerError(f"there are no kernels for {sys.platform} on {machine()}")
    root = next((x for x in SOURCES.parents if (x / "pyproject.toml").is_file()), None)
    if root is None or not os.access(root, os.W_OK):
        with tempfile.TemporaryDirectory() as folder:
            return _build(command, sets, only, sanitize, into, Path(folder))
    return _build(command, sets, only, sanitize, into, root / "build" / "kernels")


def _build(
    command: list[str],
    sets: dict[str, list[str]],
    only: tuple[str, ...],
    sanitize: bool,  # noqa: FBT001
    into: Path,
    objects_folder: Path,
) -> list[Path]:
    """Compile the libraries with objects in the folder `objects_folder`."""
    objects_folder.mkdir(parents=True, exist_ok=True)
    into.mkdir(parents=True, exist_ok=True)
    units = sorted(x for x in SOURCES.glob("*.cpp") if x.stem not in ("processor", "stamp"))
    chosen = {x: flags for x, flags in sets.items() if not only or x in only}
    extra = SANITIZERS if sanitize else []

    def compiled(source: Path, flags: list[str]) -> Path:
        return object_of(source, [*command, *FLAGS, *flags, *extra], objects_folder)

    def linked(name: str, objects: list[Path], flags: list[str]) -> Path:
        target = into / f"{name}.so"
        part = target.with_suffix(f".{os.getpid()}.part")
        stamp = f'-DSOURCES_HASH="{sources_hash()}"'
        source = SOURCES / "stamp.cpp"
        line = [*command, *FLAGS, *flags, *extra, *LINK_FLAGS, stamp, str(source)]
        _run([*line, *map(str, objects), "-o", str(part)])
        part.replace(target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        processor = pool.submit(compiled, SOURCES / "processor.cpp", [])
        units_of = {
            name: [pool.submit(compiled, unit, flags) for unit in units]
            for name, flags in chosen.items()
        }
        libraries = [linked("processor", [processor.result()], [])]
        libraries += [linked(x, [unit.result() for unit in units_of[x]], chosen[x]) for x in chosen]
    return libraries


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
    parser.add_argument("--only", nargs="*", default=(), help="instruction sets; all by default")
    parser.add_argument("--sanitize", action="store_true", help="with ASan and UBSan")
    parser.add_argument("--into", type=Path, help="the folder of the libraries")
    chosen = parser.parse_args()
    folder = chosen.into
    if (
        folder is None
    ):  # libraries with sanitizers can only be loaded by a process prepared for them
        folder = Path("build/kernels-sanitized") if chosen.sanitize else LIBRARIES
    for path in build(only=tuple(chosen.only), sanitize=chosen.sanitize, into=folder):
        print(path)
