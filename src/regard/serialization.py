"""Masks and biases as plain data with tensors beside it, and back. Nothing in the data is executed.

An object is a dict: the name of its class holds its first field, and every other field stands under
its own name. A tensor is the name under which it is kept, a word is {"word": ...}, a sequence is a
list, and an object in a field is a dict again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from regard.errors import ArgumentError
from regard.registry import Registry
from regard.untrusted_text import short_repr

Data = dict[str, object]
StoreTensor = Callable[[Tensor], str]
"""Keeps a tensor, and says under which name."""

FALLBACK_KEYS = ("dense", "was")
"""Beside the data of an object whose class a reader may lack: its numbers written out, its text."""


class NotSerializable(TypeError):
    """A field holds what is no plain data, such as a function."""


class Serializable:
    """The base of masks and biases, which are frozen dataclasses: what makes them plain data."""

    kind: ClassVar[str]
    """The name of the class in text and in files."""

    def plain_fields(self) -> dict[str, object]:
        """What another object like this one is made from: its fields, by name.

        Raises:
            NotPlain: the class is no dataclass of its own, so that its fields may not say all.
        """
        names = _field_names(type(self))
        if names is None:
            raise NotSerializable(f"{type(self).__name__} is no dataclass")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def plain_arguments(cls, first: Any, others: dict[str, Any]) -> dict[str, Any]:
        """What the constructor takes, from the fields, of which the first comes without a name."""
        names = _field_names(cls)
        return {names[0]: first, **others} if names else others


def _field_names(kind: type) -> list[str] | None:
    if "__dataclass_fields__" not in kind.__dict__:
        return None
    return [x.name for x in fields(kind) if x.init]


P = TypeVar("P", bound=Serializable)


def to_data(x: Serializable, keep: StoreTensor, inside: Callable[[Any], Data]) -> Data:
    """An object as plain data.

    Args:
        x: a mask or a bias.
        keep: keeps a tensor.
        inside: makes the data of an object that stands in a field.

    Raises:
        NotPlain: a field holds what is no plain data.
    """

    def plain(value: object) -> object:
        if isinstance(value, Tensor):
            return keep(value)
        if isinstance(value, str):
            return {"word": value}
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, tuple | list):
            return [plain(y) for y in value]
        if isinstance(value, Serializable):
            return inside(value)
        raise NotSerializable(f"{type(value).__name__} is no plain data")

    values = x.plain_fields() or {"": None}
    names = (x.kind, *list(values)[1:])
    found = {name: plain(value) for name, value in zip(names, values.values(), strict=True)}
    return {name: y for name, y in found.items() if name == x.kind or y is not None}


def from_data(
    registry: Registry[P],
    data: object,
    tensors: Mapping[str, Tensor],
    inside: Callable[[object], object],
) -> P:
    """The object that `to_data` described.

    Args:
        registry: the classes that it may be of.
        data: what `to_data` made.
        tensors: the tensors that were kept, by name.
        inside: makes the object of the data that stands in a field.

    Raises:
        ArgumentError, KeyError, TypeError: the data describes no object of a known class.
    """
    if not isinstance(data, Mapping):
        raise ArgumentError(f"a {registry.what} is {short_repr(data)}; it must be an object")

    def value(x: object) -> Any:
        if isinstance(x, str):
            return tensors[x]
        if isinstance(x, list):
            return tuple(map(value, x))
        if not isinstance(x, Mapping):
            return x
        return x["word"] if set(x) == {"word"} else inside(x)

    for name in map(str, data):
        kind = registry.get(name)
        if kind is None:
            continue
        # where it was written out, for want of the class, the other keys are those of the class
        names = (
            [] if name in FALLBACK_KEYS else [x for x in data if x not in (name, *FALLBACK_KEYS)]
        )
        others = {str(key): value(data[key]) for key in names}
        make: Callable[..., P] = kind
        return make(**kind.plain_arguments(value(data[name]), others))
    raise ArgumentError(
        f"a {registry.what} with {short_repr(sorted(map(str, data)))} is unknown; import the "
        "module "
        f"that defines its class. Known: {', '.join(name for name, _ in registry)}"
    )
