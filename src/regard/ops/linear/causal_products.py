"""Products over a chunk of tokens in which what is not finite reaches no earlier token.

A matrix product multiplies what a triangular matrix hides by 0, and 0 times infinity is NaN: so a
token whose numbers overflow would change the tokens before it, and its zero gradient would change
theirs. These functions compute with 0 in place of what is not finite, and add NaN to the rows that
read it. Nothing here reads a value, so that the functions run in graphs.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def finite_part(x: Float[Tensor, "*L"]) -> tuple[Float[Tensor, "*L"], Float[Tensor, "*L"]]:
    """Return x with 0 in place of what is not finite, and a marker that is NaN there and 0
    in all other places; the marker has no gradient, and what was replaced has none.

    >>> [y.tolist() for y in finite_part(torch.tensor([2.0, float("inf")]))]
    [[2.0, 0.0], [0.0, nan]]
    """
    marker = x.detach() - x.detach()
    return torch.where(marker == 0, x, 0), marker


def valid_decays(g: Float[Tensor, "*L"]) -> tuple[Float[Tensor, "*L"], Float[Tensor, "*L"]]:
    """Return the logarithms of decays with 0 in place of NaN and +inf, and a marker that is NaN
    there and 0 in all other places; -inf is valid: it is a decay to 0.
    """
    valid = g.detach() < torch.inf
    return torch.where(valid, g, 0), torch.zeros_like(g).masked_fill(~valid, torch.nan)


def inverse_of_unit_triangle(
    below: Float[Tensor, "*L C C"], scale: Float[Tensor, "*L C 1"]
) -> tuple[Float[Tensor, "*L C C"], Float[Tensor, "*L C 1"]]:
    """Return the finite part of (I + below)^-1 diag(scale), where `below` is finite, and 0 on and
    above the diagonal; and a marker for each row: NaN where one of its numbers is not finite.

    >>> inverse_of_unit_triangle(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.ones(2, 1))[0]
    tensor([[ 1.,  0.],
            [-2.,  1.]])
    """
    # unitriangular: torch takes the diagonal to be 1 and does not read it
    inverse = torch.linalg.solve_triangular(
        below, torch.diag_embed(scale[..., 0]), upper=False, unitriangular=True
    )
    inverse, bad = finite_part(inverse)
    # What is above the diagonal is 0. It must have no gradient: the product of a gradient of an
    # early token and a large number of a later one may overflow.
    return inverse.tril_(), bad.sum(-1, keepdim=True)
