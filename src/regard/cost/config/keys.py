"""A config.json as a mapping whose keys are checked when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regard.cost.mechanisms import LARGEST
from regard.errors import ArgumentError
from regard.foreign import shown

REQUIRED = object()
"""The default of a key that must be there."""
MOST_LAYERS = 1 << 12
"""Layers of a model, at most: each is counted."""


class Keys:
    """A parsed config.json, read key by key.

    Args:
        raw: what the file holds.
        where: for messages.

    >>> Keys({"n_layer": 2}, "config.json").size("n_layer")
    2
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these names that is there and not null, or the default.

        Raises:
            ArgumentError: the default is REQUIRED.
        """
        for name in names:
            if (value := self.raw.get(name)) is not None:
                return value
        if default is REQUIRED:
            raise ArgumentError(
                f"{self.where}: {' or '.join(names)} is missing; it is needed to count parameters"
            )
        return default

    def size(self, *names: str, default: Any = REQUIRED, least: int = 1) -> int:
        """The same, an integer from `least` to what any model could have.

        Raises:
            ArgumentError: it is not, or is missing.
        """
        value = self.get(*names, default=default)
        most = MOST_LAYERS if "layer" in names[0] else LARGEST
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ArgumentError(
                f"{self.where}: {names[0]} is {shown(value)}; it must be an integer of at least {least} and at most {most}"
            )
        return value

    def optional(self, *names: str, default: int | None = None) -> int | None:
        """A size, or None where it is null or missing."""
        value = self.get(*names, default=default)
        return None if value is None else self.size(*names, default=default)

    def flag(self, *names: str, default: bool) -> bool:
        """True or false.

        Raises:
            ArgumentError: it is something else.
        """
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise ArgumentError(
                f"{self.where}: {names[0]} is {shown(value)}; it must be true or false"
            )
        return value

    def heads(self, heads: int, groups: int) -> None:
        """See that key/value heads serve the query heads evenly.

        Raises:
            ArgumentError: they do not.
        """
        if heads % groups:
            raise ArgumentError(
                f"{self.where}: {heads} query heads are not divisible by {groups} key/value heads"
            )

    def divided(self, dim: int, heads: int) -> int:
        """The head dim that a file leaves out.

        Raises:
            ArgumentError: it is not whole.
        """
        if dim % heads:
            raise ArgumentError(
                f"{self.where}: a width of {dim} is not divisible by {heads} heads, and head_dim is not given"
            )
        return dim // heads

    @property
    def dtype(self) -> str:
        """The format that the file names, as in `regard.cost.kept.BITS`; bf16 where it names none."""
        names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
        return names.get(str(self.get("dtype", "torch_dtype")).removeprefix("torch."), "bf16")
