"""Parts of the chunked forms: decays between the tokens of a chunk, products in which what is not
finite reaches no earlier token, and running sums.

A state decays between two tokens by exp(g_{j+1} + ... + g_i), where g_t is the logarithm of the
decay at token t. It could be computed as exp(c_i - c_j) from running sums c, but this difference
loses digits where c is large, and is NaN after a decay of 0 (g = -inf). The functions here sum the
g between two tokens separately; the sum is at most 0 if all g are.

A matrix product multiplies what a triangular matrix hides by 0, and 0 times infinity is NaN: so a
token whose numbers overflow would change the tokens before it, and its zero gradient would change
theirs. `finite_part` and its neighbours compute with 0 in place of what is not finite, and add NaN
to the rows that read it. Nothing here reads a value, so that the functions run in graphs.
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
    """Return the first and the second block of each pair of blocks of `size` tokens, where `dim` is
    the dimension of the tokens from the end: `[..., C, d]` -> two tensors `[..., C/(2 size), size,
    d]`.
    """
    first, second = torch.unflatten(x, dim, (-1, 2, size)).unbind(dim - 1)
    return first, second


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
