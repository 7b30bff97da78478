"""The recurrences of RWKV-4 and RWKV-6, whose present token has a weight, the bonus."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.ops.linear.call import (
    DECAY_PER_CHANNEL,
    SHARED_ARGUMENTS,
    RecurrenceOptions,
    TokenInputs,
    group_heads,
    without_autocast,
    zero_empty_slots,
)
from regard.ops.linear.linear_recurrence import (
    FLOOR,
    decayed_sum,
    linear_recurrence,
    running_maximum,
)
from regard.ops.shared_arguments import with_shared_arguments


@with_shared_arguments(SHARED_ARGUMENTS, RecurrenceOptions)
def rwkv6(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    log_decay: Float[Tensor, "B N T #D"],
    bonus: Float[Tensor, "G D"],
    *,
    scale: float = 1.0,
    **options: Unpack[RecurrenceOptions],
) -> tuple[Float[Tensor, "B O T E"], tuple[Float[Tensor, "B N D E"]]]:
    """Compute the recurrence of RWKV-6, in which a token reads itself with the weight `bonus`.

    o_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T q_t;  S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T

    Heads are as in `gated_linear`. RWKV calls q the receptance r.

    Args:
        log_decay: g, the logarithm of the decay, `[B, N, T, D]` or `[B, N, T, 1]`.
        bonus: u, the weight of the present token in each key channel, `[G, D]`.
        scale: the factor on the queries.

    >>> one, half = torch.ones(1, 1, 3, 1), torch.full((1, 1, 3, 1), 0.5).log()
    >>> rwkv6(one, one, one, half, torch.tensor([[10.0]]))[0].flatten().tolist()
    [10.0, 11.0, 11.5]

    Source: Peng et al. 2024 (arXiv 2404.05892), equation 18.
    """
    tokens = TokenInputs(q, k, v, {"scale": scale, **options})
    g = tokens.gate("log_decay", log_decay, "B N T D | B N T 1", DECAY_PER_CHANNEL)
    tokens.check("bonus", bonus, "G D", "one number per key head and channel")
    (S,) = tokens.state(S="B N D E")
    dtype = tokens.dtype
    queries, keys, values = (x.to(dtype) for x in (tokens.q, tokens.k, tokens.v))
    queries = queries * scale
    with without_autocast(q):
        # An empty token in front moves every query one token back.
        prepend, append = (0, 0, 1, 0), (0, 0, 0, 1)
        first, then, g = (F.pad(x, prepend) for x in (keys, values, g.to(dtype)))
        before, S = linear_recurrence(
            F.pad(queries, append), first, then, g, S, form=tokens.form, chunk=tokens.chunk
        )
        grouped = group_heads(queries, keys * bonus.to(dtype)[:, None], values)
        own = (grouped.q * grouped.k[:, :, :, None]).sum(-1, keepdim=True)  # [B,G,P,R,T,1]
        out = before[:, :, :-1] + (own * grouped.v[:, :, :, None]).flatten(1, 3)
    return tokens.output(out), (S,)


class _Weighted(NamedTuple):
    """Sums of values and of weights, both divided by exp(maximum), each `[B, G, ..., D]`."""

    values: Tensor
    weights: Tensor
    maximum: Tensor


@with_shared_arguments(SHARED_ARGUMENTS, RecurrenceOptions)
def rwkv4(
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T D"],
    log_decay: Float[Tensor, "G D"],
    bonus: Float[Tensor, "G D"],
    **options: Unpack[RecurrenceOptions],
) -> tuple[Float[Tensor, "B G T D"], tuple[Float[Tensor, "B G D"], ...]]:
    """Compute the recurrence of RWKV-4: in each channel a mean of values, by exp(k) and age.

    o_t = (a_{t-1} + exp(u + k_t) v_t) / (b_{t-1} + exp(u + k_t));
    a_t = exp(g) a_{t-1} + exp(k_t) v_t,  b_t = exp(g) b_{t-1} + exp(k_t)

    Each channel has a softmax over the logits k_j + (t - 1 - j) g and u + k_t; no exponential
    overflows. Every token decays the state once.

    Args:
        k, v: keys and values `[B, G, T, D]`.
        log_decay: g, the logarithm of the decay of each channel, `[G, D]`; at most 0.
        bonus: u, added to the key of the present token, `[G, D]`.
        state: (a, b, m) of an earlier call, each `[B, G, D]` in fp32 (fp64 for fp64 inputs), a and
            b divided by exp(m); None: no tokens.
        form: "recurrent" by token; "parallel" joins spans in log2(T) steps; "chunk" in chunks;
            "auto" takes "recurrent" for up to 8 tokens, else "chunk".

    Returns:
        The output `[B, G, T, D]` in the dtype of k, and the state after the last token.

    >>> k, v = torch.zeros(1, 1, 3, 1), torch.tensor([1.0, 3.0, 5.0])[None, None, :, None]
    >>> none = torch.zeros(1, 1)
    >>> rwkv4(k, v, none, none)[0].flatten().tolist()  # without decay and bonus: the mean
    [1.0, 2.0, 3.0]

    Source: Peng et al. 2023 (arXiv 2305.13048), equations 16 and 20 to 25.
    """
    tokens = TokenInputs(k, k, v, {"scale": None, **options})
    tokens.check("v", v, "B G T D", "one value per key and channel")
    for name, x in (("log_decay", log_decay), ("bonus", bonus)):
        tokens.check(name, x, "G D", "one number per key head and channel")
    sums = _Weighted(*tokens.state(a="B G D", b="B G D", m="B G D"))
    if tokens.before is None:
        sums = sums._replace(maximum=torch.full_like(sums.maximum, FLOOR))
    empty, dtype, (_, G, T, D) = tokens.empty, tokens.dtype, k.shape
    keys, values = tokens.k.to(dtype), tokens.v.to(dtype)
    g = log_decay.to(dtype)[None, :, None].expand(1 if empty is None else empty.shape[0], G, T, D)
    g = zero_empty_slots(g, empty)
    if empty is not None:
        keys = keys.masked_fill(empty[:, None, :, None], FLOOR)
    u, size, outputs = bonus.to(dtype)[:, None], tokens.chunk_size or 1, []
    with without_autocast(k):
        for start in range(0, T, size):
            part = slice(start, min(start + size, T))
            out, sums = _rwkv4_chunk(keys[:, :, part], values[:, :, part], g[:, :, part], u, sums)
            outputs.append(out)
    out = torch.cat(outputs, 2) if outputs else torch.zeros_like(values)
    return tokens.output(out), tuple(sums)


def _rwkv4_chunk(
    k: Tensor, v: Tensor, g: Tensor, u: Tensor, sums: _Weighted
) -> tuple[Tensor, _Weighted]:
    """Return the outputs of a chunk `[B, G, C, D]`, and the sums after its last token."""
    g = g.expand_as(k)
    # The first entry is the state before the chunk, and entry t + 1 the state after token t.
    start = [x[:, :, None] for x in sums]
    decays, logits = torch.cat([torch.zeros_like(start[2]), g], 2), torch.cat([start[2], k], 2)
    maximum = running_maximum(decays.detach(), logits.detach())
    # relative to the running maximum, each step decays by at most 1
    decay = (decays[:, :, 1:] + maximum[:, :, :-1] - maximum[:, :, 1:]).exp()
    decay = torch.cat([torch.ones_like(start[2]), decay], 2)
    weight = (k - maximum[:, :, 1:]).exp()
    weights = decayed_sum(decay, torch.cat([start[1], weight], 2))
    values = decayed_sum(decay, torch.cat([start[0], weight * v], 2))
    a, b, m = (x[:, :, :-1] for x in (values, weights, maximum))
    top = torch.maximum(m, (u + k).detach())
    past, own = (m - top).exp(), (u + k - top).exp()
    out = (past * a + own * v) / (past * b + own)
    return out, _Weighted(*(x[:, :, -1].contiguous() for x in (values, weights, maximum)))
