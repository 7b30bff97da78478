"""Mixture of experts: a feed-forward layer of which each token uses a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.arguments import check_number
from regard.errors import ArgumentError
from regard.nn.linear import Linear
from regard.nn.routers import Router


class MoE(nn.Module):
    """The experts that a router chose for a token, weighted and summed, beside an expert that serves all.

    y = sum_{e in C(x)} w_e(x) expert_e(x)  (+ shared(x))

    Tokens are gathered per expert: an expert computes its own tokens alone, and one that nobody chose computes nothing.
    A token's sum runs over its experts in ascending order, in fp32 or better, whatever the batch and the device. Which
    experts are used is read from the device once a call, so that a compiled graph breaks there.

    Args:
        router: a `Router` over as many experts as there are.
        experts: feed-forward modules [n,M] -> [n,M], such as `SwiGLU` or `ClippedSwiGLU`.
        shared: a feed-forward module for every token, or None.

    Raises:
        ArgumentError: the router chooses among another number of experts.

    >>> from regard.nn.feed_forward import SwiGLU
    >>> from regard.nn.routers import SoftmaxRouter
    >>> moe = MoE(SoftmaxRouter(8, 4, 2), [SwiGLU(8, 16) for _ in range(4)], SwiGLU(8, 16))
    >>> moe(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Source: Shazeer et al. 2017 (arXiv 1701.06538), equation 1; shared: DeepSeek-AI 2024 (arXiv 2401.06066), equation 9.
    """

    def __init__(
        self, router: Router, experts: Sequence[nn.Module], shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        if router.experts != len(experts):
            raise ArgumentError(
                f"the router chooses among {router.experts} experts, and there are {len(experts)}"
            )
        self.router, self.experts, self.shared = router, nn.ModuleList(experts), shared

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """x [..., M] -> [..., M]."""
        rows = x.reshape(-1, x.shape[-1])
        y = torch.zeros_like(rows, dtype=torch.promote_types(x.dtype, torch.float32))
        for expert, tokens, weights in _assigned(*self.router(rows)):
            if tokens is None:
                y = y + self.experts[expert](rows) * weights
            else:
                # a token stands there once: its sum has the order of this loop on every device
                y.index_add_(0, tokens, (self.experts[expert](rows[tokens]) * weights).to(y.dtype))
        if self.shared is not None:
            y = y + self.shared(rows)
        return y.to(x.dtype).reshape(x.shape)


def _assigned(weights: Tensor, experts: Tensor) -> Iterator[tuple[int, Tensor | None, Tensor]]:
    """Of a routing, the experts that are used in ascending order, their tokens [n], None for all, and weights [n,1]."""
    k = experts.shape[1]
    if len(experts) == 1:  # decoding: there is nothing to gather
        for expert, slot in sorted(zip(experts[0].tolist(), range(k), strict=True)):
            yield expert, None, weights[:, slot, None]
        return
    order = experts.flatten().argsort(stable=True)
    used, counts = torch.unique_consecutive(experts.flatten()[order], return_counts=True)
    sizes = counts.tolist()
    tokens, shares = (order // k).split(sizes), weights.flatten()[order, None].split(sizes)
    yield from zip(used.tolist(), tokens, shares, strict=True)


class ClippedSwiGLU(nn.Module):
    """The experts of gpt-oss: gated, both halves clipped, and the linear one moved by 1.

    y = W_down ((clip(u, -limit, limit) + 1) * g sigmoid(alpha g)) + b_down
    g = min(W_gate x + b_gate, limit),  u = W_up x + b_up

    Args:
        dim: the model dim M.
        hidden: the width between.
        limit: where the halves are clipped; the gate from above only.
        alpha: the slope within the sigmoid; 1.702 makes it near to GELU.

    Raises:
        ArgumentError: limit or alpha is not a positive number.

    >>> layer = ClippedSwiGLU(8, 16)
    >>> layer(torch.zeros(1, 2, 8)).shape
    torch.Size([1, 2, 8])

    Source: OpenAI 2025 (arXiv 2508.10925), section 2.2.
    """

    def __init__(self, dim: int, hidden: int, *, limit: float = 7.0, alpha: float = 1.702) -> None:
        super().__init__()
        for name, value in (("limit", limit), ("alpha", alpha)):
            check_number(name, value, 0, float("inf"), "a finite number above 0")
        self.limit, self.alpha = limit, alpha
        self.gate = Linear(dim, hidden)
        self.up = Linear(dim, hidden)
        self.down = Linear(hidden, dim)

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """x [..., M] -> [..., M]."""
        gate = self.gate(x).clamp(max=self.limit)
        up = self.up(x).clamp(-self.limit, self.limit)
        return self.down((up + 1) * (gate * torch.sigmoid(self.alpha * gate)))

    def extra_repr(self) -> str:
        """The limit and the slope."""
        return f"limit={self.limit:g}, alpha={self.alpha:g}"
