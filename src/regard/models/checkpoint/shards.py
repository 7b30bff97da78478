"""Which files of a folder hold its tensors: model.safetensors, or the shards that an index
names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from regard.errors import ArgumentError, FileError
from regard.files import strict
from regard.files.header import HEADER_LIMIT, Header, read_header
from regard.files.regular import inside, whole
from regard.files.seems import instead
from regard.foreign import shown
from regard.models.checkpoint.advice import without_weights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_headers(folder: Path) -> list[Header]:
    """The checked headers of a folder's weights, in the order of the files' names.

    Where there is a model.safetensors it is the model, index or not, as for transformers. Shards
    hold together what the index says: each of its tensors in the shard that it names, and no
    others.

    Raises:
        FileError: there are no weights; or a file, a header or the index is not what it should be.

    >>> from safetensors.torch import save_file
    >>> import torch
    >>> save_file({"a": torch.zeros(2)}, "model.safetensors")
    >>> [x.name for header in read_headers(Path()) for x in header.tensors]
    ['a']
    """
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as e:
        raise FileError(f"{folder} cannot be read as a folder: {e.strerror}") from e
    if SINGLE in names:
        return [read_header(inside(folder, SINGLE))]
    if INDEX not in names:
        raise without_weights(folder, names)
    path, places = inside(folder, INDEX), read_index(folder)
    files = sorted(set(places.values()))
    headers = [read_header(_shard(folder, name, path)) for name in files]
    _check_places(places, headers, path)
    return headers


def read_index(folder: Path) -> Mapping[str, str]:
    """Tensor -> shard, from model.safetensors.index.json. What it says of sizes is not believed:
    the headers have them.

    Raises:
        FileError: it is missing, no JSON object, or has no weight_map of names.
    """
    path = inside(folder, INDEX)
    raw = whole(path, HEADER_LIMIT)
    try:
        found = strict.parse(raw)
    except ArgumentError as e:
        kind = "" if raw.lstrip().startswith(b"{") else instead(raw[:64])
        raise FileError(f"{path} {e}{f'; {kind}' if kind else ''}") from e
    places = found.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise FileError(
            f"{path}: weight_map is {shown(places)}; it must name a shard for every tensor"
        )
    wrong = next((name for name, file in places.items() if not isinstance(file, str)), None)
    if wrong is not None:
        raise FileError(
            f"{path}: weight_map gives {shown(wrong)} {shown(places[wrong])}; it must be a file "
            "name"
        )
    return places


def _shard(folder: Path, name: str, index: Path) -> Path:
    try:
        return inside(folder, name)
    except FileError as e:
        raise FileError(f"{e} ({index.name} names it)") from e


def _check_places(places: Mapping[str, str], headers: Sequence[Header], index: Path) -> None:
    """Every tensor of the index is in the shard that it names, and the shards hold no others."""
    by_shard: dict[str, set[str]] = {}
    for name, file in places.items():
        by_shard.setdefault(file, set()).add(name)
    for header in headers:
        listed = by_shard[header.file.name]
        held = {x.name for x in header.tensors}
        for names, said in (
            (listed - held, "that the index places there and it lacks"),
            (held - listed, "that the index does not place there"),
        ):
            if names:
                some = ", ".join(shown(name) for name in sorted(names)[:5])
                raise FileError(
                    f"{header.file}: {len(names)} tensors {said}: {some}; "
                    f"are {index.name} and the shards of one download?"
                )
