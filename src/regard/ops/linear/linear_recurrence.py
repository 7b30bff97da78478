"""The recurrence shared by linear attention, retention and gated linear attention, S <-
diag(exp(g)) S + k v^T: its definition and its chunked form.

The delta rules share its argument checks and the factors by which a state decays between two tokens
of a chunk. Such a factor is exp(g_{j+1} + ... + g_i), where g_t is the logarithm of the decay at
token t. It could be computed as exp(c_i - c_j) from running sums c, but this difference loses
digits where c is large, and is NaN after a decay of 0 (g = -inf). The functions here sum the g
between two tokens separately; the sum is at most 0 if all g are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, float32, float64
from torch import dtype as Dtype

from regard.argument_checks import (
    check_device,
    check_number,
    check_positions,
    check_query_key_value,
    check_tensor,
    check_value_heads,
)
from regard.errors import ArgumentError, ArgumentTypeError
from regard.ops.linear.causal_products import finite_part, valid_decays
from regard.ops.linear.form_choice import MAX_RECURRENT_TOKENS, choose_form
from regard.ops.linear.triton.kernel import RecurrenceCall, run
from regard.ops.linear.value_heads import group_heads, split_value_heads
from regard.span import Positions, find_empty_slots
from regard.units import plural


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
        (_, later_x), (earlier_k, _) = (
            _block_halves_chunk_decays(x, size),
            _block_halves_chunk_decays(k, size),
        )
        earlier_g, later_g = _block_halves_chunk_decays(g, size)
        across = (later_x * decay_since_start(later_g)) @ (
            earlier_k * decay_until_end(earlier_g)
        ).mT  # [*L,p,size,size]
        first, second = torch.unflatten(products, -3, (-1, 2)).unbind(-3)
        upper = torch.cat([first, torch.zeros_like(first)], -1)
        products = torch.cat([upper, torch.cat([across, second], -1)], -2)
        size *= 2
    return products.squeeze(-3)


def _block_halves_chunk_decays(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second block of each pair of blocks of `size` tokens: `[..., C, D]`
    -> two tensors `[..., C/(2 size), size, D]`.
    """
    first, second = torch.unflatten(x, -2, (-1, 2, size)).unbind(-3)
    return first, second


FORMS = ("auto", "recurrent", "chunk", "parallel")
"""The forms in which a recurrence can be computed: "recurrent" token by token, "chunk" in
chunks, "parallel" as one chunk, and "auto". All give the same result.
"""
FORMS_WITH_TRITON = (*FORMS, "triton")
"""The forms of the recurrences that have kernels in Triton as well."""


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    positions: Positions | None,
    form: str,
    chunk: int,
    forms: tuple[str, ...] = FORMS,
) -> None:
    """Check that q, k and v fit together and have the same number of tokens, and that the
    options are valid.
    """
    check_query_key_value(q, k, v, check_heads=check_value_heads)
    if q.shape[2] != k.shape[2]:
        raise ArgumentError(
            f"query length {q.shape[2]} != key length {k.shape[2]}: a recurrence needs a query for "
            "each key; pass the result of earlier tokens as state"
        )
    check_number("scale", scale, float("-inf"), float("inf"), "finite")
    if positions is not None:
        check_positions("k_positions", positions, k.shape[0], k.shape[2])
    if form not in forms:
        raise ArgumentError(f"form is {form!r}; it must be one of {', '.join(forms)}")
    if isinstance(chunk, bool) or not isinstance(chunk, int):
        raise ArgumentTypeError(f"chunk is {type(chunk).__name__}; it must be an int, at least 1")
    if chunk < 1:
        raise ArgumentError(f"chunk is {chunk}; it must be at least 1")


def check_tensor_shape(
    name: str, x: Tensor, allowed: tuple[tuple[int, ...], ...], meaning: str, like: Tensor
) -> None:
    """Check that x is a floating-point tensor of one of the allowed shapes, on the device of the
    keys.
    """
    check_tensor(name, x)
    check_device(name, x, like, "key")
    if tuple(x.shape) not in allowed:
        shapes = " or ".join(str(shape) for shape in allowed)
        raise ArgumentError(f"{name} is {tuple(x.shape)}; it must be {shapes}, {meaning}")


def chunk_size(form: str, chunk: int, T: int) -> int | None:
    """Return the number of tokens per chunk for one of the `FORMS`; None for computation token by
    token.

    >>> chunk_size("auto", 64, 1000), chunk_size("parallel", 64, 1000), chunk_size("auto", 64, 1)
    (64, 1000, None)
    """
    if form == "recurrent" or (form == "auto" and T <= MAX_RECURRENT_TOKENS):
        return None
    return max(1, T) if form == "parallel" else chunk


def empty_slot_mask(positions: Positions | None, q: Tensor) -> Bool[Tensor, "#B T"] | None:
    """Return a mask `[B or 1, T]` that is True in empty slots (position -1); None if it is known,
    without reading a tensor, that no slot is empty.
    """
    return None if positions is None else find_empty_slots(positions, q.device)


