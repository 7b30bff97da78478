"""`Family`: the builder, the name table and other properties of a model family (`model_type`). A
name table says which parameters a stored tensor holds, and in which layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.configs.base import ModelConfig, Raw
from regard.nn.projections.heads import HeadProjection
from regard.nn.weights import stored_modules


@dataclass(frozen=True)
class TensorRule:
    """How a stored tensor is split into parameters, and how they are joined again.

    Attributes:
        parameters: the names of the parameters, with {} for the numbers in the stored name, and *
            for every number that exists.
        unpack: (stored tensor, sizes of the parameters) -> the parameters, which may be views.
        pack: the parameters -> the stored tensor. Applied to the network's parameters, it gives the
            shape that a file must have.
        requires: a further parameter that must exist for this entry to apply; None is no condition.
        unless: a parameter that must not exist for this entry to apply; None is no condition.
        keeps_inputs: whether `unpack` keeps the inputs in their order, so that it divides codes and
            their scales as it divides a weight.
    """

    parameters: tuple[str, ...]
    unpack: Callable[[Tensor, Sequence[torch.Size]], Sequence[Tensor]]
    pack: Callable[[Sequence[Tensor]], Tensor]
    requires: str | None = None
    unless: str | None = None
    keeps_inputs: bool = False


@dataclass(frozen=True)
class HeadRows:
    """Parameters that are stored in one matrix head by head: the rows of the first head of every
    parameter, then those of the second head, and so on.

    Attributes:
        heads: the name of the `HeadProjection` that has these heads.
    """

    parameters: tuple[str, ...]
    heads: str
    requires: str | None = None
    unless: str | None = None

    def of(self, model: nn.Module, numbers: Sequence[str]) -> TensorRule:
        """Return the rule for the number of heads in a layer of a network."""
        part = model.get_submodule(self.heads.format(*numbers))
        assert isinstance(part, HeadProjection)
        return self.rule(part.heads)

    def rule(self, heads: int) -> TensorRule:
        """Return the rule for a number of heads."""

        def unpack(stored: Tensor, sizes: Sequence[torch.Size]) -> list[Tensor]:
            by_head = stored.unflatten(0, (heads, -1))
            parts = by_head.split_with_sizes([size[0] // heads for size in sizes], 1)
            return [part.flatten(0, 1) for part in parts]

        def pack(parameters: Sequence[Tensor]) -> Tensor:
            return torch.cat([x.unflatten(0, (heads, -1)) for x in parameters], 1).flatten(0, 1)

        return TensorRule(self.parameters, unpack, pack, keeps_inputs=True)


NameEntry: TypeAlias = str | TensorRule | HeadRows | tuple[TensorRule | HeadRows, ...]
"""The name of a parameter, a rule, or several rules of which one at most applies in each layer,
where a name has another meaning in layers of another kind.
"""
NameTable: TypeAlias = Mapping[str, NameEntry]
"""Stored name -> what the tensor holds."""
SAME_NAMES: NameTable = {}
"""The table of a family whose parameters are stored under their names in the network."""


def as_stored(
    parameter_name: str, *, requires: str | None = None, unless: str | None = None
) -> TensorRule:
    """Return the rule of one parameter that is stored unchanged."""
    return TensorRule(
        (parameter_name,),
        lambda stored, _: (stored,),
        lambda parts: parts[0],
        requires,
        unless,
        keeps_inputs=True,
    )


def only(
    names: NameTable, *, requires: str | None = None, unless: str | None = None
) -> dict[str, tuple[TensorRule | HeadRows, ...]]:
    """Return the entries of a table with a condition, for parts that only some layers have."""
    return {
        name: tuple(replace(rule, requires=requires, unless=unless) for rule in _rules(entry))
        for name, entry in names.items()
    }


def _rules(entry: NameEntry) -> tuple[TensorRule | HeadRows, ...]:
    """Return the rules of an entry."""
    if isinstance(entry, tuple):
        return entry
    return (as_stored(entry) if isinstance(entry, str) else entry,)


def transposed(parameter_name: str) -> TensorRule:
    """Return the rule of a matrix that is stored as [in, out]."""
    return TensorRule((parameter_name,), lambda stored, _: (stored.T,), lambda parts: parts[0].T)


def reshaped(parameter_name: str, *sizes: int) -> TensorRule:
    """Return the rule of a parameter that is stored with other sizes, one of which may be -1."""
    return TensorRule(
        (parameter_name,),
        lambda stored, own: (stored.reshape(own[0]),),
        lambda parts: parts[0].reshape(sizes),
    )


def stacked_rows(*parameter_names: str) -> TensorRule:
    """Return the rule of parameters that are stored as rows of one matrix, in this order."""
    return TensorRule(
        parameter_names,
        lambda stored, sizes: stored.split_with_sizes([size[0] for size in sizes]),
        lambda parts: torch.cat(list(parts)),
        keeps_inputs=True,
    )


def weight_and_bias(stored_name: str, parameter_name: str) -> dict[str, str]:
    """Return the table entries for the weight and the bias of a module."""
    return {f"{stored_name}.{end}": f"{parameter_name}.{end}" for end in ("weight", "bias")}


def weights_and_biases(modules: Mapping[str, str], stored: str, ours: str) -> dict[str, str]:
    """Return the table entries for the weights and the biases of several modules."""
    table: dict[str, str] = {}
    for theirs, name in modules.items():
        table |= weight_and_bias(stored + theirs, ours + name)
    return table


@dataclass(frozen=True)
class TensorBinding:
    """An entry of a table with its numbers filled in: the parameters that a stored tensor holds."""

    rule: TensorRule
    parameters: tuple[str, ...]


def bind_names(model: nn.Module, names: NameTable) -> dict[str, TensorBinding]:
    """Return stored name -> parameters for the layers of a network, without missing parts."""
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    every += [name for name, _ in stored_modules(model)]
    if names is SAME_NAMES:
        return {name: TensorBinding(as_stored(name), (name,)) for name in every}
    by_pattern: dict[str, list[tuple[str, ...]]] = {}
    for name in every:
        numbers = tuple(part for part in name.split(".") if part.isdigit())
        by_pattern.setdefault(name_pattern(name), []).append(numbers)
    bindings: dict[str, TensorBinding] = {}
    bound: set[str] = set()
    for stored_name, entry in names.items():
        for rule in _rules(entry):
            for numbers in _layers_of(rule, by_pattern):
                tensor_rule = rule if isinstance(rule, TensorRule) else rule.of(model, numbers)
                parameters = tuple(
                    n for name in rule.parameters for n in _expand(name, numbers, by_pattern)
                )
                bindings[stored_name.format(*numbers)] = TensorBinding(tensor_rule, parameters)
                bound.update(parameters)
    unnamed = set(every) - bound
    assert not unnamed, f"the name table lacks {sorted(unnamed)[:5]}"
    return bindings


def _layers_of(
    rule: TensorRule | HeadRows, known: Mapping[str, list[tuple[str, ...]]]
) -> list[tuple[str, ...]]:
    """Return the numbers of the layers to which a rule applies."""
    layers = _layers(rule.parameters[0], known)
    if rule.requires is not None:
        required = _layers(rule.requires, known)
        layers = [numbers for numbers in layers if numbers in required]
    excluded = () if rule.unless is None else _layers(rule.unless, known)
    return [numbers for numbers in layers if numbers not in excluded]


_MARK = re.compile(r"\{\}|\*|(?:(?<![^.])|(?<=\.shard_))\d+(?![^.])")
"""A number in a parameter name, or its placeholder: "layers.{}.q.steps.0.weight" has two; so has
the name of a part, "layers.0.shard_1.weight".
"""


def name_pattern(name: str) -> str:
    """Replace each number in a name by {}."""
    return _MARK.sub("{}", name)


def _fitting(
    parameter_name: str, known: Mapping[str, list[tuple[str, ...]]]
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield all numbers of each parameter that matches a name, and the numbers at its {} places."""
    marks = _MARK.findall(parameter_name)
    for numbers in known.get(name_pattern(parameter_name), []):
        pairs = list(zip(marks, numbers, strict=True))
        if all(mark in ("{}", "*", number) for mark, number in pairs):
            yield numbers, tuple(number for mark, number in pairs if mark == "{}")


