"""A published model: its config, and where that is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """Attributes: `config`, the keys of a Hugging Face config.json that say sizes; `source`; and `note` for readers."""

    config: Mapping[str, Any]
    source: str
    note: str = ""