def zero_empty_slots(x: Float[Tensor, "B n T d"], empty: Tensor | None) -> Float[Tensor, "B n T d"]:
    """Return x with 0 in the empty slots, even where they contain NaN."""
    return x if empty is None else x.masked_fill(empty[:, None, :, None], 0)


def state_dtype(k: Tensor) -> Dtype:
    """Return the dtype of a state and of all sums: fp32, or fp64 for fp64 keys."""
    return float64 if k.dtype == float64 else float32


def initial_state(
    state: tuple[Tensor, ...] | None, shapes: dict[str, tuple[int, ...]], like: Tensor
) -> tuple[Tensor, ...]:
    """Return the state before the first token: the given state, after a check of its sizes and
    dtypes, or zeros.
    """
    dtype = state_dtype(like)
    if state is None:
        return tuple(like.new_zeros(shape, dtype=dtype) for shape in shapes.values())
    if not isinstance(state, tuple) or not all(isinstance(x, Tensor) for x in state):
        raise ArgumentTypeError(
            f"state is {type(state).__name__}; it must be {_state_names(shapes)}, as an "
            "earlier call returned it, or None"
        )
    if len(state) != len(shapes):
        raise ArgumentError(
            f"state has {plural(len(state), 'tensor')}; it must be {_state_names(shapes)}, as a "
            "call with the same options returned it, or None"
        )
    for x, shape in zip(state, shapes.values(), strict=True):
        if tuple(x.shape) != shape or x.dtype != dtype:
            raise ArgumentError(
                f"state is {x.dtype} {tuple(x.shape)}; it must be {dtype} {shape}: "
                "pass the state that a call with the same sizes returned"
            )
        check_device("state", x, like, "key")
    return state


def _state_names(sizes: dict[str, tuple[int, ...]]) -> str:
    """Return the names of the tensors of a state, formatted as a tuple: "(S,)" or "(S, z)"."""
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def recurrent(
    q: Float[Tensor, "B G #P R T D"],
    k: Float[Tensor, "B G 1 T D"],
    v: Float[Tensor, "B G P T E"],
    log_decay: Float[Tensor, "#B G P T #D"] | None,
    state: Float[Tensor, "B G P D E"],
) -> tuple[Float[Tensor, "B G P R T E"], Float[Tensor, "B G P D E"]]:
    """Compute the recurrence token by token: decay the state, add the token, read the output.

    S <- diag(exp(g_t)) S + k_t v_t^T;  o_t = S^T q_t

    >>> k, v = torch.tensor([[1.0], [1.0]]), torch.tensor([[3.0], [5.0]])
    >>> k, v = k[None, None, None], v[None, None, None]
    >>> half = torch.full((1, 1, 1, 2, 1), 0.5).log()
    >>> recurrent(k[:, :, None], k, v, half, torch.zeros(1, 1, 1, 1, 1))[0].flatten().tolist()
    [3.0, 6.5]

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 18 to 20; with decay: Yang et
    al. 2023 (arXiv 2312.06635), equation 3.
    """
    S, outputs = state.clone(), []
    for t in range(k.shape[-2]):
        if log_decay is not None:
            S = S * log_decay[..., t, :, None].exp()
        S = S + k[..., t, :, None] * v[..., t, None, :]
        outputs.append(q[..., t, :] @ S)  # [B,G,P,R,E]
    return (torch.stack(outputs, -2) if outputs else q @ S.unsqueeze(-3)), S


def within_chunks(
    q: Float[Tensor, "B G #P n C R D"],
    k: Float[Tensor, "B G 1 n C D"],
    v: Float[Tensor, "B G P n C E"],
    g: Float[Tensor, "#B G P n C #D"] | None,
) -> Float[Tensor, "B G P n C R E"]:
    """Compute o_i = sum_{j <= i} sum_d q_id k_jd exp(g_{j+1,d} + ... + g_{i,d}) v_j in each of n
    chunks of C tokens.

    >>> one = torch.ones(1, 1, 1, 1, 2, 1)
    >>> within_chunks(one[..., None], one, one, None).flatten().tolist()
    [1.0, 2.0]
    """
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
    """Compute `within_chunks` with a decay per channel, by pairs of neighbouring blocks of 1, 2, 4,
    ... tokens.

    A token attends to itself without a decay. In each pair of blocks, the queries of the second
    block attend to the keys of the first: the decay from j to i is the product of the decay from j
    to the border of the blocks and the decay from the border to i. The weights of a pair are
    therefore one matrix product, and both exponents are sums of g alone, which cannot overflow
    where g <= 0.
    """
    R = q.shape[-2]
    out = (q * k[..., None, :]).sum(-1, keepdim=True) * v[..., None, :]  # a token and itself
    size = 1
    while size < k.shape[-2]:
        (first_k, _), (first_v, _) = _block_halves(k, size, -2), _block_halves(v, size, -2)
        first_g, second_g = _block_halves(g, size, -2)  # [B,G,P,n,p,s,D]
        queries = (
            _block_halves(q, size, -3)[1] * decay_since_start(second_g)[..., None, :]
        )  # [B,G,P,n,p,s,R,D]
        weights = queries.flatten(-3, -2) @ (first_k * decay_until_end(first_g)).mT  # [...,s*R,s]
        across = torch.unflatten(weights @ first_v, -2, (size, R))
        out = out + torch.stack([torch.zeros_like(across), across], -4).flatten(-5, -3)
        size *= 2
    return out


