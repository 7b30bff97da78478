"""FIRE: a small network of the distance, divided by the position of the query."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.argument_checks import check_tensor
from regard.biases.base import Bias
from regard.errors import ArgumentError


@dataclass(frozen=True, eq=False, repr=False)
class FIRE(Bias):
    """FIRE: bias_ij = MLP(ln(|c| |i - j| + 1) / ln(|c| max(i, |L|) + 1)).

    The MLP is W2 relu(w1 x + b1) + b2, per head. x lies between 0 and 1 for every earlier key,
    however long the text is; a later key has the value of its distance.

    Args:
        c: how fast small distances grow, a float tensor with one number, which may be learned.
        L: the position up to which the divisor is constant, likewise.
        w1, b1: float `[N]`, the weights and biases of the hidden units.
        w2, b2: float `[H, N]` and `[H]`, those of the results.

    Raises:
        ArgumentError: the sizes do not fit one another.
        ArgumentTypeError: one is not a float tensor.

    >>> from regard.span import Span
    >>> one = torch.ones(1)  # a hidden unit that gives x
    >>> bias = FIRE(0.1 * one, 8 * one, one, 0 * one, one[None], 0 * one)
    >>> round(bias.block(Span(3, 1), Span(0, 1)).item(), 4)
    0.4464

    Source: Li et al. 2023 (arXiv 2310.04418), equations 6 and 19.
    """

    c: Tensor
    L: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    def __post_init__(self) -> None:
        for name in ("c", "L", "w1", "b1", "w2", "b2"):
            check_tensor(name, getattr(self, name))
        H, N = self.w2.shape if self.w2.ndim == 2 else (0, 0)
        shapes = {x: tuple(getattr(self, x).shape) for x in ("c", "L", "w1", "b1", "b2")}
        if shapes != {"c": (1,), "L": (1,), "w1": (N,), "b1": (N,), "b2": (H,)}:
            raise ArgumentError(
                f"{', '.join(f'{name} is {shape}' for name, shape in shapes.items())} and w2 is "
                f"{tuple(self.w2.shape)}; they must be c (1,), L (1,), w1 (N,), b1 (N,), b2 (H,) "
                "and w2 (H, N)"
            )

    def argument(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ln(|c| |i - j| + 1) / ln(|c| max(i, |L|) + 1).

        Args:
            q, k: positions of queries and keys, which broadcast.
            dtype: the dtype of the result.

        Returns:
            The argument of the MLP for each pair.
        """
        c, L = self.c.to(q.device, dtype).abs(), self.L.to(q.device, dtype).abs()
        divisor = torch.log1p(c * torch.maximum(q.clamp(min=0).to(dtype), L))
        # the first query divides by 0 if L is 0; its distance is 0, too
        return torch.log1p(c * (q - k).abs().to(dtype)) / divisor.clamp(min=torch.finfo(dtype).tiny)

    def values(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Apply the MLP to the argument of each pair, giving `[B or 1, H, t, s]`."""
        w1, b1, w2, b2 = (x.to(q.device, dtype) for x in (self.w1, self.b1, self.w2, self.b2))
        hidden = torch.relu(self.argument(q, k, dtype)[:, 0, :, :, None] * w1 + b1)
        return F.linear(hidden, w2, b2).permute(0, 3, 1, 2)

    def _heads(self) -> int:
        return self.w2.shape[0]

    def select_heads(self, heads: slice) -> FIRE:
        """Return the bias with the results of these heads."""
        return replace(self, w2=self.w2[heads], b2=self.b2[heads])

    def __str__(self) -> str:
        return f"fire({self.w2.shape[0]}, {self.w2.shape[1]} hidden units)"
