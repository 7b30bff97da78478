"""Parts of the chunked forms: decays, running sums, products without what is not finite.

A state decays between two tokens by exp(g_{j+1} + ... + g_i). exp(c_i - c_j) of running sums would
lose digits, and is NaN after a decay of 0, so the g are summed separately.

0 times infinity is NaN: a token that overflows would change earlier ones. `finite_part` and its
neighbours compute with 0 instead, and add NaN to the rows that read it, without reading a value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def split_into_chunks(x: Float[Tensor, "*L T d"], size: int) -> Float[Tensor, "*L n size d"]:
    """Split T tokens into n chunks of `size` tokens, the last one padded with zeros."""
    return torch.unflatten(F.pad(x, (0, 0, 0, -x.shape[-2] % size)), -2, (-1, size))


def decay_since_start(g: Float[Tensor, "*L C d"]) -> Float[Tensor, "*L C d"]:
    """Return exp(g_1 + ... + g_i), the decay of the state before the chunk at token i."""
    return g.cumsum(-2).exp()


def decay_until_end(g: Float[Tensor, "*L C d"]) -> Float[Tensor, "*L C d"]:
    """Return exp(g_{j+1} + ... + g_C), the decay of token j's part at the end of the chunk."""
    later = F.pad(g[..., 1:, :], (0, 0, 0, 1))
    return later.flip(-2).cumsum(-2).flip(-2).exp()


def pairwise_decay(g: Float[Tensor, "*L C 1"]) -> Float[Tensor, "*L C C"]:
    """Return exp(g_{j+1} + ... + g_i) for j <= i, else 0: the decay of token j's part at i."""
    C = g.shape[-2]
    later = g.new_ones(C, C, dtype=torch.bool).tril(-1)  # token l comes after token j
    return g.expand(*g.shape[:-1], C).masked_fill(~later, 0).cumsum(-2).exp().tril()


def decayed_products(
    x: Float[Tensor, "*#L C D"], k: Float[Tensor, "*#L C D"], g: Float[Tensor, "*#L C D"]
) -> Float[Tensor, "*L C C"]:
    """Return sum_d x_id k_jd exp(g_{j+1,d} + ... + g_{i,d}) for j <= i, else 0.

    Since exp(-c_j) overflows, blocks of 1, 2, 4, ... tokens are combined in pairs: the decay is
    that from j to the border of the blocks times that from the border to i, both sums of g alone.

    Source: Yang et al. 2023 (arXiv 2312.06635), section 4.3, where the blocks have two sizes.
    """
    products = (x * k).sum(-1)
    products = products.expand(torch.broadcast_shapes(products.shape, g.shape[:-1]))
    products = products[..., None, None]  # [*L,C,1,1]
    size = 1
    while size < x.shape[-2]:
        (_, later_x), (earlier_k, _) = block_halves(x, size), block_halves(k, size)
        earlier_g, later_g = block_halves(g, size)  # [*L,p,size,D]
        across = (later_x * decay_since_start(later_g)) @ (
            earlier_k * decay_until_end(earlier_g)
        ).mT  # [*L,p,size,size]
        first, second = torch.unflatten(products, -3, (-1, 2)).unbind(-3)
        upper = torch.cat([first, torch.zeros_like(first)], -1)
        products = torch.cat([upper, torch.cat([across, second], -1)], -2)
        size *= 2
    return products.squeeze(-3)


def block_halves(x: Tensor, size: int, dim: int = -2) -> tuple[Tensor, Tensor]:
    """Return the first and second block of each pair, `[..., C, d]` -> `[..., C/(2 n), n, d]`."""
    first, second = torch.unflatten(x, dim, (-1, 2, size)).unbind(dim - 1)
    return first, second


def finite_part(x: Float[Tensor, "*L"]) -> tuple[Float[Tensor, "*L"], Float[Tensor, "*L"]]:
    """Return x with 0 in place of what is not finite, and a marker that is NaN there, else 0."""
    marker = x.detach() - x.detach()
    return torch.where(marker == 0, x, 0), marker


def valid_decays(g: Float[Tensor, "*L"]) -> tuple[Float[Tensor, "*L"], Float[Tensor, "*L"]]:
    """Return log decays with 0 in place of NaN and +inf, and a marker; -inf is valid."""
    valid = g.detach() < torch.inf
    return torch.where(valid, g, 0), torch.zeros_like(g).masked_fill(~valid, torch.nan)


def inverse_of_unit_triangle(
    below: Float[Tensor, "*L C C"], scale: Float[Tensor, "*L C 1"]
) -> tuple[Float[Tensor, "*L C C"], Float[Tensor, "*L C 1"]]:
    """Return the finite part of (I + below)^-1 diag(scale), and a marker for each row."""
    # unitriangular: torch takes the diagonal to be 1 and does not read it
    inverse = torch.linalg.solve_triangular(
        below, torch.diag_embed(scale[..., 0]), upper=False, unitriangular=True
    )
    inverse, bad = finite_part(inverse)
    # What is above the diagonal is 0. It must have no gradient: the product of a gradient of an
    # early token and a large number of a later one may overflow.
    return inverse.tril_(), bad.sum(-1, keepdim=True)


FLOOR = -1e30
"""A finite number that stands for the logarithm of 0: its difference from itself is not NaN."""


def _earlier(x: Tensor, step: int, fill: float) -> Tensor:
    """Return x `[..., T, d]` as it was `step` tokens before; `fill` before the first token."""
    return torch.cat([torch.full_like(x[..., :step, :], fill), x[..., :-step, :]], -2)


def running_maximum(
    log_decay: Float[Tensor, "*L T d"], x: Float[Tensor, "*L T d"]
) -> Float[Tensor, "*L T d"]:
    """Return m_t = max(g_t + m_{t-1}, x_t), where m before the first token is minus infinity.

    >>> g, x = torch.tensor([[0.0], [-1.0], [-1.0]]), torch.tensor([[5.0], [1.0], [9.0]])
    >>> running_maximum(g, x).flatten().tolist()
    [5.0, 4.0, 9.0]
    """
    step = 1
    while step < x.shape[-2]:
        x = torch.maximum(x, log_decay + _earlier(x, step, FLOOR))
        log_decay = log_decay + _earlier(log_decay, step, 0.0)
        step *= 2
    return x


def decayed_sum(
    decay: Float[Tensor, "*L T d"], x: Float[Tensor, "*L T e"]
) -> Float[Tensor, "*L T e"]:
    """Return s_t = a_t s_{t-1} + x_t, where s before the first token is 0.

    >>> decayed_sum(torch.full((3, 1), 0.5), torch.ones(3, 1)).flatten().tolist()
    [1.0, 1.5, 1.75]
    """
    step = 1
    while step < x.shape[-2]:
        x = x + decay * _earlier(x, step, 0.0)
        decay = decay * _earlier(decay, step, 1.0)
        step *= 2
    return x


def running_log_sum_exp(x: Float[Tensor, "*L T d"]) -> Float[Tensor, "*L T d"]:
    """Return log(exp(x_1) + ... + exp(x_t)) for each token t.

    >>> running_log_sum_exp(torch.zeros(4, 1)).exp().round(decimals=5).flatten().tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    step = 1
    while step < x.shape[-2]:
        x = torch.logaddexp(x, _earlier(x, step, FLOOR))
        step *= 2
    return x
