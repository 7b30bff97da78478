"""Training checkpoints: a run's state, written whole, verified by sums when it is read."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.errors import ArgumentError, FileError
from regard.files.atomic_write import sync_to_disk, temporary_folder
from regard.files.folder_lock import WRITING_PREFIX
from regard.files.folder_lock import delete_abandoned as sweep_unlocked
from regard.files.regular_files import checked_path, open_regular
from regard.files.safetensors_reader import load_tensors as read_tensors
from regard.files.strict_json import read_json
from regard.nn.renamed_weights import current_weight_name
from regard.train.batches import Feed
from regard.train.settings import Settings
from regard.untrusted_text import short_repr

MANIFEST = "manifest.json"
LONGEST = 64 << 20
"""Bytes of the manifest and of the state, at most: a state holds the random state and the data's
order.
"""
_NAME = re.compile(r"step-(\d{8,})")
MARGIN = 1 << 20
"""Bytes that a run needs beside its tensors: for its other files and the file system's own
books.
"""

note = logging.getLogger("regard.train").warning


@dataclass
class Checkpoint:
    """What one checkpoint holds: named tensors per file, and a state of JSON values.

    >>> Checkpoint(step=3, tensors={}, state={"loss": 1.5}).step
    3
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any] = field(default_factory=dict)


def save(folder: str | Path, checkpoint: Checkpoint, *, keep: int = 2) -> Path:
    """Write `folder/step-XXXXXXXX` whole, verify it, delete all but the newest `keep`.

    Raises:
        ArgumentError: `keep` is not positive.
        FileError: not enough free space (told before writing), or the disk refuses. Older
            checkpoints are untouched.
    """
    if keep < 1:
        raise ArgumentError(f"keep is {keep}; at least 1 checkpoint has to stay")
    parent = Path(folder)
    target = parent / f"step-{checkpoint.step:08d}"
    try:
        prepare(parent, _size(checkpoint))
        with temporary_folder(target) as temporary:
            _write(temporary, checkpoint)
            _replace(temporary, target)
    except (OSError, SafetensorError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"{target}: cannot write the checkpoint: {error}; the ones before it are intact"
        ) from error
    wrong = damage(target)
    if wrong:
        raise FileError(
            f"{target}: what was written does not read back: {wrong}; is the disk failing?"
        )
    older = [path for path in _complete(parent) if path.name <= target.name]
    for old in older[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def prepare(folder: str | Path, needed: int) -> None:
    """See that `needed` bytes fit, and make the folder: to be called before hours of work, too.

    Raises:
        FileError: there is too little space, of which it says how much; or the folder cannot be
            made.

    >>> import tempfile
    >>> prepare(tempfile.gettempdir(), needed=0)
    """
    there = Path(folder)
    try:
        while not there.exists():
            there = there.parent
        free = free_bytes(there)
        if needed > free:  # rounded away from each other: they never look alike
            raise FileError(
                f"the checkpoint needs {-(-needed // 2**20)} MiB, {free // 2**20} MiB free at "
                f"{folder}; free some space or choose another folder (older checkpoints are intact)"
            )
        Path(folder).mkdir(parents=True, exist_ok=True)
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"{folder}: cannot make the folder: {error.strerror or error}; choose another"
        ) from error


def load(path: str | Path) -> Checkpoint:
    """Read one checkpoint folder, every file compared with the manifest.

    Raises:
        FileError: missing, incomplete or damaged; the message names the file, and the tensor if one
            bit of it changed.
    """
    path = Path(path)
    wrong = damage(path)
    if wrong:
        raise FileError(f"{path}: {wrong}; use an older checkpoint")
    return _read(path)


def _read(path: Path) -> Checkpoint:
    """The parts of a folder whose sums are right, which is no proof of what they say.

    Raises:
        FileError: they do not make a checkpoint.
    """
    state = read_json(checked_path(path, "state.json"), limit=LONGEST)
    tensors = {
        file.stem: dict(read_tensors(checked_path(path, file.name))[0])
        for file in sorted(path.glob("*.safetensors"))
    }
    same, step, held = state.get("same"), state.get("step"), state.get("state")
    if type(step) is not int or not 0 <= step < 1 << 53 or not isinstance(held, dict):
        raise FileError(
            f"{path}: state.json has the step {short_repr(step)} and the state {short_repr(held)}"
        )
    try:
        for name, same_as in same.items():
            file, key = name.split(":", 1)
            tensors[file][key] = tensors[file][same_as]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise FileError(
            f"{path}: state.json has {short_repr(same)} as what is stored once for two names; "
            "use an older checkpoint"
        ) from None
    return Checkpoint(step, tensors, held)


