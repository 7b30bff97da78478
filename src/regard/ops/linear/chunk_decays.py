"""Decays inside chunks, from their logarithms: no exponent is a difference of two sums.

A difference of running sums is exact only relative to those sums, and is NaN behind a decay of 0
(log -inf). Here every exponent is the sum of the logarithms between two tokens and of no others, so
that it is at most 0 if they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def split_into_chunks(x: Float[Tensor, "*L T d"], size: int) -> Float[Tensor, "*L n size d"]:
    """Cut T tokens into chunks of `size`; zeros, which write nothing and decay nothing, fill the
    last one.

    >>> fold(torch.ones(5, 1), 2).flatten().tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    """
    return torch.unflatten(F.pad(x, (0, 0, 0, -x.shape[-2] % size)), -2, (-1, size))


def decay_since_start(g: Float[Tensor, "*L C d"]) -> Float[Tensor, "*L C d"]:
    """exp(g_1 + ... + g_i): what is left at token i of what stood in front of the chunk."""
    return g.cumsum(-2).exp()


def decay_until_end(g: Float[Tensor, "*L C d"]) -> Float[Tensor, "*L C d"]:
    """exp(g_{j+1} + ... + g_C): what is left behind the chunk of what token j wrote.

    >>> until_end(torch.tensor([[0.2], [0.5], [0.25]]).log()).flatten().tolist()
    [0.125, 0.25, 1.0]
    """
    later = F.pad(g[..., 1:, :], (0, 0, 0, 1))
    return later.flip(-2).cumsum(-2).flip(-2).exp()


def pairwise_decay(g: Float[Tensor, "*L C 1"]) -> Float[Tensor, "*L C C"]:
    """exp(g_{j+1} + ... + g_i) for j <= i, else 0: what is left at token i of what token j wrote.

    >>> between(torch.zeros(2, 1)).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    C = g.shape[-2]
    later = g.new_ones(C, C, dtype=torch.bool).tril(-1)  # row l stands behind column j
    return g.expand(*g.shape[:-1], C).masked_fill(~later, 0).cumsum(-2).exp().tril()


def decayed_products(
    x: Float[Tensor, "*L C D"], k: Float[Tensor, "*#L C D"], g: Float[Tensor, "*#L C D"]
) -> Float[Tensor, "*L C C"]:
    """sum_d x_id k_jd exp(g_{j+1,d} + ... + g_{i,d}) for j <= i, else 0: what x_i reads of k_j,
    each channel decayed by itself.

    exp(c_i - c_j) does not split into exp(c_i) exp(-c_j): the second factor overflows where decays
    are strong. So tokens are
    paired: single tokens, then blocks of 1, 2, 4, ... tokens, whose second half reads the first
        across their border, decayed from j to the border and from there to i. Both exponents are
        sums of g alone.

    Args:
        x, k, g: C is a power of 2.

    >>> half = torch.full((2, 1), 0.5).log()
    >>> reads(torch.ones(2, 1), torch.tensor([[3.0], [4.0]]), half).tolist()
    [[3.0, 0.0], [1.5, 4.0]]

    Source: Yang et al. 2023 (arXiv 2312.06635), section 4.3, where the blocks have two sizes.
    """
    found = (x * k).sum(-1)[..., None, None]  # [*L,C,1,1]
    size = 1
    while size < x.shape[-2]:
        (_, here), (there, _) = _block_halves(x, size), _block_halves(k, size)
        before, behind = _block_halves(g, size)
        across = (here * decay_since_start(behind)) @ (
            there * decay_until_end(before)
        ).mT  # [*L,p,size,size]
        first, second = torch.unflatten(found, -3, (-1, 2)).unbind(-3)
        above = torch.cat([first, torch.zeros_like(first)], -1)
        found = torch.cat([above, torch.cat([across, second], -1)], -2)
        size *= 2
    return found.squeeze(-3)


def _block_halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """[*L,C,D] -> the first and the second of each pair of blocks of `size` tokens,
    [*L,C/2size,size,D].
    """
    first, second = torch.unflatten(x, -2, (-1, 2, size)).unbind(-3)
    return first, second
