"""Fused projections whose numbers are clipped, so that no score grows without bound."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from regard.arguments import check_number
from regard.nn.fused import Fused, Order


class Clipped(Fused):
    """A `Fused` projection whose queries, keys and values are clipped before the steps.

    [q; k; v] = clip(W x + b, -c, c)

    Args:
        dim, heads, groups, head_dim, order, steps, bias: as for `Fused`.
        limit: c, above 0.

    Raises:
        ArgumentError: limit is not above 0; or as `Fused`.

    >>> import torch
    >>> clipped = Clipped(8, 4, 4, 2, limit=0.5, bias=False)
    >>> float(clipped.query(1e6 * torch.ones(1, 3, 8), None).detach().abs().max())
    0.5

    Source: MosaicML 2023, "Introducing MPT-7B": `clip_qkv` of its released code.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        groups: int,
        head_dim: int,
        *,
        limit: float,
        order: Order = "parts",
        steps: Sequence[nn.Module] = (),
        bias: bool = True,
    ) -> None:
        check_number("limit", limit, 0, float("inf"), "above 0: leave the clipping out otherwise")
        super().__init__(dim, heads, groups, head_dim, order=order, steps=steps, bias=bias)
        self.limit = limit

    def _heads(self, x: Tensor, which: int) -> Tensor:
        return super()._heads(x, which).clamp(-self.limit, self.limit)

    def extra_repr(self) -> str:
        """The heads, the order of the rows and the limit."""
        return f"{super().extra_repr()}, limit={self.limit:g}"