def latest(folder: str | Path) -> Checkpoint | None:
    """The newest whole checkpoint, or None; others are passed over with a logged note.

    >>> latest("no/such/folder") is None
    True
    """
    for path in _complete(Path(folder)):
        wrong = damage(path)
        if not wrong:
            try:
                return _read(path)
            except FileError as error:
                wrong = str(error)
        note("%s is ignored: %s", path, wrong)
    return None


def sweep(folder: str | Path) -> int:
    """Delete what killed writers left behind, and nothing that a living one is writing; gives how
    many folders.

    >>> sweep("no/such/folder")
    0
    """
    return sweep_unlocked(Path(folder))


def free_bytes(folder: Path) -> int:
    """Bytes that can still be written where `folder` is."""
    return shutil.disk_usage(folder).free


def _size(checkpoint: Checkpoint) -> int:
    return MARGIN + sum(t.nbytes for named in checkpoint.tensors.values() for t in named.values())


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    files: dict[str, dict[str, Any]] = {}
    same: dict[str, str] = {}
    for file, named in checkpoint.tensors.items():
        stored, repeated = _without_repeats(named)
        same |= {f"{file}:{name}": first for name, first in repeated.items()}
        path = folder / f"{file}.safetensors"
        save_file(stored, path)
        files[path.name] = describe(path) | {
            "tensors": {name: crc(t) for name, t in stored.items()}
        }
    state = folder / "state.json"
    content = {"step": checkpoint.step, "same": same, "state": checkpoint.state}
    state.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
    files[state.name] = describe(state)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": 1, "files": files}, indent=1), encoding="utf-8")
    for path in folder.iterdir():
        sync_to_disk(path)
    sync_to_disk(folder)


def _replace(temporary: Path, target: Path) -> None:
    if target.exists():  # damaged, or written by a run that was resumed from before it
        aside = target.with_name(f"{WRITING_PREFIX}old-{target.name}-{os.getpid()}")
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
        temporary.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        temporary.rename(target)
    sync_to_disk(target.parent)


