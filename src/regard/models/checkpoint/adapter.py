"""Low-rank adapters of PEFT (LoRA, DoRA) beside their base: adapter_config.json as data, and the
base's tensors with the adapter merged in as they are read. Matrices in few bits that it changes are
dequantized first, because the sum is not a number of their form; the others stay as they are.

    W' = W + s B A,  s = lora_alpha / r, or lora_alpha / sqrt(r) if use_rslora
    W'_n = m_n V_n / |V_n|,  V = W + s B A,  for the rows n of DoRA

Source: Hu et al. 2021 (arXiv 2106.09685); Kalajdzievski 2023 (arXiv 2312.03732); Liu et al. 2024
(arXiv 2402.09353).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from regard.did_you_mean import suggest
from regard.errors import FileError
from regard.files.reading import checked_path, checked_path_or_none, read_json
from regard.files.safetensors_files import (
    DEFAULT_BUFFERING,
    ReadBuffering,
    StoredTensor,
    read_header,
)
from regard.models.checkpoint.family import (
    Family,
    TensorBinding,
    TensorRule,
    bind_names,
    name_pattern,
)
from regard.models.checkpoint.group_quantized import IntegerCodes
from regard.models.checkpoint.stored_forms import StoredRecords
from regard.models.checkpoint.tensors import (
    CheckpointTensors,
    Conversion,
    describe_other_weights,
)
from regard.untrusted_text import short_repr

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the names of the base."""
_PARTS = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_embedding_A": "A",
    "lora_embedding_B": "B",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
_READ_KEYS = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "fan_in_fan_out", "use_dora", "bias"),
        *("modules_to_save", "rank_pattern", "alpha_pattern", "target_modules"),
        "init_lora_weights",
    }
)
_HARMLESS_KEYS = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "exclude_modules", "lora_dropout", "layers_to_transform"),
        *("layers_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config", "qalora_group_size", "ensure_weight_tying"),
        *("runtime_config", "velora_config", "monteclora_config"),
    }
)
"""Keys about training, or about where the adapter comes from."""
_UNUSED_KEYS = frozenset(
    {
        *("trainable_token_indices", "use_qalora", "layer_replication", "lora_bias", "kasa_config"),
        *("target_parameters", "use_bdlora", "arrow_config", "alora_invocation_tokens"),
    }
)
"""Keys of other methods, which must be empty or false."""
_INITIAL = (True, False, "gaussian", "eva", "orthogonal", None)
"""The initial values that leave the base as it is; others (PiSSA, OLoRA) change it."""


