"""Writing what a conversion made: whole or not at all, with everything of the source that is not a
weight.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from safetensors import SafetensorError
from torch import Tensor

from regard.configs.base import Raw
from regard.configs.reader import IGNORED
from regard.errors import ArgumentError, FileError
from regard.files.regular import present
from regard.files.strict import read_json
from regard.files.write import sync, workplace
from regard.foreign import told
from regard.models.convert.layer import Checkpoint
from regard.models.save import save

BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "LICENSE",
    "LICENSE.txt",
)
"""Files that go along as they are."""
STAY_BEHIND = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "model_type",
        "name_or_path",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
    }
)
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
            f"out is {out}, which is the source or lies in it; a conversion never writes there: "
            "give another folder"
        )
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise FileError(f"{out} is there and is no folder; give another name")
    if out.is_dir() and any(out.iterdir()):
        raise FileError(f"{out} is not empty; nothing is written over: give a new folder")


@contextmanager
def place_for(source: Path, out: Path) -> Iterator[Path]:
    """A folder beside `out` for what is to become it, and for nobody else, from the beginning of
    the work to its end.

    Whatever fails leaves nothing behind, and what a killed conversion left is swept.

    Raises:
        ArgumentError, FileError: as `check_out`; another run is writing `out`; or the disk refuses.
    """
    check_out(source, out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with workplace(out, alone=True) as folder:
            check_out(source, out)  # another run may have finished it meanwhile
            yield folder
    except (OSError, SafetensorError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"{out}: cannot write the folder: {told(error)}; free some space, or choose another"
        ) from error


def put(folder: Path, out: Path) -> None:
    """Rename a folder that is whole to `out`.

    Raises:
        OSError: the disk refuses, or something came to be in `out` meanwhile.
    """
    if out.is_dir():
        out.rmdir()
    folder.rename(out)
    sync(out.parent)


def write(held: Checkpoint, source: Path, raw: Raw, folder: Path) -> None:
    """Write a converted model into a folder, with everything of the source that is not a weight.

    Raises:
        FileError: a file of the source cannot be read.
        OSError, SafetensorError: the disk refuses; `place_for` tells it of the folder that the user
            named.
    """
    assert held.network.head is not None  # `convert` refuses a model without one
    dtype = cast("Tensor", held.network.head.weight).dtype
    save(held.network, held.config, folder, dtype)
    path = folder / "config.json"
    config = read_json(path)
    kept = {key: raw[key] for key in raw if key in IGNORED - STAY_BEHIND and key not in config}
    name = config["model_type"]
    if name == raw.get("model_type") and "architectures" in raw:
        kept["architectures"] = raw["architectures"]
    elif name in ARCHITECTURES:
        kept["architectures"] = [ARCHITECTURES[name]]
    path.write_text(json.dumps({**config, **kept}, indent=2) + "\n", "utf-8")
    for file in BESIDE:
        if (there := present(source, file)) is not None:
            shutil.copyfile(there, folder / file)
    for written_file in folder.iterdir():
        sync(written_file)
    sync(folder)
