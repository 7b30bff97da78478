"""Checkpoint folders: config.json, model.safetensors and tokenizer.json, with Hugging Face's names."""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.errors import ArgumentError, FileError

FAMILIES = ("llama",)


def read_config(folder: Path) -> Any:
    """The frozen config of the family that config.json names."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise FileError(
            f"{path} is missing; a model folder holds config.json and model.safetensors"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise FileError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(raw, dict):
        raise FileError(f"{path} holds {type(raw).__name__}; it must be a JSON object")
    return parse_config(raw, path)


def parse_config(raw: Mapping[str, Any], path: Path) -> Any:
    """Check every key: it shapes the model, is known not to, or has the one value that is understood."""
    family = family_of(raw.get("model_type"), path)
    raw = family.plain(raw)
    known = {f.name: f for f in fields(family.Config)}
    for key, value in raw.items():
        if key in family.FIXED and value != family.FIXED[key]:
            raise FileError(
                f"{path}: {key} is {value!r}; only {family.FIXED[key]!r} is supported for {raw['model_type']}"
            )
        if key not in known and key not in family.FIXED and key not in family.IGNORED:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise FileError(f"{path}: unknown key {key!r}{hint}")
    missing = [
        f.name for f in known.values() if f.default is f.default_factory and f.name not in raw
    ]
    if missing:
        raise FileError(f"{path} lacks {', '.join(missing)}")
    for name, f in known.items():
        if name in raw and type(raw[name]) not in _TYPES[str(f.type)]:
            raise FileError(f"{path}: {name} is {raw[name]!r}; it must be {f.type}")
    try:
        return family.Config(**{name: raw[name] for name in known if name in raw})
    except ArgumentError as e:
        raise FileError(f"{path}: {e}") from e


_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}


def family_of(name: object, path: Path) -> Any:
    """The module of a family."""
    if name not in FAMILIES:
        raise FileError(
            f"{path}: model_type {name!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return importlib.import_module(f"regard.models.families.{name}")


def read_weights(decoder: nn.Module, family: Any, path: Path) -> None:
    """Copy the tensors of a safetensors file into a model: every one is used, every parameter is filled."""
    try:
        stored = load_file(path)
    except FileNotFoundError:
        raise FileError(f"{path} is missing") from None
    except (OSError, SafetensorError) as e:
        raise FileError(f"{path} is not a whole safetensors file ({e}){_instead(path)}") from e
    wanted = names(decoder, family)
    missing, unexpected = sorted(wanted.keys() - stored), sorted(stored.keys() - wanted)
    if missing or unexpected:
        raise FileError(
            f"{path}: {len(missing)} missing {missing[:10]}, {len(unexpected)} unexpected {unexpected[:10]}"
        )
    for name, parameter in wanted.items():
        if stored[name].shape != parameter.shape:
            raise FileError(
                f"{path}: {name} is {tuple(stored[name].shape)}; the config says {tuple(parameter.shape)}"
            )
        parameter.data.copy_(stored[name])


_BEGINNINGS = {
    b"version https://git-lfs": ": it is a Git LFS pointer; fetch the file itself with `git lfs pull`",
    b"<": ": it is a web page, not the file; download it again",
    b"PK": ": it is a zip or a PyTorch pickle, which is never opened; convert it to safetensors elsewhere",
    b"\x80": ": it is a pickle, which is never opened; convert it to safetensors elsewhere",
}


def _instead(path: Path) -> str:
    """What a file that is no safetensors file seems to be, from its first bytes; else how long it should be."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        head = file.read(100_000_000)
    kind = next(
        (words for start, words in _BEGINNINGS.items() if head.lstrip().startswith(start)), ""
    )
    if kind:
        return kind
    has, header = path.stat().st_size, 8 + int.from_bytes(head[:8], "little")
    try:
        tensors = json.loads(head[8:header])
        wants = header + max(
            x["data_offsets"][1] for name, x in tensors.items() if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return f": {has} bytes; is it a partial download?"
    return f": it has {has} of {wants} bytes; is it a partial download?"


def names(decoder: nn.Module, family: Any) -> dict[str, Tensor]:
    """Checkpoint name -> parameter, a shared parameter under its first name."""
    table = {ours: theirs for theirs, ours in family.NAMES.items()}
    found: dict[str, Tensor] = {}
    for ours, parameter in decoder.named_parameters():
        parts = ours.split(".")
        layer = next((p for p in parts if p.isdigit()), "")
        pattern = ".".join("{}" if p.isdigit() else p for p in parts)
        found[table[pattern].format(layer)] = parameter
    return found


def write(
    decoder: nn.Module, config: Any, folder: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write config.json and model.safetensors into a folder that exists."""
    family = importlib.import_module(type(config).__module__)
    kind = family.__name__.rpartition(".")[2]
    tensors = {n: p.detach().to(dtype).contiguous() for n, p in names(decoder, family).items()}
    dtype_name = str(dtype).removeprefix("torch.")
    raw = {"model_type": kind, **asdict(config), "torch_dtype": dtype_name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", "utf-8")