def _block_halves(x: Tensor, size: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second block of each pair of blocks of `size` tokens, where `dim` is
    the dimension of the tokens from the end: `[..., C, d]` -> two tensors `[..., C/(2 size), size,
    d]`.
    """
    first, second = torch.unflatten(x, dim, (-1, 2, size)).unbind(dim - 1)
    return first, second


def chunked(
    q: Float[Tensor, "B G #P R T D"],
    k: Float[Tensor, "B G 1 T D"],
    v: Float[Tensor, "B G P T E"],
    log_decay: Float[Tensor, "#B G P T #D"] | None,
    state: Float[Tensor, "B G P D E"],
    size: int,
) -> tuple[Float[Tensor, "B G P R T E"], Float[Tensor, "B G P D E"]]:
    """Compute the recurrence with matrix products over chunks of `size` tokens (the last one may be
    shorter).

    With c_i the sum of g over the chunk up to token i:
    O = (Q * exp(c)) S + within_chunks(Q, K, V);  S <- diag(exp(c_C)) S + (K * exp(c_C - c))^T V

    All chunks are computed at once; only the state passes from one to the next. A decay that is one
    number per token is applied to the products with S and to V, since value heads may share Q and
    K.

    >>> k, v = torch.tensor([[1.0], [1.0]]), torch.tensor([[3.0], [5.0]])
    >>> k, v = k[None, None, None], v[None, None, None]
    >>> half = torch.full((1, 1, 1, 2, 1), 0.5).log()
    >>> chunked(k[:, :, None], k, v, half, torch.zeros(1, 1, 1, 1, 1), 2)[0].flatten().tolist()
    [3.0, 6.5]

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
    earlier = _over_chunks(q.flatten(-3, -2), chunk_states)
    earlier = torch.unflatten(earlier, -2, (size, R))
    if start is not None and not by_channel:
        earlier = earlier * start
    out = (out + earlier).flatten(-4, -3)[..., :T, :, :].movedim(-2, -3)  # [B,G,P,R,T,E]
    # A NaN in one channel of a key or a decay affects its row of the state, one in a value its
    # column, both the outputs from their token on; one in a query affects its own output.
    bad = (rows.sum(-1, keepdim=True) + columns).cumsum(-2).unsqueeze(-3)
    out = out + (bad + bad_q.sum(-1, keepdim=True))
    return out, state + (rows.sum(-2)[..., None] + columns.sum(-2)[..., None, :])


def _over_chunks(a: Tensor, b: Tensor) -> Tensor:
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
    writes = _over_chunks(k.mT, v)
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
    """Compute S <- diag(exp(g)) S + k v^T, o = scale S^T q, with sums in the dtype of the state,
    for the heads that `value_heads` describes.

    >>> k = torch.ones(1, 1, 3, 1)
    >>> zeros = torch.zeros(1, 1, 1, 1)
    >>> out, state = linear_recurrence(k, k, k, None, zeros, form="auto", chunk=64)
    >>> out.flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    call = RecurrenceCall(
        q, k, v, state, None, log_decay, scale, dtype or state.dtype, out_dtype or state.dtype
    )
    form = choose_form(call, form)
    if form == "triton":
        return run(call, lambda x: _in_torch(x, "chunk", chunk))
    return _in_torch(call, form, chunk)


def _in_torch(call: RecurrenceCall, form: str, chunk: int) -> tuple[Tensor, Tensor]:
    """Compute `linear_recurrence` in operations of torch."""
    q, k, v, log_decay, state = call.q, call.k, call.v, call.log_decay, call.state
    G, T = k.shape[1:3]
    q, k, v = (x.to(state.dtype) for x in (q, k, v))
    queries, keys, values = group_heads(q if call.scale == 1 else q * call.scale, k, v)
    g = None if log_decay is None else split_value_heads(log_decay.to(state.dtype), G)
    grouped, size = split_value_heads(state, G), chunk_size(form, chunk, T)
    with torch.autocast(q.device.type, enabled=False):
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
    """Compute `chunked` without a decay, where the value heads of a key head share queries and
    keys: they are the columns of one value head with P E channels.
    """
    P, E = v.shape[2], v.shape[-1]
    v, state = (x.movedim(2, -2).flatten(-2)[:, :, None] for x in (v, state))  # [B,G,1,...,P*E]
    out, state = chunked(q, k, v, None, state, size)
    out, state = (torch.unflatten(x, -1, (P, E))[:, :, 0].movedim(-2, 2) for x in (out, state))
    return out, state
