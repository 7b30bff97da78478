"""Weights in fewer bits: the names of their forms, how a network gets them, and how a folder holds
them, as `regard.<parameter>.<tensor>` with `quant_method` "regard", so that no weight is rounded
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, FileError
from regard.files.safetensors_files import StoredTensor
from regard.models.checkpoint.tensors import CheckpointTensors
from regard.nn.weights import can_store_weight
from regard.ops.stored_weights import (
    GROUPS,
    INT4_BLOCK,
    HalfWeight,
    Int4Weight,
    Int8Weight,
    StoredWeight,
)
from regard.units import plural
from regard.untrusted_text import escape_controls, short_repr

PREFIX, METHOD = "regard.", "regard"
MIXED = "mixed"
"""The form of a folder that has weights of 8 and of 4 bits, such as one made from a GGUF file."""


@dataclass(frozen=True)
class WeightForm:
    """A form in which `regard.load(weights=...)` stores weights.

    Attributes:
        store: (weight, dtype of the computation) -> its record.
        compute: the only dtype of the computation; None allows float32, bfloat16 and float16.
    """

    name: str
    store: Callable[[Tensor, torch.dtype], StoredWeight]
    compute: torch.dtype | None = None

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Check that the form supports a dtype of the computation."""
        allowed = (
            (torch.float32, torch.bfloat16, torch.float16)
            if self.compute is None
            else (self.compute,)
        )
        if dtype not in allowed:
            names = " or ".join(str(x).removeprefix("torch.") for x in allowed)
            raise ArgumentError(
                f"weights are {self.name!r} and dtype is {dtype}; this form computes in {names}",
                argument="weights",
            )


def _half(weight: Tensor, _dtype: torch.dtype, *, half: torch.dtype) -> StoredWeight:
    return HalfWeight.round(weight, half)


FORMS = {
    "int8": WeightForm("int8", lambda w, dtype: Int8Weight.quantize(w, dtype=dtype)),
    "int4": WeightForm("int4", lambda w, dtype: Int4Weight.quantize(w, dtype=dtype)),
    "float16": WeightForm("float16", partial(_half, half=torch.float16), torch.float32),
    "bfloat16": WeightForm("bfloat16", partial(_half, half=torch.bfloat16), torch.float32),
}
"""Name -> form, as in `regard.load(weights=...)`."""


def weight_form(name: str) -> WeightForm:
    """Return the form of a name."""
    if name not in FORMS:
        raise ArgumentError(
            f"weights is {name!r}; it must be one of {', '.join(FORMS)}",
            argument="weights",
            value=name,
        )
    return FORMS[name]


def may_store(parameter: Tensor, owners: list[tuple[nn.Module, str]]) -> bool:
    """Return whether a parameter can be stored in fewer bits: a matrix, and every module that holds
    it computes with a stored weight.
    """
    return parameter.ndim == 2 and all(
        name == "weight" and can_store_weight(module) for module, name in owners
    )


class StoredRecords(Protocol):
    """Weights that a folder or a file holds in fewer bits, by the names of their parameters."""

    @property
    def names(self) -> Mapping[str, object]:
        """The names of the parameters, as keys."""

    @property
    def where(self) -> str:
        """The place and the kind of the weights, for messages."""

    def read(self, parameter_name: str, shape: torch.Size, dtype: torch.dtype) -> StoredWeight:
        """Read the record of a parameter of this shape, for computations in a dtype."""


@dataclass(frozen=True)
class RecordTensors:
    """The records of a folder that this package wrote.

    Attributes:
        names: name of a parameter -> name of the record's tensor -> stored name.
    """

    store: CheckpointTensors
    form: str
    names: Mapping[str, Mapping[str, str]]

    @property
    def where(self) -> str:
        """The folder and the form, for messages."""
        return f"{self.store.folder}: the {self.form} weight"

    def read(self, parameter_name: str, shape: torch.Size, dtype: torch.dtype) -> StoredWeight:
        """Read the record of a parameter of this shape, for computations in a dtype."""
        names = self.names[parameter_name]
        entries = {key: self.store.tensors[name] for key, name in names.items()}
        any_entry = next(iter(entries.values()))
        form = self.form
        if form == MIXED and "codes" in entries:
            form = "int8" if entries["codes"].dtype == torch.int8 else "int4"
        if problem := _layout_problem(form, entries, shape):
            raise FileError(
                f"{any_entry.file}: the {form} weight of {escape_controls(parameter_name)} "
                f"{problem}; is the file from another model?"
            )
        read = dict(self.store.read(names.values()))
        tensors = {key: read[name] for key, name in names.items()}
        if form == "int8":
            return Int8Weight(tensors["codes"], tensors["scales"], shape[1], dtype)
        return Int4Weight(tensors["codes"], tensors["scales"], shape[1], dtype)


def _layout_problem(
    form: str, entries: Mapping[str, StoredTensor], shape: torch.Size
) -> str | None:
    """Return what is wrong with the stored tensors of a record, or None."""
    if entries.keys() != {"codes", "scales"}:
        return f"has the tensors {sorted(entries)}; it must have codes and scales"
    codes, scales = entries["codes"], entries["scales"]
    N, M = shape
    per_byte, wanted = (1, torch.int8) if form == "int8" else (2, torch.uint8)
    for name, x in entries.items():
        if len(x.shape) < 2 or x.shape[0] != N or 0 in x.shape:
            return f"has {name} {x.shape}; it must have {plural(N, 'row')}"
    if codes.dtype != wanted or scales.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"has codes {codes.dtype} and scales {scales.dtype}"
    width, groups = codes.shape[1] * per_byte, scales.shape[-1]
    fits = (
        len(codes.shape) == 2
        and len(scales.shape) == (2 if form == "int8" else 3)
        and (form == "int8" or (scales.shape[1] == 2 and width % INT4_BLOCK == 0))
        and width % groups == 0
        and width // groups in GROUPS
        and M <= width < M + INT4_BLOCK
    )
    return (
        None
        if fits
        else f"has codes {codes.shape} and scales {scales.shape} for {plural(M, 'input')}"
    )


def take_records(
    store: CheckpointTensors, quantization_config: Any
) -> tuple[CheckpointTensors, RecordTensors | None]:
    """Split the tensors of a folder into plain ones and the records that this package wrote."""
    mine = isinstance(quantization_config, Mapping) and quantization_config.get("quant_method")
    if mine != METHOD:
        return store, None
    form = quantization_config.get("weights")
    if form not in ("int8", "int4", MIXED) or quantization_config.keys() - {
        "quant_method",
        "weights",
    }:
        raise FileError(
            f"{store.folder / 'config.json'}: quantization_config is "
            f"{short_repr(dict(quantization_config))}; of quant_method 'regard' it must have "
            "weights, 'int8', 'int4' or 'mixed', and nothing else"
        )
    names: dict[str, dict[str, str]] = {}
    plain: dict[str, StoredTensor] = {}
    for name, entry in store.tensors.items():
        if name.startswith(PREFIX):
            parameter_name, _, key = name.removeprefix(PREFIX).rpartition(".")
            names.setdefault(parameter_name, {})[key] = name
        else:
            plain[name] = entry
    rest = replace(store, tensors=MappingProxyType(plain))
    return rest, RecordTensors(store, form, names)


def record_tensors(parameter_name: str, record: StoredWeight) -> dict[str, Tensor]:
    """Return the tensors of a record by the names under which a folder holds them."""
    return {f"{PREFIX}{parameter_name}.{name}": x for name, x in record.tensors().items()}
