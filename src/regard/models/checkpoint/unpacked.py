"""A checkpoint whose matrices are packed, seen as if they were plain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from regard.errors import FileError
from regard.files.header import Stored
from regard.files.reading import USUAL, Pace
from regard.foreign import shown
from regard.models.checkpoint.packed import unpack_fp8, unpack_mxfp4
from regard.models.checkpoint.store import Store

_LARGEST_BLOCK = 1 << 14  # published files have 128


@dataclass(frozen=True)
class Pair:
    """A matrix that is stored as small numbers and their scales.

    Attributes:
        values, scales: the names of the two tensors.
        plain: what they stand for: its name, dtype and shape.
        unpack: (values, scales) -> that.
    """

    values: str
    scales: str
    plain: Stored
    unpack: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Unpacked(Store):
    """A store in which each pair of tensors is the one that they stand for, unpacked when it is
    read.

    Scales are read first: they are a sixteenth of what they belong to, or less.

    Attributes:
        packed: what the files hold.
        pairs: by the name of the plain tensor.
    """

    packed: Store
    pairs: Mapping[str, Pair]

    def read(
        self, names: Iterable[str] | None = None, pace: Pace = USUAL
    ) -> Iterator[tuple[str, Tensor]]:
        """As `Store.read`; the memory in use is also that of the scales, and of one plain
        tensor.
        """
        chosen = list(self.tensors if names is None else names)
        pairs = {self.pairs[n].values: self.pairs[n] for n in chosen if n in self.pairs}
        scales = dict(self.packed.read([pair.scales for pair in pairs.values()], pace))
        whole = [n for n in chosen if n not in self.pairs]
        for name, tensor in self.packed.read([*whole, *pairs], pace):
            if name in pairs:
                pair = pairs[name]
                yield pair.plain.name, pair.unpack(tensor, scales.pop(pair.scales))
            else:
                yield name, tensor


def unpacked(store: Store, said: Any) -> Store:
    """The store of a folder, with the block formats that its config.json names taken apart.

    "mxfp4" (gpt-oss) is `X_blocks` and `X_scales`, which are X: [..., in, out], where blocks are
    along `in`; "fp8" (DeepSeek-V3) is `X.weight` and `X.weight_scale_inv`.

    Args:
        store: the tensors of the folder.
        said: `quantization_config` of its config.json; None is a plain checkpoint.

    Raises:
        FileError: the method or a key of it is not understood; tensors do not make pairs, or not of
            fitting shapes.

    >>> store = Store(Path("folder"), {}, 0, {})
    >>> unpacked(store, None) is store
    True
    >>> unpacked(store, {"quant_method": "gptq"})
    Traceback (most recent call last):
    regard.errors.FileError: folder/config.json: quantization_config has the quant_method 'gptq'; supported are 'mxfp4' \
and 'fp8': take a plain checkpoint
    """
    if said is None:
        return store
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if method == "mxfp4":
        pairs = _mxfp4(store)
    elif method == "fp8":
        pairs = _fp8(store, _block(store.folder, said))
    else:
        raise _config(
            store.folder,
            f"the quant_method {shown(method)}; supported are 'mxfp4' and 'fp8': take a plain "
            "checkpoint",
        )
    hidden = {name for pair in pairs for name in (pair.values, pair.scales)}
    found = {name: x for name, x in store.tensors.items() if name not in hidden}
    for pair in pairs:
        if pair.plain.name in found:
            raise FileError(
                f"{pair.plain.file}: {shown(pair.plain.name)} is stored plain, and packed too; "
                "keep one"
            )
        found[pair.plain.name] = pair.plain
    total = sum(x.bytes for x in found.values())
    by_name = {pair.plain.name: pair for pair in pairs}
    return Unpacked(store.folder, MappingProxyType(found), total, store.marks, store, by_name)


def _mxfp4(store: Store) -> list[Pair]:
    pairs = []
    for name, x in store.tensors.items():
        plain = name.removesuffix("_blocks")
        if plain == name:
            continue
        scales = _scales(store, x, plain + "_scales")
        fits = len(x.shape) > 2 and x.shape[-1] == 16 and scales.shape == x.shape[:-1]
        if not fits or {x.dtype, scales.dtype} != {torch.uint8}:
            raise _misfit(x, scales, "uint8 [..., G, 16] and uint8 [..., G]")
        shape = (*x.shape[:-3], 32 * x.shape[-2], x.shape[-3])
        pairs.append(Pair(name, scales.name, _plain(x, plain, shape, torch.bfloat16), _transposed))
    return pairs


def _transposed(blocks: Tensor, scales: Tensor) -> Tensor:
    # bfloat16 holds every value exactly
    return unpack_mxfp4(blocks, scales, torch.bfloat16).mT


def _fp8(store: Store, block: int) -> list[Pair]:
    pairs = []
    for name, x in store.tensors.items():
        if x.dtype != torch.float8_e4m3fn:
            continue
        scales = _scales(store, x, name + "_scale_inv")
        wanted = tuple(-(-size // block) for size in x.shape)
        if len(x.shape) != 2 or scales.shape != wanted or scales.dtype != torch.float32:
            raise _misfit(x, scales, f"a matrix and float32 {wanted}")
        plain = _plain(x, name, x.shape, torch.float32)
        pairs.append(Pair(name, scales.name, plain, partial(unpack_fp8, block=block)))
    return pairs


def _block(folder: Path, said: Mapping[str, Any]) -> int:
    """The side of a block."""
    fmt, sides = said.get("fmt", "e4m3"), said.get("weight_block_size")
    if fmt != "e4m3":
        raise _config(folder, f"the fmt {shown(fmt)}; supported is 'e4m3'")
    side = sides[0] if isinstance(sides, list) and len(sides) == 2 else None
    if type(side) is not int or not 1 <= side <= _LARGEST_BLOCK or sides != [side, side]:
        raise _config(folder, f"the weight_block_size {shown(sides)}; supported are square blocks")
    return side


def _scales(store: Store, values: Stored, name: str) -> Stored:
    if name not in store.tensors:
        raise FileError(
            f"{values.file}: {shown(values.name)} is packed, and its scales {shown(name)} are "
            "missing; "
            "is a shard missing?"
        )
    return store.tensors[name]


def _plain(values: Stored, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Stored:
    return replace(
        values, name=name, shape=shape, dtype=dtype, bytes=math.prod(shape) * dtype.itemsize
    )


def _misfit(values: Stored, scales: Stored, wanted: str) -> FileError:
    said = [f"{shown(x.name)} is {x.dtype} {x.shape}" for x in (values, scales)]
    return FileError(f"{values.file}: {' and '.join(said)}; they must be {wanted}")


def _config(folder: Path, problem: str) -> FileError:
    return FileError(f"{folder / 'config.json'}: quantization_config has {problem}")
