"""Models in GGUF files: metadata as the keys of a config.json, and tensors under the names and in
the layout of Hugging Face's checkpoints.

    blk.3.attn_q.weight      -> model.layers.3.self_attn.q_proj.weight

Three differences in layout are undone. For the architecture "llama", llama.cpp stores the rows of
queries and keys in the order of interleaved rotary positions: row 2 i + j of a head is row
j D / 2 + i. For "gemma", norms are stored as 1 + w. Factors on the rotary frequencies
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import FileError
from regard.files.gguf_files import (
    GgufHeader,
    GgufTensor,
    is_gguf,
    read_gguf_header,
    read_matrix,
    read_plain,
    read_rows,
)
from regard.files.regular_files import checked_path
from regard.files.safetensors_files import DEFAULT_BUFFERING, ReadBuffering, StoredTensor
from regard.freed_memory import give_back_freed_memory
from regard.huge_pages import empty_like
from regard.models.checkpoint.family import NameTable, name_pattern
from regard.models.checkpoint.gguf_blocks import (
    RECORD_FORMS,
    dequantize_gguf,
    float_dtype,
    gguf_record,
)
from regard.models.checkpoint.gguf_config import (
    READ_KEYS,
    ROPE_FACTORS,
    gguf_architecture,
    gguf_config,
)
from regard.models.checkpoint.tensors import INDEX, SINGLE, CheckpointTensors
from regard.ops.stored_weights import StoredWeight
from regard.units import plural
from regard.untrusted_text import short_repr

_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


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
    if len(files) > 1:
        some = ", ".join(short_repr(name) for name in files[:5])
        raise FileError(
            f"{source} has {len(files)} GGUF files: {some}; give the path of the one to load"
        )
    return checked_path(source, files[0])


@dataclass(frozen=True)
class GgufModel:
    """The checked header of a model's GGUF file."""

    header: GgufHeader
    architecture: str
    config: Mapping[str, Any]
    names: Mapping[str, GgufTensor]
    ignored: tuple[str, ...]

    @classmethod
    def open(cls, path: Path, ignore: Sequence[str] = ()) -> GgufModel:
        """Read and check the header of a model's GGUF file."""
        header = read_gguf_header(path)
        architecture = gguf_architecture(header)
        unknown: list[str] = []
        names: dict[str, GgufTensor] = {}
        for name, tensor in header.tensors.items():
            known = _checkpoint_name(name)
            if known is not None:
                names[known] = tensor
            elif name != ROPE_FACTORS:
                unknown.append(name)
        prefix = f"{architecture}."
        known_keys = {prefix + key for key in READ_KEYS}
        unknown += [k for k in header.metadata if k.startswith(prefix) and k not in known_keys]
        refused = [x for x in unknown if not any(fnmatchcase(x, pattern) for pattern in ignore)]
        if refused:
            raise FileError(
                f"{path}: {', '.join(map(short_repr, refused[:5]))} "
                f"{'are' if len(refused) > 1 else 'is'} not known for the architecture "
                f"{architecture!r}, and the model could compute something else without them. If "
                f"that is meant, ignore them: regard.load(file, ignore={refused[:20]!r})"
            )
        config = gguf_config(header, architecture)
        return cls(header, architecture, config, MappingProxyType(names), tuple(unknown))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most bytes if no tensor has blocks; float32 for quantized files, in which
        the numbers of every block are exact.
        """
        bytes_of: dict[torch.dtype, int] = {}
        for tensor in self.names.values():
            dtype = float_dtype(tensor.format.name)
            if dtype is None:
                return torch.float32
            bytes_of[dtype] = bytes_of.get(dtype, 0) + tensor.bytes
        return max(bytes_of, key=lambda d: bytes_of[d], default=torch.float32)

    def split(
        self, table: NameTable, form: str | None, dtype: torch.dtype
    ) -> tuple[GgufTensors, GgufRecords]:
        """Split the tensors into those that are dequantized and those that stay in few bits."""
        plain: dict[str, GgufTensor] = {}
        records: dict[str, str] = {}
        for name, tensor in self.names.items():
            own = RECORD_FORMS.get(tensor.format.name)
            entry = table.get(name_pattern(name))
            is_matrix = len(tensor.shape) == 2 and isinstance(entry, str)
            if own is not None and form in (None, own) and is_matrix:
                assert isinstance(entry, str)
                numbers = [part for part in name.split(".") if part.isdigit()]
                records[entry.format(*numbers)] = name
            else:
                plain[name] = tensor
        return GgufTensors.of(self, plain, dtype), GgufRecords(self, MappingProxyType(records))

    def rows(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """Return the function that puts the rows of a tensor into Hugging Face's order, or None."""
        if self.architecture != "llama":
            return None
        part = next((x for x in ("q_proj", "k_proj") if f".{x}." in name), None)
        if part is None:
            return None
        key = "num_attention_heads" if part == "q_proj" else "num_key_value_heads"
        heads = self.config[key]
        rows = math.prod(self.names[name].shape[: None if ".bias" in name else -1])
        if rows % (2 * heads):
            raise FileError(
                f"{self.header.file}: {short_repr(name)} has {plural(rows, 'row')}, which "
                f"{plural(heads, 'head')} with rotary positions cannot have"
            )
        order = torch.arange(rows, device="cpu").view(heads, -1, 2).mT.flatten()
        return lambda x: x[order]


