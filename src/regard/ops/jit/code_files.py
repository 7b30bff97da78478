"""Compiled entries in files, which a process loads without Numba and LLVM.

Numba compiles an entry once on each machine. Its own disk cache loads the code through LLVM, which
needs a second of processor time and 100 MiB of memory in every process. Here the object file that
LLVM wrote is stored as it is, and `object_code` loads it. The file is valid for the stamp of the
module (`source_stamps`), the versions of Numba, llvmlite and Python, the processor, and the
settings of Numba. Where it is missing or not valid, the module is imported, and compiles it.

Only x86-64 Linux has such files; on other systems Numba's cache is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import stat
import sys
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any

from regard.ops.jit import CPU_BYTES, CPU_FILE
from regard.ops.jit.object_code import LoadedObject, UnsupportedObject, load_object
from regard.ops.jit.source_stamps import JIT_FOLDER, JIT_PACKAGE, source_stamp

_CPU_LINES = ("vendor_id", "cpu family", "model", "stepping", "flags")

_loaded_objects: list[LoadedObject] = []
"""The loaded code; this list keeps it alive as long as the process."""


class CodeFile:
    """The place of the compiled code of one entry.

    Args:
        loops: the name of the module of the loops in this package.
        function: the name of its function that makes the entry.
        arguments: the arguments of that function.
    """

    def __init__(self, loops: str, function: str, arguments: tuple[object, ...]) -> None:
        words = [str(x).removeprefix("torch.") for x in arguments]
        self.name = f"{'.'.join([loops, function, *words])}.{machine()[:12]}.code"
        self.key = {"machine": machine(), "stamp": source_stamp(f"{JIT_PACKAGE}.{loops}")}

    def load(self) -> int | None:
        """Return the address of the code; None if there is no valid file."""
        for folder in filter(is_ours, _folders()):
            try:
                header, _, code = _read(folder / self.name).partition(b"\n")
                facts = json.loads(header)
            except (OSError, ValueError, RecursionError):
                continue
            if not isinstance(facts, dict) or not isinstance(facts.get("symbol"), str):
                continue
            if facts.get("key") != self.key or facts.get("sha256") != _digest(code):
                continue
            with suppress(UnsupportedObject):
                return _load(code, facts["symbol"])
        return None

    def save(self, code: bytes, symbol: str) -> bool:
        """Write the code into the first folder that can be written; return whether there is one.

        Args:
            code: the object file.
            symbol: the name of the function in it.
        """
        header = json.dumps({"key": self.key, "sha256": _digest(code), "symbol": symbol})
        for folder in _folders():
            with suppress(OSError):
                folder.mkdir(mode=0o755, parents=True, exist_ok=True)
                if is_ours(folder):
                    _write(folder / self.name, header.encode() + b"\n" + code)
                    return True
        _say_that_nothing_is_kept()
        return False


@cache
def compiled_entry(loops: str, function: str, *arguments: object) -> int:
    """Return the address of a compiled entry: from its file, or else from its module, which is then
    imported and compiles it.

    Args:
        loops: the name of a module of this package, such as "gemv_loops".
        function: the name of its function that returns the address, such as "entry_address".
        *arguments: the arguments of that function.
    """
    file = code_file(loops, function, arguments)
    if file is not None and (address := file.load()) is not None:
        return address
    module = importlib.import_module(f"{JIT_PACKAGE}.{loops}")
    compiled: int = getattr(module, function)(*arguments)
    return compiled


@cache
def code_file(loops: str, function: str, arguments: tuple[object, ...]) -> CodeFile | None:
    """Return the file of an entry; None where this system has no such files."""
    return CodeFile(loops, function, arguments) if machine() else None


@cache
def machine() -> str:
    """Return a hash of everything besides the sources that code depends on: processor, versions,
    settings; "" if this system has no code files.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or not CPU_FILE.is_file():
        return ""
    if Path(".numba_config.yaml").exists():  # settings that only Numba can read
        return ""
    with CPU_FILE.open(encoding="utf-8", errors="replace") as file:
        lines = file.read(CPU_BYTES).split("\n\n")[0].splitlines()
    settings = {k: v for k, v in sorted(os.environ.items()) if k.startswith("NUMBA_")}
    settings.pop("NUMBA_CACHE_DIR", None)
    try:
        versions = [importlib.metadata.version(x) for x in ("numba", "llvmlite")]
    except importlib.metadata.PackageNotFoundError:  # installed in a way that tells no version
        return ""
    facts = {
        "processor": [x for x in lines if x.split("\t")[0].strip() in _CPU_LINES],
        "versions": versions,
        "python": [sys.version, sys.implementation.cache_tag],
        "settings": settings,
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _folders() -> list[Path]:
    """Return the folders of code files, in the order in which they are tried."""
    if own := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(own) / "regard"]
    folders = [JIT_FOLDER / "__pycache__"]
    with suppress(RuntimeError):  # no home
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard")
    return folders


