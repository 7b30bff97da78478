"""The recurrence S <- diag(exp(g)) S + k v^T: its definition, its chunked form, and which one
runs.

"auto" computes few tokens one by one; more run in Triton on a GPU that serves them, else in chunks.
A form that is named runs or is refused.

A state decays between two tokens by exp(g_{j+1} + ... + g_i). exp(c_i - c_j) of running sums would
lose digits, and is NaN after a decay of 0, so the g are summed separately.

0 times infinity is NaN: a token that overflows would change earlier ones. `finite_part` and its
neighbours compute with 0 instead, and add NaN to the rows that read it, without reading a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch import dtype as Dtype

from regard.errors import KernelRefusal
from regard.ops.linear.call import (
    MAX_RECURRENT_TOKENS,
    RecurrenceCall,
    chunk_size,
    group_heads,
    split_value_heads,
    without_autocast,
)
from regard.ops.linear.triton import kernel
from regard.units import plural


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


@dataclass(frozen=True)
class FormChoice:
    """The form of a recurrence that would run, and why not in Triton."""

    form: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return self.form + "".join(f"\n  not triton: {reason}" for reason in self.reasons)


def plan_form(call: RecurrenceCall, form: str) -> FormChoice:
    """Return which form runs a call, and why the kernels in Triton do not."""
    if form not in ("auto", "triton"):
        return FormChoice(form, (f'form is "{form}"',))
    reasons = kernel.why_not(call)
    if form == "triton":
        if reasons:
            raise KernelRefusal(
                f'form is "triton", which cannot run this recurrence: {"; ".join(reasons)}; '
                'pass form="auto"'
            )
        return FormChoice("triton", ())
    if call.q.shape[2] <= MAX_RECURRENT_TOKENS:
        few = f"at most {plural(MAX_RECURRENT_TOKENS, 'token')} are computed one by one"
        return FormChoice("recurrent", (*reasons, few))
    if call.q.device.type != "cuda" and not reasons:
        reasons = ["triton only interprets kernels on a CPU"]
    return FormChoice("chunk", tuple(reasons)) if reasons else FormChoice("triton", ())


def choose_form(call: RecurrenceCall, form: str) -> str:
    """Return which form runs a call (`plan_form`); without a GPU, "auto" stays as it is."""
    if form == "triton" or (form == "auto" and call.q.is_cuda):
        return plan_form(call, form).form
    return form


def run_form(
    call: RecurrenceCall,
    form: str,
    chunk: int,
    in_torch: Callable[[RecurrenceCall, str, int], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Compute a call in the form of `choose_form`; `in_torch` has all forms but "triton"."""
    form = choose_form(call, form)
    if form == "triton":
        return kernel.run(call, lambda x: in_torch(x, "chunk", chunk))
    return in_torch(call, form, chunk)


def recurrent(
    q: Float[Tensor, "B G #P R T D"],
    k: Float[Tensor, "B G 1 T D"],
    v: Float[Tensor, "B G P T E"],
    log_decay: Float[Tensor, "#B G P T #D"] | None,
    state: Float[Tensor, "B G P D E"],
) -> tuple[Float[Tensor, "B G P R T E"], Float[Tensor, "B G P D E"]]:
    """Compute the recurrence token by token: decay the state, add the token, read the output.

    S <- diag(exp(g_t)) S + k_t v_t^T;  o_t = S^T q_t

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 18 to 20; Yang et al. 2023
    (arXiv 2312.06635), equation 3.
    """
    S, outputs = state, []
    for t in range(k.shape[-2]):
        if log_decay is not None:
            S = S * log_decay[..., t, :, None].exp()
        S = S + k[..., t, :, None] * v[..., t, None, :]
        outputs.append(q[..., t, :] @ S)  # [B,G,P,R,E]
    if not outputs:
        return q @ S.unsqueeze(-3), S.clone()
    return torch.stack(outputs, -2), S


