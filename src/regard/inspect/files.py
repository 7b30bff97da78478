"""Recordings on disk: one safetensors file each, with the rules as text and numbers in its
header.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import ArgumentError, FileError
from regard.files.reading import load as read_tensors
from regard.files.strict import parse
from regard.files.write import written
from regard.foreign import shown, told
from regard.inspect.kept import Pool, Step
from regard.inspect.place import Place
from regard.inspect.recording import Recording
from regard.inspect.rules import bias_data, bias_from, mask_data, mask_from
from regard.span import Positions, Span, as_tensor, count

_KEY, _FORMAT, _READ = "regard.recording", 2, (1, 2)
"""Format 2 keeps scores and patterns that were edited; a reader of format 1 would compute
others.
"""
_LARGEST = 1 << 53

LONGEST = 1 << 26
"""The most queries of a call, or columns, that a file may speak of without holding them."""


def save(recording: Recording, path: str | Path) -> None:
    """Write a recording to a file, whole or not at all: to a temporary file, then renamed over
    `path`.

    Masks and biases are written as what they say, or as their tensors; one that is a function of
    the caller's is written out, for the calls that were recorded.

    Args:
        recording: what `record` gave.
        path: the file; its folder exists.

    Raises:
        FileError: the file cannot be written; one that was there before is as it was.

    >>> import regard
    >>> found = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> save(found, "run.safetensors")
    >>> again = load("run.safetensors")
    >>> bool((again.weights(0, 1) == found.weights(0, 1)).all()), again.pieces == found.pieces
    (True, True)
    """
    path, tensors = Path(path), _Tensors()
    data = {
        "format": _FORMAT,
        "about": dict(recording.about),
        "pieces": list(recording.pieces),
        "source_pieces": list(recording.source_pieces),
        "ids": tensors.optional(recording.ids),
        "source_ids": tensors.optional(recording.source_ids),
        "places": [_place_data(place, tensors) for place in recording.places.values()],
    }
    try:
        with written(path) as place:
            save_file(tensors.named, place, metadata={_KEY: json.dumps(data)})
    except (OSError, SafetensorError) as error:
        raise FileError(
            f"{path}: cannot write the recording: {error}; choose another folder, or free some "
            "space"
        ) from error


def load(path: str | Path) -> Recording:
    """Read a recording that `save` wrote. The file is data of unknown origin: all of it is checked.

    Raises:
        FileError: the file is missing, damaged or no recording, or its parts do not fit together.

    >>> load("no/such/file")
    Traceback (most recent call last):
    regard.errors.FileError: no/such/file ...
    """
    path = Path(path)
    tensors, metadata = read_tensors(path)
    if _KEY not in metadata:
        raise FileError(
            f"{path} holds no recording: its header has no {_KEY!r}; "
            "regard.inspect.save(recording, path) writes one"
        )
    try:
        data = parse(metadata[_KEY].encode())
        if data["format"] not in _READ:
            raise FileError(
                f"{path} has format {shown(data['format'])}; this version reads "
                f"{' and '.join(map(str, _READ))}"
            )
        return _recording(data, tensors)
    except _UNFIT as error:
        raise FileError(
            f"{path}: its parts do not make a recording: {told(error)}; save it again"
        ) from error


_UNFIT = (
    ArgumentError,
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    RuntimeError,
    OverflowError,
    MemoryError,
)
"""What a part of a recording raises that is not what recording made."""


class _Tensors:
    """Tensors by name; one that comes twice is kept once."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self._names: dict[int, tuple[str, Tensor]] = {}  # holds them, so that no id is used again

    def __call__(self, x: Tensor) -> str:
        if id(x) not in self._names:
            name = str(len(self._names))
            # a copy: two names may look at one memory, which the format does not allow
            self.named[name] = x.detach().to("cpu", copy=True).contiguous()
            self._names[id(x)] = (name, x)
        return self._names[id(x)][0]

    def optional(self, x: Tensor | None) -> str | None:
        """The name, or None."""
        return None if x is None else self(x)

    def positions(self, x: Positions) -> list[int] | str:
        """A span as its two numbers."""
        return [x.start, x.length] if isinstance(x, Span) else self(x)


def _place_data(place: Place, keep: _Tensors) -> dict[str, Any]:
    pools = [
        {
            "k": keep(p.k),
            "v": keep.optional(p.v),
            "columns": keep(p.columns),
            "groups": list(p.groups),
            "G": p.G,
            "held": p.held,
        }
        for p in place.pools
    ]
    return {
        "name": place.name,
        "H": place.H,
        "heads": list(place.heads),
        "N": place.N,
        "pools": pools,
        "steps": [_step_data(step, keep) for step in place.steps],
    }


