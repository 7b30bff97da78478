"""Saving a model as a checkpoint folder: config.json, model.safetensors and tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.errors import FileError
from regard.files.atomic_write import sync_to_disk, temporary_folder
from regard.models.checkpoint.family import bind_names
from regard.models.checkpoint.stored_forms import METHOD, MIXED, record_tensors
from regard.models.families import family, model_type_of
from regard.models.tokenizer import Tokenizer
from regard.nn.weights import stored_modules
from regard.ops.stored_weights import HalfWeight, Int4Weight, Int8Weight, StoredWeight
from regard.untrusted_text import error_text


def save(network: nn.Module, config: Any, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json and model.safetensors into a folder that exists: stored weights as they
    are, half-precision ones in half precision, a shared parameter once, a decoder without a head as
    a base model.
    """
    model_type = model_type_of(config)
    its_family = family(model_type)
    parameters: dict[str, Tensor | StoredWeight] = {
        **dict(network.named_parameters(remove_duplicate=False)),
        **dict(stored_modules(network)),
    }
    tensors: dict[str, Tensor] = {}
    written_ids: set[int] = set()
    forms: set[str] = set()
    bindings = bind_names(network, its_family.names)
    is_base_model = its_family.head is not None and its_family.head not in bindings
    for table_name, binding in bindings.items():
        ids = {id(parameters[name]) for name in binding.parameters}
        if ids & written_ids:
            continue
        written_ids |= ids
        records = {
            name: record
            for name in binding.parameters
            if isinstance(record := parameters[name], (Int8Weight, Int4Weight))
        }
        if records:
            tensors |= _record_tensors(binding.parameters, records)
            forms |= {record.form for record in records.values()}
            continue
        parts = [
            _plain_tensor(parameters[name], its_family.dtype_of(name, dtype))
            for name in binding.parameters
        ]
        stored = table_name.removeprefix(its_family.prefixes[0]) if is_base_model else table_name
        tensors[stored] = binding.rule.pack(parts).contiguous()
    dtype_name = str(dtype).removeprefix("torch.")
    keys = {k: v for k, v in asdict(config).items() if k not in config.unwritten}
    raw = {"model_type": model_type, **keys, "torch_dtype": dtype_name}
    if forms:
        form = forms.pop() if len(forms) == 1 else MIXED
        raw["quantization_config"] = {"quant_method": METHOD, "weights": form}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", "utf-8")


def _plain_tensor(value: Tensor | StoredWeight, dtype: torch.dtype) -> Tensor:
    """Return the tensor of a plain weight in a dtype, or half-precision numbers as they are."""
    if isinstance(value, HalfWeight):
        return value.values
    assert isinstance(value, Tensor)
    return value.detach().to(dtype)


def _record_tensors(
    parameters: Sequence[str], records: Mapping[str, StoredWeight]
) -> dict[str, Tensor]:
    """Return the tensors of the records of one stored tensor."""
    if plain := [name for name in parameters if name not in records]:
        raise FileError(
            f"{plain[0]} has a plain weight and {next(iter(records))} does not, and a checkpoint "
            "stores both as one tensor; store the weights of both in the same form"
        )
    named = [record_tensors(name, record) for name, record in records.items()]
    return {name: x for tensors in named for name, x in tensors.items()}


def write_files(folder: Path, tokenizer: Tokenizer | None, files: Mapping[str, Any]) -> None:
    """Write a tokenizer and further files, of JSON or of tensors, into a folder that exists."""
    if tokenizer is not None:
        tokenizer.save(folder)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if name.endswith(".safetensors"):
            save_file(content, folder / name, metadata={"format": "pt"})
            continue
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def save_model(
    network: nn.Module,
    config: object,
    folder: Path,
    *,
    dtype: torch.dtype,
    tokenizer: Tokenizer | None,
    files: Mapping[str, Any],
) -> Path:
    """Write a network, its config, its tokenizer and further files, of JSON or of tensors, to a new
    folder, completely or not at all.
    """
    with new_folder(folder, partial(check_free, folder, "saving")) as staging:
        save(network, config, staging, dtype)
        write_files(staging, tokenizer, files)
        rename_to(staging, folder)
    return folder


def check_free(folder: Path, writer: str) -> None:
    """Raise if a folder that is to be made has something in its place."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise FileError(f"{folder} exists and is not a folder; give another name")
    if folder.is_dir() and any(folder.iterdir()):
        raise FileError(f"{folder} is not empty; {writer} never overwrites: give a new folder")


@contextmanager
def new_folder(out: Path, check: Callable[[], None]) -> Iterator[Path]:
    """Create a folder next to `out` that `rename_to` makes it, and that goes after an error."""
    check()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(out, alone=True) as staging:
            check()  # another process may have finished it meanwhile
            yield staging
    except (OSError, SafetensorError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"{out}: cannot write the folder: {error_text(error)}; free some space, or "
            "choose another"
        ) from error


def rename_to(folder: Path, out: Path) -> None:
    """Rename a complete folder to `out`, when all of it is on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync_to_disk(path)
    if out.is_dir():
        out.rmdir()
    folder.rename(out)
    sync_to_disk(out.parent)
