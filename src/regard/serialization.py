"""Conversion of masks, biases and score rules to plain data and back, executing nothing: the class
maps to its first field, a tensor becomes its stored name, a string {"word": ...}, a nested rule a
dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeVar

from torch import Tensor

from regard.errors import ArgumentError
from regard.process_state import is_compiling
from regard.registry import Registry
from regard.units import plural
from regard.untrusted_text import short_repr

Data = dict[str, object]
StoreTensor = Callable[[Tensor], str]
"""A function that stores a tensor and returns the name under which it is stored."""

FALLBACK_KEYS = ("dense", "was")
"""Keys that are added for objects whose class a reader may lack: the values as a dense tensor
("dense"), and the text of the object ("was").
"""


class NotSerializable(TypeError):
    """A field contains a value that cannot be stored as plain data, such as a function."""


class Serializable:
    """Base class of masks, biases and score rules: frozen dataclasses, stored as plain data."""

    kind: ClassVar[str]
    """The name of the class in text and in files."""

    _custom_code: ClassVar[bool | None] = None
    """What `has_custom_code` found in an instance, asked per layer and token; None before."""

    @property
    def has_custom_code(self) -> bool:
        """Whether this rule, or one in its fields, is a class of a user or contains a function."""
        if self._custom_code is None:
            custom = self._finds_custom_code()
            if is_compiling():
                return custom
            object.__setattr__(self, "_custom_code", custom)  # of a frozen dataclass
        return bool(self._custom_code)

    def _finds_custom_code(self) -> bool:
        if not type(self).__module__.startswith("regard."):
            return True
        values = [getattr(self, x.name) for x in fields(self)]  # type: ignore[arg-type]
        inner = [y for x in values for y in (x if isinstance(x, tuple) else (x,))]
        return any(x.has_custom_code if isinstance(x, Serializable) else callable(x) for x in inner)

    def plain_fields(self) -> dict[str, object]:
        """Return the constructor arguments of an equal object: the fields, by name."""
        names = _field_names(type(self))
        if names is None:
            raise NotSerializable(f"{type(self).__name__} is not a dataclass")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def plain_arguments(cls, first: object, others: dict[str, object]) -> dict[str, object]:
        """Return constructor arguments from stored fields, the first without a name."""
        names = _field_names(cls)
        return {names[0]: first, **others} if names else others


@dataclass(frozen=True, eq=False, repr=False)
class RuleWithTensors(Serializable):
    """Base class of biases and score rules, whose tensors compare by identity."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the rule, which may require gradients."""
        return tuple(getattr(self, name) for name in self._tensor_names())

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """Return the same rule with other tensors."""
        names = self._tensor_names()
        self._check_count(tensors, len(names))
        return replace(self, **dict(zip(names, tensors, strict=True)))

    def select_heads(self, heads: slice) -> Self:
        """Return the rule of some of the query heads."""
        raise ArgumentError(
            f"{self} cannot be split by heads; define `select_heads` in its class, or split the "
            "call in another way"
        )

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, RuleWithTensors) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return str(self)

    def _tensor_names(self) -> tuple[str, ...]:
        return tuple(f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor))

    def _key(self) -> tuple[object, ...]:
        return (type(self), *(_identity(getattr(self, f.name)) for f in fields(self)))

    def _check_count(self, tensors: Sequence[Tensor], n: int) -> None:
        if len(tensors) != n:
            raise ArgumentError(
                f"{self} has {plural(n, 'tensor')} and got {len(tensors)}; give one for each of "
                "tensors()"
            )


def _identity(value: object) -> object:
    """Return a value that compares tensors by identity."""
    if isinstance(value, Tensor):
        return ("tensor", id(value))
    return tuple(map(_identity, value)) if isinstance(value, tuple) else value


def _field_names(kind: type) -> list[str] | None:
    if "__dataclass_fields__" not in kind.__dict__:
        return None
    return [x.name for x in fields(kind) if x.init]


P = TypeVar("P", bound=Serializable)


def to_data(
    x: Serializable, store_tensor: StoreTensor, convert_nested: Callable[[Any], Data]
) -> Data:
    """Convert a mask or a bias to plain data."""

    def plain(value: object) -> object:
        if isinstance(value, Tensor):
            return store_tensor(value)
        if isinstance(value, str):
            return {"word": value}
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, tuple | list):
            return [plain(y) for y in value]
        if isinstance(value, Serializable):
            return convert_nested(value)
        raise NotSerializable(f"{type(value).__name__} cannot be stored as plain data")

    values = x.plain_fields() or {"": None}
    names = (x.kind, *list(values)[1:])
    data = {name: plain(value) for name, value in zip(names, values.values(), strict=True)}
    return {name: y for name, y in data.items() if name == x.kind or y is not None}


def from_data(
    registry: Registry[P],
    data: object,
    tensors: Mapping[str, Tensor],
    convert_nested: Callable[[object], object],
) -> P:
    """Create the object that `to_data` described."""
    if not isinstance(data, Mapping):
        raise ArgumentError(f"a {registry.what} is {short_repr(data)}; it must be a JSON object")

    def value(x: object) -> object:
        if isinstance(x, str):
            return tensors[x]
        if isinstance(x, list):
            return tuple(map(value, x))
        if not isinstance(x, Mapping):
            return x
        return x["word"] if set(x) == {"word"} else convert_nested(x)

    for name in map(str, data):
        kind = registry.get(name)
        if kind is None:
            continue
        # an object that was stored as a dense tensor also has the keys of its own class
        names = (
            [] if name in FALLBACK_KEYS else [x for x in data if x not in (name, *FALLBACK_KEYS)]
        )
        others = {str(key): value(data[key]) for key in names}
        make: Callable[..., P] = kind
        return make(**kind.plain_arguments(value(data[name]), others))
    raise ArgumentError(
        f"a {registry.what} with {short_repr(sorted(map(str, data)))} is unknown; import the "
        f"module that defines its class. Known: {', '.join(name for name, _ in registry)}"
    )
