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
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from regard import huge_pages
from regard.configs.deepseek import SHARED
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
from regard.files.reading import checked_path
from regard.files.safetensors_files import DEFAULT_BUFFERING, ReadBuffering, StoredTensor
from regard.freed_memory import give_back_freed_memory
from regard.huge_pages import empty_like
from regard.language import Phrase
from regard.models.checkpoint.family import (
    Family,
    NameEntry,
    NameTable,
    TensorRule,
    name_pattern,
)
from regard.models.checkpoint.gguf_architectures import ARCHITECTURES, Architecture
from regard.models.checkpoint.gguf_blocks import (
    RECORD_FORMS,
    dequantize_gguf,
    gguf_record,
    plain_dtype,
)
from regard.models.checkpoint.gguf_completions import ROPE_FACTORS
from regard.models.checkpoint.gguf_config import LONG_FACTORS, gguf_architecture, gguf_config
from regard.models.checkpoint.tensors import INDEX, SINGLE, CheckpointTensors, largest_dtype
from regard.models.families import family
from regard.models.sentence_settings import PoolingMode
from regard.ops.stored_weights import INT4_BLOCK, StoredWeight
from regard.units import plural, size
from regard.untrusted_text import short_repr

_LAYER = re.compile(r"(?:enc\.|dec\.)?blk\.([0-9]{1,4})\.")
_POOLING: Mapping[object, PoolingMode] = {1: "mean", 2: "cls"}
_SPELLINGS = {
    "e_score_correction_bias": "e_score_correction.bias",
    ".dt_bias": ".dt_proj.bias",
}
"""A parameter of its own here, and there the bias of a module."""
_PLAIN = (
    *(".attn_rel_b.", "compressor_ape.", ".ffn_gate_inp", "hc_attn_fn.", "hc_ffn_fn."),
    *("output_hc_fn.", "position_embd.", ".shortconv.conv.", ".ssm_alpha.", ".ssm_ba."),
    *(".ssm_beta.", ".ssm_conv1d.", "token_types."),
)
"""Parts of the names of matrices that no map with stored weights has."""
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
        family: the family, with the names of tensors as this file has them.
        names: stored name of the family -> the tensor, or the tensors of which it is made.
    """

    header: GgufHeader
    architecture: Architecture
    family: Family
    config: Mapping[str, Any]
    names: Mapping[str, tuple[GgufTensor, ...]]
    ignored: tuple[str, ...]

    @classmethod
    def open(cls, path: Path, ignore: Sequence[str] = ()) -> GgufModel:
        """Read and check the header of a model's GGUF file."""
        header = read_gguf_header(path)
        name = gguf_architecture(header)
        config, layers, unknown = gguf_config(header, name)
        its_family, architecture = family(config["model_type"]), ARCHITECTURES[name]
        if architecture.names:
            its_family = replace(its_family, names=_name_table(its_family, architecture.names))
        kinds = config.get("indexer_types") or ()
        shared = {i for i, kind in enumerate(kinds) if kind == SHARED}
        copies = {x for x in header.tensors if ".indexer." in x and _layer_of(x) in shared}
        named = _stored_names(header, name, its_family, layers)
        names = {x: tensors for x, tensors in named if tensors[0].name not in copies}
        integers = [x.name for x in header.tensors.values() if x.format.name == "I32"]
        if wrong := [x for x in integers if not x.endswith(".ffn_gate_tid2eid.weight")]:
            raise invalid_gguf(path, f"{short_repr(wrong[0])} is I32, which only tables are")
        used = {tensor.name for tensors in names.values() for tensor in tensors}
        used |= {ROPE_FACTORS, *LONG_FACTORS, *architecture.unused, *copies}
        unread = [x for x in header.tensors if x not in used]
        predicts = header.metadata.get(f"{name}.nextn_predict_layers", 0) != 0
        unknown = [x for x in unread if not (predicts and _layer_of(x) >= layers)] + unknown
        refused = [x for x in unknown if not any(fnmatchcase(x, pattern) for pattern in ignore)]
        if refused:
            raise FileError(
                f"{path}: {', '.join(map(short_repr, refused[:5]))} "
                f"{'are' if len(refused) > 1 else 'is'} not known for the architecture "
                f"{name!r}, and the model could compute something else without them. If "
                f"that is meant, ignore them: regard.load(file, ignore={refused[:20]!r})"
            )
        table = MappingProxyType(names)
        return cls(header, architecture, its_family, config, table, tuple(unknown))

    @property
    def pooling_mode(self) -> PoolingMode:
        """How an encoder's states become one vector."""
        key = f"{self.header.metadata['general.architecture']}.pooling_type"
        number = self.header.metadata.get(key, 1)
        if type(number) is not int or number not in _POOLING:
            raise FileError(
                f"{self.header.file}: {key} is {short_repr(number)}; read are 1 (mean) and 2 (cls)"
            )
        return _POOLING[number]

    @property
    def numbers(self) -> dict[str, Tensor]:
        """The stored tensors of the family that the file has as numbers in its metadata."""
        numbers: dict[str, Tensor] = {}
        for end, (key, shape) in self.architecture.numbers.items():
            values = self.header.metadata.get(key)
            pattern = next(name for name in self.family.names if name.endswith(end))
            layers = range(min(self.config["num_hidden_layers"], 1 << 12))
            listed = values if isinstance(values, list) else []
            if len(listed) != len(layers) or not all(isinstance(x, float) for x in listed):
                raise invalid_gguf(self.header.file, f"{key} is no list of a number for each layer")
            for i, value in zip(layers, listed, strict=True):
                number = torch.tensor(value, dtype=torch.float32, device="cpu")
                numbers[pattern.format(i)] = number.reshape(shape)
        return numbers

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most bytes if no tensor has blocks; float32 for quantized files, in which
        the numbers of every block are exact.
        """
        sizes = [(plain_dtype(x.format.name), x.bytes) for x in self.header.tensors.values()]
        if any(dtype is None for dtype, _ in sizes):
            return torch.float32
        return largest_dtype(
            (x, size) for x, size in sizes if x is not None and x.is_floating_point
        )

    def split(
        self, table: NameTable, form: str | None, dtype: torch.dtype
    ) -> tuple[GgufTensors, GgufRecords]:
        """Split the tensors into those that are dequantized and those that stay in few bits."""
        plain: dict[str, tuple[GgufTensor, ...]] = {}
        records: dict[str, str] = {}
        by_pattern = {name_pattern(name): entry for name, entry in table.items()}
        for name, tensors in self.names.items():
            own = RECORD_FORMS.get(tensors[0].format.name)
            parameters = self._parameters(name, by_pattern)
            is_plain = any(x in tensors[0].name for x in _PLAIN)
            is_matrix = len(tensors) == 1 and len(tensors[0].shape) == 2 and not is_plain
            if self.columns(name) is not None:  # whole groups change places
                is_matrix &= self._size("linear_value_head_dim") % INT4_BLOCK == 0
            if own is not None and form in (None, own) and is_matrix and parameters:
                records |= dict.fromkeys(parameters, name)
            else:
                plain[name] = tensors
        self._say_what_grows(plain, form, dtype)
        return GgufTensors.of(self, plain, dtype), GgufRecords(self, MappingProxyType(records))

    def _parameters(self, name: str, by_pattern: NameTable) -> tuple[str, ...]:
        """Return the parameters that are the rows of a stored matrix, in their order; none if it
        has others.
        """
        entry = by_pattern.get(name_pattern(name))
        numbers = [part for part in name.split(".") if part.isdigit()]
        if isinstance(entry, str):
            return (entry.format(*numbers),)
        if isinstance(entry, tuple) and len(entry) == 1:  # a condition that the name fulfils
            (entry,) = entry
        if not isinstance(entry, TensorRule) or any("*" in x for x in entry.parameters):
            return ()
        count = len(entry.parameters)
        rows = torch.arange(count, device="cpu")[:, None]
        unpacked = entry.unpack(rows, [torch.Size((1, 1))] * count)
        in_order = [x.flatten().tolist() for x in unpacked] == [[i] for i in range(count)]
        return tuple(x.format(*numbers) for x in entry.parameters) if in_order else ()

    def _say_what_grows(
        self, plain: Mapping[str, tuple[GgufTensor, ...]], form: str | None, dtype: torch.dtype
    ) -> None:
        """Warn of matrices whose blocks no loop knows, with the memory that they take instead."""
        tensors = [x for parts in plain.values() for x in parts if len(x.shape) > 1]
        grown = [x for x in tensors if plain_dtype(x.format.name) is None]
        if form is None and grown:
            kinds = ", ".join(sorted({x.format.name for x in grown}))
            memory = sum(math.prod(x.shape) for x in grown) * dtype.itemsize
            warning = Phrase(
                "{file}: {matrices} matrices in {kinds} ({stored}) are numbers in {dtype} "
                "({memory}) here, because no product reads these formats; weights='int8' takes "
                "less memory, and rounds them once more",
                file=self.header.file,
                matrices=len(grown),
                kinds=kinds,
                stored=size(sum(x.bytes for x in grown)),
                dtype=dtype,
                memory=size(memory),
            )
            warnings.warn(warning, stacklevel=4)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor of the family."""
        shapes = [x.shape for x in self.names[name]]
        try:
            return tuple(
                self.join(
                    name, [torch.empty(x, dtype=torch.float32, device="meta") for x in shapes]
                ).shape
            )
        except (RuntimeError, IndexError):
            raise invalid_gguf(
                self.header.file, f"the tensors of {short_repr(name)} do not fit together: {shapes}"
            ) from None

    def join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return the stored tensor of the family that is made of some tensors of the file."""
        for end, (files, make) in self.architecture.joined.items():
            if name.endswith(end) and len(files) == len(parts):
                stored: Tensor = make(*parts)
                return stored
        return parts[0]

    def rows(self, name: str) -> Tensor | None:
        """Return the order of the file's rows that is the family's, or None if it is the same."""
        count = self.names[name][0].shape[0]
        if self.architecture.fused_heads and (".query_key_value." in name):
            return self._fused_rows(name, count)
        if self.architecture.tiled_values and (".linear_attn." in name):
            return self._value_rows(name, count)
        if self.architecture.gated_queries and name.endswith("attn.q_proj.weight"):
            H = self._size("num_attention_heads")
            if count < 1 or count % (2 * H):
                raise self._uneven(name, count, H)
            return torch.arange(count, device="cpu").view(H, 2, -1).transpose(0, 1).flatten()
        if not self.architecture.pairs:
            return None
        part = next((x for x in ("q_proj", "k_proj") if f".{x}." in name), None)
        if part is None:
            return None
        heads = self._size(f"num_{'attention' if part == 'q_proj' else 'key_value'}_heads")
        if count < 1 or count % (2 * heads):
            raise self._uneven(name, count, heads)
        return torch.arange(count, device="cpu").view(heads, -1, 2).mT.flatten()

    def _value_rows(self, name: str, count: int) -> Tensor | None:
        """Return the order of rows in which the value heads of each key head are neighbours."""
        part = name.rsplit(".linear_attn.")[1]
        if part in ("norm.weight", "out_proj.weight"):
            return None
        N, width = (self._size(f"linear_{x}") for x in ("num_value_heads", "value_head_dim"))
        before = count - N * width if part.startswith(("in_proj_qkv", "conv1d")) else 0
        if not 0 <= before < count or (count - before) % N:
            raise self._uneven(name, count, N)
        places = torch.arange(count - before, device="cpu").view(N, -1)
        order = before + places[self._value_heads()].flatten()
        return torch.cat([torch.arange(before, device="cpu"), order])

    def columns(self, name: str) -> Tensor | None:
        """Return the order of blocks of columns, one for each value head, that is the family's."""
        is_output = self.architecture.tiled_values and name.endswith("linear_attn.out_proj.weight")
        return self._value_heads() if is_output else None

    def _value_heads(self) -> Tensor:
        """Return the places in the file of value heads in the order of their key heads."""
        N, G = (self._size(f"linear_num_{x}_heads") for x in ("value", "key"))
        if N % G:
            raise invalid_gguf(self.header.file, f"{N} value heads for {G} key heads")
        return torch.arange(N, device="cpu").view(-1, G).T.flatten()

    def _size(self, key: str) -> int:
        """Return a number of the config, which a damaged file may lack."""
        size = self.config.get(key)
        if type(size) is not int or size < 1:
            raise invalid_gguf(
                self.header.file, f"its tensors need {key}, which is {short_repr(size)}"
            )
        return size

    def _fused_rows(self, name: str, count: int) -> Tensor:
        """Return the order in which each key head follows its queries, and its value head it."""
        H, G = (self._heads(x) for x in ("attention.head_count", "attention.head_count_kv"))
        if G < 1 or H < 1 or H % G or count < 1 or count % (H + 2 * G):
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


