"""Writing what a conversion made: whole or not at all, with everything of the source that is not a weight."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from torch import Tensor

from regard.errors import ArgumentError, FileError
from regard.models.checkpoint.config import IGNORED
from regard.models.checkpoint.family import Raw
from regard.models.checkpoint.folder import inside
from regard.models.convert.checkpoint import Checkpoint
from regard.models.save import save

BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "generation_config.json", "chat_template.jinja", "LICENSE", "LICENSE.txt",
)  # fmt: skip
"""Files that go along as they are."""
STAY_BEHIND = frozenset({
    "_commit_hash", "_name_or_path", "architectures", "auto_map", "dtype", "model_type", "name_or_path",
    "quantization_config", "torch_dtype", "transformers_version",
})  # fmt: skip
"""Keys of config.json that speak of the source alone."""
ARCHITECTURES = {"deepseek_v2": "DeepseekV2ForCausalLM", "llama": "LlamaForCausalLM"}
"""What transformers calls the families that a conversion may end in."""


def check_out(source: Path, out: Path) -> None:
    """Refuse to write over anything.

    Raises:
        ArgumentError: out is the source, or lies in it.
        FileError: out is a file, or a folder that holds something.

    >>> check_out(Path("a"), Path("a"))
    Traceback (most recent call last):
    regard.errors.ArgumentError: out is a, which is the source or lies in it; a conversion never writes there: give another folder
    """
    if out.resolve() == source.resolve() or source.resolve() in out.resolve().parents:
        raise ArgumentError(
            f"out is {out}, which is the source or lies in it; a conversion never writes there: give another folder"
        )
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise FileError(f"{out} is there and is no folder; give another name")
    if out.is_dir() and any(out.iterdir()):
        raise FileError(f"{out} is not empty; nothing is written over: give a new folder")


@contextmanager
def written(held: Checkpoint, source: Path, raw: Raw, out: Path) -> Iterator[Path]:
    """Write a folder under another name, have it looked at there, and rename it; whatever fails leaves nothing behind.

    Raises:
        FileError: the disk refuses.
    """
    temporary = out.with_name(f".{out.name}.writing-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write(held, source, raw, temporary)
        yield temporary
        if out.is_dir():
            out.rmdir()  # which refuses to remove what came to be in it meanwhile
        temporary.rename(out)
        _sync(out.parent)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{out}: cannot write the folder: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(held: Checkpoint, source: Path, raw: Raw, folder: Path) -> None:
    assert held.network.head is not None  # `convert` refuses a model without one
    dtype = cast("Tensor", held.network.head.weight).dtype
    save(held.network, held.config, folder, dtype)
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    kept = {key: raw[key] for key in raw if key in IGNORED - STAY_BEHIND and key not in config}
    name = config["model_type"]
    if name == raw.get("model_type") and "architectures" in raw:
        kept["architectures"] = raw["architectures"]
    elif name in ARCHITECTURES:
        kept["architectures"] = [ARCHITECTURES[name]]
    path.write_text(json.dumps({**config, **kept}, indent=2) + "\n", "utf-8")
    for file in BESIDE:
        if (source / file).exists():
            shutil.copyfile(inside(source, file), folder / file)
    for written_file in folder.iterdir():
        _sync(written_file)
    _sync(folder)


def _sync(path: Path) -> None:
    """Have a file or folder reach the disk: a rename must not be there before what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
