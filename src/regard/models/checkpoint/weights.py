"""Filling a network's parameters with the stored tensors of a checkpoint: every tensor is used and
every parameter filled, or the folder is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.did_you_mean import close_matches
from regard.errors import ArgumentError, FileError
from regard.huge_pages import HugePageBlock
from regard.models.checkpoint.family import Family, TensorBinding, bind_names, name_pattern
from regard.models.checkpoint.group_quantized import IntegerCodes
from regard.models.checkpoint.stored_forms import StoredRecords, WeightForm, may_store
from regard.models.checkpoint.tensors import CheckpointTensors, Conversion, check_finite
from regard.nn.weights import StoredWeightMixin, store_weight, stored_to_huge_pages
from regard.ops.cpu.library import DTYPES
from regard.ops.stored_weights import StoredWeight
from regard.untrusted_text import error_text, escape_controls, short_repr

# the largest number of wrapper prefixes, such as "module."; each needs a pass over all names
_MAX_PREFIX_PARTS = 8


class FillResult(NamedTuple):
    """Where a checkpoint and a network differ: weights left random, unused tensors, and what became
    of matrices in a form that is not computed with.
    """

    newly_initialized: list[str]
    ignored: list[str]
    converted: Conversion | None


def fill_parameters(
    model: nn.Module,
    family: Family,
    store: CheckpointTensors,
    *,
    dtype: torch.dtype,
    allow_missing: Sequence[str] = (),
    ignore: Sequence[str] = (),
    finite: bool = False,
    initialize: Callable[[], nn.Module] | None = None,
    form: WeightForm | None = None,
    records: StoredRecords | None = None,
) -> FillResult:
    """Give every parameter of a network, possibly on "meta", its stored values in one dtype; names
    and shapes are compared first, and one tensor is read at a time.
    """
    bindings = bind_names(model, family.names)
    mapping = map_names(store.folder, store.tensors, family, bindings.__contains__)
    name_of = mapping.names
    parameters = dict(model.named_parameters(remove_duplicate=False))
    wanted = _first_names(bindings, parameters)
    owners = _owners(model)
    recorded = _fill_records(records, parameters, owners, dtype, finite=finite)
    wanted = [n for n in wanted if not recorded.issuperset(bindings[n].parameters)]
    stored_parameters = {
        id(parameters[parameter_name])
        for name in name_of.values()
        for parameter_name in bindings[name].parameters
    }
    missing = [
        name
        for name in wanted
        if not stored_parameters.issuperset(id(parameters[p]) for p in bindings[name].parameters)
    ]
    allowed = [n for n in missing if any(fnmatchcase(n, p) for p in allow_missing)]
    ignored = [n for n in mapping.unmatched if any(fnmatchcase(n, p) for p in ignore)]
    passed = {*ignored}
    unexpected = [n for n in mapping.unmatched if n not in passed]
    if unexpected or len(missing) > len(allowed):
        wrong = _mismatch_message(store, [n for n in missing if n not in allowed], unexpected)
        raise FileError(error_text(wrong, 4000))
    _check_shapes(store, name_of, bindings, parameters)
    filled: dict[int, str] = {}
    memory = HugePageBlock(sum(dtype.itemsize * p.numel() for p in _by_id(parameters).values()))
    storable = {key for key, p in _by_id(parameters).items() if may_store(p, owners[key])}
    integer_names = [
        stored_name
        for stored_name, name in name_of.items()
        if form is None
        and dtype in DTYPES
        and bindings[name].rule.keeps_inputs
        and all(id(parameters[p]) in storable for p in bindings[name].parameters)
    ]
    dense: dict[str, int] = {}
    for stored_name, tensor in store.read_kept(name_of, integer_names):
        if finite:
            check_finite(stored_name, tensor if isinstance(tensor, Tensor) else tensor.scales)
        binding = bindings[name_of[stored_name]]
        parts, shares = _parts(tensor, binding, parameters)
        for parameter_name, part in zip(binding.parameters, parts, strict=True):
            key = id(parameters[parameter_name])
            value = part if isinstance(part, Tensor) else _record_or_weight(part, dtype)
            if isinstance(value, Tensor) and form is not None and key in storable:
                value = _stored(form, value, dtype, parameter_name)  # rounded once
            elif isinstance(value, Tensor):
                kind = family.dtype_of(parameter_name, dtype)
                value = memory.copy(value, kind) if shares or value.dtype != kind else value
                dense[stored_name] = dense.get(stored_name, 0) + value.nbytes
            if key in filled:
                _check_same(store, (filled[key], stored_name), value, owners[key])
            else:
                _assign(owners[key], value)
                filled[key] = stored_name
    if allowed:
        assert initialize is not None
        initial = dict(initialize().named_parameters(remove_duplicate=False))
        for parameter_name in (o for name in allowed for o in bindings[name].parameters):
            value = initial[parameter_name].detach().to(family.dtype_of(parameter_name, dtype))
            _assign(owners[id(parameters[parameter_name])], value)
    stored_to_huge_pages(model)
    return FillResult(allowed, ignored, store.conversion(dense))


def _first_names(
    bindings: Mapping[str, TensorBinding], parameters: Mapping[str, Tensor]
) -> list[str]:
    """Return the first name of every parameter. A checkpoint may store a parameter under a further
    name instead: one that is tied to it, or one of a tensor that holds several parameters.
    """
    named: set[int] = set()
    names: list[str] = []
    for name, binding in bindings.items():
        own = {id(parameters[parameter_name]) for parameter_name in binding.parameters}
        if own - named:
            names.append(name)
        named |= own
    return names


def _check_shapes(
    store: CheckpointTensors,
    name_of: Mapping[str, str],
    bindings: Mapping[str, TensorBinding],
    parameters: Mapping[str, Tensor],
) -> None:
    for stored_name, name in name_of.items():
        binding, entry = bindings[name], store.tensors[stored_name]
        meta = [
            parameters[parameter_name].detach().to("meta") for parameter_name in binding.parameters
        ]
        wanted = tuple(binding.rule.pack(meta).shape)
        if entry.shape != wanted:
            raise FileError(
                f"{entry.file}: {escape_controls(stored_name)} is {entry.shape}; the "
                f"config requires {wanted}"
            )
        if entry.dtype.is_floating_point != meta[0].is_floating_point():
            kind = "a floating-point number" if meta[0].is_floating_point() else "an integer"
            raise FileError(
                f"{entry.file}: {escape_controls(stored_name)} is {entry.dtype}; a weight must be "
                f"{kind}"
            )


def _parts(
    tensor: Tensor | IntegerCodes, binding: TensorBinding, parameters: Mapping[str, Tensor]
) -> tuple[Sequence[Tensor | IntegerCodes], bool]:
    """Return the parameters of a stored tensor, and whether they may be views of it."""
    sizes = [parameters[name].shape for name in binding.parameters]
    if isinstance(tensor, IntegerCodes):
        return tensor.divide(lambda x: binding.rule.unpack(x, sizes)), False
    values = binding.rule.unpack(tensor, sizes)
    return values, not (len(values) == 1 and values[0].is_contiguous())


def _record_or_weight(codes: IntegerCodes, dtype: torch.dtype) -> Tensor | StoredWeight:
    """Return a stored weight with the same numbers, or the numbers where there is none."""
    record = codes.record(dtype)
    return codes.dequantize() if record is None else record


def _stored(form: WeightForm, part: Tensor, dtype: torch.dtype, name: str) -> StoredWeight:
    """Store a parameter in a form of fewer bits."""
    try:
        return form.store(part, dtype)
    except ArgumentError as error:
        raise ArgumentError(f"{name} cannot be stored as {form.name}: {error}") from error


def _by_id(parameters: Mapping[str, Tensor]) -> dict[int, Tensor]:
    return {id(p): p for p in parameters.values()}


def _fill_records(
    records: StoredRecords | None,
    parameters: Mapping[str, Tensor],
    owners: ParameterOwners,
    dtype: torch.dtype,
    *,
    finite: bool,
) -> set[str]:
    """Give parameters the records of the folder, and return all names of these parameters."""
    if records is None:
        return set()
    done = set[int]()
    for name in records.names:
        parameter = parameters.get(name)
        if (
            parameter is None
            or id(parameter) in done
            or not may_store(parameter, owners[id(parameter)])
        ):
            raise FileError(
                f"{records.where} {short_repr(name)} belongs to no linear map or embedding of this "
                "model that has none yet; is config.json that of another model?"
            )
        record = records.read(name, parameter.shape, dtype)
        if finite:
            for key, tensor in record.tensors().items():
                check_finite(f"{name}.{key}", tensor)
        _assign(owners[id(parameter)], record)
        done.add(id(parameter))
    return {name for name, p in parameters.items() if id(p) in done}


ParameterOwners = dict[int, list[tuple[nn.Module, str]]]
"""id of a parameter -> the modules that hold it, with its name there; several if it is shared."""


def _owners(model: nn.Module) -> ParameterOwners:
    owners: ParameterOwners = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    return owners


def _assign(owners: Sequence[tuple[nn.Module, str]], value: Tensor | StoredWeight) -> None:
    if isinstance(value, StoredWeight):
        for module, _ in owners:
            store_weight(module, value)
        return
    module, name = owners[0]
    old = module._parameters[name]
    parameter = nn.Parameter(value, requires_grad=old is not None and old.requires_grad)
    for module, name in owners:
        module._parameters[name] = parameter


def _check_same(
    store: CheckpointTensors,
    names: tuple[str, str],
    value: Tensor | StoredWeight,
    owners: Sequence[tuple[nn.Module, str]],
) -> None:
    """Check that two stored tensors that are tied have the same values."""
    module, attribute = owners[0]
    if isinstance(value, StoredWeight):
        assert isinstance(module, StoredWeightMixin)
        assigned = module.stored_weight
        same = all(map(torch.equal, assigned.tensors().values(), value.tensors().values()))
    else:
        parameter = module._parameters[attribute]
        same = parameter is not None and torch.equal(parameter, value)
    if not same:
        raise FileError(
            f"{store.tensors[names[1]].file}: {escape_controls(names[0])} and "
            f"{escape_controls(names[1])} are tied by the config, and their values differ; set "
            "tie_word_embeddings to false if that is meant"
        )


def _mismatch_message(
    store: CheckpointTensors, missing: Sequence[str], unexpected: Sequence[str]
) -> str:
    """Describe the missing and unexpected tensors: how many, the first ones, and similar names."""
    extra = [f"{name} {store.tensors[name].shape}" for name in unexpected[:10]]
    parts = [
        (
            f"{store.folder}: {len(missing)} missing {list(missing[:10])}, {len(unexpected)} "
            f"unexpected {extra}"
        )
    ]
    for name in missing[:3]:
        close = close_matches(name, [x[:200] for x in unexpected[:500]], cutoff=0.7, longest=200)
        parts += [f"; is {close[0]} meant to be {name}?"] if close else []
    if missing and not unexpected:
        parts.append("; is a shard missing? --allow-missing PATTERN gives them random weights")
    if unexpected and not missing:
        names = [short_repr(pattern) for pattern in _patterns(unexpected)]
        python, shell = ", ".join(names), " ".join(f"--ignore {name}" for name in names)
        parts.append(
            "; the model has no place for them. If they change nothing that is computed here, as a "
            f"head of another task does not, ignore them: regard.load(folder, ignore=[{python}]), "
            f"or {shell}; * stands for any letters"
        )
    return "".join(parts)


def _patterns(names: Sequence[str], most: int = 8) -> list[str]:
    """Return a few patterns that match all names: the names, or one for all numbers of a layer, or
    one for all that begin alike.
    """
    for patterns in (
        names,
        [re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names],
        [f"{name.partition('.')[0]}*" for name in names],
    ):
        if len(distinct := list(dict.fromkeys(patterns))) <= most:
            return distinct
    return ["*"]


@dataclass(frozen=True)
class NameMapping:
    """The stored tensors of a folder, mapped to the names of a family's table.

    Attributes:
        unmatched: stored names that have none and are no buffers; the folder is refused for them.
        is_base_model: whether the names lack the family's prefix, because the base model was saved
            alone.
    """

    names: dict[str, str]
    unmatched: tuple[str, ...]
    is_base_model: bool


def map_names(
    folder: Path, stored: Collection[str], family: Family, known: Callable[[str], bool]
) -> NameMapping:
    """Map all stored names to names of the table in the one way that maps the most: as they are, or
    without a prefix that all share ("module."), and with or without the family's own prefix in
    front.
    """
    ways = [
        way
        for removed in ("", *_shared_prefixes(stored))
        for added in ("", *family.prefixes)
        if (way := _mapping(folder, stored, removed, added, family, known)) is not None
    ]
    fitting = [way for way in ways if not way.unmatched]
    other = next((way for way in fitting if way.names != fitting[0].names), None)
    if other is not None:
        name = next(name for name in stored if other.names.get(name) != fitting[0].names.get(name))
        raise FileError(
            f"{folder}: the stored names can be read in two ways: {short_repr(name)} is "
            f"{fitting[0].names.get(name)} or {other.names.get(name)}; rename the tensors as the "
            "family's published checkpoints have them"
        )
    # `ways` begins with the unchanged names, which are preferred among equally good ways
    return fitting[0] if fitting else max(ways, key=lambda way: len(way.names))


def name_matcher(family: Family) -> Callable[[str], bool]:
    """Return a function that says whether a name is in a family's table, for any layers."""
    patterns = {name_pattern(name) for name in family.names}
    cached: dict[str, bool] = {}

    def known(name: str) -> bool:
        if name not in cached:
            cached[name] = name_pattern(name) in patterns
        return cached[name]

    return known


