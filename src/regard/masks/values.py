"""Checks and shapes that several masks share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.foreign import shown

Rows = TypeVar("Rows", bound=tuple[Any, ...])
Lengths: TypeAlias = Sequence[int] | Tensor

LARGEST = (1 << 62) - 1


def whole(name: str, x: object, least: int, advice: str = "") -> int:
    """x as an int of at least `least`, with room for a sum of two in 64 bits; `name` is "Window size" or the like."""
    if isinstance(x, bool) or not isinstance(x, int):
        raise ArgumentTypeError(f"{name} is {_say(x)}; it must be an int, {least} or more")
    if x < least:
        raise ArgumentError(f"{name} is {x}; it must be {least} or more{advice and ': ' + advice}")
    if x > LARGEST:
        raise ArgumentError(f"{name} is {shown(x)}; positions have 64 bits: give at most {LARGEST}")
    return x


def wholes(name: str, xs: object, least: int) -> tuple[int, ...]:
    """xs, a sequence or 1-D tensor of ints of at least `least`, as a tuple."""
    if isinstance(xs, Tensor):
        xs = xs.tolist()
    if isinstance(xs, (str, bytes)) or not isinstance(xs, Iterable):
        raise ArgumentTypeError(f"{name} is {_say(xs)}; it must be a sequence of ints")
    return tuple(whole(f"{name}[{i}]", x, least) for i, x in enumerate(xs))


def some(rows: Rows, name: str) -> Rows:
    """Rows, at least one."""
    if not rows:
        raise ArgumentError(f"{name} of no batch rows; give at least one")
    return rows


def row(values: tuple[int, ...], like: Tensor) -> Tensor:
    """One number per batch row, [B,1,1,1]."""
    return torch.tensor(values, dtype=torch.int64, device=like.device)[:, None, None, None]


def table(rows: tuple[tuple[int, ...], ...], fill: int | None, like: Tensor) -> Tensor:
    """Lists of different lengths as one tensor [B, n], filled up with `fill` (None: each one's last number)."""
    n = max(map(len, rows))
    filled = [[*x, *[x[-1] if fill is None else fill] * (n - len(x))] for x in rows]
    return torch.tensor(filled, dtype=torch.int64, device=like.device).reshape(len(rows), n)


def four(x: Tensor) -> Tensor:
    """x with dimensions of size 1 in front, 4 in all."""
    return x if x.ndim == 4 else x[(None,) * (4 - x.ndim)]


def locate(bounds: Tensor, x: Tensor) -> Tensor:
    """How many of the sorted bounds [B, n] are <= x, for x of up to 4 dimensions with the batch first of 4."""
    if x.numel() == 1:  # also what a mask_mod sees, under vmap, which searchsorted does not like
        return (bounds[:, None, None, None] <= x[..., None]).sum(-1)
    if bounds.shape[0] == 1:
        return torch.searchsorted(bounds[0], x.contiguous(), right=True)
    x = four(x)
    x = x.expand(bounds.shape[0], *x.shape[1:])
    found = torch.searchsorted(bounds, x.flatten(1).contiguous(), right=True)
    return found.reshape(x.shape)


def check_rows(mask: str, rows: int, B: int) -> None:
    """The mask holds something for each of `rows` batch rows; a call has B."""
    if rows not in (1, B):
        raise ArgumentError(
            f"{mask} holds {rows} batch rows, but the call has batch {B}; "
            f"give one entry per batch row, or one for all"
        )


def _say(x: object) -> str:
    return f"{type(x).__name__} {x!r}"
