"""Gated slot attention: a softmax over a few slots, with the gates of ABC and LightNet."""

from __future__ import annotations

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_positions, check_tensor
from regard.errors import ArgumentError
from regard.ops.linear.call import (
    SHARED_ARGUMENTS,
    ScaledOptions,
    TokenInputs,
    empty_slot_mask,
    initial_state,
    state_dtype,
    without_autocast,
    zero_empty_slots,
)
from regard.ops.linear.chunks import (
    FLOOR,
    block_halves,
    decay_since_start,
    decay_until_end,
    running_log_sum_exp,
    split_into_chunks,
)
from regard.ops.linear.linear_recurrence import linear_recurrence
from regard.ops.shared_arguments import with_shared_arguments
from regard.span import Positions


def log_sum_exp_gates(
    logits: Float[Tensor, "B G T m"],
    *,
    state: tuple[Float[Tensor, "B G m"], ...] | None = None,
    k_positions: Positions | None = None,
) -> tuple[Float[Tensor, "B G T m"], tuple[Float[Tensor, "B G m"]]]:
    """Compute log decays with which a state is the mean of its inputs, weighted by exp(logits).

    L_t = log(exp(z_1) + ... + exp(z_t));  g_t = L_{t-1} - L_t;  1 - exp(g_t) = exp(z_t - L_t)

    Args:
        logits: z `[B, G, T, m]`.
        state: (L,) as an earlier call returned it, `[B, G, m]`; None: no tokens.
        k_positions: positions of the tokens; slots at -1 are empty: their decay is 1.

    Returns:
        The log decays `[B, G, T, m]` in fp32 or fp64, at most 0, and L after the last token.

    Raises:
        ArgumentError, ArgumentTypeError: logits, positions or state do not fit.

    >>> g, _ = log_sum_exp_gates(torch.zeros(1, 1, 3, 1))
    >>> (1 - g.exp()).round(decimals=5).flatten().tolist()  # a mean of 1, 2 and 3 inputs
    [1.0, 0.5, 0.3333300054073334]

    Source: Peng et al. 2021 (arXiv 2110.02488), section 3; Qin et al. 2024 (arXiv 2405.21022).
    """
    check_tensor("logits", logits)
    if logits.ndim != 4:
        shape = tuple(logits.shape)
        raise ArgumentError(f"logits are {shape}; they must be [batch, heads, length, slots]")
    (B, G), m = logits.shape[:2], logits.shape[3]
    if k_positions is not None:
        check_positions("k_positions", k_positions, B, logits.shape[2])
    (first,) = initial_state(state, {"L": (B, G, m)}, logits)
    if state is None:
        first = torch.full_like(first, FLOOR)
    empty = empty_slot_mask(k_positions, logits)
    z = logits.to(state_dtype(logits))
    if empty is not None:
        z = z.masked_fill(empty[:, None, :, None], FLOOR)
    total = running_log_sum_exp(torch.cat([first[:, :, None], z], 2))
    # exp(g) = 1 / (1 + exp(z - L_{t-1})): no difference of two large sums
    g = torch.nn.functional.logsigmoid(total[:, :, :-1] - z)
    return zero_empty_slots(g, empty), (total[:, :, -1].contiguous(),)