def is_ours(path: Path) -> bool:
    """Return whether only this user and those who wrote this package may write a file or a folder,
    and no other user may replace a folder above it.
    """
    if not hasattr(os, "geteuid"):
        return True
    try:
        state, above = path.stat(), [x.stat() for x in path.resolve().parents]
    except OSError:
        return False
    others = stat.S_IWOTH if state.st_gid == os.getegid() else stat.S_IWOTH | stat.S_IWGRP
    return (
        state.st_uid in (0, os.geteuid(), Path(__file__).stat().st_uid)
        and not state.st_mode & others
        and not any(x.st_mode & stat.S_IWOTH and not x.st_mode & stat.S_ISVTX for x in above)
    )


def _read(path: Path) -> bytes:
    """Return the content of a regular file that no other user may write."""
    # a pipe would wait for a writer
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or not is_ours(path):
            raise OSError(f"{path} is not a file of this user")
        return file.read()


@cache
def _say_that_nothing_is_kept() -> None:
    """Warn once in a process."""
    warnings.warn(
        "no folder keeps compiled code, so that every process compiles it again: "
        f"{' and '.join(map(repr, map(str, _folders())))} cannot be written, or others may write "
        "there; set NUMBA_CACHE_DIR to a folder of your own",
        RuntimeWarning,
        stacklevel=2,
    )


def _digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Write a file in one piece: other processes see all of it, or what was there before."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(unfinished, flags, 0o644), "wb") as file:
            file.write(data)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def _load(code: bytes, symbol: str) -> int:
    """Load an object file, and return the address of a function in it."""
    loaded = load_object(code, _address_of)
    _loaded_objects.append(loaded)
    return loaded.addresses[symbol]


@cache
def _address_of(name: str) -> int:
    """Return the address of a function or an object outside of the compiled code: of Numba's small
    runtime, of Python, or of the C library.
    """
    helpers = _numba_helpers()
    if name in helpers:
        return helpers[name]
    if name.startswith("PyExc_"):  # the object itself, as Numba's code expects
        return id(getattr(__import__("builtins"), name.removeprefix("PyExc_")))
    if name == "_Py_NoneStruct":
        return id(None)
    for library in _libraries():
        with suppress(AttributeError):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    raise UnsupportedObject(f"an unknown symbol {name}")


@cache
def _libraries() -> list[ctypes.CDLL]:
    """Return the libraries in which symbols are looked for: all of this process, and libm."""
    libraries: list[ctypes.CDLL] = [ctypes.pythonapi, ctypes.CDLL(None)]
    with suppress(OSError):
        libraries.append(ctypes.CDLL("libm.so.6"))
    return libraries


@cache
def _numba_helpers() -> dict[str, int]:
    """Return the addresses of the functions that Numba gives to compiled code, by name: they are in
    two extension modules, which need neither the rest of Numba nor LLVM.
    """
    general, runtime = _extension("numba._helperlib"), _extension("numba.core.runtime._nrt_python")
    named = {f"numba_{name}": address for name, address in general.c_helpers.items()}
    for name, address in runtime.c_helpers.items():
        named[name if name.startswith("_") else f"NRT_{name}"] = address
    return named


def _extension(name: str) -> Any:
    """Return an extension module of Numba without importing the packages around it."""
    if name in sys.modules:
        return sys.modules[name]
    package = importlib.util.find_spec("numba")
    folders = () if package is None else package.submodule_search_locations or ()
    _, *inner, file = name.split(".")
    for folder in folders:
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            path = Path(folder, *inner, file + suffix)
            if path.is_file():
                return _import_extension(name, path)
    raise UnsupportedObject(f"Numba has no module {name}")


def _import_extension(name: str, path: Path) -> ModuleType:
    """Import an extension module under its own name, so that a later import of Numba finds the
    same state; Numba itself does not count as imported.
    """
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise UnsupportedObject(f"{name} cannot be imported alone: {error}") from error
    sys.modules.pop(name, None)
    return module
