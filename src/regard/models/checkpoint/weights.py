"""Filling a model with stored tensors: each one is used, each parameter is filled, or the folder is
refused.

`placed` finds which name of the family's table each stored tensor has: a file may lack a prefix, or
have one too many.
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
from regard.errors import FileError
from regard.models.checkpoint.family import Family
from regard.models.checkpoint.names import Binding, bind, pattern
from regard.models.checkpoint.store import Store, check_finite
from regard.untrusted_text import error_text, escape_controls, short_repr

_DEEPEST = 8  # wrappers around a model; each costs a pass over all names


class Filled(NamedTuple):
    """What was not as a checkpoint has it.

    Attributes:
        fresh: names of weights that were missing, and allowed to be: they are not trained.
        ignored: names of stored tensors that belong to no parameter, and were passed over.
    """

    fresh: list[str]
    ignored: list[str]


def fill(
    model: nn.Module,
    family: Family,
    store: Store,
    *,
    dtype: torch.dtype,
    allow_missing: Sequence[str] = (),
    ignore: Sequence[str] = (),
    finite: bool = False,
    fresh: Callable[[], nn.Module] | None = None,
) -> Filled:
    """Give every parameter of a model, which may be on the device "meta", its stored values in one
    dtype.

    Names and shapes are compared before anything is read. A tensor at a time is read, so that no
    more is in memory than the model and that one tensor.

    Args:
        model: made by the family's builder.
        family: with the name table.
        store: the tensors of a folder.
        dtype: of the parameters.
        allow_missing: patterns (`*`, `?`) of stored names that may be absent; their parameters are
            those of `fresh`.
        ignore: patterns (`*`, `?`) of stored names that may be left unused where the model has no
            parameter for them.
        finite: whether to look for NaN and infinity in what is read.
        fresh: makes the model with fresh weights, for what may be missing.

    Raises:
        FileError: a tensor is missing, unexpected, of another shape, not finite, or contradicts its
            twin.
    """
    bindings = bind(model, family.names)
    where = placed(store.folder, store.tensors, family, bindings.__contains__)
    place = where.names
    parameters = dict(model.named_parameters(remove_duplicate=False))
    wanted, twins = _first_names(bindings, parameters)
    given = {twins.get(name, name) for name in place.values()}
    missing = [name for name in wanted if name not in given]
    allowed = [n for n in missing if any(fnmatchcase(n, p) for p in allow_missing)]
    ignored = [n for n in where.homeless if any(fnmatchcase(n, p) for p in ignore)]
    passed = {*ignored}
    unexpected = [n for n in where.homeless if n not in passed]
    if unexpected or len(missing) > len(allowed):
        wrong = _complaint(store, [n for n in missing if n not in allowed], unexpected)
        raise FileError(error_text(wrong, 4000))
    _check_shapes(store, place, bindings, parameters)
    owners = _owners(model)
    filled: dict[int, str] = {}
    for stored_name, tensor in store.read(place):
        if finite:
            check_finite(stored_name, tensor)
        found = _taken(tensor, bindings[place[stored_name]], parameters, family, dtype)
        for ours, value in found.items():
            key = id(parameters[ours])
            if key in filled:
                _check_same(store, (filled[key], stored_name), value, owners[key])
            else:
                _assign(owners[key], value)
                filled[key] = stored_name
    if allowed:
        assert fresh is not None
        made = dict(fresh().named_parameters(remove_duplicate=False))
        for ours in (o for name in allowed for o in bindings[name].ours):
            value = made[ours].detach().to(family.dtype_of(ours, dtype))
            _assign(owners[id(parameters[ours])], value)
    return Filled(allowed, ignored)


def _first_names(
    bindings: Mapping[str, Binding], parameters: Mapping[str, Tensor]
) -> tuple[list[str], dict[str, str]]:
    """Names that must be stored, and those of parameters that another name fills: name -> that
    name.
    """
    by_parameter: dict[int, str] = {}
    wanted: list[str] = []
    twins: dict[str, str] = {}
    for name, binding in bindings.items():
        other = by_parameter.get(id(parameters[binding.ours[0]]))
        if other is None:
            wanted.append(name)
            by_parameter.update({id(parameters[ours]): name for ours in binding.ours})
        else:
            twins[name] = other
    return wanted, twins


def _check_shapes(
    store: Store,
    place: Mapping[str, str],
    bindings: Mapping[str, Binding],
    parameters: Mapping[str, Tensor],
) -> None:
    for stored_name, name in place.items():
        binding, found = bindings[name], store.tensors[stored_name]
        meta = [parameters[ours].detach().to("meta") for ours in binding.ours]
        wanted = tuple(binding.rule.give(meta).shape)
        if found.shape != wanted:
            raise FileError(
                f"{found.file}: {escape_controls(stored_name)} is {found.shape}; the config says "
                f"{wanted}"
            )
        if not found.dtype.is_floating_point:
            raise FileError(
                f"{found.file}: {escape_controls(stored_name)} is {found.dtype}; a weight must be "
                "a "
                "floating-point number"
            )


def _taken(
    tensor: Tensor,
    binding: Binding,
    parameters: Mapping[str, Tensor],
    family: Family,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The parameters that a stored tensor holds; views are copied, so that the stored one can
    go.
    """
    values = binding.rule.take(tensor, [parameters[ours].shape for ours in binding.ours])
    whole = len(values) == 1 and values[0].is_contiguous()
    found = {}
    for ours, value in zip(binding.ours, values, strict=True):
        wanted = family.dtype_of(ours, dtype)
        found[ours] = value.to(wanted) if whole else value.to(wanted, copy=True).contiguous()
    return found