def _name_table(its_family: Family, own: NameTable) -> NameTable:
    """Return the name table of a family with entries in place of those for the same parameters."""
    replaced = {name for entry in own.values() for name in _parameter_patterns(entry)}
    others = {k: x for k, x in its_family.names.items() if not replaced & _parameter_patterns(x)}
    return {**others, **own}


def _parameter_patterns(entry: NameEntry) -> set[str]:
    """Return the names of the parameters of an entry, with {} for numbers."""
    if isinstance(entry, str):
        return {entry}
    rules = entry if isinstance(entry, tuple) else (entry,)
    return {name_pattern(name) for rule in rules for name in rule.parameters}


def _layer_of(name: str) -> int:
    """Return the layer of a tensor of the file, or -1."""
    match = _LAYER.match(name)
    return -1 if match is None else int(match[1])


def _files_of(
    pattern: str,
    layer: int,
    header: GgufHeader,
    its: Architecture,
    known: tuple[Any, Sequence[str]],
) -> tuple[str, ...]:
    """Return the names of the tensors of which a stored tensor of a layer is made, by llama.cpp's
    table, which lacks some families' prefixes.
    """
    for name_end, (parts, _) in its.joined.items():
        tensor_names = tuple(x.format(layer) for x in parts)
        if pattern.endswith(name_end) and tensor_names[0] in header.tensors:
            return tensor_names
    if pattern in its.file_names:
        return (its.file_names[pattern].format(layer),)
    for ours, theirs in _SPELLINGS.items():
        pattern = pattern.replace(ours, theirs)
    stem, _, end = pattern.replace(".experts.{}.", ".experts.").format(layer).rpartition(".")
    suffixes: tuple[str, ...] = (f".{end}",)
    if end not in ("weight", "bias"):
        stem, suffixes = f"{stem}.{end}", (".weight", ".bias", "")
    table, prefixes = known
    spellings = (stem, *(stem.removeprefix(x) for x in prefixes))
    own = next((x for x in map(table.get_name, spellings) if x is not None), None)
    return next(((own + x,) for x in suffixes if own and own + x in header.tensors), ())


