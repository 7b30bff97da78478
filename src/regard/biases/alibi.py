"""ALiBi: a penalty that grows linearly with distance, with one slope per head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.argument_checks import check_number
from regard.biases.base import Bias
from regard.errors import ArgumentError, ArgumentTypeError


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head: 2^(-8h/n), h = 1..n, for n = 2^k heads.

    For other numbers: those of the next smaller power of two n, then every other one of 2n.

    Args:
        heads: the number of query heads.

    Returns:
        One slope per head.

    Raises:
        ArgumentError: heads is less than 1.

    >>> alibi_slopes(8)[:3]
    (0.5, 0.25, 0.125)
    >>> [round(m, 6) for m in alibi_slopes(12)[8:]]
    [0.707107, 0.353553, 0.176777, 0.088388]

    Source: Press et al. 2021 (arXiv 2108.12409), section 3, and its released code.
    """
    if heads < 1:
        raise ArgumentError(f"heads is {heads}; it must be at least 1")
    n = 1 << (heads.bit_length() - 1)
    finer = [2.0 ** (-4 * h / n) for h in range(1, 2 * n + 1, 2)]
    return (*(2.0 ** (-8 * h / n) for h in range(1, n + 1)), *finer[: heads - n])


@dataclass(frozen=True, eq=False, repr=False)
class ALiBi(Bias):
    """Attention with linear biases: bias_ij = -m_h (i - j), of the positions i and j.

    This is causal: for later keys it is **positive**, unless `symmetric=True` gives -m_h |i - j|.
    It is not simplified to m_h j, which would shift the log-sum-exp of a row.

    Args:
        heads: the number of query heads H; the slopes are those of `alibi_slopes`.
        slopes: H numbers, or a tensor `[H]`, which may be learned, instead of `heads`.
        symmetric: whether the bias penalizes distance in both directions.

    Raises:
        ArgumentError: not one of heads and slopes is given, or one does not fit.
        ArgumentTypeError: slopes is a tensor of integers.

    >>> from regard.span import Span
    >>> ALiBi(2).block(Span(2, 1), Span(0, 3))[0, :, 0].tolist()
    [[-0.125, -0.0625, -0.0], [-0.0078125, -0.00390625, -0.0]]

    Source: Press et al. 2021 (arXiv 2108.12409), section 3.
    """

    heads: int | None = None
    slopes: Sequence[float] | Tensor | None = None
    symmetric: bool = False

    def __post_init__(self) -> None:
        if (self.heads is None) == (self.slopes is None):
            raise ArgumentError(
                f"ALiBi(heads={self.heads}, "
                f"slopes={'given' if self.slopes is not None else None}): give one of the two"
            )
        if self.heads is not None and self.heads < 1:
            raise ArgumentError(f"heads is {self.heads}; it must be at least 1")
        if isinstance(self.slopes, Tensor):
            if self.slopes.ndim != 1:
                raise ArgumentError(
                    f"slopes is {tuple(self.slopes.shape)}; it must be 1-D, one number per query "
                    "head"
                )
            if not self.slopes.is_floating_point():
                raise ArgumentTypeError("slopes is a tensor of integers; use .float()")
        elif self.slopes is not None:
            object.__setattr__(self, "slopes", tuple(self.slopes))  # hashable
            for h, slope in enumerate(self.slopes):
                check_number(f"slopes[{h}]", slope, -float("inf"), float("inf"), "finite")

    def values(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Return -m (i - j), or -m |i - j|, never in half precision."""
        distance = (q - k).abs() if self.symmetric else q - k
        return -self.slopes_on(q.device, dtype)[:, None, None] * distance.to(dtype)

    def _heads(self) -> int:
        return self.heads if self.heads is not None else len(self.slopes)  # type: ignore[arg-type]

    def select_heads(self, heads: slice) -> ALiBi:
        """Return the bias with the slopes of these heads."""
        slopes = alibi_slopes(self._heads()) if self.slopes is None else self.slopes
        return ALiBi(slopes=slopes[heads], symmetric=self.symmetric)

    def slopes_on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the slopes as a tensor.

        Args:
            device: the device of the tensor.
            dtype: its dtype.

        Returns:
            The slopes m, `[H]`.
        """
        if isinstance(self.slopes, Tensor):
            return self.slopes.to(device, dtype)
        slopes = alibi_slopes(self._heads()) if self.slopes is None else self.slopes
        return torch.tensor(slopes, dtype=dtype, device=device)

    def plain_fields(self) -> dict[str, object]:
        """Return the slopes, also if they follow from `heads`, and the symmetry."""
        slopes = self.slopes_on(torch.device("cpu"), torch.float64)
        return {"slopes": slopes.detach(), "symmetric": self.symmetric}

    @classmethod
    def plain_arguments(cls, first: object, others: dict[str, object]) -> dict[str, object]:
        """Return the constructor arguments, of which the slopes come first."""
        return {"slopes": first, **others}

    def __str__(self) -> str:
        own = str(self.heads) if self.heads is not None else f"{self._heads()} slopes"
        return f"alibi({own}{', symmetric' * self.symmetric})"