def within_chunks(
    q: Float[Tensor, "B G #P n C R D"],
    k: Float[Tensor, "B G 1 n C D"],
    v: Float[Tensor, "B G P n C E"],
    g: Float[Tensor, "#B G P n C #D"] | None,
) -> Float[Tensor, "B G P n C R E"]:
    """Compute o_i = sum_{j <= i} sum_d q_id k_jd exp(g_{j+1,d} + ... + g_{i,d}) v_j by chunk."""
    if g is not None and g.shape[-1] > 1:
        return _within_chunks_by_halves(q, k, v, g)
    C, R = q.shape[-3:-1]
    weights = torch.unflatten(q.flatten(-3, -2) @ k.mT, -2, (C, R))  # [B,G,P or 1,n,C,R,C]
    if g is not None:
        weights = weights * pairwise_decay(g)[..., None, :]
    later = weights.new_ones(C, C, dtype=torch.bool).triu(1)
    weights = weights.masked_fill(later[:, None], 0)
    return torch.unflatten(weights.flatten(-3, -2) @ v, -2, (C, R))


def _within_chunks_by_halves(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Compute `within_chunks` with a decay per channel, by pairs of blocks of 1, 2, 4, ...

    The decay from j to i is that from j to the border of the blocks times that from the border to
    i: one matrix product per pair, with exponents that cannot overflow where g <= 0.
    """
    R = q.shape[-2]
    out = (q * k[..., None, :]).sum(-1, keepdim=True) * v[..., None, :]  # a token and itself
    size = 1
    while size < k.shape[-2]:
        (first_k, _), (first_v, _) = block_halves(k, size), block_halves(v, size)
        first_g, second_g = block_halves(g, size)  # [B,G,P,n,p,s,D]
        queries = (
            block_halves(q, size, -3)[1] * decay_since_start(second_g)[..., None, :]
        )  # [B,G,P,n,p,s,R,D]
        weights = queries.flatten(-3, -2) @ (first_k * decay_until_end(first_g)).mT  # [...,s*R,s]
        across = torch.unflatten(weights @ first_v, -2, (size, R))
        out = out + torch.stack([torch.zeros_like(across), across], -4).flatten(-5, -3)
        size *= 2
    return out


def chunked(
    q: Float[Tensor, "B G #P R T D"],
    k: Float[Tensor, "B G 1 T D"],
    v: Float[Tensor, "B G P T E"],
    log_decay: Float[Tensor, "#B G P T #D"] | None,
    state: Float[Tensor, "B G P D E"],
    size: int,
) -> tuple[Float[Tensor, "B G P R T E"], Float[Tensor, "B G P D E"]]:
    """Compute the recurrence with matrix products over chunks of `size` tokens.

    With c_i the sum of g over the chunk up to token i:
    O = (Q * exp(c)) S + within_chunks(Q, K, V);  S <- diag(exp(c_C)) S + (K * exp(c_C - c))^T V

    Only the state passes from chunk to chunk. A decay of one number per token is applied to V and
    the products with S.

    Source: Sun et al. 2023 (arXiv 2307.08621), equation 7; Yang et al. 2023 (arXiv 2312.06635),
    section 4.1.
    """
    (R, T, D), size = q.shape[-3:], min(size, k.shape[-2])
    if T == 0:
        return q @ state.unsqueeze(-3), state.clone()
    by_channel = log_decay is not None and log_decay.shape[-1] > 1
    if by_channel:
        size = 1 << (size - 1).bit_length()
    (q, bad_q), (k, rows), (v, columns) = map(finite_part, (q, k, v))
    if log_decay is not None:
        log_decay, bad_g = valid_decays(log_decay)
        rows = rows + bad_g
    q = torch.unflatten(
        split_into_chunks(q.movedim(-3, -2).flatten(-2), size), -1, (R, D)
    )  # [B,G,P or 1,n,C,R,D]
    k, v = split_into_chunks(k, size), split_into_chunks(v, size)
    g = None if log_decay is None else split_into_chunks(log_decay, size)
    out = within_chunks(q, k, v, g)  # [B,G,P,n,C,R,E]
    chunk_states, state = _chunk_states(k, v, g, state)
    start = None if g is None else decay_since_start(g)[..., None, :]  # [B,G,P,n,C,1,D or 1]
    if start is not None and by_channel:
        q = q * start
    earlier = matmul_over_chunks(q.flatten(-3, -2), chunk_states)
    earlier = torch.unflatten(earlier, -2, (size, R))
    if start is not None and not by_channel:
        earlier = earlier * start
    out = (out + earlier).flatten(-4, -3)[..., :T, :, :].movedim(-2, -3)  # [B,G,P,R,T,E]
    # A NaN in one channel of a key or a decay affects its row of the state, one in a value its
    # column, both the outputs from their token on; one in a query affects its own output.
    bad = (rows.sum(-1, keepdim=True) + columns).cumsum(-2).unsqueeze(-3)
    out = out + (bad + bad_q.sum(-1, keepdim=True))
    return out, state + (rows.sum(-2)[..., None] + columns.sum(-2)[..., None, :])


def matmul_over_chunks(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for tensors `[B, G, P or 1, n, ...]`, where value heads may share a."""
    if a.shape[2] == b.shape[2]:
        return a @ b
    return torch.einsum("bgnij,bgpnjl->bgpnil", a[:, :, 0], b)


def _chunk_states(
    k: Tensor, v: Tensor, g: Tensor | None, state: Tensor
) -> tuple[Float[Tensor, "B G P n D E"], Float[Tensor, "B G P D E"]]:
    """Return the state before each of the n chunks, and the state after the last chunk."""
    if g is not None:
        until_end = decay_until_end(g)
        k, v = (k * until_end, v) if g.shape[-1] > 1 else (k, v * until_end)
    writes = matmul_over_chunks(k.mT, v)
    remaining = None if g is None else decay_since_start(g)[..., -1, :, None]  # [...,n,D or 1,1]
    states = []
    for i in range(writes.shape[-3]):
        states.append(state)
        state = state if remaining is None else state * remaining[..., i, :, :]
        state = state + writes[..., i, :, :]
    return torch.stack(states, -3), state


def linear_recurrence(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    log_decay: Float[Tensor, "#B N T #D"] | None,
    state: Float[Tensor, "B N D E"],
    *,
    form: str,
    chunk: int,
    scale: float = 1.0,
    dtype: Dtype | None = None,
    out_dtype: Dtype | None = None,
) -> tuple[Float[Tensor, "B O T E"], Float[Tensor, "B N D E"]]:
    """Compute S <- diag(exp(g)) S + k v^T, o = scale S^T q, for the heads of `value_heads`."""
    call = RecurrenceCall(
        q, k, v, state, None, log_decay, scale, dtype or state.dtype, out_dtype or state.dtype
    )
    return run_form(call, form, chunk, _in_torch)


def _in_torch(call: RecurrenceCall, form: str, chunk: int) -> tuple[Tensor, Tensor]:
    """Compute `linear_recurrence` in operations of torch."""
    q, k, v, log_decay, state = call.q, call.k, call.v, call.log_decay, call.state
    G, T = k.shape[1:3]
    q, k, v = (x.to(state.dtype) for x in (q, k, v))
    queries, keys, values = group_heads(q if call.scale == 1 else q * call.scale, k, v)
    g = None if log_decay is None else split_value_heads(log_decay.to(state.dtype), G)
    grouped, size = split_value_heads(state, G), chunk_size(form, chunk, T)
    with without_autocast(q):
        if size is None:
            out, S = recurrent(queries, keys, values, g, grouped)
        elif g is None and queries.shape[2] < values.shape[2]:
            out, S = _chunked_as_columns(queries, keys, values, grouped, size)
        else:
            out, S = chunked(queries, keys, values, g, grouped, size)
    return out.flatten(1, 3).to(call.out_dtype), S.flatten(1, 2)


def _chunked_as_columns(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Compute `chunked` without a decay, where value heads are columns of one of P E channels."""
    P, E = v.shape[2], v.shape[-1]
    v, state = (x.movedim(2, -2).flatten(-2)[:, :, None] for x in (v, state))  # [B,G,1,...,P*E]
    out, state = chunked(q, k, v, None, state, size)
    out, state = (torch.unflatten(x, -1, (P, E))[:, :, 0].movedim(-2, 2) for x in (out, state))
    return out, state
