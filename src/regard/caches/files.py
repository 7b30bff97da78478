"""Caches on disk: one safetensors file each, with the kind, its settings and its spans in the header."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.caches.base import Cache, Contents, memory_of
from regard.caches.memory import HELD
from regard.caches.rolling import Rolling
from regard.errors import ArgumentError, FileError
from regard.span import Span, count

_KEY = "regard.cache"
_FORMAT = 1


def save(cache: Cache, path: str | Path) -> None:
    """Write a cache to a file, whole or not at all: to a temporary file, synced, then renamed over `path`.

    Tensors are those of `cache.contents()`, by name; the header holds the class, its settings, spans and numbers as JSON.

    Args:
        cache: any cache of `regard.caches`.
        path: the file; its folder exists.

    Raises:
        ArgumentError: the class of the cache is not known to `load`.
        FileError: the file cannot be written; one that was there before is as it was.

    >>> from regard.caches import Growing
    >>> cache = Growing()
    >>> _ = cache.update((torch.ones(1, 2, 3, 4),), Span(0, 3))
    >>> save(cache, "prompt.safetensors")
    >>> load("prompt.safetensors").next(1)
    Span(start=3, length=1)
    """
    path, kind = Path(path), type(cache).__name__
    if _kinds().get(kind) is not type(cache):
        raise ArgumentError(
            f"{kind} cannot be saved: load knows {', '.join(sorted(_kinds()))}; save its contents() yourself"
        )
    held = cache.contents()
    spans = {name: [x.start, x.length] for name, x in held.items() if isinstance(x, Span)}
    numbers = {name: x for name, x in held.items() if isinstance(x, int)}
    # copies: two names may look at one memory, which the format does not allow
    tensors = {
        name: x.detach().to("cpu", copy=True).contiguous()
        for name, x in held.items() if isinstance(x, Tensor)
    }  # fmt: skip
    header = {
        "format": _FORMAT, "class": kind, "settings": cache.settings, "spans": spans, "numbers": numbers,
        "tensors": {name: list(x.shape) for name, x in tensors.items()},
    }  # fmt: skip
    try:
        _write(path, tensors, {_KEY: json.dumps(header)})
    except (OSError, SafetensorError) as error:
        raise FileError(
            f"{path}: cannot write the cache: {error}; choose another folder, or free some space"
        ) from error


def load(path: str | Path, *, device: torch.device | str = "cpu") -> Cache:
    """Read a cache that `save` wrote; going on with it is, bitwise, going on with the one that was saved.

    Nothing in the file is executed: a class is looked up by its name among those of `regard.caches`.

    Args:
        path: the file.
        device: where its tensors go.

    Raises:
        FileError: the file is missing, damaged or no cache; its class is unknown or refuses the settings; a tensor is
            missing, unexpected, or of a wrong shape.

    >>> load("no/such/file")
    Traceback (most recent call last):
    regard.errors.FileError: no/such/file is missing; save(cache, path) writes one
    """
    path = Path(path)
    header, tensors = _read(path)
    kind = _kinds().get(header["class"])
    if kind is None:
        raise FileError(
            f"{path}: the class {header['class']!r} is unknown; known: {', '.join(sorted(_kinds()))}"
        )
    wanted = {name: tuple(shape) for name, shape in header["tensors"].items()}
    missing, unexpected = sorted(wanted.keys() - tensors), sorted(tensors.keys() - wanted)
    if missing or unexpected:
        raise FileError(f"{path}: {len(missing)} missing {missing}, {len(unexpected)} unexpected {unexpected}; save it again")  # fmt: skip
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise FileError(
                f"{path}: {name} is {tuple(tensors[name].shape)}; its header says {shape}; save it again"
            )
    try:
        contents: Contents = {name: x.to(device) for name, x in tensors.items()}
        contents |= {name: Span(*x) for name, x in header["spans"].items()} | header["numbers"]
        cache = kind(**header["settings"])
        _check(contents, cache)
        cache.fill(contents)
        _compare(contents, cache.contents())
    except (ArgumentError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise FileError(
            f"{path}: its contents do not make a {kind.__name__}: {error}; save it again"
        ) from error
    return cache


def _kinds() -> dict[str, type[Cache]]:
    """Class name -> class, of the caches of this package."""
    found, left = {}, list(Cache.__subclasses__())
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if kind.__module__.startswith("regard."):
            found[kind.__name__] = kind
    return found


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        save_file(tensors, temporary, metadata=metadata)
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Have a file or folder reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            raw = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except FileNotFoundError:
        raise FileError(f"{path} is missing; save(cache, path) writes one") from None
    except (OSError, SafetensorError) as error:
        raise FileError(
            f"{path} is not a whole safetensors file: {error}; save it again"
        ) from error
    if raw is None:
        raise FileError(
            f"{path} holds no cache: its header has no {_KEY!r}; save(cache, path) writes one"
        )
    try:
        header = json.loads(raw)
        if header["format"] != _FORMAT:
            raise FileError(f"{path} has format {header['format']!r}; this version reads {_FORMAT}")
        _check_header(header)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FileError(f"{path}: its header cannot be read: {error!r}; save it again") from error
    return header, tensors


def _check_header(header: dict[str, Any]) -> None:
    """Every field has its type, whoever wrote the file."""
    for name, kind in (("class", str), ("settings", dict), ("spans", dict), ("numbers", dict), ("tensors", dict)):  # fmt: skip
        if not isinstance(header[name], kind):
            raise TypeError(f"{name} is {type(header[name]).__name__}, not {kind.__name__}")
    whole = [*header["numbers"].values(), *(i for x in header["spans"].values() for i in x)]
    if any(type(i) is not int for i in whole) or any(len(x) != 2 for x in header["spans"].values()):
        raise TypeError("spans are pairs of integers, numbers are integers")


def _check(contents: Contents, cache: Cache) -> None:
    """Tensors have rows of one batch, and memory as many slots as there are positions."""
    rows = {x.shape[0] if x.ndim else 0 for x in contents.values() if isinstance(x, Tensor)} - {1}
    if len(rows) > 1:
        raise ArgumentError(f"its tensors have {sorted(rows)} rows; all must have one batch, or 1")
    positions = contents.get(HELD, contents.get("positions"))
    if isinstance(positions, Tensor) and (positions.ndim != 2 or positions.is_floating_point()):
        raise ArgumentError(
            f"positions are {positions.dtype} {tuple(positions.shape)}; they must be integers [batch, slots]"
        )
    # a ring's span says what it saw, not what its slots are
    seen = isinstance(cache, Rolling) and isinstance(positions, Span)
    slots = None if positions is None or isinstance(positions, int) or seen else count(positions)
    for i, x in enumerate(memory_of(contents)):
        if x.ndim != 4 or slots not in (None, x.shape[2]):
            raise ArgumentError(
                f"memory.{i} is {tuple(x.shape)} for {slots} positions; it must be [batch, heads, slots, dim]"
            )


def _compare(given: Contents, held: Contents) -> None:
    """A cache holds what it was given: a name that it does not know would be dropped in silence."""
    for name in sorted(given.keys() ^ held.keys()):
        raise ArgumentError(f"{name} is {'unexpected' if name in given else 'missing'}")
    for name, x in given.items():
        y = held[name]
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape != y.shape:
            raise ArgumentError(f"{name} is {tuple(x.shape)}, and comes to {tuple(y.shape)}")
