"""Sparse activations of a feed-forward layer: only the largest inputs of each token are kept."""

from __future__ import annotations

from statistics import NormalDist

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_number


class GaussianTopK(nn.Module):
    """An activation that sets a share of its inputs to zero, those below a quantile of a normal
    distribution with the mean and the deviation of the token's inputs.

    y = f(max(0, x - mean(x) - z std(x))),  z = Phi^-1(sparsity)

    >>> x = torch.tensor([-1.0, 0.0, 1.0, 8.0])
    >>> GaussianTopK(0.5, nn.ReLU())(x).tolist()
    [0.0, 0.0, 0.0, 6.0]

    Source: Gemma 3n, `activation_sparsity_pattern` of its released code; You et al. 2025 (arXiv
    2506.06644), section 3.
    """

    def __init__(self, sparsity: float, activation: nn.Module) -> None:
        super().__init__()
        check_number("sparsity", sparsity, 0, 1, "above 0 and below 1")
        self.sparsity, self.activation = sparsity, activation

    def forward(self, x: Float[Tensor, "*L F"]) -> Float[Tensor, "*L F"]:
        """Return the activations [..., F] of inputs [..., F]."""
        deviations = NormalDist().inv_cdf(self.sparsity)
        cutoff = x.mean(-1, keepdim=True) + deviations * x.std(-1, keepdim=True, unbiased=False)
        y: Tensor = self.activation(torch.relu(x - cutoff))
        return y

    def extra_repr(self) -> str:
        """Return the share of zeros."""
        return f"{self.sparsity:g}"