@with_shared_arguments(SHARED_ARGUMENTS, ScaledOptions)
def gated_slots(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    log_decay: Float[Tensor, "B G T m"],
    **options: Unpack[ScaledOptions],
) -> tuple[Float[Tensor, "B H T E"], tuple[Tensor, Tensor]]:
    """Compute gated slot attention: m slots, written with 1 - a, where a is a slot's decay.

    K_t = K_{t-1} diag(a_t) + k_t (1 - a_t)^T,  V_t = diag(a_t) V_{t-1} + (1 - a_t) v_t^T
    o_t = V_t^T softmax(scale K_t^T q_t),  a_t = exp(g_t)

    Both sums are gated linear attention; with `log_sum_exp_gates` it is ABC.

    Args:
        q: queries `[B, H, T, D]`; query head h reads the slots of key/value head h // (H/G).
        v: values `[B, G, T, E]`.
        log_decay: g, the logarithm of the decay of each slot, `[B, G, T, m]`, at most 0.
        state: (K, V) as an earlier call returned them, K `[B, G, D, m]` and V `[B, G, m, E]` in
            fp32 (fp64 for fp64 inputs); None: zeros. It is not changed.

    Returns:
        The output `[B, H, T, E]` in the dtype of q, and the state after the last token. Sums are in
        fp32 (fp64 for fp64 inputs).

    >>> one = torch.ones(1, 1, 3, 1)
    >>> out, (K, V) = gated_slots(one, one, one, torch.full((1, 1, 3, 2), 0.5).log())
    >>> out.flatten().tolist(), V.shape  # each token fills half of what is free
    ([0.5, 0.75, 0.875], torch.Size([1, 1, 2, 1]))

    Source: Zhang et al. 2024 (arXiv 2409.07146), equations 10 to 12; Peng et al. 2021 (arXiv
    2110.02488).
    """
    tokens = TokenInputs(q, k, v, options)
    check_tensor("log_decay", log_decay)
    m, dtype, G = log_decay.shape[-1], tokens.dtype, tokens.G
    tokens.check("v", v, "B G T E", "one value per key")
    g = tokens.gate("log_decay", log_decay, "B G T m", "one number per slot", m=m).to(dtype)
    K, V = tokens.state(sizes={"m": m}, K="B G D m", V="B G m E")
    write = -torch.expm1(g)
    queries = tokens.q.to(dtype) * tokens.scale
    with without_autocast(q):
        grouped = torch.unflatten(queries, 1, (G, -1))  # [B,G,R,T,D]
        logits, K = _decayed_values(grouped, tokens.k.to(dtype), write, g, K, tokens.chunk_size)
        weights = logits.flatten(1, 2).softmax(-1)
        out, V = linear_recurrence(
            weights, write, tokens.v, g, V, form=tokens.form, chunk=tokens.chunk
        )
    return tokens.output(out), (K, V)


def _decayed_values(
    q: Float[Tensor, "B G R T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    g: Float[Tensor, "B G T E"],
    state: Float[Tensor, "B G D E"],
    size: int | None,
) -> tuple[Float[Tensor, "B G R T E"], Float[Tensor, "B G D E"]]:
    """Compute S <- S diag(exp(g)) + k v^T, o = S^T q, whose values' channels decay."""
    T = k.shape[2]
    if size is None or T == 0:
        outputs = []
        for t in range(T):
            decayed = state * g[:, :, t, None].exp()
            state = decayed + k[:, :, t, :, None] * v[:, :, t, None]
            outputs.append(q[:, :, :, t] @ state)  # [B,G,R,E]
        return (torch.stack(outputs, 3) if outputs else q @ state[:, :, None]), state.clone()
    size = 1 << (min(size, T) - 1).bit_length()
    q = split_into_chunks(q, size)  # [B,G,R,n,C,D]
    k, v, g = (split_into_chunks(x[:, :, None], size) for x in (k, v, g))  # [B,G,1,n,C,d]
    out = (q * k).sum(-1, keepdim=True) * v
    length = 1
    while length < size:
        # In each pair of blocks, the queries of the second read the keys of the first.
        (_, later_q), (first_k, _), (first_v, _), (first_g, later_g) = (
            block_halves(x, length) for x in (q, k, v, g)
        )
        across = (later_q @ first_k.mT) @ (first_v * decay_until_end(first_g))
        across = across * decay_since_start(later_g)
        out = out + torch.stack([torch.zeros_like(across), across], -3).flatten(-4, -2)
        length *= 2
    start = decay_since_start(g)
    writes = (k.mT @ (v * decay_until_end(g)))[:, :, 0]  # [B,G,n,D,E]
    states = []
    for i in range(k.shape[3]):
        states.append(state)
        state = state * start[:, :, 0, i, -1:] + writes[:, :, i]
    out = out + (q @ torch.stack(states, 2)[:, :, None]) * start
    return out.flatten(3, 4)[:, :, :, :T], state