def _step_data(step: Step, keep: _Tensors) -> dict[str, Any]:
    columns: list[int] | str = (
        keep(step.columns) if step.run is None else [step.run, len(step.columns)]
    )
    return {
        "q": keep(step.q),
        "lse": keep(step.lse),
        "out": keep.optional(step.out),
        "columns": columns,
        "q_positions": keep.positions(step.q_positions),
        "k_positions": keep.positions(step.k_positions),
        "mask": mask_data(step.mask, step, keep),
        "bias": bias_data(step.bias, step, keep),
        "scale": step.scale,
        "softcap": step.softcap,
        "sink": keep.optional(step.sink),
        "kernel": step.kernel,
        "first": step.first,
        "token": step.token,
        "dropout": step.dropout,
        "pool": step.pool,
        "keys": keep.optional(step.keys),
        "scores": keep.optional(step.scores),
        "pattern": keep.optional(step.pattern),
    }


def _recording(data: dict[str, Any], tensors: dict[str, Tensor]) -> Recording:
    about = {str(k): str(v) for k, v in data["about"].items()}
    texts = [tuple(str(x) for x in data[name]) for name in ("pieces", "source_pieces")]
    ids, source_ids = (
        None if data[name] is None else tensors[data[name]] for name in ("ids", "source_ids")
    )
    places = [_place(x, tensors) for x in data["places"]]
    names = {place.name: place for place in places}
    if len(names) < len(places):
        raise ArgumentError("two places have one name")
    return Recording(names, ids, texts[0], about, source_ids, texts[1])


def _place(data: dict[str, Any], tensors: dict[str, Tensor]) -> Place:
    from regard.inspect.checked import check_place

    pools = tuple(
        Pool(
            tensors[p["k"]],
            None if p["v"] is None else tensors[p["v"]],
            tensors[p["columns"]],
            tuple(map(_whole, p["groups"])),
            _whole(p["G"]),
            _name(p["held"]),
        )
        for p in data["pools"]
    )
    held = sum(len(pool.columns) for pool in pools if pool.columns.ndim)
    steps = tuple(_step(x, tensors, held) for x in data["steps"])
    H, heads, N = _whole(data["H"]), tuple(map(_whole, data["heads"])), _whole(data["N"])
    place = Place(_name(data["name"]), steps, pools, H, heads, N)
    check_place(place)
    return place


def _step(data: dict[str, Any], tensors: dict[str, Tensor], held: int) -> Step:
    """A step of a place that holds so many keys."""

    def named(name: str) -> Tensor | None:
        return None if data[name] is None else tensors[data[name]]

    data = {"scores": None, "pattern": None, **data}  # format 1 has neither
    columns = data["columns"]
    if isinstance(columns, list):
        columns = as_tensor(_span(columns, held))[0]
    else:
        columns = tensors[columns]
    return Step(
        tensors[data["q"]],
        tensors[data["lse"]],
        named("out"),
        columns,
        _positions(data["q_positions"], tensors),
        _positions(data["k_positions"], tensors),
        mask_from(data["mask"], tensors),
        bias_from(data["bias"], tensors),
        float(data["scale"]),
        None if data["softcap"] is None else float(data["softcap"]),
        named("sink"),
        _name(data["kernel"]),
        _whole(data["first"]),
        _whole(data["token"]),
        float(data["dropout"]),
        _whole(data["pool"]),
        named("keys"),
        named("scores"),
        named("pattern"),
    )


def _positions(data: Any, tensors: dict[str, Tensor]) -> Positions:
    found = _span(data) if isinstance(data, list) else tensors[data]
    if count(found) > LONGEST:
        raise ArgumentError(f"positions of {count(found)} tokens; at most {LONGEST} are read")
    return found


def _name(x: Any) -> str:
    """A name as code gives it: it stands in messages and on pages."""
    if not isinstance(x, str) or len(x) > 200 or not x.isprintable():
        raise ArgumentError(f"{shown(x)} stands where a name must")
    return x


def _whole(x: Any) -> int:
    if type(x) is not int:
        raise ArgumentError(f"{shown(x)} stands where an integer must")
    if abs(x) > _LARGEST:
        raise ArgumentError(f"{x} is larger than any number of a recording, {_LARGEST}")
    return x


def _span(data: list[int], most: int = LONGEST) -> Span:
    start, length = data
    if type(length) is int and length > most:
        raise ArgumentError(f"a span of {length} positions; at most {most} are read")
    return Span(_whole(start), _whole(length))
