"""Models in GGUF files: metadata as the keys of a config.json, and tensors under the names and in
the layout of Hugging Face's checkpoints, by llama.cpp's own table of names (the library `gguf`).

    blk.3.attn_q.weight      -> model.layers.3.self_attn.q_proj.weight

`ARCHITECTURES` says which differences in layout are undone. Rows of queries and keys that are in
the order of interleaved rotary positions: row 2 i + j of a head is row j D / 2 + i. A matrix of all
experts is one for each.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from regard import huge_pages
from regard.errors import FileError
from regard.files.gguf_files import (
    GgufHeader,
    GgufTensor,
    invalid_gguf,
    is_gguf,
    read_gguf_header,
    read_plain,
    read_rows,
)
from regard.files.regular_files import checked_path
from regard.files.safetensors_files import DEFAULT_BUFFERING, ReadBuffering, StoredTensor
from regard.freed_memory import give_back_freed_memory
from regard.huge_pages import empty_like
from regard.models.checkpoint.family import Family, NameTable, TensorRule, name_pattern
from regard.models.checkpoint.gguf_blocks import (
    RECORD_FORMS,
    dequantize_gguf,
    float_dtype,
    gguf_record,
)
from regard.models.checkpoint.gguf_config import (
    ARCHITECTURES,
    LONG_FACTORS,
    ROPE_FACTORS,
    Architecture,
    gguf_architecture,
    gguf_config,
)
from regard.models.checkpoint.tensors import INDEX, SINGLE, CheckpointTensors
from regard.models.families import family
from regard.models.sentence_settings import PoolingMode
from regard.ops.stored_weights import StoredWeight
from regard.units import plural, size
from regard.untrusted_text import short_repr

_LAYER = re.compile(r"blk\.([0-9]{1,4})\.")
_POOLING: Mapping[object, PoolingMode] = {1: "mean", 2: "cls"}
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def find_gguf(source: Path) -> Path | None:
    """Return the GGUF file that a path means: the file itself, or the only one of a folder without
    safetensors; else None.
    """
    if not source.is_dir():
        return source if is_gguf(source) else None
    try:
        names = sorted(path.name for path in source.iterdir())
    except OSError:
        return None  # the reader of folders describes the problem
    files = [name for name in names if name.lower().endswith(".gguf")]
    if not files or SINGLE in names or INDEX in names:
        return None
    files = [name for name in files if not _LATER_PART.search(name)]
    if len(files) > 1:
        some = ", ".join(short_repr(name) for name in files[:5])
        raise FileError(
            f"{source} has {len(files)} GGUF files: {some}; give the path of the one to load"
        )
    return checked_path(source, files[0])


@dataclass(frozen=True)
class GgufModel:
    """The checked header of a model's GGUF file, or of all its files.

    Attributes:
        names: stored name of the family -> the tensor, or the tensors whose rows it has.
    """

    header: GgufHeader
    architecture: Architecture
    config: Mapping[str, Any]
    names: Mapping[str, tuple[GgufTensor, ...]]
    ignored: tuple[str, ...]

    @classmethod
    def open(cls, path: Path, ignore: Sequence[str] = ()) -> GgufModel:
        """Read and check the header of a model's GGUF file."""
        header = read_gguf_header(path)
        name = gguf_architecture(header)
        config, unknown = gguf_config(header, name)
        its_family, architecture = family(config["model_type"]), ARCHITECTURES[name]
        names = dict(_stored_names(header, name, its_family))
        used = {tensor.name for tensors in names.values() for tensor in tensors}
        used |= {ROPE_FACTORS, *LONG_FACTORS}
        unknown = [x for x in header.tensors if x not in used] + unknown
        refused = [x for x in unknown if not any(fnmatchcase(x, pattern) for pattern in ignore)]
        if refused:
            raise FileError(
                f"{path}: {', '.join(map(short_repr, refused[:5]))} "
                f"{'are' if len(refused) > 1 else 'is'} not known for the architecture "
                f"{name!r}, and the model could compute something else without them. If "
                f"that is meant, ignore them: regard.load(file, ignore={refused[:20]!r})"
            )
        return cls(header, architecture, config, MappingProxyType(names), tuple(unknown))

    @property
    def pooling_mode(self) -> PoolingMode:
        """How an encoder's states become one vector."""
        number = self.header.metadata.get("bert.pooling_type", 1)
        if type(number) is not int or number not in _POOLING:
            raise FileError(
                f"{self.header.file}: bert.pooling_type is {short_repr(number)}; read are "
                "1 (mean) and 2 (cls)"
            )
        return _POOLING[number]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most bytes if no tensor has blocks; float32 for quantized files, in which
        the numbers of every block are exact.
        """
        bytes_of: dict[torch.dtype, int] = {}
        for tensor in self.header.tensors.values():
            dtype = float_dtype(tensor.format.name)
            if dtype is None:
                return torch.float32
            bytes_of[dtype] = bytes_of.get(dtype, 0) + tensor.bytes
        return max(bytes_of, key=lambda d: bytes_of[d], default=torch.float32)

    def split(
        self, table: NameTable, form: str | None, dtype: torch.dtype
    ) -> tuple[GgufTensors, GgufRecords]:
        """Split the tensors into those that are dequantized and those that stay in few bits."""
        plain: dict[str, tuple[GgufTensor, ...]] = {}
        records: dict[str, str] = {}
        for name, tensors in self.names.items():
            own = RECORD_FORMS.get(tensors[0].format.name)
            parameters = self._parameters(name, table)
            is_router = ".ffn_gate_inp." in tensors[0].name  # no stored weight is computed there
            is_matrix = len(tensors) == 1 and len(tensors[0].shape) == 2 and not is_router
            if own is not None and form in (None, own) and is_matrix and parameters:
                records |= dict.fromkeys(parameters, name)
            else:
                plain[name] = tensors
        self._say_what_grows(plain, form, dtype)
        return GgufTensors.of(self, plain, dtype), GgufRecords(self, MappingProxyType(records))

    def _parameters(self, name: str, table: NameTable) -> tuple[str, ...]:
        """Return the parameters that are the rows of a stored matrix, in their order; none if it
        has others.
        """
        entry = table.get(name_pattern(name))
        numbers = [part for part in name.split(".") if part.isdigit()]
        if isinstance(entry, str):
            return (entry.format(*numbers),)
        if not isinstance(entry, TensorRule) or self.is_transposed(name):
            return ()
        count = len(entry.parameters)
        if count == 1 or any("*" in x for x in entry.parameters) or entry.requires or entry.unless:
            return ()
        rows = torch.arange(count, device="cpu")[:, None]
        unpacked = entry.unpack(rows, [torch.Size((1, 1))] * count)
        in_order = [x.flatten().tolist() for x in unpacked] == [[i] for i in range(count)]
        return tuple(x.format(*numbers) for x in entry.parameters) if in_order else ()

    def _say_what_grows(
        self, plain: Mapping[str, tuple[GgufTensor, ...]], form: str | None, dtype: torch.dtype
    ) -> None:
        """Warn of matrices whose blocks no loop knows, with the memory that they take instead."""
        tensors = [x for parts in plain.values() for x in parts if len(x.shape) > 1]
        grown = [x for x in tensors if float_dtype(x.format.name) is None]
        if form is None and grown:
            kinds = ", ".join(sorted({x.format.name for x in grown}))
            memory = sum(math.prod(x.shape) for x in grown) * dtype.itemsize
            warnings.warn(
                f"{self.header.file}: {len(grown)} matrices in {kinds} "
                f"({size(sum(x.bytes for x in grown))}) are numbers in {dtype} "
                f"({size(memory)}) here, because no product reads these formats; "
                "weights='int8' takes less memory, and rounds them once more",
                stacklevel=4,
            )

    def is_transposed(self, name: str) -> bool:
        """Return whether the family stores a matrix as [in, out]."""
        parts = name.split(".")
        return parts[-1] == "weight" and parts[-2] in self.architecture.transposed

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor of the family."""
        tensors = self.names[name]
        shape = list(tensors[0].shape)
        if self.is_transposed(name):
            shape.reverse()
        if len(tensors) > 1:
            shape[-2] = sum(x.shape[-2] for x in tensors)
        return tuple(shape)

    def rows(self, name: str) -> Tensor | None:
        """Return the order of the file's rows that is the family's, or None if it is the same."""
        count = self.names[name][0].shape[0]
        if self.architecture.fused_heads and (".query_key_value." in name):
            return self._fused_rows(name, count)
        if not self.architecture.pairs:
            return None
        part = next((x for x in ("q_proj", "k_proj") if f".{x}." in name), None)
        if part is None:
            return None
        heads = self.config[f"num_{'attention' if part == 'q_proj' else 'key_value'}_heads"]
        if count % (2 * heads):
            raise self._uneven(name, count, heads)
        return torch.arange(count, device="cpu").view(heads, -1, 2).mT.flatten()

    def _fused_rows(self, name: str, count: int) -> Tensor:
        """Return the order in which each key head follows its queries, and its value head it."""
        H, G = (self._heads(x) for x in ("attention.head_count", "attention.head_count_kv"))
        if G < 1 or H % G or count % (H + 2 * G):
            raise self._uneven(name, count, H)
        q, k, v = torch.arange(count, device="cpu").view(H + 2 * G, -1).split_with_sizes([H, G, G])
        parts = [q.unflatten(0, (G, H // G)), k[:, None], v[:, None]]
        return torch.cat(parts, 1).flatten()

    def _heads(self, key: str) -> int:
        """Return a number of heads."""
        name = self.header.metadata["general.architecture"]
        default = self.header.metadata[f"{name}.attention.head_count"]
        value = self.header.metadata.get(f"{name}.{key}", default)
        return value if isinstance(value, int) else 0

    def _uneven(self, name: str, rows: int, heads: int) -> FileError:
        return FileError(
            f"{self.header.file}: {short_repr(name)} has {plural(rows, 'row')}, which "
            f"{plural(heads, 'head')} with rotary positions cannot have"
        )


def _stored_names(
    header: GgufHeader, architecture: str, its_family: Family
) -> Iterator[tuple[str, tuple[GgufTensor, ...]]]:
    """Yield the family's names of stored tensors that the file has, with these."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    matches = (_LAYER.match(name) for name in header.tensors)
    numbers = {int(match[1]) for match in matches if match}
    layers = sorted(x for x in numbers if x < len(header.tensors))
    table = get_tensor_name_map(number, layers[-1] + 1 if layers else 0)
    its = ARCHITECTURES[architecture]
    for pattern in its_family.names:
        # a parameter of its own here, and there the bias of a module
        stored = pattern.replace("e_score_correction_bias", "e_score_correction.bias")
        stem, dot, end = stored.rpartition(".")
        is_expert = ".experts.{}." in pattern
        for layer in layers if "{}" in pattern else [0]:
            joined = next((x for end, x in its.joined.items() if pattern.endswith(end)), None)
            if joined is not None:
                files = tuple(x.format(layer) for x in joined)
            else:
                key = stem.replace(".experts.{}.", ".experts.").format(layer)
                plain = [key.removeprefix(x) for x in its_family.prefixes]
                known = (table.get_name(x) for x in (key, *plain))
                own = next((x for x in known if x is not None), None)
                files = () if own is None else (f"{own}{dot}{end}",)
            if not files or any(x not in header.tensors for x in files):
                continue
            other, needed = its.alternatives.get(stem.rpartition(".")[2], ("", False))
            if (f"blk.{layer}.{other}" in header.tensors) != needed:
                continue
            tensors = tuple(header.tensors[x] for x in files)
            if {len(x.shape) for x in tensors} != {3} and joined is not None:
                raise invalid_gguf(header.file, f"{files} are no matrices of experts")
            if len({(x.shape[0], x.shape[-1]) for x in tensors}) > 1 or (
                is_expert and len(tensors[0].shape) < 2
            ):
                raise invalid_gguf(header.file, f"{files} have shapes that do not fit together")
            if not is_expert:
                yield pattern.format(layer), tensors
                continue
            for i in range(min(tensors[0].shape[0], 1 << 12)):
                yield pattern.format(layer, i), tuple(x.part(i) for x in tensors)


@dataclass(frozen=True)
class GgufTensors(CheckpointTensors):
    """The tensors of a GGUF file by Hugging Face's names, dequantized in fp32 to `dtype`."""

    model: GgufModel
    dtype: torch.dtype

    @classmethod
    def of(
        cls, model: GgufModel, tensors: Mapping[str, tuple[GgufTensor, ...]], dtype: torch.dtype
    ) -> GgufTensors:
        """Return some tensors of a file."""
        entries = {
            name: StoredTensor(
                name,
                float_dtype(parts[0].format.name) or dtype,
                model.shape(name),
                parts[0].file,
                parts[0].start,
                sum(x.bytes for x in parts),
            )
            for name, parts in tensors.items()
        }
        total = sum(x.bytes for x in entries.values())
        file = model.header.file
        return cls(file, MappingProxyType(entries), total, model.header.marks, model, dtype)

    def read(
        self, names: Iterable[str] | None = None, buffering: ReadBuffering = DEFAULT_BUFFERING
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values as `CheckpointTensors.read` does; `buffering` is not used."""
        chosen = set(self.tensors if names is None else names)
        for name in (x for x in self.tensors if x in chosen):
            yield name, self._read(name)

    def _read(self, name: str) -> Tensor:
        architecture, rows = self.model.architecture, self.model.rows(name)
        parts = [self._numbers(x) for x in self.model.names[name]]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
        if architecture.norm_offset and name.endswith("norm.weight"):
            whole = whole - architecture.norm_offset
        if self.model.is_transposed(name):
            whole = whole.T
        return whole if rows is None else whole[rows]

    def _numbers(self, tensor: GgufTensor) -> Tensor:
        """Return the numbers of a tensor of the file."""
        header, kind = self.model.header, tensor.format.name
        if (plain := float_dtype(kind)) is not None:
            return read_plain(header, tensor, plain)
        rows = math.prod(tensor.shape[:-1])
        whole = huge_pages.empty((rows, tensor.shape[-1]), dtype=self.dtype)
        for first, raw in read_rows(header, tensor):
            whole[first : first + len(raw)] = torch.from_numpy(dequantize_gguf(kind, raw))
        return whole.view(tensor.shape)


@dataclass(frozen=True)
class GgufRecords:
    """The matrices of a GGUF file that stay in few bits, by the names of their parameters."""

    model: GgufModel
    names: Mapping[str, str]
    taken: dict[str, int] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The file and what is in it, for messages."""
        return f"{self.model.header.file}: the matrix"

    def read(self, parameter_name: str, shape: torch.Size, dtype: torch.dtype) -> StoredWeight:
        """Read the record of a parameter of this shape, for computations in a dtype."""
        name = self.names[parameter_name]
        (tensor,) = self.model.names[name]
        first = self.taken.get(name, 0)  # parameters that share a matrix are read in its order
        self.taken[name] = last = first + shape[0]
        is_last = [key for key, x in self.names.items() if x == name][-1] == parameter_name
        rows = tensor.shape[0]
        if tensor.shape[1] != shape[1] or last > rows or (is_last and last < rows):
            raise FileError(
                f"{self.model.header.file}: {short_repr(tensor.name)} is {tensor.shape}; the "
                f"metadata requires {tuple(shape)}"
            )
        return self._whole(name, tensor.rows(first, last), dtype)

    def _whole(self, name: str, tensor: GgufTensor, dtype: torch.dtype) -> StoredWeight:
        """Return all rows, put together panel by panel."""
        kind, whole = tensor.format.name, list[Tensor]()
        record: StoredWeight | None = None
        for first, raw in read_rows(self.model.header, tensor):
            record = gguf_record(kind, raw, dtype)
            parts = list(record.tensors().values())
            whole = whole or [empty_like(x, (tensor.shape[0], *x.shape[1:])) for x in parts]
            for x, part in zip(whole, parts, strict=True):
                x.numpy()[first : first + len(part)] = part.numpy()
        assert record is not None  # no dimension is 0
        give_back_freed_memory()  # otherwise the panels of all matrices add up
        rows, remaining = self.model.rows(name), iter(whole)
        if rows is None:
            return record.map(lambda _: next(remaining))
        order = rows.numpy()
        return record.map(lambda _: torch.from_numpy(next(remaining).numpy()[order]))
