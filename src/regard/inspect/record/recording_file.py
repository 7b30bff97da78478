"""Recordings on disk: one safetensors file each, with masks, biases and score rules as plain data
in its metadata.

Nothing in a file is executed: each rule is stored as the name of a class, its numbers and its
tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from regard import masks
from regard.biases import BIASES, Bias
from regard.errors import ArgumentError, FileError
from regard.files.atomic_write import write_atomically
from regard.files.reading import parse_json
from regard.files.safetensors_files import load_tensors as read_tensors
from regard.inspect.record.recorded_place import KeyValuePool, Place, RecordedStep
from regard.inspect.record.recording import PlaceLabels, Recording, UnrecordedCall
from regard.masks import MASKS, Mask
from regard.registry import is_builtin
from regard.scores import SCORES, ScoreBlock, ScoreRule
from regard.serialization import NotSerializable, StoreTensor, from_data, to_data
from regard.span import Positions, Span, as_tensor, slot_count
from regard.units import plural
from regard.untrusted_text import error_text, short_repr

_KEY, _FORMAT = "regard.recording", 3
"""The metadata key, and the format of the file."""
_MAX_INTEGER = 1 << 53
"""The largest absolute value of an integer in a file."""
MAX_TOKENS = 1 << 26
"""The largest number of queries of a call, or of columns, that a file may declare without
storing them.
"""
_MAX_DEPTH = 50
"""How deep masks and biases in a file may be nested."""
_MALFORMED = (
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
"""Exceptions that reading raises if a part of the file is not what `save` writes."""


def save(recording: Recording, path: str | Path) -> None:
    """Write a recording to a file, either completely or not at all.

    The recording is written to a temporary file, which is then renamed to `path`. Masks, biases
    and score rules are written as their parameters and tensors. A mask or bias that is a Python
    function is written as a dense table for the recorded calls, and a score rule that is one as its
    text, beside the scores and weights that it gave.

    Args:
        recording: what `record` or `Recorder.recording` returned.
        path: the file; its folder must exist.

    Raises:
        FileError: the file cannot be written; an earlier file of that name is left unchanged.

    >>> import regard
    >>> recording = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> save(recording, "run.safetensors")
    >>> again = load("run.safetensors")
    >>> bool((again.weights(0, 1) == recording.weights(0, 1)).all())
    True
    """
    path, tensors = Path(path), _NamedTensors()
    data = {
        "format": _FORMAT,
        "metadata": dict(recording.metadata),
        "pieces": list(recording.pieces),
        "source_pieces": list(recording.source_pieces),
        "ids": tensors.optional(recording.ids),
        "source_ids": tensors.optional(recording.source_ids),
        "token_labels": {name: list(map(list, x)) for name, x in recording.token_labels.items()},
        "unrecorded": [[call.place, call.reason, call.count] for call in recording.unrecorded],
        "places": [_place_data(place, tensors) for place in recording.places.values()],
    }
    try:
        with write_atomically(path) as place:
            save_file(tensors.named, place, metadata={_KEY: json.dumps(data)})
    except (OSError, SafetensorError) as error:
        raise FileError(
            f"{path}: cannot write the recording: {error}; choose another folder, or free some "
            "space"
        ) from error


def load(path: str | Path) -> Recording:
    """Read a recording that `save` wrote, in the current or an earlier format.

    The file is treated as untrusted data: every part of it is checked.

    Args:
        path: the file.

    Returns:
        The recording.

    Raises:
        FileError: the file is missing, damaged or not a recording, or its parts do not fit
            together.

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
        data = parse_json(metadata[_KEY].encode())
        if data["format"] != _FORMAT:
            raise FileError(
                f"{path} has format {short_repr(data['format'])}; this version reads "
                f"format {_FORMAT}"
            )
        return _read_recording(data, tensors)
    except _MALFORMED as error:
        raise FileError(
            f"{path}: its parts do not form a recording: {error_text(error)}; save it again"
        ) from error