@dataclass(frozen=True)
class LowRankChange:
    """The change of one matrix of a base.

    Attributes:
        names: "A", "B" and, in DoRA, "magnitude" -> the name in the adapter's file.
        scale: the factor of B A.
        turned: whether the product is transposed to the layout of the base's tensor.
    """

    names: Mapping[str, str]
    scale: float
    turned: bool

    def apply(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the changed matrix, in fp32 or better."""
        A, B, magnitude = (tensors.get(key) for key in ("A", "B", "magnitude"))
        assert A is not None
        assert B is not None
        dtype = torch.promote_types(weight.dtype, torch.float32)
        own = weight.to(dtype).T if self.turned else weight.to(dtype)
        changed = torch.addmm(own, B.to(dtype), A.to(dtype), alpha=self.scale)
        if magnitude is not None:
            changed *= (magnitude.to(dtype) / changed.norm(dim=1))[:, None]
        return changed.T.contiguous() if self.turned else changed


@dataclass(frozen=True)
class AdaptedTensors(CheckpointTensors):
    """The tensors of a base with an adapter merged in.

    Attributes:
        changes: name of a base's tensor -> its change, or the name of the adapter's tensor in its
            place.
    """

    base: CheckpointTensors
    adapter: CheckpointTensors
    changes: Mapping[str, LowRankChange | str]

    def read(
        self, names: Iterable[str] | None = None, buffering: ReadBuffering = DEFAULT_BUFFERING
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values as `CheckpointTensors.read` does."""
        for name, tensor in self.base.read(names, buffering):
            yield name, self._changed(name, tensor)

    def read_kept(
        self, names: Iterable[str], integer_names: Collection[str]
    ) -> Iterator[tuple[str, Tensor | IntegerCodes]]:
        """Yield names and values as `CheckpointTensors.read_kept` does; changed ones are plain."""
        for name, value in self.base.read_kept(names, set(integer_names) - self.changes.keys()):
            yield name, self._changed(name, value) if isinstance(value, Tensor) else value

    def conversion(self, dense: Mapping[str, int]) -> Conversion | None:
        """Return what `CheckpointTensors.conversion` of the base does."""
        return self.base.conversion(dense)

    def _changed(self, name: str, weight: Tensor) -> Tensor:
        change = self.changes.get(name)
        if change is None:
            return weight
        if isinstance(change, str):
            return dict(self.adapter.read([change]))[change]
        read = dict(self.adapter.read(change.names.values()))
        return change.apply(weight, {key: read[stored] for key, stored in change.names.items()})


@dataclass(frozen=True)
class WidenedTensors(CheckpointTensors):
    """The plain tensors of a base, and some matrices that it holds in few bits, dequantized.

    Attributes:
        network: the network on "meta", which has the shapes of the parameters.
        widened: the stored name of a matrix that is dequantized -> its parameters.
        taken: what was dequantized: stored name -> its form and its bytes.
    """

    base: CheckpointTensors
    records: StoredRecords
    network: nn.Module
    widened: Mapping[str, TensorBinding]
    taken: dict[str, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        base: CheckpointTensors,
        records: StoredRecords,
        network: nn.Module,
        widened: Mapping[str, TensorBinding],
    ) -> WidenedTensors:
        """Return a base with further names."""
        entries = dict(base.tensors)
        for name, x in widened.items():
            whole = x.rule.pack([network.get_parameter(y) for y in x.parameters])
            entries[name] = StoredTensor(
                name, torch.float32, tuple(whole.shape), base.folder, 0, 4 * whole.numel()
            )
        return cls(
            base.folder,
            MappingProxyType(entries),
            base.bytes,
            base.marks,
            base,
            records,
            network,
            widened,
        )

    def read(
        self, names: Iterable[str] | None = None, buffering: ReadBuffering = DEFAULT_BUFFERING
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values as `CheckpointTensors.read` does."""
        chosen = set(self.tensors if names is None else names)
        yield from self.base.read(chosen - self.widened.keys(), buffering)
        for name in (x for x in self.widened if x in chosen):
            yield name, self._whole(name)

    def _whole(self, name: str) -> Tensor:
        """Return a matrix in fp32, in the layout of its stored name."""
        parts, forms, size = [], set(), 0
        for parameter in self.widened[name].parameters:
            shape = self.network.get_parameter(parameter).shape
            record = self.records.read(parameter, shape, torch.float32)
            parts.append(record.dequantize())
            forms.add(record.form)
            size += record.bytes
        self.taken[name] = "+".join(sorted(forms)), size
        return self.widened[name].rule.pack(parts)

    def conversion(self, dense: Mapping[str, int]) -> Conversion | None:
        """Count the matrices in few bits that became plain numbers of so many bytes, or None."""
        taken = {name: x for name, x in self.taken.items() if name in dense}
        forms = sorted({form for form, _ in taken.values()})
        sizes = sum(x for _, x in taken.values()), sum(dense[name] for name in taken)
        count = sum(len(self.widened[name].parameters) for name in taken)
        return (
            Conversion("+".join(forms), count, len(self.records.names), *sizes) if taken else None
        )


def adapted(
    base: CheckpointTensors,
    records: StoredRecords | None,
    folder: Path,
    family: Family,
    network: nn.Module,
) -> tuple[AdaptedTensors, StoredRecords | None]:
    """Return the tensors of a base with the adapter of a folder merged in, and what stays in few
    bits.
    """
    config = _read_config(folder)
    header = read_header(_weights(folder))
    tensors = {x.name: x for x in header.tensors}
    total = sum(x.bytes for x in header.tensors)
    marks = MappingProxyType({header.file: header.mark})
    adapter = CheckpointTensors(folder, MappingProxyType(tensors), total, marks)
    groups: dict[str, dict[str, str]] = {}
    changes: dict[str, LowRankChange | str] = {}
    in_few_bits: dict[str, TensorBinding] = {}
    if records is not None:
        bindings = bind_names(network, family.names).items()
        in_few_bits = {n: x for n, x in bindings if records.names.keys() >= {*x.parameters}}
    find = partial(_base_name, base.tensors.keys() | in_few_bits.keys(), family)
    for stored in tensors:
        if not stored.startswith(PREFIX):
            raise FileError(
                f"{header.file}: the name {short_repr(stored)} does not begin with {PREFIX!r}, as "
                "the names of PEFT do; was it saved by another library?"
            )
        name = stored.removeprefix(PREFIX)
        end = next((end for end in _PARTS if name.endswith(f".{end}")), None)
        if end is None:
            changes[find(name.replace(".base_layer.", "."))] = stored
        else:
            groups.setdefault(name.removesuffix(f".{end}"), {})[end] = stored
    for module, suffixes in groups.items():
        name = find(f"{module}.weight")
        changes[name] = _low_rank(adapter, config, module, suffixes, _is_turned(family, name))
    if records is not None:
        widened = {name: x for name, x in in_few_bits.items() if name in changes}
        base = WidenedTensors.of(base, records, network, widened)
        own = {parameter for x in widened.values() for parameter in x.parameters}
        rest = {name: x for name, x in records.names.items() if name not in own}
        records = replace(records, names=rest)  # type: ignore[type-var]
    for name, change in changes.items():
        _check_change(base, adapter, name, change)
    _check_saved(header.file, config, changes)
    entries = dict(base.tensors)
    for name, change in changes.items():
        dtype = torch.promote_types(entries[name].dtype, torch.float32)
        dtype = tensors[change].dtype if isinstance(change, str) else dtype
        entries[name] = replace(entries[name], dtype=dtype)
    merged = AdaptedTensors(
        base.folder,
        MappingProxyType(entries),
        base.bytes,
        MappingProxyType({**base.marks, **marks}),
        base,
        adapter,
        MappingProxyType(changes),
    )
    return merged, records


def _base_name(stored: Collection[str], family: Family, name: str) -> str:
    """Return the base's name of a tensor: one of both may lack the prefix that heads add."""
    spellings = [name, *(prefix + name for prefix in family.prefixes)]
    spellings += [name.removeprefix(prefix) for prefix in family.prefixes]
    return next((x for x in spellings if x in stored), name)


def _is_turned(family: Family, name: str) -> bool:
    """Return whether a family stores a matrix as [in, out]."""
    entries = [family.names.get(name_pattern(x + name)) for x in ("", *family.prefixes)]
    return any(isinstance(x, TensorRule) and not x.keeps_inputs for x in entries)


def _weights(folder: Path) -> Path:
    """Return the file of an adapter's tensors."""
    if checked_path_or_none(folder, WEIGHTS) is None:
        other = describe_other_weights(
            [path.name for path in folder.iterdir() if path.name.startswith("adapter_model")]
        )
        there = f"; the folder has {other}" if other else ""
        raise FileError(f"{folder / WEIGHTS} is missing{there}")
    return checked_path(folder, WEIGHTS)


def _read_config(folder: Path) -> Mapping[str, Any]:
    """Return the keys of adapter_config.json, each known."""
    if checked_path_or_none(folder, CONFIG) is None:
        raise FileError(
            f"{folder / CONFIG} is missing; an adapter is a folder with it and {WEIGHTS}"
        )
    path = checked_path(folder, CONFIG)
    config: Mapping[str, Any] = read_json(path)
    known = _READ_KEYS | _HARMLESS_KEYS | _UNUSED_KEYS
    for key, value in config.items():
        if key not in known:
            hint = suggest(key, sorted(known), otherwise=";")
            raise FileError(
                f"{path}: the unknown key {short_repr(key)}{hint} its effect on the weights is not "
                "known. Remove it if it has none"
            )
        if key in _UNUSED_KEYS and value:
            raise FileError(
                f"{path}: {key} is {short_repr(value)}, which is not supported; merge the adapter "
                "with PEFT (merge_and_unload), and load the folder that it saves"
            )
    allowed: dict[str, tuple[object, ...]] = {
        "peft_type": ("LORA",),
        "bias": ("none", "all", "lora_only", None),
        "init_lora_weights": _INITIAL,
    }
    allowed |= dict.fromkeys(("use_rslora", "fan_in_fan_out", "use_dora"), (True, False, None))
    for key, values in allowed.items():
        value = config.get(key)
        if not any(type(value) is type(x) and value == x for x in values):
            names = ", ".join(map(repr, values))
            raise FileError(f"{path}: {key} is {short_repr(value)}; supported: {names}")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise FileError(f"{path}: {key} is {short_repr(config[key])}; it must be an object")
    return config


def _low_rank(
    adapter: CheckpointTensors,
    config: Mapping[str, Any],
    module: str,
    suffixes: Mapping[str, str],
    turned: bool,  # noqa: FBT001
) -> LowRankChange:
    """Return the change of a module, checked against the settings."""
    path, names = adapter.folder / CONFIG, {_PARTS[end]: stored for end, stored in suffixes.items()}
    embeds = "lora_embedding_A" in suffixes
    wanted = {"A", "B", "magnitude"} if config.get("use_dora") else {"A", "B"}
    if names.keys() != wanted or (embeds and config.get("use_dora")):
        raise FileError(
            f"{adapter.folder / WEIGHTS}: {short_repr(module)} has {', '.join(sorted(suffixes))}; "
            f"with use_dora {bool(config.get('use_dora'))} it must have {', '.join(sorted(wanted))}"
        )
    targets = config.get("target_modules")
    if isinstance(targets, list) and not any(_names_module(str(x), module) for x in targets):
        raise FileError(
            f"{path}: target_modules are {short_repr(targets)}, and {WEIGHTS} has a change of "
            f"{short_repr(module)}; are the two files from one adapter?"
        )
    A, B = adapter.tensors[names["A"]].shape, adapter.tensors[names["B"]].shape
    rank = _setting(path, config, "r", "rank_pattern", module)
    if len(A) != 2 or len(B) != 2 or A[0] != rank or B[1] != rank or rank != int(rank):
        raise FileError(
            f"{adapter.folder / WEIGHTS}: {short_repr(module)} has A {A} and B {B}; {CONFIG} gives "
            f"it the rank {rank}, so that they must be [{rank}, in] and [out, {rank}]"
        )
    alpha = _setting(path, config, "lora_alpha", "alpha_pattern", module)
    fan_in_fan_out = bool(config.get("fan_in_fan_out"))
    if turned != fan_in_fan_out and not embeds:
        layout = "[in, out]" if turned else "[out, in]"
        raise FileError(
            f"{path}: fan_in_fan_out is {fan_in_fan_out}, and the base stores {short_repr(module)} "
            f"as {layout}; is this the adapter of another model?"
        )
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return LowRankChange(names, scale, turned or embeds)


def _setting(
    path: Path, config: Mapping[str, Any], key: str, pattern_key: str, module: str
) -> float:
    """Return a number for a module: that of the first pattern with its name, or the common one."""
    value: Any = config.get(key)
    for pattern, own in (config.get(pattern_key) or {}).items():
        if re.search(r"[^\w.\-^\\]", pattern):
            raise FileError(
                f"{path}: {pattern_key} has {short_repr(pattern)}; names are supported, and no "
                "other patterns"
            )
        if _names_module(pattern.replace("\\", ""), module):
            value = own
            break
    if type(value) not in (int, float) or not 0 < value < 2**24:
        raise FileError(f"{path}: {key} is {short_repr(value)}; it must be a number above 0")
    number: float = value
    return number


def _names_module(name: str, module: str) -> bool:
    """Return whether a name is that of a module, or the end of it; ^ is the beginning."""
    whole = name.removeprefix("^")
    return module == whole or (whole == name and module.endswith(f".{name}"))


def _check_change(
    base: CheckpointTensors, adapter: CheckpointTensors, name: str, change: LowRankChange | str
) -> None:
    """Check that a base has the tensor of a change, in its shape."""
    file = adapter.folder / WEIGHTS
    if name not in base.tensors:
        raise FileError(
            f"{file} changes {short_repr(name)}, which {base.folder} does not have"
            f"{suggest(name, base.tensors)}; is it the adapter of another model?"
        )
    if isinstance(change, str):
        shape = adapter.tensors[change].shape
    else:
        A, B = (adapter.tensors[change.names[key]].shape for key in ("A", "B"))
        shape = (A[1], B[0]) if change.turned else (B[0], A[1])
        magnitude = change.names.get("magnitude")
        if magnitude is not None and adapter.tensors[magnitude].shape != B[:1]:
            raise FileError(f"{file}: {short_repr(magnitude)} must have the length {B[0]}")
    if shape != base.tensors[name].shape:
        raise FileError(
            f"{file} changes {short_repr(name)} as {shape}, which is {base.tensors[name].shape} in "
            f"{base.folder}; is it the adapter of another model, or of another vocabulary?"
        )


def _check_saved(
    file: Path, config: Mapping[str, Any], changes: Mapping[str, LowRankChange | str]
) -> None:
    """Check that the adapter has every module that was trained as a whole."""
    whole = [name.rpartition(".")[0] for name, x in changes.items() if isinstance(x, str)]
    for module in config.get("modules_to_save") or ():
        if not any(_names_module(str(module), name) for name in whole):
            raise FileError(
                f"{file} lacks {short_repr(module)}, which is one of modules_to_save in {CONFIG}"
            )