def _mapping(
    folder: Path,
    stored: Collection[str],
    removed: str,
    added: str,
    family: Family,
    known: Callable[[str], bool],
) -> NameMapping | None:
    """Map the names without one prefix and with another; None if two become one."""
    names: dict[str, str] = {}
    unmatched: list[str] = []
    taken: dict[str, str] = {}
    is_base_model = False
    for name in stored:
        plain = family.rename_stored(name[len(removed) :])
        mapped = added + plain
        if not known(mapped) and added and not plain.startswith(added):
            mapped = plain
        if not known(mapped):
            spellings = (name, name[len(removed) :], plain, added + plain)
            if not any(re.fullmatch(buffer, s) for s in spellings for buffer in family.buffers):
                unmatched.append(name)
            continue
        if mapped in taken:
            if removed or added:
                return None
            raise FileError(
                f"{folder}: {short_repr(name)} and {short_repr(taken[mapped])} are two names of "
                f"{mapped}; keep one"
            )
        names[name], taken[mapped] = mapped, name
        is_base_model = is_base_model or mapped != plain
    return NameMapping(names, tuple(unmatched), is_base_model)


def _shared_prefixes(stored: Collection[str]) -> list[str]:
    """Return the prefixes, of whole parts, that all names share, shortest first."""
    if not stored:
        return []
    first, last = min(stored).split("."), max(stored).split(".")
    prefixes = []
    for n in range(1, min(len(first), len(last), _MAX_PREFIX_PARTS + 1)):
        if first[:n] != last[:n]:
            break
        prefixes.append(".".join(first[:n]) + ".")
    return prefixes