class _NamedTensors:
    """Collects tensors under names; a tensor that is passed twice is stored once."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self._names: dict[int, tuple[str, Tensor]] = {}  # references, so that no id is reused

    def __call__(self, x: Tensor) -> str:
        if id(x) not in self._names:
            name = str(len(self._names))
            # a copy, because the format does not allow two tensors that share memory
            self.named[name] = x.detach().to("cpu", copy=True).contiguous()
            self._names[id(x)] = (name, x)
        return self._names[id(x)][0]

    def optional(self, x: Tensor | None) -> str | None:
        """Return the name of a tensor, or None for None."""
        return None if x is None else self(x)

    def positions(self, x: Positions) -> list[int] | str:
        """Return the name of a tensor of positions; a span is returned as its start and length."""
        return [x.start, x.length] if isinstance(x, Span) else self(x)


def _place_data(place: Place, keep: _NamedTensors) -> dict[str, object]:
    """Return a place as JSON data; its tensors go into `keep`."""
    pools = [
        {
            "k": keep(p.k),
            "v": keep.optional(p.v),
            "columns": keep(p.columns),
            "groups": list(p.groups),
            "G": p.G,
            "key_kind": p.key_kind,
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


def _step_data(step: RecordedStep, keep: _NamedTensors) -> dict[str, object]:
    """Return a step as JSON data; its tensors go into `keep`."""
    columns: list[int] | str = (
        keep(step.columns) if step.first_column is None else [step.first_column, len(step.columns)]
    )
    return {
        **{name: keep.optional(getattr(step, name)) for name in ("q", "lse", *_OPTIONAL)},
        **{name: keep.positions(getattr(step, name)) for name in ("q_positions", "k_positions")},
        **{name: getattr(step, name) for name in ("scale", "softcap", "dropout", "kernel")},
        **{name: getattr(step, name) for name in _INTEGERS},
        "columns": columns,
        "mask": mask_data(step.mask, step, keep),
        "bias": bias_data(step.bias, step, keep),
        "score": score_data(step.score, keep),
    }


_OPTIONAL = ("out", "sink", "pool_index", "scores", "pattern")
"""The tensors that a step may lack."""
_INTEGERS = ("first", "token", "pool")


def mask_data(mask: Mask, step: RecordedStep, keep: StoreTensor) -> dict[str, object]:
    """Return a mask as JSON data: its text if `masks.parse` reads it, else its fields.

    A function, or a class from outside the package, becomes a dense table.
    """

    def dense_table() -> dict[str, object]:
        table = mask.block(step.q_positions, step.k_positions)
        return {"dense": keep(table.contiguous()), "was": str(mask)}

    if _has_text(mask):
        return {"text": str(mask)} if _is_ours(mask) else {"text": str(mask), **dense_table()}
    try:
        data = to_data(mask, keep, lambda x: mask_data(x, step, keep))
    except NotSerializable:
        return dense_table()
    return data if is_builtin(type(mask)) else {**data, **dense_table()}


def _check_depth(what: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ArgumentError(f"{what} is nested deeper than {_MAX_DEPTH}")


def _has_text(mask: Mask) -> bool:
    """Return whether `masks.parse` reads the text of a mask back as an equal mask."""
    try:
        return masks.parse(str(mask)) == mask
    except ArgumentError:
        return False


def _is_ours(rule: Mask) -> bool:
    """Return whether a mask and all its members are classes of this package."""
    return is_builtin(type(rule)) and all(map(_is_ours, rule.members()))


def mask_from(data: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Mask:
    """Build the mask that `mask_data` described; a dense mask where its class is unknown here."""
    _check_depth("a mask", depth)
    if "text" in data:
        try:
            return masks.parse(data["text"])
        except ArgumentError:
            if "dense" not in data:
                raise
            return masks.Dense(tensors[data["dense"]])
    return from_data(MASKS, data, tensors, lambda x: mask_from(x, tensors, depth + 1))


def bias_data(bias: Bias | None, step: RecordedStep, keep: StoreTensor) -> dict[str, object] | None:
    """Return a bias as JSON data; one without plain data, such as a function, as a dense table."""
    if bias is None:
        return None

    def dense_table() -> dict[str, object]:
        table = bias.block(step.q_positions, step.k_positions, dtype=torch.float64)
        return {"dense": keep(table.contiguous()), "was": str(bias)}

    try:
        data = to_data(bias, keep, lambda x: bias_data(x, step, keep) or {})
    except NotSerializable:
        return dense_table()
    return data if is_builtin(type(bias)) else {**data, **dense_table()}


def bias_from(data: object, tensors: Mapping[str, Tensor], depth: int = 0) -> Bias | None:
    """Build the bias that `bias_data` described; a dense bias where its class is unknown here."""
    if data is None:
        return None
    _check_depth("a bias", depth)
    return from_data(BIASES, data, tensors, lambda x: bias_from(x, tensors, depth + 1))


def score_data(rule: ScoreRule | None, keep: StoreTensor) -> dict[str, Any] | None:
    """Return a score rule as JSON data, or as its text if it has none or is from outside.

    The text suffices, because a recording contains the scores and weights that the rule gave.
    """
    if rule is None:
        return None
    text = {RecordedRule.kind: {"word": str(rule)}}
    try:
        data = to_data(rule, keep, lambda x: score_data(x, keep) or {})
    except NotSerializable:
        return text
    return data if is_builtin(type(rule)) else {**data, **text}


def score_from(data: object, tensors: Mapping[str, Tensor], depth: int = 0) -> ScoreRule | None:
    """Build the score rule that `score_data` described; a `RecordedRule` where only its text is
    stored, or its class is unknown here.

    >>> score_from({"temperature": 2.0}, {}), score_from({"recorded": {"word": "fn(near)"}}, {})
    (temperature(2), fn(near))
    """
    if data is None:
        return None
    _check_depth("a score rule", depth)
    text = RecordedRule.kind
    if isinstance(data, Mapping) and text in data:
        others = {name: x for name, x in data.items() if name != text}
        known = any(SCORES.get(str(name)) is not None for name in others)
        data = others if known else {text: data[text]}
    return from_data(SCORES, data, tensors, lambda x: score_from(x, tensors, depth + 1))


@dataclass(frozen=True, eq=False, repr=False)
class RecordedRule(ScoreRule):
    """The text of a rule that a file could not store, such as a function."""

    kind: ClassVar[str] = "recorded"

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", error_text(str(self.text), 200))

    def change_scores(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Raise, because the rule is not known."""
        raise ArgumentError(
            f"the score rule {self.text} was recorded as text only; pass the rule itself"
        )

    def __str__(self) -> str:
        return self.text


