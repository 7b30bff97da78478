"""What comes back: an output, and perhaps weights and a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.errors import ArgumentTypeError
from regard.inspect.audit.subject import Reply


@dataclass(frozen=True)
class Reading:
    """Where in a reply the weights stand, if anywhere.

    >>> import torch
    >>> x = torch.ones(2, 3, 4)
    >>> Reading(1).read((x, torch.ones(2, 3, 3))).weights.shape
    torch.Size([2, 1, 3, 3])
    """

    weights: int | None = None

    def read(self, given: Any) -> Reply:
        """Out, weights [B,H or 1,T,S], and what is left over: a cache."""
        parts = items(given)
        weights = None
        if self.weights is not None and self.weights < len(parts):
            weights = parts[self.weights]
        rest = [x for n, x in enumerate(parts) if n and n != self.weights and x is not None]
        memory = None if not rest else rest[0] if len(rest) == 1 else rest
        if isinstance(weights, Tensor):
            weights = weights[:, None] if weights.ndim == 3 else weights
        return Reply(parts[0], weights if isinstance(weights, Tensor) else None, memory)

    @staticmethod
    def of(replies: dict[int, Any], B: int) -> Reading:
        """From replies to several lengths: weights are what has the length twice, at each of
        them.
        """
        parts = {T: items(reply) for T, reply in replies.items()}
        for n in range(1, min(len(p) for p in parts.values())):
            if all(_square(p[n], B, T) for T, p in parts.items()):
                return Reading(n)
        return Reading()


def items(given: Any) -> list[Any]:
    """The parts of a reply, the output first.

    Raises:
        ArgumentTypeError: there is no tensor where the output should be.
    """
    if isinstance(given, Reply):
        return list(given)
    if hasattr(given, "to_tuple"):  # a ModelOutput of transformers
        given = given.to_tuple()
    if isinstance(given, dict):
        given = tuple(given.values())
    parts = list(given) if isinstance(given, (tuple, list)) else [given]
    if not parts or not isinstance(parts[0], Tensor):
        what = type(parts[0]).__name__ if parts else "nothing"
        raise ArgumentTypeError(
            f"the code returned {what}; its output must be a tensor, or the first of what it "
            "returns: give an adapter"
        )
    return parts


def _square(x: Any, B: int, T: int) -> bool:
    return isinstance(x, Tensor) and x.ndim in (3, 4) and x.shape[0] == B and x.shape[-2:] == (T, T)
