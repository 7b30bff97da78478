"""One row of the table of mechanisms: who uses one, when to choose it and when not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Usage:
    """What a reader should know before choosing a mechanism.

    Attributes:
        models: public models that use it.
        choose: when it is a good choice.
        avoid: when it is not.
        options: sizes of a published model, for the options that have no default.
        symbols: symbols of the equation that have another meaning in other equations.

    >>> from regard.nn.variants.usage import USAGE
    >>> USAGE["mqa"].models
    'PaLM, StarCoder, Falcon 7B, Gemma 2B'
    """

    models: str
    choose: str
    avoid: str
    options: Mapping[str, Any] = field(default_factory=dict)
    symbols: Mapping[str, str] = field(default_factory=dict)