def _read_recording(data: dict[str, Any], tensors: dict[str, Tensor]) -> Recording:
    """Build a recording from JSON data and tensors."""
    metadata = {str(k): str(v) for k, v in data["metadata"].items()}
    texts = [tuple(str(x) for x in data[name]) for name in ("pieces", "source_pieces")]
    ids, source_ids = (_optional(data[name], tensors) for name in ("ids", "source_ids"))
    places = [_read_place(x, tensors) for x in data["places"]]
    names = {place.name: place for place in places}
    if len(names) < len(places):
        raise ArgumentError("two places have the same name")
    # files that were written before any module could be recorded have neither of these
    labels = {str(name): _read_labels(x) for name, x in data.get("token_labels", {}).items()}
    unrecorded = tuple(
        UnrecordedCall(_check_name(place), str(why), _check_integer(n))
        for place, why, n in data.get("unrecorded", [])
    )
    recording = Recording(names, ids, texts[0], metadata, source_ids, texts[1], labels, unrecorded)
    _check_labels(recording)
    return recording


def _read_labels(data: Any) -> PlaceLabels:
    """Build the texts of the rows and columns of a place."""
    rows, columns = data
    return PlaceLabels(tuple(map(str, rows)), tuple(map(str, columns)))


def _check_labels(recording: Recording) -> None:
    """Check that the labels belong to places, one for each row and column."""
    for name, labels in recording.token_labels.items():
        if name not in recording.places:
            raise ArgumentError(f"there are labels of {short_repr(name)}, which is no place")
        place = recording.places[name]
        for texts, length in ((labels.rows, place.T), (labels.columns, place.N)):
            if texts and len(texts) != length:
                raise ArgumentError(
                    f"{name} has {plural(len(texts), 'label')} for {plural(length, 'token')}"
                )


def _read_place(data: dict[str, Any], tensors: dict[str, Tensor]) -> Place:
    """Build a place from JSON data and tensors, and check it."""
    pools = tuple(
        KeyValuePool(
            tensors[p["k"]],
            _optional(p["v"], tensors),
            tensors[p["columns"]],
            tuple(map(_check_integer, p["groups"])),
            _check_integer(p["G"]),
            _check_name(p["key_kind"]),
        )
        for p in data["pools"]
    )
    num_keys = sum(len(pool.columns) for pool in pools if pool.columns.ndim)
    steps = tuple(_read_step(x, tensors, num_keys) for x in data["steps"])
    H, *heads, N = map(_check_integer, (data["H"], *data["heads"], data["N"]))
    place = Place(_check_name(data["name"]), steps, pools, H, tuple(heads), N)
    check_place(place)
    return place


