"""Training checkpoints: the state of a run, written atomically and verified by checksums."""

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
from regard.files.atomic_write import (
    WRITING_PREFIX,
    sync_to_disk,
    temporary_folder,
)
from regard.files.reading import checked_path, open_regular, read_json
from regard.files.safetensors_files import load_tensors
from regard.train.batches import BatchSource
from regard.train.settings import Settings
from regard.untrusted_text import short_repr

MANIFEST = "manifest.json"
MAX_JSON_BYTES = 64 << 20
"""The size limit in bytes of manifest.json, and of state.json with its random generators."""
_FOLDER_NAME = re.compile(r"step-(\d{8,})")
EXTRA_BYTES = 1 << 20
"""Bytes that a run needs in addition to its tensors: other files and file system metadata."""

log_warning = logging.getLogger("regard.train").warning


@dataclass(eq=False)
class TrainingCheckpoint:
    """The content of one checkpoint.

    Args:
        state: JSON values: settings, random state, data order, and the state of the run.

    >>> TrainingCheckpoint(step=3, tensors={}, state={"loss": 1.5}).step
    3
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any] = field(default_factory=dict)


def save(folder: str | Path, checkpoint: TrainingCheckpoint, *, keep: int = 2) -> Path:
    """Write a checkpoint to `folder/step-XXXXXXXX`, verify it, and delete older ones.

    It is renamed when it is complete.
    """
    if keep < 1:
        raise ArgumentError(f"keep is {keep}; it must be at least 1")
    parent = Path(folder)
    target = parent / f"step-{checkpoint.step:08d}"
    try:
        check_free_space(parent, _bytes_needed(checkpoint))
        with temporary_folder(target) as temporary:
            _write(temporary, checkpoint)
            _replace(temporary, target)
    except (OSError, SafetensorError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"{target}: cannot write the checkpoint: {error}; older checkpoints are intact: free "
            "some space or choose another folder"
        ) from error
    problem = find_damage(target)
    if problem:
        raise FileError(
            f"{target}: the checkpoint on disk differs from what was written: {problem}; check the "
            "disk"
        )
    checkpoints = [path for path in _checkpoint_folders(parent) if path.name <= target.name]
    for old in checkpoints[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def check_free_space(folder: str | Path, needed: int) -> None:
    """Check that `needed` bytes are free, and create the folder.

    >>> import tempfile
    >>> check_free_space(tempfile.gettempdir(), needed=0)
    """
    existing = Path(folder)
    try:
        while not existing.exists():
            existing = existing.parent
        free = free_bytes(existing)
        if needed > free:  # rounded up and down, so that the message never has two equal numbers
            raise FileError(
                f"the checkpoint needs {-(-needed // 2**20)} MiB, and {free // 2**20} MiB are free "
                f"in {folder}; free some space or choose another folder (older checkpoints are "
                "intact)"
            )
        Path(folder).mkdir(parents=True, exist_ok=True)
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"{folder}: cannot create the folder: {error.strerror or error}; choose another"
        ) from error


def load(path: str | Path) -> TrainingCheckpoint:
    """Read one checkpoint and verify every file against the manifest."""
    path = Path(path)
    problem = find_damage(path)
    if problem:
        raise FileError(f"{path}: {problem}; use an older checkpoint")
    return _read(path)


def _read(path: Path) -> TrainingCheckpoint:
    """Return the checkpoint in a folder whose checksums were verified."""
    state = read_json(checked_path(path, "state.json"), limit=MAX_JSON_BYTES)
    tensors = {
        file.stem: dict(load_tensors(checked_path(path, file.name))[0])
        for file in sorted(path.glob("*.safetensors"))
    }
    duplicates, step, run_state = state.get("same"), state.get("step"), state.get("state")
    if type(step) is not int or not 0 <= step < 1 << 53 or not isinstance(run_state, dict):
        raise FileError(
            f"{path}: state.json has the step {short_repr(step)} and the state "
            f"{short_repr(run_state)}; the step must be an integer from 0, and the state an "
            "object: use an older checkpoint"
        )
    try:
        for name, stored_key in duplicates.items():
            file, key = name.split(":", 1)
            tensors[file][key] = tensors[file][stored_key]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise FileError(
            f"{path}: state.json has {short_repr(duplicates)} as the names of shared tensors; "
            "use an older checkpoint"
        ) from None
    return TrainingCheckpoint(step, tensors, run_state)


def latest(folder: str | Path) -> TrainingCheckpoint | None:
    """Return the newest valid checkpoint of a folder, or None; damaged ones are logged."""
    for path in _checkpoint_folders(Path(folder)):
        problem = find_damage(path)
        if not problem:
            try:
                return _read(path)
            except FileError as error:
                problem = str(error)
        log_warning("%s is ignored: %s", path, problem)
    return None


def free_bytes(folder: Path) -> int:
    """Return the bytes that can still be written to the file system of a folder."""
    return shutil.disk_usage(folder).free


def _bytes_needed(checkpoint: TrainingCheckpoint) -> int:
    """Return the size of a checkpoint on disk, rounded up."""
    return EXTRA_BYTES + sum(
        t.nbytes for named in checkpoint.tensors.values() for t in named.values()
    )


def _write(folder: Path, checkpoint: TrainingCheckpoint) -> None:
    """Write the files of a checkpoint and flush them to disk."""
    files: dict[str, dict[str, object]] = {}
    duplicates: dict[str, str] = {}
    for file, named in checkpoint.tensors.items():
        stored, file_duplicates = _deduplicate(named)
        duplicates |= {
            f"{file}:{name}": stored_name for name, stored_name in file_duplicates.items()
        }
        path = folder / f"{file}.safetensors"
        save_file(stored, path)
        files[path.name] = size_and_checksum(path) | {
            "tensors": {name: tensor_crc32(t) for name, t in stored.items()}
        }
    state = folder / "state.json"
    content = {"step": checkpoint.step, "same": duplicates, "state": checkpoint.state}
    state.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
    files[state.name] = size_and_checksum(state)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": 1, "files": files}, indent=1), encoding="utf-8")
    for path in folder.iterdir():
        sync_to_disk(path)
    sync_to_disk(folder)


def _replace(temporary: Path, target: Path) -> None:
    """Rename the complete folder `temporary` to `target`, and delete an older `target`."""
    # an older target is damaged, or belongs to a run that was resumed from an earlier step
    if target.exists():
        aside = target.with_name(f"{WRITING_PREFIX}old-{target.name}-{os.getpid()}")
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
        temporary.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        temporary.rename(target)
    sync_to_disk(target.parent)


def _deduplicate(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to store, and the names that share the memory of one of them."""
    stored: dict[str, Tensor] = {}
    duplicates: dict[str, str] = {}
    first_names: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in named.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first_names:
            duplicates[name] = first_names[key]
        else:
            first_names[key] = name
            copy = tensor.detach().cpu().contiguous()
            memory = copy.untyped_storage().data_ptr()
            # safetensors does not store two tensors that share memory, such as views of one buffer
            stored[name] = copy.clone() if memory and memory in storages else copy
            storages.add(memory)
    return stored, duplicates


