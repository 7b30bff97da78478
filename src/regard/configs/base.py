"""What every family's config has in common: the class `ModelConfig`, its checks, and the names of
activations.

A config is a frozen dataclass whose fields are the keys of a config.json that shape the model. It
needs no torch: `regard.load` builds a network from it, and `regard cost` asks it for `sizes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from regard.cost.model import ModelSpec
from regard.errors import ArgumentError
from regard.foreign import shown
from regard.suggest import suggest

Raw: TypeAlias = Mapping[str, Any]
"""A config.json as it was parsed."""


class UnknownKey(ArgumentError):
    """A key of config.json that its family does not know: the one kind of key that a caller may
    have passed over.

    Attributes:
        path: the key, behind those of the objects that it stands in.

    >>> raise UnknownKey(("rope_scaling", "fator"), "rope_scaling has the unknown key 'fator'")
    Traceback (most recent call last):
    regard.configs.base.UnknownKey: rope_scaling has the unknown key 'fator'. If it
    changes nothing that is computed, pass it over: regard.load(folder,
    ignore=('rope_scaling.fator',)), or --ignore 'rope_scaling.fator'
    """

    def __init__(self, path: tuple[str, ...], reason: str) -> None:
        self.path = path
        name = shown(self.key)
        super().__init__(
            f"{reason}{'' if reason.endswith('?') else '.'} If it changes nothing that is "
            "computed, pass it over: "
            f"regard.load(folder, ignore=({name},)), or --ignore {name}"
        )

    @property
    def key(self) -> str:
        """The path with dots, as `ignore` names it."""
        return ".".join(self.path)


@dataclass(frozen=True)
class ModelConfig(ABC):
    """The config of one family. Its fields are the keys that shape the model, with Hugging Face's
    names; a field without a default must be in the file.

    `__post_init__` refuses sizes that contradict each other. What only the parts of the network can
    refuse, such as the numbers of a rotary scaling, is refused when it is built, and by
    `regard.models.checkpoint.family.Family.check` when a folder is read.

    Attributes:
        model_types: the values of `model_type` that this class reads. The first one is written, and
            names the family's file in `regard.models.families`.
        ignored: other keys that do not shape the computation, beside those of every family.
        fixed: other keys that are understood with these values only.
        code: what the class names of the family's published code begin with: an `auto_map` that
            names only such classes asks for what is computed here anyway. Nothing of it is run.
    """

    model_types: ClassVar[tuple[str, ...]]
    ignored: ClassVar[frozenset[str]] = frozenset()
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    code: ClassVar[str | None] = None

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, Any]:
        """The config.json with this class's own keys: older and newer spellings are renamed, and
        defaults that depend on other keys are filled in.

        Raises:
            ArgumentError: two keys contradict each other.
        """
        return dict(raw)

    @abstractmethod
    def sizes(self, name: str) -> ModelSpec:
        """The sizes of the model, from which its parameters, cache and FLOPs are counted.

        Args:
            name: what the model is called.

        Raises:
            ArgumentError: the sizes fit no model, or are not counted.
        """


def check_sizes(config: ModelConfig, *, zero: Collection[str] = ()) -> None:
    """Check that every whole number of a config is at least 1, or 0 where it may be.

    Args:
        config: the config.
        zero: the fields that may be 0.

    Raises:
        ArgumentError: a number is less.
    """
    for name, value in vars(config).items():
        least = 0 if name in zero else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ArgumentError(f"{name} is {value}; it must be at least {least}")


def rename_keys(raw: Raw, names: Mapping[str, str]) -> dict[str, Any]:
    """A config.json with other names of a key replaced by the family's own; a null says nothing.

    Args:
        raw: the parsed config.json; it is not changed.
        names: other name -> the family's own.

    Raises:
        ArgumentError: both are given, and differ.

    >>> rename_keys({"n_embed": 64, "n_layer": 2}, {"n_embed": "hidden_size"})
    {'n_layer': 2, 'hidden_size': 64}
    """
    found = dict(raw)
    for other, own in names.items():
        value = found.pop(other, None)
        if value is None:
            continue
        if found.get(own) not in (None, value):
            raise ArgumentError(
                f"{other} is {value!r} and {own} is {found[own]!r}; they mean the same: keep one"
            )
        found[own] = value
    return found


ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "linear": "linear",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""Name in config.json -> the nonlinearity that it means. "gelu" is x Phi(x) with the error
function; five names mean its approximation with tanh.
"""


def check_activation(name: str, key: str = "hidden_act") -> None:
    """Check that a name in config.json means a nonlinearity.

    Args:
        name: such as "gelu_new".
        key: where config.json has it, for the message.

    Raises:
        ArgumentError: the name is not known.

    >>> check_activation("gelu_new")
    """
    if name not in ACTIVATIONS:
        raise ArgumentError(
            f"{key} is {name!r}; supported are {', '.join(sorted(ACTIVATIONS))}"
            f"{suggest(name, ACTIVATIONS)}"
        )
