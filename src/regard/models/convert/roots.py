"""Square roots of Gram matrices."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def both_roots(
    gram: Float[Tensor, "*b d d"],
) -> tuple[Float[Tensor, "*b d d"], Float[Tensor, "*b d d"]]:
    """S with S^2 = gram, symmetric, and its pseudo-inverse: what rounding made of a 0 stays 0.

    >>> root, inverse = both_roots(torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
    >>> root.tolist(), inverse.tolist()
    ([[2.0, 0.0], [0.0, 0.0]], [[0.5, 0.0], [0.0, 0.0]])
    """
    if not gram.shape[-1]:
        return gram, gram
    values, vectors = torch.linalg.eigh(gram)
    least = values[..., -1:].clamp(min=0) * gram.shape[-1] * torch.finfo(gram.dtype).eps
    real = values > least
    roots = torch.where(real, values, 0).sqrt()
    inverse = torch.where(real, 1 / torch.where(real, roots, 1), 0)
    return vectors * roots[..., None, :] @ vectors.mT, vectors * inverse[..., None, :] @ vectors.mT