def _layers(
    parameter_name: str, known: Mapping[str, list[tuple[str, ...]]]
) -> list[tuple[str, ...]]:
    """Return the numbers that fit the {} places of a name, each once."""
    return list(dict.fromkeys(filled for _, filled in _fitting(parameter_name, known)))


def _expand(
    parameter_name: str, numbers: tuple[str, ...], known: Mapping[str, list[tuple[str, ...]]]
) -> Iterator[str]:
    """Yield a name with its numbers filled in; with *, all names that exist."""
    if "*" not in parameter_name:
        yield parameter_name.format(*numbers)
        return
    for all_numbers, filled in _fitting(parameter_name, known):
        if filled == numbers:
            yield name_pattern(parameter_name).format(*all_numbers)


def tie_absent_head(config: Any, raw: Raw, stored: Collection[str]) -> Any:
    """Tie the head to the embedding if it is not stored, unless config.json says otherwise."""
    if "lm_head.weight" in stored or raw.get("tie_word_embeddings") is False:
        return config
    return replace(config, tie_word_embeddings=True)


def _accept(config: object) -> None:
    """Accept every config: its class has checked it completely."""


@dataclass(frozen=True)
class Family:
    """A model family: everything about a Hugging Face `model_type` except the parts of its network.

    Attributes:
        names: the name table: stored name -> parameter name or `TensorRule`; {} is a layer number.
        complete_config: (config, raw config.json, stored names of the table) -> config with what
            only the stored tensors show, such as a tied head.
        prefixes: prefixes of stored names, such as "transformer.", that are missing where a base
            model was saved without its head.
        head: the stored name of the head's matrix, which a base model may lack; None if it may not.
        buffers: patterns (`re.fullmatch`) of stored tensors that are not weights.
        rename_stored: an older spelling of a stored name -> the spelling of the table.
        keep_float32: patterns (`*`) of parameters that a narrower dtype would damage; they stay in
            float32 or better.
        keep_int64: patterns of parameters that are whole numbers, such as a table of experts.
        check: raises for a config that only the parts of the network can refuse, such as numbers of
            a rotary scaling; it is called before weights are read or downloaded.
        architecture: the kind of network: "decoder", "encoder", "encoder-decoder", or
            "speech-to-text", an encoder-decoder whose source is log-mel features.
    """

    config: type[ModelConfig]
    build: Callable[[Any], nn.Module]
    names: NameTable
    complete_config: Callable[[Any, Raw, Collection[str]], Any] = tie_absent_head
    prefixes: tuple[str, ...] = ()
    head: str | None = None
    buffers: tuple[str, ...] = ()
    rename_stored: Callable[[str], str] = str
    keep_float32: tuple[str, ...] = ()
    keep_int64: tuple[str, ...] = ()
    check: Callable[[Any], object] = _accept
    architecture: str = "decoder"

    def build_empty(self, config: ModelConfig) -> nn.Module:
        """Build a network on "meta", without the time that drawing initial values takes."""
        with torch.device("meta"), _NoInitialValues():
            return self.build(config)

    def dtype_of(self, parameter_name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of one parameter in a network of this dtype."""
        if any(fnmatchcase(parameter_name, pattern) for pattern in self.keep_int64):
            return torch.int64
        keeps = any(fnmatchcase(parameter_name, pattern) for pattern in self.keep_float32)
        return torch.promote_types(dtype, torch.float32) if keeps else dtype


class _NoInitialValues(TorchFunctionMode):
    """A context in which the functions of `torch.nn.init` skip tensors on the device "meta"."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        keywords = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else keywords["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **keywords)