def _checkpoint_name(name: str) -> str | None:
    """Return the name of a tensor in Hugging Face's checkpoints, or None if it is not known."""
    stem, _, end = name.rpartition(".")
    if end not in ("weight", "bias"):
        return None
    if stem in _MODEL_NAMES:
        return f"{_MODEL_NAMES[stem]}.{end}"
    first, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    number = layer.isascii() and layer.isdigit() and str(int(layer[:9])) == layer
    if first != "blk" or not number or part not in _LAYER_NAMES:
        return None
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{end}"


@dataclass(frozen=True)
class GgufTensors(CheckpointTensors):
    """The tensors of a GGUF file by Hugging Face's names, dequantized in fp32 to `dtype`."""

    model: GgufModel
    dtype: torch.dtype

    @classmethod
    def of(
        cls, model: GgufModel, tensors: Mapping[str, GgufTensor], dtype: torch.dtype
    ) -> GgufTensors:
        """Return some tensors of a file."""
        entries = {
            name: StoredTensor(
                name,
                float_dtype(x.format.name) or dtype,
                x.shape,
                model.header.file,
                x.start,
                x.bytes,
            )
            for name, x in tensors.items()
        }
        total = sum(x.bytes for x in entries.values())
        marks = {model.header.file: model.header.mark}
        file = model.header.file
        return cls(file, MappingProxyType(entries), total, MappingProxyType(marks), model, dtype)

    def read(
        self, names: Iterable[str] | None = None, buffering: ReadBuffering = DEFAULT_BUFFERING
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values as `CheckpointTensors.read` does; `buffering` is not used."""
        chosen = set(self.tensors if names is None else names)
        for name in (x for x in self.tensors if x in chosen):
            yield name, self._read(name)

    def _read(self, name: str) -> Tensor:
        tensor, rows = self.model.names[name], self.model.rows(name)
        kind, dtype = tensor.format.name, self.tensors[name].dtype
        whole = (
            read_plain(self.model.header, tensor, dtype)
            if float_dtype(kind) is not None
            else read_matrix(
                self.model.header, tensor, lambda raw: dequantize_gguf(kind, raw).to(dtype)
            ).view(tensor.shape)
        )
        if self.model.architecture == "gemma" and name.endswith("norm.weight"):
            whole = whole - 1
        return whole if rows is None else rows(whole)


@dataclass(frozen=True)
class GgufRecords:
    """The matrices of a GGUF file that stay in few bits, by the names of their parameters."""

    model: GgufModel
    names: Mapping[str, str]

    @property
    def where(self) -> str:
        """The file and what is in it, for messages."""
        return f"{self.model.header.file}: the matrix"

    def read(self, parameter_name: str, shape: torch.Size, dtype: torch.dtype) -> StoredWeight:
        """Read the record of a parameter of this shape, for computations in a dtype."""
        name = self.names[parameter_name]
        tensor = self.model.names[name]
        if tensor.shape != tuple(shape):
            raise FileError(
                f"{self.model.header.file}: {short_repr(tensor.name)} is {tensor.shape}; the "
                f"metadata requires {tuple(shape)}"
            )
        return self._whole(name, tensor, dtype)

    def _whole(self, name: str, tensor: GgufTensor, dtype: torch.dtype) -> StoredWeight:
        """Return all rows, put together panel by panel."""
        header, kind, whole = self.model.header, tensor.format.name, list[Tensor]()
        record: StoredWeight | None = None
        for first, raw in read_rows(header, tensor):
            record = gguf_record(kind, raw, dtype)
            parts = list(record.tensors().values())
            whole = whole or [empty_like(x, (tensor.shape[0], *x.shape[1:])) for x in parts]
            for x, part in zip(whole, parts, strict=True):
                place = x[first : first + len(part)]  # in one thread, like the record
                np.copyto(
                    place.view(torch.uint8).numpy(), part.contiguous().view(torch.uint8).numpy()
                )
        assert record is not None  # no dimension is 0
        give_back_freed_memory()  # otherwise the panels of all matrices add up
        rows, remaining = self.model.rows(name), iter(whole)
        return record.map(lambda _: next(remaining) if rows is None else rows(next(remaining)))
