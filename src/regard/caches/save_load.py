"""Caches in a safetensors file, with class, settings and spans in its header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from regard.caches.base import CACHES, Cache, Contents, parts_of
from regard.caches.ring import RingBase
from regard.caches.state import STORED_POSITIONS
from regard.errors import ArgumentError, FileError
from regard.files.atomic_write import write_atomically
from regard.files.reading import parse_json
from regard.files.safetensors_files import load_tensors as read_tensors
from regard.registry import is_builtin
from regard.span import Span, slot_count
from regard.units import plural
from regard.untrusted_text import error_text, short_repr

_KEY = "regard.cache"
_FORMAT = 1
_INTEGER_DTYPES = (torch.int32, torch.int64)
MAX_POSITION = 1 << 26
"""The largest position, and the largest number of slots or pages, that a file may contain."""


def save(cache: Cache, path: str | Path) -> None:
    """Write a cache to a file, completely or not at all.

    A temporary file is synced and then renamed to `path`. It holds the tensors of
    `cache.contents()`; the header has the class, settings, spans and numbers as JSON.

    Args:
        cache: any cache of `regard.caches`, or of a class of your own that has a `kind`.
        path: the file; its folder must exist.

    Raises:
        ArgumentError: `load` does not know the class of the cache.
        FileError: the file cannot be written; an older one is unchanged.

    >>> from regard.caches import Growing
    >>> cache = Growing()
    >>> _ = cache.update((torch.ones(1, 2, 3, 4),), Span(0, 3))
    >>> save(cache, "prompt.safetensors")
    >>> load("prompt.safetensors").next(1)
    Span(start=3, length=1)
    """
    path, known = Path(path), _loadable_classes()
    kind = next((name for name, x in known.items() if x is type(cache)), None)
    if kind is None:
        raise ArgumentError(
            f"{type(cache).__name__} cannot be saved: load knows {', '.join(sorted(known))}; give "
            "the class a `kind` of its own, or save its contents() yourself"
        )
    contents = cache.contents()
    spans = {name: [x.start, x.length] for name, x in contents.items() if isinstance(x, Span)}
    numbers = {name: x for name, x in contents.items() if isinstance(x, int)}
    # copies, because the format does not allow two names for one storage
    tensors = {
        name: x.detach().to("cpu", copy=True).contiguous()
        for name, x in contents.items()
        if isinstance(x, Tensor)
    }
    header = {
        "format": _FORMAT,
        "class": kind,
        "settings": cache.settings,
        "spans": spans,
        "numbers": numbers,
        "tensors": {name: list(x.shape) for name, x in tensors.items()},
    }
    try:
        with write_atomically(path) as place:
            save_file(tensors, place, metadata={_KEY: json.dumps(header)})
    except (OSError, SafetensorError) as error:
        raise FileError(
            f"{path}: cannot write the cache: {error}; choose another folder, or free some space"
        ) from error


def load(
    path: str | Path, *, device: torch.device | str = "cpu", max_bytes: int = 4 << 30
) -> Cache:
    """Read a cache that `save` wrote; later updates give bitwise the results of the saved cache.

    Nothing in the file is executed: the class is looked up by its name.

    Args:
        path: the file.
        device: the device of its tensors.
        max_bytes: the most bytes that the cache may reserve for future tokens.

    Returns:
        The cache.

    Raises:
        FileError: the file is missing, damaged or not a cache; its class is unknown or refuses the
            settings; or it would reserve more than `max_bytes`.

    >>> load("no/such/file")
    Traceback (most recent call last):
    regard.errors.FileError: no/such/file is missing; save(cache, path) writes one
    """
    path = Path(path)
    header, tensors = _read(path)
    kind = _loadable_classes().get(header.kind)
    if kind is None:
        raise FileError(
            f"{path}: the class {short_repr(header.kind)} is unknown; known: "
            f"{', '.join(sorted(_loadable_classes()))}"
        )
    try:
        contents: Contents = {name: x.to(device) for name, x in tensors.items()}
        contents |= {**header.spans, **header.numbers}
        _check_reserved_bytes(header.settings, contents, max_bytes)
        cache = kind(**header.settings)
        _check_shapes(contents, cache)
        cache.fill(contents)
        _check_same_contents(contents, cache.contents())
    except (ArgumentError, TypeError, ValueError, IndexError, RuntimeError, MemoryError) as error:
        raise FileError(
            f"{path}: its contents do not form a {kind.__name__}: {error_text(error)}; save it "
            "again"
        ) from error
    return cache


class _Header(NamedTuple):
    """The checked header of a cache file."""

    kind: str
    settings: dict[str, object]
    spans: dict[str, Span]
    numbers: dict[str, int]


def _loadable_classes() -> dict[str, type[Cache]]:
    """Return the classes that a file may name: those of this package, and others by `kind`."""
    classes = {kind: x for kind, x in CACHES if not is_builtin(x) and x.savable}
    pending = list(Cache.__subclasses__())
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        is_private = kind.__name__.startswith("_")  # what other classes share
        if is_builtin(kind) and kind.savable and not is_private:
            classes[kind.__name__] = kind
    return classes


def _read(path: Path) -> tuple[_Header, dict[str, Tensor]]:
    """Return the checked header and the tensors, which are those that the header lists."""
    if not path.exists():
        raise FileError(f"{path} is missing; save(cache, path) writes one")
    tensors, metadata = read_tensors(path)
    raw = metadata.get(_KEY)
    if raw is None:
        raise FileError(
            f"{path} holds no cache: its header has no {_KEY!r}; save(cache, path) writes one"
        )
    try:
        return _header(parse_json(raw.encode("utf-8")), tensors), tensors
    except ArgumentError as error:
        raise FileError(
            f"{path}: the header of its cache {error_text(error)}; save it again"
        ) from error


def _header(fields: dict[str, Any], tensors: Mapping[str, Tensor]) -> _Header:
    """Check the fields of a header one by one."""
    if fields.get("format") != _FORMAT:
        raise ArgumentError(
            f"has format {short_repr(fields.get('format'))}; this version reads {_FORMAT}"
        )
    kinds = {"class": str, "settings": dict, "spans": dict, "numbers": dict, "tensors": dict}
    for name, kind in kinds.items():
        if not isinstance(fields.get(name), kind):
            raise ArgumentError(
                f"has {short_repr(fields.get(name))} as {name}; it must be a {kind.__name__}"
            )
    spans = {name: _span(name, x) for name, x in fields["spans"].items()}
    for name, x in (*fields["numbers"].items(), *fields["settings"].items()):
        _check_number(name, x, among_settings=name in fields["settings"])
    shapes = {name: list(x.shape) for name, x in tensors.items()}
    if fields["tensors"] != shapes:
        wrong = sorted(
            n
            for n in fields["tensors"].keys() | shapes
            if fields["tensors"].get(n) != shapes.get(n)
        )
        name = wrong[0]
        raise ArgumentError(
            f"lists {short_repr(name)} as {short_repr(fields['tensors'].get(name))}, and the file "
            f"holds {short_repr(shapes.get(name))}"
        )
    return _Header(fields["class"], fields["settings"], spans, fields["numbers"])


def _span(name: str, value: object) -> Span:
    if isinstance(value, list) and len(value) == 2 and all(type(i) is int for i in value):
        start, length = value
        if abs(start) <= MAX_POSITION and 0 <= length <= MAX_POSITION:
            return Span(start, length)
    raise ArgumentError(
        f"has the span {short_repr(value)} of {short_repr(name)}; it must be a start and a "
        f"length, both at most {MAX_POSITION}"
    )


def _check_number(name: str, value: object, *, among_settings: bool) -> None:
    """Raise unless a number is an integer within the bounds."""
    plain = among_settings and (value is None or isinstance(value, str))
    if among_settings and isinstance(value, list):
        for x in value:
            _check_number(name, x, among_settings=True)
    elif not plain and (type(value) is not int or abs(value) > MAX_POSITION):
        raise ArgumentError(
            f"has {short_repr(value)} as {short_repr(name)}; it must be an integer, at most "
            f"{MAX_POSITION}"
        )


def _check_reserved_bytes(
    settings: Mapping[str, object], contents: Contents, max_bytes: int
) -> None:
    """Raise if the settings would reserve more memory than is allowed."""

    def largest(*names: str) -> int:
        """Return the largest of these settings; 0 if there are none."""
        return max((x for name in names if type(x := settings.get(name)) is int), default=0)

    slots = max(largest("capacity"), largest("page_size") * (largest("pages") + 1))
    needed = slots * sum(x.nbytes // max(1, x.shape[2]) for x in parts_of(contents) if x.ndim == 4)
    if needed > max_bytes or largest("pages") > max_bytes // 64:
        raise ArgumentError(
            f"its settings {short_repr(dict(settings))} reserve "
            f"{max(needed, 64 * largest('pages')):,} bytes, more than {max_bytes:,}; to allow "
            f"it, call load(path, max_bytes=...)"
        )


def _check_shapes(contents: Contents, cache: Cache) -> None:
    """Raise unless tensors have rows of one batch, and memory has one slot per position."""
    rows = {x.shape[0] if x.ndim else 0 for x in contents.values() if isinstance(x, Tensor)} - {1}
    if len(rows) > 1:
        raise ArgumentError(
            f"its tensors have batch sizes {sorted(rows)}; all must have one batch size, or 1"
        )
    positions = contents.get(STORED_POSITIONS, contents.get("positions"))
    if isinstance(positions, Tensor) and (
        positions.ndim != 2 or positions.dtype not in _INTEGER_DTYPES
    ):
        raise ArgumentError(
            f"positions are {positions.dtype} {tuple(positions.shape)}; they must be integers "
            "[batch, slots]"
        )
    lost = contents.get("lost")
    if isinstance(lost, Tensor) and lost.dtype not in _INTEGER_DTYPES:
        raise ArgumentError(f"lost is {lost.dtype}; it must be integers")
    # the span of a ring covers all tokens that were ever stored, not only its slots
    is_ring_span = isinstance(cache, RingBase) and isinstance(positions, Span)
    slots = (
        None
        if positions is None or isinstance(positions, int) or is_ring_span
        else slot_count(positions)
    )
    for i, x in enumerate(parts_of(contents)):
        if x.ndim != 4 or slots not in (None, x.shape[2]):
            raise ArgumentError(
                f"memory.{i} is {tuple(x.shape)} for {plural(slots or 0, 'position')}; it must be "
                "[batch, heads, slots, dim]"
            )


def _check_same_contents(saved: Contents, loaded: Contents) -> None:
    """Raise if the filled cache holds other names or shapes than the file."""
    for name in sorted(saved.keys() ^ loaded.keys()):
        raise ArgumentError(f"{name} is {'unexpected' if name in saved else 'missing'}")
    for name, x in saved.items():
        y = loaded[name]
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape != y.shape:
            raise ArgumentError(
                f"{name} is {tuple(x.shape)} in the file, but {tuple(y.shape)} in the loaded cache"
            )