def _stored_names(
    header: GgufHeader, architecture: str, its_family: Family, count: int
) -> Iterator[tuple[str, tuple[GgufTensor, ...]]]:
    """Yield the family's names of stored tensors that the file has, with these."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    its = ARCHITECTURES[architecture]
    known_as = its.library or architecture
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == known_as)
    most = len(header.tensors)
    if header.metadata.get(f"{architecture}.nextn_predict_layers", 0) != 0:
        most = min(most, count)  # the layers behind are not read
    layers = sorted({x for x in map(_layer_of, header.tensors) if 0 <= x < most})
    table = get_tensor_name_map(number, layers[-1] + 1 if layers else 0)
    for pattern in its_family.names:
        is_expert = ".experts.{}." in pattern
        stem = pattern.rpartition(".")[0]
        for layer in layers if "{}" in pattern else [0]:
            files = _files_of(pattern, layer, header, its, (table, its_family.prefixes))
            if not files or any(x not in header.tensors for x in files):
                continue
            other, needed = its.alternatives.get(stem.rpartition(".")[2], ("", False))
            place = _LAYER.match(files[0])
            if place and (f"{place[0]}{other}" in header.tensors) != needed:
                continue
            tensors = tuple(header.tensors[x] for x in files)
            if is_expert and len(tensors[0].shape) < 2:
                raise invalid_gguf(header.file, f"{files} have shapes that do not fit together")
            if not is_expert:
                yield pattern.format(layer), tensors
                continue
            for i in range(min(tensors[0].shape[0], 1 << 12)):
                yield pattern.format(layer, i), tuple(x.part(i) for x in tensors)


def _in_order(x: Tensor, blocks: Tensor) -> Tensor:
    """Return the columns of a tensor, block by block in another order."""
    ordered: Tensor = x.unflatten(-1, (len(blocks), -1))[..., blocks, :]
    return ordered.flatten(-2)


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
                plain_dtype(parts[0].format.name) or dtype,
                model.shape(name),
                parts[0].file,
                parts[0].start,
                sum(x.bytes for x in parts),
            )
            for name, parts in tensors.items()
        }
        file = model.header.file
        entries |= {
            name: StoredTensor(name, x.dtype, tuple(x.shape), file, 0, x.nbytes)
            for name, x in model.numbers.items()
        }
        total = sum(x.bytes for x in entries.values())
        return cls(file, MappingProxyType(entries), total, model.header.marks, model, dtype)

    def read(
        self, names: Iterable[str] | None = None, buffering: ReadBuffering = DEFAULT_BUFFERING
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values as `CheckpointTensors.read` does; `buffering` is not used."""
        chosen = set(self.tensors if names is None else names)
        for name in (x for x in self.tensors if x in chosen):
            yield name, self._read(name)

    def _read(self, name: str) -> Tensor:
        if name not in self.model.names:
            return self.model.numbers[name]
        architecture, rows = self.model.architecture, self.model.rows(name)
        parts = [self._numbers(x) for x in self.model.names[name]]
        whole = self.model.join(name, parts)
        if (
            architecture.norm_offset
            and name.endswith("norm.weight")
            and ".linear_attn." not in name
        ):
            whole = whole - architecture.norm_offset
        whole = whole if rows is None else whole[rows]
        columns = self.model.columns(name)
        return whole if columns is None else _in_order(whole, columns)

    def _numbers(self, tensor: GgufTensor) -> Tensor:
        """Return the numbers of a tensor of the file."""
        header, kind = self.model.header, tensor.format.name
        if (plain := plain_dtype(kind)) is not None:
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
        count = tensor.shape[0]
        if tensor.shape[1] != shape[1] or last > count or (is_last and last < count):
            raise FileError(
                f"{self.model.header.file}: {short_repr(tensor.name)} is {tensor.shape}; the "
                f"metadata requires {tuple(shape)}"
            )
        rows = self.model.rows(name)
        if rows is None:
            return self._whole(name, tensor.rows(first, last), None, dtype)
        return self._whole(name, tensor, rows[first:last], dtype)

    def _whole(
        self, name: str, tensor: GgufTensor, rows: Tensor | None, dtype: torch.dtype
    ) -> StoredWeight:
        """Return all rows of a tensor in an order, put together panel by panel."""
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
        columns = self.model.columns(name)
        if columns is not None:
            whole = [_in_order(x, columns) for x in whole]
        remaining = iter(whole)
        if rows is None:
            return record.map(lambda _: next(remaining))
        order = rows.numpy()
        return record.map(lambda _: torch.from_numpy(next(remaining).numpy()[order]))
