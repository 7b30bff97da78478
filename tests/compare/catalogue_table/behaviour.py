"""What each mechanism computes beside softmax attention over all earlier tokens, and what becomes
of it in texts longer than those of its training: the groups of behaviour.json.

A mechanism that no group names is in the first one, exact softmax over all earlier tokens. In
longer texts it is in the first group if it has rotary positions, and in the second otherwise.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from regard.nn.variants import VARIANTS


@dataclass(frozen=True)
class Behaviour:
    """A group of mechanisms: the words of its column and what they mean, by language."""

    words: Mapping[str, str]
    meaning: Mapping[str, str]
    names: tuple[str, ...]


def _groups(column: str) -> tuple[Behaviour, ...]:
    data = json.loads((Path(__file__).parent / "behaviour.json").read_text("utf-8"))
    return tuple(
        Behaviour({k: x[k] for k in ("en", "zh")}, x["meaning"], tuple(x["mechanisms"]))
        for x in data[column]
    )


RESULTS, BEYOND = _groups("results"), _groups("beyond training")


def result_of(name: str) -> Behaviour:
    """What a mechanism computes."""
    return next((group for group in RESULTS if name in group.names), RESULTS[0])


@functools.cache
def beyond_training(name: str) -> Behaviour:
    """What becomes of a mechanism in texts longer than those of its training."""
    if named := [group for group in BEYOND if name in group.names]:
        return named[0]
    return BEYOND[0] if has_angles(VARIANTS[name].example()) else BEYOND[1]


def has_angles(module: nn.Module) -> bool:
    """Whether queries and keys are rotated by their positions."""
    return any("Rotary" in type(part).__name__ for part in module.modules())
