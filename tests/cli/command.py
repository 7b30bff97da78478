"""The type of the fixtures `said` and `refused`, which run a command."""

from __future__ import annotations

from collections.abc import Callable

Said = Callable[..., str]
