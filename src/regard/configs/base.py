"""`ModelConfig`, the base class of all configs, and checks that they share.

A config is a frozen dataclass whose fields are the keys of config.json that change the network. It
needs no torch: `regard.load` builds a network from it, and `regard cost` uses its `sizes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from regard.cost.model import ModelSpec
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.untrusted_text import short_repr

Raw: TypeAlias = Mapping[str, Any]
"""The parsed content of a config.json."""


class UnknownKey(ArgumentError):
    """A key of config.json that its family does not know; a caller may choose to ignore it.

    Args:
        path: the key, after the keys of the objects that contain it.
        reason: the message.

    >>> raise UnknownKey(("rope_scaling", "fator"), "rope_scaling has the unknown key 'fator'")
    Traceback (most recent call last):
    regard.configs.base.UnknownKey: rope_scaling has the unknown key 'fator'. If it does
    not change the computation, ignore it: regard.load(folder,
    ignore=('rope_scaling.fator',)), or --ignore 'rope_scaling.fator'
    """

    def __init__(self, path: tuple[str, ...], reason: str) -> None:
        self.path = path
        name = short_repr(self.key)
        super().__init__(
            f"{reason}{'' if reason.endswith('?') else '.'} If it does not change the computation, "
            f"ignore it: regard.load(folder, ignore=({name},)), or --ignore {name}"
        )

    @property
    def key(self) -> str:
        """The path with dots, as `ignore` spells it."""
        return ".".join(self.path)


@dataclass(frozen=True)
class ModelConfig(ABC):
    """The config of one family: its fields are the keys of config.json that change the network.

    The names are those of Hugging Face. A field without a default is required. `__post_init__`
    raises for sizes that contradict each other. Values that only the parts of the network can
    check, such as the numbers of a rotary scaling, are checked when the network is built, and by
    `regard.models.checkpoint.family.Family.check` when a folder is read.

    Attributes:
        model_types: the values of `model_type` that this class reads. The first one is written, and
            is the name of the family's file in `regard.models.families`.
        ignored: further keys that do not change the computation, besides those for every family.
        fixed: key -> the only values that are supported.
        code: the beginning of the class names in the family's published code: an `auto_map` that
            names only such classes is accepted, because it is the same computation. No code is run.
    """

    model_types: ClassVar[tuple[str, ...]]
    ignored: ClassVar[frozenset[str]] = frozenset()
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    code: ClassVar[str | None] = None

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, Any]:
        """Return the keys with this class's spelling, and with defaults that depend on other keys.

        Raises:
            ArgumentError: two keys contradict each other.
        """
        return dict(raw)

    @abstractmethod
    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the model, from which parameters, cache and FLOPs are counted.

        Args:
            name: the name of the model.

        Raises:
            ArgumentError: the sizes are not possible, or cannot be counted.
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
    """Rename keys to the family's own spelling; a null counts as absent.

    Args:
        raw: the parsed config.json; it is not changed.
        names: other name of a key -> the family's own name.

    Raises:
        ArgumentError: a key and its other name are both given, with different values.

    >>> rename_keys({"n_embed": 64, "n_layer": 2}, {"n_embed": "hidden_size"})
    {'n_layer': 2, 'hidden_size': 64}
    """
    renamed = dict(raw)
    for other, own in names.items():
        value = renamed.pop(other, None)
        if value is None:
            continue
        if renamed.get(own) not in (None, value):
            raise ArgumentError(
                f"{other} is {value!r} and {own} is {renamed[own]!r}; they mean the same: keep one"
            )
        renamed[own] = value
    return renamed


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
"""Name in config.json -> nonlinearity. "gelu" is x Phi(x) with the error function; five names mean
its approximation with tanh.
"""


def check_activation(name: str, key: str = "hidden_act") -> None:
    """Check that a name in config.json is that of a nonlinearity.

    Args:
        name: such as "gelu_new".
        key: the key in config.json, for the message.

    Raises:
        ArgumentError: the name is not known.

    >>> check_activation("gelu_new")
    """
    if name not in ACTIVATIONS:
        raise ArgumentError(
            f"{key} is {name!r}; supported are {', '.join(sorted(ACTIVATIONS))}"
            f"{suggest(name, ACTIVATIONS)}"
        )
