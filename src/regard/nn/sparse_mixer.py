"""The router of Phi-3.5-MoE, which chooses two experts one after the other."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_number
from regard.nn.feed_forward import Router, Routing


class SparseMixerRouter(Router):
    """A router that chooses the best expert twice; each weight is a softmax over the experts whose
    score is nearly that of the chosen one.

    e_1 = argmax s;  N_1 = {e: (s_max - s_e) / max(|s_e|, s_max) <= 2 tolerance}
    w_1 = exp(s_e1) / sum_{e in N_1} exp(s_e);  the second in the same way without e_1

    A weight is 1 where no other expert is near, so that the two weights sum to up to 2. This is the
    computation of inference; the estimate of gradients with which SparseMixer trains is not built.

    >>> router = SparseMixerRouter(1, 3, tolerance=0.01)
    >>> _ = router.linear.weight.data.copy_(torch.tensor([[1.0], [3.0], [2.0]]))
    >>> weights, experts = router(torch.ones(1, 1))
    >>> experts.tolist(), weights.tolist()
    ([[1, 2]], [[1.0, 1.0]])

    Source: Liu et al. 2024 (arXiv 2409.12136), section 3, and the released code.
    """

    def __init__(self, dim: int, experts: int, *, tolerance: float) -> None:
        super().__init__(dim, experts, 2)
        check_number("tolerance", tolerance, -1e-300, float("inf"), "at least 0")
        self.tolerance = tolerance

    def forward(self, x: Float[Tensor, "N M"]) -> Routing:
        """Choose two experts for tokens x [N,M]; return weights [N,2] and indices [N,2]."""
        scores = self.logits(x)
        chosen = self.choose(scores, scores)  # the second is the best without the first
        left, weights = scores, []
        for expert in chosen.split(1, -1):
            best = left.gather(-1, expert)
            # a score that is left out is at -inf, which is far, whatever it is divided by
            distance = (best - left) / torch.maximum(scores.abs(), best)
            near_scores = left.masked_fill(distance > 2 * self.tolerance, -torch.inf)
            weights.append(near_scores.softmax(-1).gather(-1, expert))
            left = left.scatter(-1, expert, -torch.inf)
        return Routing(torch.cat(weights, -1), chosen)

    def extra_repr(self) -> str:
        """Return the numbers of chosen and all experts, and the tolerance."""
        return f"{super().extra_repr()}, tolerance={self.tolerance:g}"
