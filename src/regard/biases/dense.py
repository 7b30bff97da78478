"""A bias that is given as a tensor, slot by slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.arguments import check_tensor
from regard.biases.base import ALL, Bias
from regard.errors import ArgumentError
from regard.span import Positions, count


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Bias):
    """bias_ij = tensor[..., i, j], where i and j are slots (places in q and k), not positions.

    Args:
        tensor: a float tensor [T, S] or [B or 1, H or 1, T or 1, S]. Three dimensions are refused: [B, T, S] and
            [H, T, S] cannot be told apart.

    Raises:
        ArgumentError: another number of dimensions; in a call, a shape that does not fit it.
        ArgumentTypeError: not a float tensor.

    >>> from regard.span import Span
    >>> Dense(torch.arange(6.0).view(2, 3)).block(Span(0, 2), Span(0, 3), slice(1, 2)).tolist()
    [[[[3.0, 4.0, 5.0]]]]
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        check_tensor("bias", self.tensor)
        if self.tensor.ndim not in (2, 4):
            raise ArgumentError(
                f"bias has {self.tensor.ndim} dimensions, {tuple(self.tensor.shape)}; it must be [T, S] or "
                "[B or 1, H or 1, T or 1, S]: index with [:, None] if it is [B, T, S], with [None] if it is [H, T, S]"
            )

    def block(
        self,
        q_positions: Positions,
        k_positions: Positions,
        rows: slice = ALL,
        columns: slice = ALL,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Float[Tensor, "b h t s"]:
        """Rows and columns of the tensor."""
        x = self.tensor if self.tensor.ndim == 4 else self.tensor[None, None]
        if x.shape[2] == 1:
            x = x.expand(-1, -1, count(q_positions), -1)
        return x[:, :, rows, columns].to(device=device, dtype=dtype)

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """The shape fits the call."""
        shape = tuple(self.tensor.shape)
        if self.tensor.ndim == 2:
            fits = shape == (T, S)
        else:
            b, h, t, s = shape
            fits = b in (1, B) and h in (1, H) and t in (1, T) and s == S
        if not fits:
            raise ArgumentError(
                f"bias is {shape}; for this call it must be ({T}, {S}) or ({B} or 1, {H} or 1, {T} or 1, {S})"
            )

    def __str__(self) -> str:
        return f"dense({'x'.join(map(str, self.tensor.shape))})"