def _read_step(data: dict[str, Any], tensors: dict[str, Tensor], num_keys: int) -> RecordedStep:
    """Build a step of a place that stores `num_keys` keys."""
    # format 1 has none of these, and files of calls without rules had no "score"
    data = {"scores": None, "pattern": None, "score": None, **data}
    columns = data["columns"]
    if isinstance(columns, list):
        columns = as_tensor(_read_span(columns, num_keys))[0]
    else:
        columns = tensors[columns]
    integers: dict[str, Any] = {name: _check_integer(data[name]) for name in _INTEGERS}
    return RecordedStep(
        q=tensors[data["q"]],
        lse=tensors[data["lse"]],
        columns=columns,
        q_positions=_read_positions(data["q_positions"], tensors),
        k_positions=_read_positions(data["k_positions"], tensors),
        mask=mask_from(data["mask"], tensors),
        bias=bias_from(data["bias"], tensors),
        scale=float(data["scale"]),
        softcap=None if data["softcap"] is None else float(data["softcap"]),
        kernel=_check_name(data["kernel"]),
        dropout=float(data["dropout"]),
        score=score_from(data["score"], tensors),
        **{name: _optional(data[name], tensors) for name in _OPTIONAL},
        **integers,
    )


def _optional(name: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a tensor by its name, or None for None."""
    return None if name is None else tensors[name]


def _read_positions(data: Any, tensors: dict[str, Tensor]) -> Positions:
    """Build positions: a span from two integers, or a tensor from its name."""
    positions = _read_span(data) if isinstance(data, list) else tensors[data]
    if slot_count(positions) > MAX_TOKENS:
        raise ArgumentError(
            f"there are positions of {plural(slot_count(positions), 'token')}; at most "
            f"{MAX_TOKENS} "
            "are read"
        )
    return positions


def _check_name(x: object) -> str:
    """Check that a value is a short, printable name, since messages and pages show it."""
    if not isinstance(x, str) or len(x) > 200 or not x.isprintable():
        raise ArgumentError(
            f"{short_repr(x)} is not a name; it must be printable text of at most 200 characters"
        )
    return x


def _check_integer(x: object) -> int:
    """Check that a value is an integer of a plausible size."""
    if type(x) is not int:
        raise ArgumentError(f"{short_repr(x)} is not an integer, where one is required")
    if abs(x) > _MAX_INTEGER:
        raise ArgumentError(f"{x} is too large; integers of a recording are at most {_MAX_INTEGER}")
    return x


def _read_span(data: list[int], most: int = MAX_TOKENS) -> Span:
    """Build a span from its start and length, if it is not too long."""
    start, length = data
    if type(length) is int and length > most:
        raise ArgumentError(
            f"there is a span of {plural(length, 'position')}; at most {most} are read"
        )
    return Span(_check_integer(start), _check_integer(length))


def check_place(place: Place) -> None:
    """Check that recording could have produced every shape, index and number."""
    H, heads = place.H, place.heads
    if H < 1 or place.N < 0:
        raise ArgumentError(
            f"{place.name} has {plural(H, 'head')} and {plural(place.N, 'column')}; it needs at "
            "least 1 head"
        )
    _check_indices(f"heads of {place.name}", heads, H)
    if not place.steps or not place.pools or not heads:
        raise ArgumentError(f"{place.name} has no steps, pools or heads")
    B = place.steps[0].q.shape[0]
    for pool in place.pools:
        _check_pool(place, pool, B)
    if sum(len(pool.columns) for pool in place.pools) < place.N:
        raise ArgumentError(f"{place.name} has {plural(place.N, 'column')}, but fewer keys")
    for number, step in enumerate(place.steps):
        where = f"step {number} of {place.name}"
        if not 0 <= step.pool < len(place.pools):
            raise ArgumentError(f"{where} refers to pool {step.pool}; there are {len(place.pools)}")
        _check_step(where, place, step, place.pools[step.pool], B)


def _check_pool(place: Place, pool: KeyValuePool, B: int) -> None:
    """Check one pool of a place."""
    G = pool.G
    if G < 1 or place.H % G:
        raise ArgumentError(
            f"{place.name} has {plural(place.H, 'head')}, which is not a multiple of "
            f"{plural(G, 'key/value head')}"
        )
    _check_indices(f"groups of {place.name}", pool.groups, G)
    if {head // (place.H // G) for head in place.heads} != set(pool.groups):
        raise ArgumentError(
            f"the key/value heads of {place.name} are not those that its query heads read"
        )
    n = len(pool.columns) if pool.columns.ndim == 1 else -1
    for name, x in (("k", pool.k), ("v", pool.v)):
        if x is not None:
            _check_floats(f"{name} of {place.name}", x, (B, len(pool.groups), n, None))
    _check_range(f"columns of {place.name}", pool.columns, n, place.N)


def _check_step(where: str, place: Place, step: RecordedStep, pool: KeyValuePool, B: int) -> None:
    """Check one step of a place."""
    h, t, s = len(place.heads), step.q.shape[2] if step.q.ndim == 4 else -1, len(step.columns)
    E = None if pool.v is None else pool.v.shape[3]
    shapes: dict[str, tuple[Tensor | None, tuple[int | None, ...]]] = {
        "q": (step.q, (B, h, t, pool.k.shape[3])),
        "lse": (step.lse, (B, h, t)),
        "out": (step.out, (B, h, t, E)),
        "scores": (step.scores, (B, h, t, s)),
        "pattern": (step.pattern, (B, h, t, s)),
        "sink": (step.sink, (h,)),
    }
    for name, (x, shape) in shapes.items():
        if x is not None:
            _check_floats(f"{name} of {where}", x, shape)
    _check_range(f"columns of {where}", step.columns, s, place.N)
    if len(step.columns.unique()) < s:
        raise ArgumentError(f"columns of {where} contain a column twice")
    _check_range(
        f"keys of {where}",
        step.columns if step.pool_index is None else step.pool_index,
        s,
        len(pool.columns),
    )
    for name, n in (("first", step.first), ("token", step.token)):
        if n < 0:
            raise ArgumentError(f"{name} of {where} is {n}; it must be 0 or more")
    num_queries = slot_count(step.q_positions)
    if num_queries < step.first + t or slot_count(step.k_positions) != s:
        raise ArgumentError(
            f"{where} has {plural(t, 'query')} after {step.first} others and {plural(s, 'key')}, "
            "but "
            f"positions of {num_queries} and {slot_count(step.k_positions)}"
        )
    for positions in (step.q_positions, step.k_positions):
        if not isinstance(positions, Span):
            index = as_tensor(positions)
            if (
                index.ndim != 2
                or index.shape[0] not in (1, B)
                or index.dtype not in (torch.int32, torch.int64)
            ):
                raise ArgumentError(
                    f"positions of {where} are {index.dtype} {tuple(index.shape)}; they must be "
                    f"int32 or int64 with 2 dims, the first of size 1 or {B}"
                )
    capped = step.softcap is None or (math.isfinite(step.softcap) and step.softcap > 0)
    if not (math.isfinite(step.scale) and capped and 0 <= step.dropout < 1):
        raise ArgumentError(
            f"scale, softcap or dropout of {where} is out of range: they are {step.scale}, "
            f"{step.softcap} and {step.dropout}; scale must be finite, softcap above 0 and dropout "
            "from 0 to below 1"
        )
    _check_score(where, place, step)
    step.mask.require(B, place.H, num_queries, s)
    if step.bias is not None:
        step.bias.require(B, place.H, num_queries, s)


def _check_score(where: str, place: Place, step: RecordedStep) -> None:
    """Check the score rule of a step."""
    if step.score is None:
        return
    if step.scores is None or step.pattern is None:
        raise ArgumentError(f"{where} has the score rule {step.score} without its weights")
    step.score.require(place.H, step.q.shape[3], step.q_positions, step.q.device)


def _check_indices(name: str, indices: tuple[int, ...], n: int) -> None:
    """Check that indices are increasing and lie between 0 and n - 1."""
    inside = all(0 <= x < n for x in indices)
    if not inside or list(indices) != sorted(set(indices)):
        raise ArgumentError(f"{name} are {indices}; they must be increasing and from 0 to {n - 1}")


def _check_range(name: str, indices: Tensor, length: int, n: int) -> None:
    """Check the dtype, the length and the range of a tensor of indices."""
    if indices.dtype != torch.int64 or indices.shape != (length,):
        raise ArgumentError(
            f"{name} are {indices.dtype} {tuple(indices.shape)}; they must be int64 ({length},)"
        )
    if length and not 0 <= int(indices.min()) <= int(indices.max()) < n:
        raise ArgumentError(
            f"{name} are from {int(indices.min())} to {int(indices.max())}; they must be from 0 "
            f"to {n - 1}"
        )


def _check_floats(name: str, x: Tensor, shape: tuple[int | None, ...]) -> None:
    """Check that a tensor is floating-point and has this shape; None allows any size."""
    fits = x.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, x.shape, strict=True))
    if not fits or not x.is_floating_point() or x.element_size() == 1:
        raise ArgumentError(f"{name} is {x.dtype} {tuple(x.shape)}; it must be floats {shape}")