def _without_repeats(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors to store, and names that are the same memory as one of them (tied weights)."""
    stored: dict[str, Tensor] = {}
    repeated: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in named.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            repeated[name] = first[key]
        else:
            first[key] = name
            own = tensor.detach().cpu().contiguous()
            memory = own.untyped_storage().data_ptr()
            # another view of memory that is stored already: the format wants a copy
            stored[name] = own.clone() if memory and memory in storages else own
            storages.add(memory)
    return stored, repeated


def _complete(folder: Path) -> list[Path]:
    """Checkpoint folders by name, the newest first."""
    found = [(int(m[1]), p) for p in folder.glob("step-*") if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found, reverse=True)]


_FREE = ("save_every",)  # settings that change no number of a run


def pack(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    batches: Feed,
    settings: Settings,
    run: dict[str, Any],
) -> Checkpoint:
    """Everything that the next step depends on. `run` is JSON-able, with its "step"."""
    tensors, groups = _pack_optimiser(optimiser)
    state = {
        "run": run,
        "settings": asdict(settings),
        "batches": batches.state_dict(),
        "optimiser": groups,
        "random": {"cpu": _text(torch.get_rng_state())},
    }
    if torch.cuda.is_available():
        state["random"]["cuda"] = [_text(s) for s in torch.cuda.get_rng_state_all()]
    return Checkpoint(run["step"], {"model": model.state_dict(), "optimizer": tensors}, state)


def unpack(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    batches: Feed,
    settings: Settings,
) -> dict[str, Any]:
    """Put a checkpoint's state into the parts of a run, all checks first; gives back `run`.

    Raises:
        ArgumentError: the settings, the weights' names or shapes, or the data differ from the saved
            run's; names which.
    """
    state = checkpoint.state
    for name, value in asdict(settings).items():
        saved = state["settings"].get(name)
        if value != saved and name not in _FREE:
            raise ArgumentError(
                f"{name} is {value}, the run to resume has {short_repr(saved)}; "
                "repeat its settings or start a new run"
            )
    weights = {current_weight_name(name): t for name, t in checkpoint.tensors["model"].items()}
    _check_weights(model, weights)
    batches.load_state_dict(state["batches"])
    model.load_state_dict(weights)
    _unpack_optimiser(optimiser, checkpoint.tensors["optimizer"], state["optimiser"])
    torch.set_rng_state(_bytes(state["random"]["cpu"]))
    if torch.cuda.is_available() and "cuda" in state["random"]:
        torch.cuda.set_rng_state_all([_bytes(text) for text in state["random"]["cuda"]])
    return dict(state["run"])


def check_about(checkpoint: Checkpoint, about: Mapping[str, Any] | None) -> None:
    """What is said of the model is what was said of the saved one; a checkpoint that says nothing
    passes.

    Raises:
        ArgumentError: it differs; names the first key, and both values.
    """
    saved, now = checkpoint.state.get("about") or {}, about or {}
    if not isinstance(saved, dict):
        raise TypeError(f"about is {short_repr(saved)}")
    for name in sorted({*saved, *now}) if saved else ():
        if saved.get(name) != now.get(name):
            raise ArgumentError(
                f"{name} is {now.get(name)!r}, the model to resume has "
                f"{short_repr(saved.get(name))}; "
                "repeat its options or start a new run"
            )


def _check_weights(model: nn.Module, saved: dict[str, Tensor]) -> None:
    own = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    for name in sorted(own.keys() | saved.keys()):
        theirs = tuple(saved[name].shape) if name in saved else None
        if own.get(name) != theirs:
            raise ArgumentError(
                f"weight {short_repr(name)} is {own.get(name)} in the model and {theirs} in the "
                "checkpoint; "
                "resume with the first run's model"
            )


def _pack_optimiser(optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    content = optimiser.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for index, entries in content["state"].items():
        for key, value in entries.items():
            (tensors if isinstance(value, Tensor) else values)[f"{index}.{key}"] = value
    return tensors, {"groups": content["param_groups"], "values": values}


def _unpack_optimiser(
    optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], saved: dict[str, Any]
) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *saved["values"].items()]:
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    own = optimiser.state_dict()["param_groups"]
    # JSON has no tuples: keep the kind of each setting as the optimiser has it
    groups = [
        {
            key: tuple(value) if isinstance(mine.get(key), tuple) else value
            for key, value in group.items()
        }
        for mine, group in zip(own, saved["groups"], strict=True)
    ]
    optimiser.load_state_dict({"state": state, "param_groups": groups})


def _text(tensor: Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode("ascii")


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def damage(path: Path) -> str:
    """What is wrong with a checkpoint folder, or "" when it is whole."""
    try:
        manifest = read_json(checked_path(path, MANIFEST), limit=LONGEST)
        if manifest.get("format") != 1:
            return (
                f"{MANIFEST} has format {short_repr(manifest.get('format'))}, this version reads 1"
            )
        files = manifest.get("files")
        if not isinstance(files, dict):
            return f"{MANIFEST} has {short_repr(files)} as files; it must be an object"
        for name, expected in files.items():
            wrong = _differs(path, name, expected)
            if wrong:
                return wrong
    except FileError as error:
        return f"cannot be read: {error}"
    return "" if "state.json" in files else "state.json is not in the manifest"


def _differs(folder: Path, name: str, expected: Any) -> str:
    """How a file is not what the manifest says of it, or ""."""
    if Path(name).name != name:
        return f"{MANIFEST} names {short_repr(name)}, which is outside the folder"
    if not isinstance(expected, dict):
        return f"{MANIFEST} says {short_repr(expected)} of {short_repr(name)}; it must be an object"
    path = checked_path(folder, name)
    size = path.stat().st_size
    if size != expected.get("bytes"):
        return f"{name} has {size} bytes, not {short_repr(expected.get('bytes'))}"
    if _sha256(path) != expected.get("sha256"):
        return f"{name} does not match its checksum{_which(path, expected)}"
    return ""


def _which(path: Path, expected: Mapping[str, Any]) -> str:
    """Names the tensors whose own sums differ."""
    sums = expected.get("tensors")
    if not isinstance(sums, dict):
        return ""
    try:
        named, _ = read_tensors(path)
    except FileError:
        return " (its header)"
    changed = [short_repr(name) for name, tensor in named.items() if crc(tensor) != sums.get(name)]
    return f" (tensor {', '.join(changed[:3])})" if changed else ""


def describe(path: Path) -> dict[str, Any]:
    """Size and sum of a file, as the manifest holds them."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with open_regular(path) as (file, _):
        return hashlib.file_digest(file, "sha256").hexdigest()


def crc(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes: finds which tensor of a damaged file changed."""
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