def _checkpoint_folders(folder: Path) -> list[Path]:
    """Return the folders with the names of checkpoints, the newest first."""
    numbered = [
        (int(m[1]), p) for p in folder.glob("step-*") if (m := _FOLDER_NAME.fullmatch(p.name))
    ]
    return [path for _, path in sorted(numbered, reverse=True)]


_CHANGEABLE_SETTINGS = ("save_every",)
"""Settings that may differ when a run resumes, because they do not affect the weights."""


def pack(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: BatchSource,
    settings: Settings,
    run: dict[str, Any],
) -> TrainingCheckpoint:
    """Return a checkpoint of everything that the next step depends on."""
    tensors, groups = _pack_optimizer(optimizer)
    state = {
        "run": run,
        "settings": asdict(settings),
        "batches": batches.state_dict(),
        "optimizer": groups,
        "random": {"cpu": _encode_tensor(torch.get_rng_state())},
    }
    if torch.cuda.is_available():
        state["random"]["cuda"] = [_encode_tensor(s) for s in torch.cuda.get_rng_state_all()]
    return TrainingCheckpoint(
        run["step"], {"model": model.state_dict(), "optimizer": tensors}, state
    )


def unpack(
    checkpoint: TrainingCheckpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: BatchSource,
    settings: Settings,
) -> dict[str, Any]:
    """Restore the parts of a run from a checkpoint, after checking that all of them match."""
    state = checkpoint.state
    for name, value in asdict(settings).items():
        saved = state["settings"].get(name)
        if value != saved and name not in _CHANGEABLE_SETTINGS:
            raise ArgumentError(
                f"{name} is {value}, and the run to resume has {short_repr(saved)}; "
                "repeat its settings or start a new run"
            )
    weights = checkpoint.tensors["model"]
    _check_weights(model, weights)
    batches.load_state_dict(state["batches"])
    model.load_state_dict(checkpoint.tensors["model"])
    _unpack_optimizer(optimizer, checkpoint.tensors["optimizer"], state["optimizer"])
    torch.set_rng_state(_decode_tensor(state["random"]["cpu"]))
    if torch.cuda.is_available() and "cuda" in state["random"]:
        torch.cuda.set_rng_state_all([_decode_tensor(text) for text in state["random"]["cuda"]])
    return dict(state["run"])


