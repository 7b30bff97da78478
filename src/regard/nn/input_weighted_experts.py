"""The mixture of experts of Llama 4, whose weights multiply what an expert reads, and its
router.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from regard.nn.feed_forward import MoE, Router, Routing


class LogitSigmoidRouter(Router):
    """A router that chooses by logits, and whose weights are their sigmoids, without a correction
    and without a division by their sum.

    l = W x + b;  C = the k experts with the highest l;  w_e = scale sigmoid(l_e)

    The choice is by logits, because the sigmoids of large ones round to the same number.

    >>> import torch
    >>> router = LogitSigmoidRouter(1, 3, 1)
    >>> _ = router.linear.weight.data.copy_(torch.tensor([[40.0], [50.0], [0.0]]))
    >>> weights, experts = router(torch.ones(1, 1))
    >>> experts.tolist(), weights.tolist()
    ([[1]], [[1.0]])

    Source: the code of Llama 4 in transformers, 2025.
    """

    def __init__(self, dim: int, experts: int, k: int, *, scale: float = 1.0) -> None:
        super().__init__(dim, experts, k, scale=scale)

    def forward(self, x: Float[Tensor, "N M"]) -> Routing:
        """Choose experts for tokens x [N,M]; return weights [N,k] and indices [N,k]."""
        logits = self.logits(x)
        chosen = self.choose(logits, logits)
        return Routing(logits.gather(-1, chosen).sigmoid() * self.scale, chosen)


class InputWeightedMoE(MoE):
    """A mixture of experts whose weights multiply what an expert reads, not what it adds.

    y = sum_{e in C(x)} expert_e(w_e(x) x)  (+ shared(x))

    The arguments are those of `MoE`.

    >>> import torch
    >>> from regard.nn import SwiGLU
    >>> experts = [SwiGLU(8, 16) for _ in range(4)]
    >>> moe = InputWeightedMoE(LogitSigmoidRouter(8, 4, 1), experts, SwiGLU(8, 16))
    >>> moe(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Source: the code of Llama 4 in transformers, 2025.
    """

    def weighted_expert(
        self,
        expert: Callable[[Tensor], Tensor],
        rows: Float[Tensor, "n M"],
        weights: Float[Tensor, "n 1"],
    ) -> Float[Tensor, "n M"]:
        """Compute what an expert adds to its tokens, expert(w x), from x [n,M] and w [n,1]."""
        result: Float[Tensor, "n M"] = expert(rows * weights.to(rows.dtype))
        return result
