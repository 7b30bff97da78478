"""What the loop asks of its data: batches that can be moved, and an order that can be saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, Self

import torch


class Rows(Protocol):
    """Some examples: a tensor [N, row] is one, and so is anything that moves, splits and counts like it."""

    def __len__(self) -> int: ...

    def to(self, device: torch.device, /) -> Self:
        """The same on a device."""
        ...

    def split(self, size: int, /) -> Iterable[Self]:
        """Parts of at most `size` examples."""
        ...


class Feed(Protocol):
    """Endless batches of `batch` examples, each with about `context` tokens to be predicted."""

    batch: int
    context: int

    def __next__(self) -> Any:
        """The next batch, `Rows` that the loss understands."""

    def state_dict(self) -> dict[str, Any]:
        """Where the drawing stands, and what it is drawn from: plain values, for a JSON file."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on where `state_dict` was taken; refuses a state of other data."""
