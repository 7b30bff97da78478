"""The mask of neighborhood attention on a grid of 1, 2 or 3 dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks.base import MAX_INT, Mask, check_int, check_ints
from regard.masks.tiling import Intervals
from regard.units import plural

MAX_RANGES = 256
"""The most key ranges per query that `Neighborhood` returns; beyond, pairs are evaluated."""


@dataclass(frozen=True, eq=False)
class Neighborhood(Mask):
    """Neighborhood attention: a query sees a window of keys around it in each dimension of a grid.

    Positions are row-major indices of the grid. The window of a query near a border is shifted into
    the grid, so that it has `kernel_size` keys; under a causal dimension, fewer at the start.

    In each dimension, with i the query's index, n the length, K the kernel size and s the stride:

    - the centre is i, or with a stride the middle of the query's group of s neighbouring queries,
      min(i // s * s + s // 2, n - 1): all queries of a group have the same window;
    - the window is K keys from start = min(max(centre - K // 2, 0), n - K);
    - in a causal dimension it is the keys from max(last - K + 1, 0) to i, where last is the last
      query of the group;
    - with a dilation d, only the indices i % d, i % d + d, ... take part, and i, n and the window
      count these.

    Positions outside the grid see nothing and are not visible; keys without a place in it, such as
    a class token, are a call of their own (`merge`).

    Args:
        shape: the 1 to 3 lengths of the grid, such as (height, width), or an int.
        kernel_size, stride, dilation, is_causal: one for all dimensions or one for each;
            kernel_size is K, the visible keys; stride is s, of queries that share a window;
            dilation is d; in a causal dimension later indices are hidden.

    Raises:
        ArgumentError, ArgumentTypeError: an argument has a wrong type or number of entries, or the
            sizes do not fit the grid or a call.

    >>> from regard.span import Span
    >>> grid = Span(0, 16)
    >>> mask = Neighborhood((4, 4), 3)
    >>> mask.visible(grid, grid).unique().tolist()  # every query sees 3 x 3 keys
    [9]
    >>> mask.block(grid, grid)[0, 0, 0].view(4, 4).int().tolist()  # those of the top left corner
    [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]

    Source: Hassani et al. 2023 (arXiv 2204.07143), equations 1 to 3; dilated: Hassani and Shi 2022
    (arXiv 2209.15001); stride and causal dimensions: Hassani et al. 2025 (arXiv 2504.16922), as
    the library NATTEN computes them.
    """

    shape: int | Sequence[int]
    kernel_size: int | Sequence[int]
    stride: int | Sequence[int] = 1
    dilation: int | Sequence[int] = 1
    is_causal: bool | Sequence[bool] = False

    def __post_init__(self) -> None:
        for name in ("shape", "kernel_size", "stride", "dilation"):
            value = getattr(self, name)
            checked = (
                check_int(f"Neighborhood {name}", value, 1)
                if isinstance(value, int)
                else check_ints(f"Neighborhood {name}", value, 1)
            )
            object.__setattr__(self, name, checked)
        causal: object = self.is_causal
        if not isinstance(causal, bool):
            if not isinstance(causal, (tuple, list)) or not all(
                isinstance(x, bool) for x in causal
            ):
                raise ArgumentTypeError(
                    f"Neighborhood is_causal is {causal!r}; it must be a bool, or one per dimension"
                )
            object.__setattr__(self, "is_causal", tuple(causal))
        if not 1 <= len(self._shape) <= 3:
            raise ArgumentError(
                f"Neighborhood shape is {self.shape}; it must have 1, 2 or 3 dimensions"
            )
        if math.prod(self._shape) > MAX_INT:
            raise ArgumentError(
                f"Neighborhood shape is {self.shape}; it must have at most "
                f"{plural(MAX_INT, 'position')}"
            )
        for dim in range(len(self._shape)):
            self._check_dimension(dim)
        for name in ("kernel_size", "stride", "dilation", "is_causal"):
            values = self._of(name)  # one entry if all are equal, so that equal masks compare equal
            object.__setattr__(self, name, values[0] if len(set(values)) == 1 else values)
        object.__setattr__(self, "shape", self._shape[0] if len(self._shape) == 1 else self._shape)

    def _check_dimension(self, dim: int) -> None:
        """Check the numbers of one dimension of the grid."""
        n, K, s, d = (
            x[dim]
            for x in (
                self._shape,
                self._of("kernel_size"),
                self._of("stride"),
                self._of("dilation"),
            )
        )
        self._of("is_causal")
        if s > K:
            raise ArgumentError(
                f"Neighborhood stride is {s} in dimension {dim}; it must be at most the kernel "
                f"size, {K}, or some queries would not see themselves"
            )
        if K * d > n:
            raise ArgumentError(
                f"Neighborhood kernel_size {K} times dilation {d} is {K * d} in dimension {dim}; "
                f"it must be at most the length of the grid, {n}"
            )

    @property
    def _shape(self) -> tuple[int, ...]:
        """The lengths of the grid, one per dimension."""
        return (self.shape,) if isinstance(self.shape, int) else tuple(self.shape)

    def _of(self, name: str) -> tuple[int, ...]:
        """Return an argument with one entry per dimension."""
        value, dims = getattr(self, name), len(self._shape)
        if isinstance(value, int):
            return (value,) * dims
        if len(value) != dims:
            raise ArgumentError(
                f"Neighborhood {name} is {value}; it must have one entry, or {dims} for the "
                f"{plural(dims, 'dimension')} of the grid {self.shape}"
            )
        return tuple(value)

    def _coordinates(self, x: Tensor) -> list[Tensor]:
        """Return the index in each dimension of the grid of each position."""
        indices = []
        for n in reversed(self._shape):
            indices.append(x % n)
            x = x // n
        return indices[::-1]

    def _windows(self, q: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return for each dimension the first visible index of each query, and that behind."""
        windows = []
        arguments = zip(
            self._coordinates(q),
            self._shape,
            *map(self._of, ("kernel_size", "stride", "dilation", "is_causal")),
            strict=True,
        )
        for index, n, K, s, d, causal in arguments:
            residue, i = index % d, index // d
            length = (n - 1 - residue) // d + 1  # how many indices of the grid have this residue
            group = i // s * s
            if causal:
                start = (torch.minimum(group + (s - 1), length - 1) - (K - 1)).clamp(min=0)
                stop = i + 1
            else:
                centre = torch.minimum(group + s // 2, length - 1)
                start = torch.minimum((centre - K // 2).clamp(min=0), length - K)
                stop = start + K
            windows.append((residue + start * d, residue + stop * d))
        return windows

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return whether the key is in the query's window in every dimension of the grid."""
        positions = math.prod(self._shape)
        visible = (q >= 0) & (q < positions) & (k >= 0) & (k < positions)
        for (start, stop), index, d in zip(
            self._windows(q), self._coordinates(k), self._of("dilation"), strict=True
        ):
            visible = visible & (index >= start) & (index < stop)
            if d > 1:
                visible = visible & ((index - start) % d == 0)
        return visible

    def _intervals(self, q: Tensor) -> Intervals | None:
        sizes, dilations = self._of("kernel_size"), self._of("dilation")
        # Keys that are neighbours in the last dimension are neighbours as positions, too.
        joined = dilations[-1] == 1
        if math.prod(sizes[:-1] if joined else sizes) > MAX_RANGES:
            return None
        *outer, (start, stop) = self._windows(q)
        if joined:
            starts, stops = start, stop
        else:
            starts = start + torch.arange(sizes[-1], device=q.device) * dilations[-1]
            stops = torch.where(starts < stop, starts + 1, starts)
        step = self._shape[-1]  # how far apart two neighbours of this dimension are as positions
        for (first, end), K, d, n in reversed(
            list(zip(outer, sizes[:-1], dilations[:-1], self._shape[:-1], strict=True))
        ):
            indices = first + torch.arange(K, device=q.device) * d  # [B,1,t,K]
            moved = indices[..., None] * step
            hidden = (indices >= end)[..., None]
            starts, stops = (
                (x[..., None, :] + moved).masked_fill(hidden, 0).flatten(-2)
                for x in (starts, stops)
            )
            step *= n
        outside = (q < 0) | (q >= math.prod(self._shape))
        return Intervals(starts, stops.masked_fill(outside, 0))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that the grid covers all keys of the call."""
        if (positions := math.prod(self._shape)) < S:
            raise ArgumentError(
                f"Neighborhood has a grid of {' x '.join(map(str, self._shape))} = "
                f"{plural(positions, 'position')}, but there are {plural(S, 'key')}; give the "
                "shape of the grid whose tokens are the keys"
            )
