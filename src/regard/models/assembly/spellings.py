"""Keys of config.json that have had more than one name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regard.errors import ArgumentError


def respelled(raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A config.json with other names of a key replaced by the family's own; a null says nothing.

    Args:
        raw: the parsed config.json; it is not changed.
        names: other name -> the family's own.

    Raises:
        ArgumentError: both are given, and differ.

    >>> respelled({"n_embed": 64, "n_layer": 2}, {"n_embed": "hidden_size"})
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