Owners = dict[int, list[tuple[nn.Module, str]]]
"""Parameter -> the modules that hold it, and under which name: several where it is shared."""


def _owners(model: nn.Module) -> Owners:
    found: Owners = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, name))
    return found


def _assign(owners: Sequence[tuple[nn.Module, str]], value: Tensor) -> None:
    module, name = owners[0]
    requires = module._parameters[name]
    made = nn.Parameter(value, requires_grad=requires is not None and requires.requires_grad)
    for module, name in owners:
        module._parameters[name] = made


def _check_same(
    store: Store, names: tuple[str, str], value: Tensor, owners: Sequence[tuple[nn.Module, str]]
) -> None:
    """What is stored twice, because it is tied, is the same both times."""
    module, attribute = owners[0]
    held = module._parameters[attribute]
    if held is None or not torch.equal(held, value):
        raise FileError(
            f"{store.tensors[names[1]].file}: {escape_controls(names[0])} and "
            f"{escape_controls(names[1])} are tied by "
            "the config, and their values differ; "
            "set tie_word_embeddings to false if that is meant"
        )


def _complaint(store: Store, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What does not fit, how many, the first of them with shapes, and what they may be meant to
    be.
    """
    extra = [f"{name} {store.tensors[name].shape}" for name in unexpected[:10]]
    said = [
        (
            f"{store.folder}: {len(missing)} missing {list(missing[:10])}, {len(unexpected)} "
            f"unexpected {extra}"
        )
    ]
    for name in missing[:3]:
        close = close_matches(name, [x[:200] for x in unexpected[:500]], cutoff=0.7, longest=200)
        said += [f"; is {close[0]} meant to be {name}?"] if close else []
    if missing and not unexpected:
        said.append("; is a shard missing? --allow-missing PATTERN gives them fresh weights")
    if unexpected and not missing:
        name = short_repr(unexpected[0])
        said.append(
            "; the model has no place for them. If they change nothing that is computed here, as "
            "a head of another task does "
            f"not, pass them over: regard.load(folder, ignore=({name},)), or --ignore {name}; * "
            "stands for any letters"
        )
    return "".join(said)


@dataclass(frozen=True)
class Placed:
    """The stored tensors of a folder by the names of a family's table.

    Attributes:
        names: stored name -> name of the table, for those that have one.
        homeless: stored names that have none, and are no buffers: what a folder is refused for.
        bare: whether the names lack the family's prefix, because the base model was saved alone.
    """

    names: dict[str, str]
    homeless: tuple[str, ...]
    bare: bool


def placed(
    folder: Path, stored: Collection[str], family: Family, known: Callable[[str], bool]
) -> Placed:
    """The one way in which all names of a file are names of the table; or else the way that places
    the most.

    Tried are the names as they are, and without each prefix that all of them share, such as
    "module." of training on several devices; and both with the family's own prefix in front, which
    a base model that was saved alone lacks. A file in which some names have that prefix and others
    lack it fits no way: it was put together from two models.

    Args:
        folder: for messages.
        stored: the names in its files.
        family: its prefixes, buffers and older spellings.
        known: whether a name is one of the table.

    Raises:
        FileError: two ways fit all names, and give them to different parameters; or two stored
            names mean one parameter.

    >>> from regard.configs.base import ModelConfig
    >>> family = Family(ModelConfig, str, {}, prefixes=("model.",))
    >>> known = {"model.layers.0.w", "head"}.__contains__
    >>> placed(Path("a"), ["layers.0.w", "head"], family, known).names
    {'layers.0.w': 'model.layers.0.w', 'head': 'head'}
    >>> placed(Path("a"), ["module.model.layers.0.w", "module.head"], family, known).homeless
    ()
    """
    ways = [
        way
        for taken_off in ("", *_shared_prefixes(stored))
        for added in ("", *family.prefixes)
        if (way := _way(folder, stored, taken_off, added, family, known)) is not None
    ]
    fitting = [way for way in ways if not way.homeless]
    other = next((way for way in fitting if way.names != fitting[0].names), None)
    if other is not None:
        name = next(name for name in stored if other.names.get(name) != fitting[0].names.get(name))
        raise FileError(
            f"{folder}: the stored names can be read in two ways: {short_repr(name)} is "
            f"{fitting[0].names.get(name)} or "
            f"{other.names.get(name)}; rename the tensors as the family's published checkpoints "
            "have them"
        )
    # of equally good ways the first, which takes the names as they are
    return fitting[0] if fitting else max(ways, key=lambda way: len(way.names))


def table(family: Family) -> Callable[[str], bool]:
    """Whether a name is one of a family's table, in a model of any number of layers.

    >>> from regard.configs.base import ModelConfig
    >>> has = table(Family(ModelConfig, str, {"h.{}.w": "layers.{}.weight"}))
    >>> has("h.12.w"), has("h.w")
    (True, False)
    """
    patterns = {pattern(name) for name in family.names}
    found: dict[str, bool] = {}

    def known(name: str) -> bool:
        if name not in found:
            found[name] = pattern(name) in patterns
        return found[name]

    return known


def _way(
    folder: Path,
    stored: Collection[str],
    taken_off: str,
    added: str,
    family: Family,
    known: Callable[[str], bool],
) -> Placed | None:
    """The names without one prefix and with another; None where that makes two names one.

    A name of the table that never has the family's prefix, such as a head's, gets none.
    """
    names: dict[str, str] = {}
    homeless: list[str] = []
    taken: dict[str, str] = {}
    bare = False
    for name in stored:
        plain = family.respell(name[len(taken_off) :])
        found = added + plain
        if not known(found) and added and not plain.startswith(added):
            found = plain
        if not known(found):
            spellings = (name, name[len(taken_off) :], plain, added + plain)
            if not any(re.fullmatch(buffer, s) for s in spellings for buffer in family.buffers):
                homeless.append(name)
            continue
        if found in taken:
            if taken_off or added:
                return None
            raise FileError(
                f"{folder}: {short_repr(name)} and {short_repr(taken[found])} are two names of "
                f"{found}; "
                "keep one"
            )
        names[name], taken[found] = found, name
        bare = bare or found != plain
    return Placed(names, tuple(homeless), bare)


def _shared_prefixes(stored: Collection[str]) -> list[str]:
    """What stands in front of every name, whole parts of it, shortest first.

    >>> _shared_prefixes(["a.b.w", "a.b.c"])
    ['a.', 'a.b.']
    """
    if not stored:
        return []
    first, last = min(stored).split("."), max(stored).split(".")
    found = []
    for n in range(1, min(len(first), len(last), _DEEPEST + 1)):
        if first[:n] != last[:n]:
            break
        found.append(".".join(first[:n]) + ".")
    return found
