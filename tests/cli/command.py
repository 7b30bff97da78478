"""The type of the fixture `said`, which runs a command."""

from __future__ import annotations

from collections.abc import Callable

Said = Callable[..., str]
