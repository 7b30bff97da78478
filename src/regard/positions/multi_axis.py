"""Rotary positions with several axes (M-RoPE, 2-D RoPE), for images and videos.

Positions are an integer tensor [1 + A, B, T]: the order of the tokens, -1 for an empty slot, which
masks and caches use; and A coordinates, which only the rotation reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_tensor
from regard.errors import ArgumentError, ArgumentTypeError
from regard.positions.rotary import Rotary, apply_rotary
from regard.positions.scalings import base_frequencies
from regard.span import EMPTY, Positions, as_tensor

Grid: TypeAlias = tuple[int, int, int]
"""The frames, rows and columns of the tokens of an image (1 frame) or a video."""


def multi_axis_positions(
    rows: Sequence[Sequence[int | Grid]], *, padding: Literal["left", "right"] = "left"
) -> Tensor:
    """Compute positions of texts with images and videos, with the axes time, height and width.

    A text token has one coordinate c on all axes; c then grows by 1. The token at (t, h, w) of a
    grid has the coordinates (c + t, c + h, c + w); c then becomes the largest coordinate plus 1.

    Args:
        rows: for each row its parts: a number of text tokens, or (frames, rows, columns).
        padding: the side on which shorter rows get empty slots.

    Returns:
        The positions [4,B,T], int64: the order, time, height and width.

    Raises:
        ArgumentError: there is no row, a number is negative, or the padding is unknown.
        ArgumentTypeError: a part is neither a number nor three numbers.

    >>> multi_axis_positions([[2, (1, 2, 2), 1]])[:, 0].tolist()
    [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]]

    Source: Wang et al. 2024 (arXiv 2409.12191), section 2.1, M-RoPE.
    """
    if padding not in ("left", "right"):
        raise ArgumentError(f"padding is {padding!r}; it must be left or right")
    if not rows:
        raise ArgumentError("multi_axis_positions got no rows; give the parts of at least one")
    planes = [_row_positions(row) for row in rows]
    length = max(plane.shape[1] for plane in planes)
    result = torch.full((4, len(rows), length), EMPTY, device="cpu")
    for b, plane in enumerate(planes):
        n = plane.shape[1]
        where = slice(length - n, length) if padding == "left" else slice(0, n)
        result[:, b, where] = plane
    return result


def _row_positions(row: Sequence[int | Grid]) -> Tensor:
    """Return the positions [4,L] of one row."""
    parts, start = [], 0
    for part in row:
        sizes = (part,) if isinstance(part, int) else part
        if not isinstance(sizes, tuple) or len(sizes) not in (1, 3):
            raise ArgumentTypeError(
                f"a part of a row is {part!r}; it must be a number of text tokens, or (frames, "
                "rows, columns)"
            )
        if min(sizes) < 0 or (len(sizes) == 3 and min(sizes) < 1):
            raise ArgumentError(f"a part of a row is {part}; its numbers must not be negative or 0")
        if len(sizes) == 1:
            axes = torch.arange(start, start + sizes[0], device="cpu").expand(3, -1)
            start += sizes[0]
        else:
            steps = [torch.arange(start, start + n, device="cpu") for n in sizes]
            axes = torch.stack(torch.meshgrid(*steps, indexing="ij")).flatten(1)
            start += max(sizes)
        parts.append(axes)
    axes = torch.cat(parts, 1) if parts else torch.zeros(3, 0, dtype=torch.int64, device="cpu")
    return torch.cat([torch.arange(axes.shape[1], device="cpu")[None], axes])


def next_text_positions(positions: Tensor, length: int = 1) -> Tensor:
    """Return the positions of text tokens that follow.

    The first one has the largest coordinate of its row plus 1 on all axes.

    Args:
        positions: positions [1 + A,B,T] of all tokens so far.
        length: the number of tokens that follow.

    Returns:
        Their positions [1 + A,B,length].

    Raises:
        ArgumentError: positions are not [1 + A,B,T] with at least one axis.

    >>> next_text_positions(multi_axis_positions([[2, (1, 4, 4)]]))[:, 0].tolist()
    [[18], [6], [6], [6]]

    Source: Wang et al. 2024 (arXiv 2409.12191), section 2.1.
    """
    if positions.ndim != 3 or positions.shape[0] < 2:
        raise ArgumentError(
            f"positions are {tuple(positions.shape)}; they must be [1 + axes, batch, length]"
        )
    steps = torch.arange(1, length + 1, device=positions.device)
    if not positions.shape[2]:
        return (steps - 1).expand(*positions.shape[:2], -1)
    empty = positions[0] <= EMPTY
    last = positions.masked_fill(empty, EMPTY).amax(2)  # [1 + A,B]
    last[1:] = last[1:].amax(0)
    return last[..., None] + steps


class MultiAxisRotary(Rotary):
    """A rotary embedding whose pairs of dims read the coordinates of several axes.

    angle of pair i = coordinate(axis of i) * theta_i, theta_i = base^(-2i/D)

    Text has one plane [B,T] or a `Span`, and the rotation of `Rotary`.

    Args:
        dim: the head dim D.
        base: the base b.
        sections: the pairs of each axis, D/2 in all, such as (16, 24, 24) in Qwen2-VL.
        order: "chunks": one axis after another (Qwen2-VL); "interleaved": the axes take turns, and
            the remaining pairs belong to the first (Qwen3-VL).
        own_frequencies: whether each axis has frequencies base^(-i/n) for its n pairs, as 2-D RoPE
            of images; only with "chunks".

    Attributes:
        axes: the axis of each pair.

    Raises:
        ArgumentError: the sections do not add up to D/2, or the order does not suit.

    >>> MultiAxisRotary(16, sections=(4, 2, 2), order="interleaved").axes
    (0, 1, 2, 0, 1, 2, 0, 0)
    >>> MultiAxisRotary(16, sections=(2, 3, 3)).axes
    (0, 0, 1, 1, 1, 2, 2, 2)

    Source: Wang et al. 2024 (arXiv 2409.12191), section 2.1; interleaved: the code of Qwen3-VL.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        *,
        sections: Sequence[int],
        order: Literal["chunks", "interleaved"] = "chunks",
        own_frequencies: bool = False,
    ) -> None:
        super().__init__(dim, base)
        self.sections, self.order = tuple(sections), order
        self.own_frequencies = own_frequencies
        if not self.sections or min(self.sections) < 1 or sum(self.sections) != dim // 2:
            raise ArgumentError(
                f"sections are {self.sections}; they must be at least 1 and add up to {dim // 2}, "
                f"the number of pairs of the head dim {dim}"
            )
        if order not in ("chunks", "interleaved"):
            raise ArgumentError(f"order is {order!r}; it must be chunks or interleaved")
        if own_frequencies and order != "chunks":
            raise ArgumentError("own_frequencies needs the order chunks")
        self.axes = _chunks(self.sections) if order == "chunks" else _turns(self.sections)
        if own_frequencies:
            series = [base_frequencies(base, 2 * n, n) for n in self.sections]
            self.inv_freq = torch.cat(series).to(self.inv_freq)

    def forward(
        self, x: Float[Tensor, "B H L D"], positions: Positions
    ) -> Float[Tensor, "B H L D"]:
        """Rotate queries or keys by their coordinates."""
        if not isinstance(positions, Tensor) or positions.ndim == 2:
            return super().forward(x, positions)
        check_tensor("x", x)
        axes, wanted = len(self.sections), (x.shape[0], x.shape[2])
        if positions.shape[0] != 1 + axes or x.ndim != 4 or x.shape[-1] != self.dim:
            raise ArgumentError(
                f"x is {tuple(x.shape)} and positions are {tuple(positions.shape)}; they must be "
                f"[batch, heads, length, {self.dim}] and [{1 + axes}, batch, length]"
            )
        if positions.shape[1] not in (1, wanted[0]) or positions.shape[2] != wanted[1]:
            raise ArgumentError(
                f"positions are {tuple(positions.shape)}; for x {tuple(x.shape)} they must be "
                f"[{1 + axes}, {wanted[0]} or 1, {wanted[1]}]"
            )
        device = torch.device("cpu") if x.device.type == "mps" else x.device  # mps has no fp64
        coordinates = positions[1:].to(device, torch.float64)[list(self.axes)]  # [n,B,L]
        angle = coordinates.permute(1, 2, 0)[:, None] * self.inv_freq.to(device)
        cos, sin = (y.to(x.device, x.dtype) for y in (angle.cos(), angle.sin()))
        return apply_rotary(x, cos, sin, self.layout)

    def extra_repr(self) -> str:
        """Return the head dim, the base, and the pairs of each axis."""
        own = ", own_frequencies=True" if self.own_frequencies else ""
        return f"{self.dim}, base={self.base}, sections={self.sections}, order={self.order!r}{own}"


def order_of(positions: Positions) -> Positions:
    """Return the order of tokens: the first plane of several, or positions as they are."""
    return positions[0] if isinstance(positions, Tensor) and positions.ndim == 3 else positions


def text_axes(positions: Positions, shift: Tensor, axes: int) -> Tensor:
    """Return the positions of text tokens whose coordinates are their order plus a shift."""
    order = as_tensor(positions, shift.device)
    both = torch.broadcast_tensors(order, order + shift)
    return torch.cat([both[0][None], both[1].expand(axes, -1, -1)])


def _chunks(sections: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis, n in enumerate(sections) for _ in range(n))


def _turns(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axis of each pair if the axes take turns; the first axis has what remains."""
    n, axes = sum(sections), len(sections)
    axis_of_pair = [0] * n
    for axis in range(1, axes):
        for i in range(axis, axes * sections[axis], axes):
            if i >= n:
                raise ArgumentError(
                    f"sections are {sections}; an interleaved order has room for at most "
                    f"{n // axes} pairs of each axis after the first"
                )
            axis_of_pair[i] = axis
    return tuple(axis_of_pair)
