"""Log-linear attention: gated linear attention with one state for each level of a Fenwick tree."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.argument_checks import check_tensor
from regard.errors import ArgumentError
from regard.ops.linear.call import (
    SHARED_ARGUMENTS,
    ScaledOptions,
    TokenInputs,
    group_heads,
    shared_matmul,
    split_value_heads,
    without_autocast,
)
from regard.ops.linear.linear_recurrence import (
    decay_since_start,
    decay_until_end,
    finite_part,
    matmul_over_chunks,
    pairwise_decay,
    split_into_chunks,
    valid_decays,
)
from regard.ops.shared_arguments import with_shared_arguments
from regard.units import plural

MAX_LEVELS = 24
"""The largest number of levels: the count of tokens is a number of the state, exact in fp32."""


def fenwick_levels(n: Int[Tensor, "*#L"], m: Int[Tensor, "*#L"], levels: int) -> Int[Tensor, "*L"]:
    """Return the level of token m for the query n >= m: the bits of n xor m, at most levels - 1.

    n and m first differ in bit b: the bucket of b holds 2^b tokens, those that n counts with it.

    >>> fenwick_levels(torch.tensor(7), torch.arange(8), 16).tolist()
    [3, 3, 3, 3, 2, 2, 1, 0]
    """
    powers = 2 ** torch.arange(levels - 1, device=n.device)
    return ((n ^ m)[..., None] >= powers).sum(-1)


@with_shared_arguments(SHARED_ARGUMENTS, ScaledOptions)
def log_linear(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    log_decay: Float[Tensor, "B N T 1"],
    level_weights: Float[Tensor, "B N T L"],
    **options: Unpack[ScaledOptions],
) -> tuple[Float[Tensor, "B N T E"], tuple[Tensor, Tensor]]:
    """Compute log-linear attention: gated linear attention whose past is kept in L levels.

    o_t = scale sum_{j <= t} lambda[t, l(t, j)] exp(g_{j+1} + ... + g_t) (q_t . k_j) v_j

    l(t, j) is the number of bits of t xor j: level 0 holds token t itself, and level l >= 1 a
    bucket of 2^(l-1) tokens of a Fenwick tree, larger for older ones. The last level L - 1 holds
    all that is older as well. By token, with s the lowest bit of t that is set:

    S <- exp(g_t) S;  S[s+1] <- S[0] + ... + S[s], which become 0;  S[0] <- k_t v_t^T
    o_t = scale sum_l lambda[t, l] S[l]^T q_t

    With lambda = 1 it is `gated_linear` with one decay per head. Tokens are counted in each row
    from its first one on, whatever their positions are.

    Args:
        v: values `[B, N, T, E]`; G divides N, and the H query heads are G or N.
        log_decay: g, the logarithm of the decay, `[B, N, T, 1]`, of any floating dtype. Above 0 the
            state may grow without bound; -inf clears it.
        level_weights: lambda, the weight of each level, `[B, N, T, L]`, with 1 to 24 levels.
        state: (S, n) as an earlier call returned it, S `[B, N, L, D, E]` and the number of tokens
            n `[B, 1]`, both in fp32 (fp64 for fp64 inputs); None: zeros. It is not changed.
        chunk: the number of tokens in a chunk, at least 1, rounded up to a power of 2.

    Returns:
        The output `[B, N, T, E]` in the dtype of q, and the state after the last token. Sums are in
        fp32 (fp64 for fp64 inputs). From 2^(L-1) tokens on, n is a smaller number with the same
        last L - 1 bits.

    >>> one, none = torch.ones(1, 1, 4, 1), torch.zeros(1, 1, 4, 1)
    >>> weights = torch.tensor([1.0, 10.0, 100.0]).expand(1, 1, 4, 3)
    >>> log_linear(one, one, one, none, weights)[0].flatten().tolist()  # token 3: 1 + 10 + 2 x 100
    [1.0, 11.0, 201.0, 211.0]

    Source: Guo et al. 2025 (arXiv 2506.04761), section 3.
    """
    tokens = TokenInputs(q, k, v, options)
    check_tensor("level_weights", level_weights)
    L, N, T, empty = level_weights.shape[-1], tokens.N, tokens.T, tokens.empty
    if q.shape[1] not in (tokens.G, N):
        raise ArgumentError(
            f"q has {plural(q.shape[1], 'head')}, k {tokens.G} and v {N}; log_linear needs as "
            "many query heads as key heads or value heads"
        )
    g = tokens.gate("log_decay", log_decay, "B N T 1", "one number per head and token")
    meaning = f"1 to {MAX_LEVELS} levels per value head and token"
    weights = tokens.gate("level_weights", level_weights, "B N T L", meaning, L=L)
    if not 1 <= L <= MAX_LEVELS:
        raise ArgumentError(f"level_weights has {L} levels; it must have 1 to {MAX_LEVELS}")
    S, n = tokens.state(sizes={"L": L}, S="B N L D E", n="B 1")
    dtype, count = tokens.dtype, n.long()
    q, k, v = group_heads(*(x.to(dtype) for x in (tokens.q, tokens.k, tokens.v)))
    g, weights, S = (split_value_heads(x.to(dtype), tokens.G) for x in (g, weights, S))
    inputs = _Inputs(q[:, :, :, 0] * tokens.scale, k, v, g, weights)  # one query head per state
    filled = count.new_ones(1, T) if empty is None else (~empty).long()
    index = count + filled.cumsum(1) - 1  # [B,T]: how many tokens of the row are before a token
    with without_autocast(q):
        if tokens.chunk_size is None or T == 0:
            out, S = _by_token(inputs, S, index, empty)
        else:
            before = None if tokens.before is None else S
            out, S = _in_blocks(inputs, before, index, empty, count, tokens.chunk_size)
    n = count + filled.sum(1, keepdim=True)
    n = torch.where(n < 2 ** (L - 1), n, n % 2 ** (L - 1) + 2 ** (L - 1))
    return tokens.output(out.flatten(1, 2)), (S.flatten(1, 2), n.to(dtype))


class _Inputs(NamedTuple):
    """The tokens of a call, with P value heads for each of G key heads."""

    q: Float[Tensor, "B G #P T D"]
    k: Float[Tensor, "B G 1 T D"]
    v: Float[Tensor, "B G P T E"]
    g: Float[Tensor, "B G P T 1"]
    weights: Float[Tensor, "B G P T L"]


def _decay_and_merge(
    S: Float[Tensor, "B G P L D E"],
    decay: Float[Tensor, "B G P 1"],
    n: Int[Tensor, "B 1"],
    m: Int[Tensor, "B 1"],
) -> Float[Tensor, "B G P L D E"]:
    """Return a state behind token m as token n >= m divides it: levels below theirs are joined."""
    levels = torch.arange(S.shape[3], device=n.device)
    target = fenwick_levels(n, m, len(levels))
    is_target, low = (x[:, None, None, :, None, None] for x in (levels == target, levels <= target))
    decay = decay[..., None, None]  # [B,G,P,1,1,1]
    total = (S * (low * decay)).sum(3, keepdim=True)
    return torch.where(is_target, total, S * (~low * decay))


def _by_token(
    inputs: _Inputs, S: Tensor, index: Int[Tensor, "B T"], empty: Bool[Tensor, "#B T"] | None
) -> tuple[Float[Tensor, "B G P T E"], Float[Tensor, "B G P L D E"]]:
    """Compute the recurrence: decay all levels, merge the lower ones, add the token, read all."""
    q, k, v, g, weights = inputs
    outputs = []
    for t in range(k.shape[-2]):
        n = index[:, t, None]
        new = _decay_and_merge(S, g[..., t, :].exp(), n, (n - 1).clamp(min=0))
        new[:, :, :, 0] += k[..., t, :, None] * v[..., t, None, :]
        S = new if empty is None else torch.where(empty[:, t].view(-1, *[1] * 5), S, new)
        read = torch.unflatten(weights[..., t, None, :] @ S.flatten(-2), -1, S.shape[-2:])
        outputs.append((q[..., t, None, :] @ read[..., 0, :, :])[..., 0, :])
    return (torch.stack(outputs, -2), S) if outputs else (torch.zeros_like(v), S.clone())


def _in_blocks(
    inputs: _Inputs,
    before: Float[Tensor, "B G P L D E"] | None,
    index: Int[Tensor, "B T"],
    empty: Bool[Tensor, "#B T"] | None,
    count: Int[Tensor, "B 1"],
    size: int,
) -> tuple[Float[Tensor, "B G P T E"], Float[Tensor, "B G P L D E"]]:
    """Compute all tokens by matrix products: within chunks, between blocks, from the state before.

    Slots begin at a multiple of the largest block, so that a block of the tree is one of slots.
    """
    (q, bad_q), (k, rows), (v, columns), (w, bad_w) = (
        finite_part(x) for x in (inputs.q, inputs.k, inputs.v, inputs.weights)
    )
    g, bad_g = valid_decays(inputs.g)
    rows = rows + bad_g
    T, L = index.shape[1], w.shape[-1]
    size = 1 << (min(size, T) - 1).bit_length()
    largest = size if before is None else max(size, 1 << (T - 1).bit_length())
    start, slots = count - count % largest, T if before is None else T + largest
    place = index - start  # [B,T]
    is_moved = before is not None or empty is not None
    if is_moved:
        to = place if empty is None else place.masked_fill(empty, slots)
        source = torch.full((len(to), slots + 1), T, device=to.device)
        source = source.scatter(1, to, torch.arange(T, device=to.device).expand_as(to))
        source = source[:, None, None, :slots, None]  # the token of each slot; T is none
        q, k, v, g, w = (
            torch.take_along_dim(F.pad(x, (0, 0, 0, 1)), source, 3) for x in (q, k, v, g, w)
        )
    first, last = (count - 1).clamp(min=0), index[:, -1:].clamp(min=0)
    slot_index = start + torch.arange(slots, device=index.device)  # [B,slots]
    lowest = fenwick_levels(slot_index, first, L)[:, None, None, :, None]
    parts = _Inputs(*(split_into_chunks(x, size) for x in (q, k, v, g, w)))  # [B,G,P,n,C,d]
    out = _within_chunks(parts).flatten(3, 4)[..., :slots, :]
    writes = matmul_over_chunks(parts.k.mT, parts.v * decay_until_end(parts.g))  # [B,G,P,n,D,E]
    topmost = _at_level(w, lowest)
    out = out + _between_blocks(_Inputs(q, k, v, g, w), writes, parts.g.sum(-2), size, topmost)
    S = _sums_by_level(parts, writes, start, last)
    if before is not None:
        reads = torch.zeros_like(out)
        for level in range(L):
            reads = reads + _at_level(w, lowest.clamp(min=level)) * shared_matmul(
                q, before[:, :, :, level]
            )
        out = out + reads * decay_since_start(g)
        S = S + _decay_and_merge(before, g.sum(-2).exp(), last, first)
    if is_moved:
        out = torch.take_along_dim(out, place.clamp(min=0)[:, None, None, :, None], 3)
    # what is not finite reaches its own output, or all from its token on, as in `chunked`
    bad = (rows.sum(-1, keepdim=True) + columns).cumsum(-2)
    out = out + (bad + bad_q.sum(-1, keepdim=True) + bad_w.sum(-1, keepdim=True))
    lost = rows.sum(-2)[..., None] + columns.sum(-2)[..., None, :]
    return out, S + lost[:, :, :, None]


def _at_level(
    weights: Float[Tensor, "B G P T L"], level: Int[Tensor, "B 1 1 T 1"]
) -> Float[Tensor, "B G P T 1"]:
    """Return the weight of one level for each token."""
    return torch.take_along_dim(weights, level, -1)


def _within_chunks(parts: _Inputs) -> Float[Tensor, "B G P n C E"]:
    """Compute the pairs of tokens of the same chunk, of which the level is that of their places."""
    i = torch.arange(parts.k.shape[-2], device=parts.k.device)
    levels = fenwick_levels(i[:, None], i, parts.weights.shape[-1])  # [C,C]
    products = (parts.q @ parts.k.mT).masked_fill(i[:, None] < i, 0)
    # what overflows in a row has no part in the gradients of earlier tokens
    weights, bad = finite_part(products * parts.weights[..., i[:, None], levels])
    return (weights * pairwise_decay(parts.g)) @ parts.v + bad.sum(-1, keepdim=True)


def _between_blocks(
    inputs: _Inputs,
    writes: Float[Tensor, "B G P n D E"],
    totals: Float[Tensor, "B G P n 1"],
    size: int,
    topmost: Float[Tensor, "B G P T 1"],
) -> Float[Tensor, "B G P T E"]:
    """Compute the pairs of tokens of different chunks: of two blocks of chunks, the queries of the
    second read the sum of the first. The level of the largest pair depends on its place.
    """
    (D, E), (slots, L) = writes.shape[-2:], inputs.weights.shape[-2:]
    out, sums = torch.zeros_like(inputs.v), writes.flatten(-2)  # [B,G,P,n,D*E]
    while size < slots:
        (first, second), (_, passed) = (split_into_chunks(x, 2).unbind(-2) for x in (sums, totals))
        level = min(size.bit_length(), L - 1)
        weights = topmost if 2 * size >= slots else inputs.weights[..., level, None]
        later = [
            split_into_chunks(x, 2 * size)[..., size:, :] for x in (inputs.q, inputs.g, weights)
        ]
        read = matmul_over_chunks(later[0], torch.unflatten(first, -1, (D, E)))
        read = read * decay_since_start(later[1]) * later[2]  # [B,G,P,m,size,E]
        out = out + F.pad(read, (0, 0, size, 0)).flatten(3, 4)[..., :slots, :]
        sums = first * passed.exp() + second
        totals = split_into_chunks(totals, 2).sum(-2)
        size *= 2
    return out


def _sums_by_level(
    parts: _Inputs,
    writes: Float[Tensor, "B G P n D E"],
    start: Int[Tensor, "B 1"],
    last: Int[Tensor, "B 1"],
) -> Float[Tensor, "B G P L D E"]:
    """Return the state of the tokens of a call behind the last one: of whole chunks, and of the
    tokens of the last chunk.
    """
    (C, L), n = parts.weights.shape[-2:], writes.shape[3]
    levels = torch.arange(L, device=last.device)
    i = torch.arange(n * C, device=last.device)
    shares = (fenwick_levels(last, start + i, L)[..., None] == levels).to(writes)  # [B,n*C,L]
    shares = torch.unflatten(shares, 1, (n, C))
    end = ((last - start) // C).clamp(min=0)  # [B,1], the chunk of the last token
    whole = shares[:, :, 0] * (torch.arange(n, device=last.device) < end)[..., None]
    decayed = writes * decay_until_end(parts.g.sum(-2))[..., None]
    S = torch.einsum("bnl,bgpnde->bgplde", whole, decayed)
    own = torch.take_along_dim(shares, end[:, :, None, None], 1)[:, 0]  # [B,C,L]
    k, v, g = (
        torch.take_along_dim(x, end[:, None, None, :, None, None], 3)[:, :, :, 0]
        for x in (parts.k, parts.v, parts.g)
    )
    return S + torch.einsum("bcl,bgpcd,bgpce->bgplde", own, k, v * decay_until_end(g))
