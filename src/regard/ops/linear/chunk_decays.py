"""The factors by which a recurrent state decays between two tokens of a chunk.

Such a factor is exp(g_{j+1} + ... + g_i), where g_t is the logarithm of the decay at token t. It
could be computed as exp(c_i - c_j) from running sums c, but this difference loses digits where c is
large, and is NaN after a decay of 0 (g = -inf). The functions here sum the g between two tokens
separately; the sum is at most 0 if all g are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def split_into_chunks(x: Float[Tensor, "*L T d"], size: int) -> Float[Tensor, "*L n size d"]:
    """Split T tokens into n chunks of `size` tokens. The last chunk is padded with zeros: a token
    with k = v = g = 0 changes no state.

    >>> split_into_chunks(torch.ones(5, 1), 2).flatten().tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    """
    return torch.unflatten(F.pad(x, (0, 0, 0, -x.shape[-2] % size)), -2, (-1, size))


def decay_since_start(g: Float[Tensor, "*L C d"]) -> Float[Tensor, "*L C d"]:
    """Return exp(g_1 + ... + g_i): the factor by which the state before the chunk has decayed
    at token i.
    """
    return g.cumsum(-2).exp()


def decay_until_end(g: Float[Tensor, "*L C d"]) -> Float[Tensor, "*L C d"]:
    """Return exp(g_{j+1} + ... + g_C): the factor by which the contribution of token j has decayed
    at the end of the chunk.

    >>> decay_until_end(torch.tensor([[0.2], [0.5], [0.25]]).log()).flatten().tolist()
    [0.125, 0.25, 1.0]
    """
    later = F.pad(g[..., 1:, :], (0, 0, 0, 1))
    return later.flip(-2).cumsum(-2).flip(-2).exp()


def pairwise_decay(g: Float[Tensor, "*L C 1"]) -> Float[Tensor, "*L C C"]:
    """Return exp(g_{j+1} + ... + g_i) for j <= i, else 0: the factor by which the contribution of
    token j has decayed at token i.

    >>> pairwise_decay(torch.zeros(2, 1)).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    C = g.shape[-2]
    later = g.new_ones(C, C, dtype=torch.bool).tril(-1)  # token l comes after token j
    return g.expand(*g.shape[:-1], C).masked_fill(~later, 0).cumsum(-2).exp().tril()


def decayed_products(
    x: Float[Tensor, "*#L C D"], k: Float[Tensor, "*#L C D"], g: Float[Tensor, "*#L C D"]
) -> Float[Tensor, "*L C C"]:
    """Return sum_d x_id k_jd exp(g_{j+1,d} + ... + g_{i,d}) for j <= i, else 0: the products of x
    and k where each channel decays separately.

    With running sums c of g, the factors exp(c_i) and exp(-c_j) would give this as one matrix
    product, but the second overflows where decays are strong. Instead, blocks of 1, 2, 4, ...
    tokens are combined in pairs: for i in the second block and j in the first, the decay is the
    product of the decay from j to the border of the blocks and the decay from the border to i. Both
    exponents are sums of g alone.

    Args:
        x: `[..., C, D]`, where C is a power of 2.
        k: `[..., C, D]`.
        g: the logarithms of the decays `[..., C, D]`.

    >>> half = torch.full((2, 1), 0.5).log()
    >>> decayed_products(torch.ones(2, 1), torch.tensor([[3.0], [4.0]]), half).tolist()
    [[3.0, 0.0], [1.5, 4.0]]

    Source: Yang et al. 2023 (arXiv 2312.06635), section 4.3, where the blocks have two sizes.
    """
    products = (x * k).sum(-1)
    products = products.expand(torch.broadcast_shapes(products.shape, g.shape[:-1]))
    products = products[..., None, None]  # [*L,C,1,1]
    size = 1
    while size < x.shape[-2]:
        (_, later_x), (earlier_k, _) = _block_halves(x, size), _block_halves(k, size)
        earlier_g, later_g = _block_halves(g, size)
        across = (later_x * decay_since_start(later_g)) @ (
            earlier_k * decay_until_end(earlier_g)
        ).mT  # [*L,p,size,size]
        first, second = torch.unflatten(products, -3, (-1, 2)).unbind(-3)
        upper = torch.cat([first, torch.zeros_like(first)], -1)
        products = torch.cat([upper, torch.cat([across, second], -1)], -2)
        size *= 2
    return products.squeeze(-3)


def _block_halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second block of each pair of blocks of `size` tokens: `[..., C, D]`
    -> two tensors `[..., C/(2 size), size, D]`.
    """
    first, second = torch.unflatten(x, -2, (-1, 2, size)).unbind(-3)
    return first, second
