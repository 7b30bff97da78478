"""`ForgetBias`: what the forget gates between a key and a query leave of the key's weight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_tensor
from regard.biases.base import ALL_SLOTS, Bias
from regard.errors import ArgumentError
from regard.span import Positions


@dataclass(frozen=True, eq=False, repr=False)
class ForgetBias(Bias):
    """The bias of forget gates: bias_ij = c_i - c_j, c the running sum of their logarithms.

    The term c_i cancels in the softmax, but belongs to the log-sum-exp, and the difference is
    rounded once. The sums may be large, so give them in float64.

    Args:
        queries: c of the queries, a float tensor `[B or 1, H or 1, T]`.
        keys: c of the keys, `[B or 1, H or 1, S]`.

    Raises:
        ArgumentError: a tensor is not 3-D; in a call, a size differs.
        ArgumentTypeError: a tensor is not a float tensor.

    >>> from regard.span import Span
    >>> c = torch.tensor([[[-1.0, -3.0, -3.5]]])
    >>> ForgetBias(c[..., 2:], c).block(Span(2, 1), Span(0, 3)).flatten().tolist()
    [-2.5, -0.5, 0.0]

    Source: Lin et al. 2025 (arXiv 2503.02130), equation 8.
    """

    kind: ClassVar[str] = "forget"

    queries: Tensor
    keys: Tensor

    def __post_init__(self) -> None:
        for name, x in (("queries", self.queries), ("keys", self.keys)):
            check_tensor(name, x)
            if x.ndim != 3:
                raise ArgumentError(f"{name} is {tuple(x.shape)}; it must be [B or 1, H or 1, L]")

    def block(
        self,
        q_positions: Positions,
        k_positions: Positions,
        rows: slice = ALL_SLOTS,
        columns: slice = ALL_SLOTS,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Float[Tensor, "b h t s"]:
        """Return the differences, rounded once."""
        difference = self.queries[:, :, rows, None] - self.keys[:, :, None, columns]
        return difference.to(device=device, dtype=dtype)

    @property
    def by_slot(self) -> bool:
        """True, because the numbers belong to slots of the call."""
        return True

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that both tensors fit the call."""
        for name, x, L in (("queries", self.queries, T), ("keys", self.keys, S)):
            b, h, n = x.shape
            if b not in (1, B) or h not in (1, H) or n != L:
                raise ArgumentError(
                    f"{name} of {self} is {tuple(x.shape)}; for this call it must be ({B} or 1, "
                    f"{H} or 1, {L})"
                )

    def select_heads(self, heads: slice) -> ForgetBias:
        """Return the bias with the sums of these heads."""
        own = (x if x.shape[1] == 1 else x[:, heads] for x in (self.queries, self.keys))
        return replace(self, **dict(zip(("queries", "keys"), own, strict=True)))

    def __str__(self) -> str:
        return f"forget({'x'.join(map(str, self.keys.shape))})"
