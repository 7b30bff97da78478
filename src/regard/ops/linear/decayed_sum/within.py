"""What the tokens of a chunk answer one another: weights q_i . (k_j decayed from j to i), for j <= i, times values."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.ops.linear.decays import between, since_start, until_end


def within(
    q: Float[Tensor, "B G n C R D"],
    k: Float[Tensor, "B G n C D"],
    v: Float[Tensor, "B G n C E"],
    g: Float[Tensor, "#B G n C #D"] | None,
) -> Float[Tensor, "B G n C R E"]:
    """o_i = sum_{j <= i} sum_d q_id k_jd exp(g_{j+1,d} + ... + g_{i,d}) v_j, in each of n chunks of C tokens.

    Args:
        g: logarithms of decays, one per channel, one for all channels, or None: none. With one per channel C is a power of 2.

    >>> one = torch.ones(1, 1, 1, 2, 1)
    >>> within(one[..., None], one, one, None).flatten().tolist()
    [1.0, 2.0]
    """
    if g is not None and g.shape[-1] > 1:
        return _by_halves(q, k, v, g)
    C, R = q.shape[3:5]
    weights = (q.flatten(3, 4) @ k.mT).unflatten(3, (C, R))  # [B,G,n,C,R,C]
    if g is not None:
        weights = weights * between(g)[..., None, :]
    later = weights.new_ones(C, C, dtype=torch.bool).triu(1)
    weights = weights.masked_fill(later[:, None], 0)
    return (weights.flatten(3, 4) @ v).unflatten(3, (C, R))


def _by_halves(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Each token alone, then pairs of blocks of 1, 2, 4, ... tokens: the second block reads the first across their border.

    The decay from j to i is the one from j to the border times the one from the border to i. So the weights of two blocks
    are one product of matrices, whatever the decays, and no exponent is greater than the sum of the g that it stands for.
    """
    R = q.shape[4]
    out = (q * k[..., None, :]).sum(-1, keepdim=True) * v[..., None, :]  # a token and itself
    s = 1
    while s < k.shape[3]:
        (first_k, _), (first_v, _) = _halves(k, s), _halves(v, s)
        first_g, second_g = _halves(g, s)  # [B,G,n,p,s,D]
        reads = _halves(q, s)[1] * since_start(second_g)[..., None, :]  # [B,G,n,p,s,R,D]
        weights = reads.flatten(4, 5) @ (first_k * until_end(first_g)).mT  # [B,G,n,p,s*R,s]
        found = (weights @ first_v).unflatten(4, (s, R))
        out = out + torch.stack([torch.zeros_like(found), found], 4).flatten(3, 5)
        s *= 2
    return out


def _halves(x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """[B,G,n,C,...] -> the first and the second of each pair of blocks of s tokens, [B,G,n,C/2s,s,...]."""
    first, second = x.unflatten(3, (-1, 2, s)).unbind(4)
    return first, second