def check_metadata(checkpoint: TrainingCheckpoint, metadata: Mapping[str, object] | None) -> None:
    """Check that the metadata of a model equals a checkpoint's, or that this has none.

    Checkpoints of earlier versions store the metadata under the key "about".
    """
    state = checkpoint.state
    saved, current = state.get("metadata") or state.get("about") or {}, metadata or {}
    if not isinstance(saved, dict):
        raise TypeError(f"metadata is {short_repr(saved)}")
    for name in sorted({*saved, *current}) if saved else ():
        if saved.get(name) != current.get(name):
            raise ArgumentError(
                f"{name} is {current.get(name)!r}, and the model to resume has "
                f"{short_repr(saved.get(name))}; repeat its options or start a new run"
            )


def _check_weights(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Raise an error if a weight's name or shape differs between model and checkpoint."""
    model_shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    for name in sorted(model_shapes.keys() | saved.keys()):
        saved_shape = tuple(saved[name].shape) if name in saved else None
        if model_shapes.get(name) != saved_shape:
            raise ArgumentError(
                f"weight {short_repr(name)} is {model_shapes.get(name)} in the model and "
                f"{saved_shape} in the checkpoint; resume with the model of the first run"
            )


def _pack_optimizer(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return the tensors of an optimizer's state, and its other values as JSON values."""
    content = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, object] = {}
    for index, entries in content["state"].items():
        for key, value in entries.items():
            (tensors if isinstance(value, Tensor) else values)[f"{index}.{key}"] = value
    return tensors, {"groups": content["param_groups"], "values": values}


def _unpack_optimizer(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], saved: dict[str, Any]
) -> None:
    """Load the state of `_pack_optimizer` into an optimizer."""
    state: dict[int, dict[str, object]] = {}
    for name, value in [*tensors.items(), *saved["values"].items()]:
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    current_groups = optimizer.state_dict()["param_groups"]
    # JSON has no tuples: restore them where the optimizer has them
    groups = [
        {
            key: tuple(value) if isinstance(current.get(key), tuple) else value
            for key, value in group.items()
        }
        for current, group in zip(current_groups, saved["groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _encode_tensor(tensor: Tensor) -> str:
    """Return the bytes of a tensor in base64."""
    return base64.b64encode(tensor.numpy().tobytes()).decode("ascii")


def _decode_tensor(text: str) -> Tensor:
    """Return the uint8 tensor of a text in base64."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def find_damage(path: Path) -> str:
    """Return what is wrong with a checkpoint folder, or "" if nothing is."""
    try:
        manifest = read_json(checked_path(path, MANIFEST), limit=MAX_JSON_BYTES)
        if manifest.get("format") != 1:
            return (
                f"{MANIFEST} has format {short_repr(manifest.get('format'))}; this version reads 1"
            )
        files = manifest.get("files")
        if not isinstance(files, dict):
            return f"{MANIFEST} has {short_repr(files)} as files; it must be an object"
        for name, expected in files.items():
            problem = _file_damage(path, name, expected)
            if problem:
                return problem
    except FileError as error:
        return f"cannot be read: {error}"
    return "" if "state.json" in files else "state.json is not in the manifest"


def _file_damage(folder: Path, name: str, expected: object) -> str:
    """Return how a file differs from its entry in the manifest, or "" if it does not."""
    if Path(name).name != name:
        return f"{MANIFEST} names {short_repr(name)}, which is outside the folder"
    if not isinstance(expected, dict):
        return f"{MANIFEST} has {short_repr(expected)} for {short_repr(name)}; it must be an object"
    path = checked_path(folder, name)
    size = path.stat().st_size
    if size != expected.get("bytes"):
        return f"{name} has {size} bytes, not {short_repr(expected.get('bytes'))}"
    if _sha256(path) != expected.get("sha256"):
        return f"{name} does not match its checksum{_changed_tensors(path, expected)}"
    return ""


def _changed_tensors(path: Path, expected: Mapping[str, object]) -> str:
    """Return the names of the tensors whose own checksums differ, for a message."""
    checksums = expected.get("tensors")
    if not isinstance(checksums, dict):
        return ""
    try:
        named, _ = load_tensors(path)
    except FileError:
        return " (its header)"
    changed = [
        short_repr(name)
        for name, tensor in named.items()
        if tensor_crc32(tensor) != checksums.get(name)
    ]
    return f" (tensor {', '.join(changed[:3])})" if changed else ""


def size_and_checksum(path: Path) -> dict[str, object]:
    """Return the size and the sha256 of a file, as the manifest stores them."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with open_regular(path) as (file, _):
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_crc32(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes, which shows which tensor of a file changed."""
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
