"""Modules that rotate queries and keys themselves: their projections must leave them without positions."""

from __future__ import annotations

from torch import nn

from regard.errors import ArgumentError
from regard.nn.project import Projection
from regard.positions import Rotary


def check_unrotated(project: Projection, why: str) -> None:
    """The projection holds no rotary: the module that says why has its own.

    Raises:
        ArgumentError: it does.
    """
    if not isinstance(project, nn.Module):
        return
    for name, part in project.named_modules():
        if isinstance(part, Rotary):
            raise ArgumentError(
                f"project.{name} is {part}, but {why}; make the heads without it and give rotary= to the module"
            )


def check_rotary(rotary: nn.Module | None, D: int) -> None:
    """A rotary is for heads of this size, and its frequencies do not follow the length of each call.

    Raises:
        ArgumentError: it is for others, or they do.
    """
    if not isinstance(rotary, Rotary):
        return
    if rotary.dim != D:
        raise ArgumentError(f"rotary is for heads of {rotary.dim}, and queries have {D}")
    if rotary.follows:
        raise ArgumentError(
            f"{rotary} follows the length of each call, and queries and keys are rotated apart; freeze its length: "
            "length=<number>"
        )
