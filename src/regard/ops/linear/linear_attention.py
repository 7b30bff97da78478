"""Linear attention, retention, gated linear attention and the matrix memory of xLSTM,
S <- diag(exp(g)) S + k v^T; and gated slot attention, a softmax over a few slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, where
from torch.nn.functional import pad

from regard.argument_checks import check_positions, check_tensor
from regard.errors import ArgumentError, ArgumentTypeError
from regard.ops.infini_attention import elu_plus_one
from regard.ops.linear.call import (
    DECAY_PER_CHANNEL,
    FORMS_WITH_TRITON,
    SHARED_ARGUMENTS,
    SHARED_ARGUMENTS_WITH_TRITON,
    RecurrenceOptions,
    ScaledOptions,
    TokenInputs,
    empty_slot_mask,
    initial_state,
    state_dtype,
    without_autocast,
    zero_empty_slots,
)
from regard.ops.linear.linear_recurrence import (
    FLOOR,
    block_halves,
    decay_since_start,
    decay_until_end,
    linear_recurrence,
    running_log_sum_exp,
    running_maximum,
    split_into_chunks,
)
from regard.ops.shared_arguments import with_shared_arguments
from regard.span import Positions

FeatureMap: TypeAlias = str | Callable[[Tensor], Tensor]
"""The name of a feature map, or a function `[B, n, T, D]` -> `[B, n, T, F]` per token."""


def identity(x: Float[Tensor, "*L D"]) -> Float[Tensor, "*L D"]:
    """Return x itself; with negative features the sum of the weights may be 0."""
    return x


def relu(x: Float[Tensor, "*L D"]) -> Float[Tensor, "*L D"]:
    """Return the elementwise maximum of x and 0."""
    return x.relu()


def squared_relu(x: Float[Tensor, "*L D"]) -> Float[Tensor, "*L D"]:
    """Return the square of max(x, 0) elementwise."""
    return x.relu().square()


def exponential(x: Float[Tensor, "*L D"]) -> Float[Tensor, "*L D"]:
    """Return exp(x) elementwise; in fp32 it is infinite for x above 88."""
    return x.exp()


def softmax(x: Float[Tensor, "*L D"]) -> Float[Tensor, "*L D"]:
    """Return exp(x_d) / sum_d exp(x_d), over the channels of one token."""
    return x.softmax(-1)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu+1": elu_plus_one,
    "exp": exponential,
    "identity": identity,
    "relu": relu,
    "relu^2": squared_relu,
    "softmax": softmax,
}
"""The feature maps by name. Sources: elu+1 Katharopoulos et al. 2020 (arXiv 2006.16236); relu
Choromanski et al. 2021 (arXiv 2009.14794); softmax Zhang et al. 2024 (arXiv 2402.04347).
"""


def feature_map_of(feature_map: FeatureMap) -> Callable[[Tensor], Tensor]:
    """Return the feature map of a name, or the given function itself."""
    if isinstance(feature_map, str):
        if feature_map not in FEATURE_MAPS:
            known = ", ".join(FEATURE_MAPS)
            raise ArgumentError(
                f"feature_map is {feature_map!r}; it must be one of {known}, or a function of a "
                "tensor"
            )
        return FEATURE_MAPS[feature_map]
    if not callable(feature_map):
        raise ArgumentTypeError(
            f"feature_map is {type(feature_map).__name__}; it must be a name "
            f"({', '.join(FEATURE_MAPS)}) or a function"
        )
    return feature_map


def normalized_query_features(
    feature_map: FeatureMap, q: Float[Tensor, "*L D"]
) -> Float[Tensor, "*L F"]:
    """Return the features of queries, divided by a factor per query that cancels."""
    if feature_map == "exp":
        return (q - q.detach().amax(-1, keepdim=True)).exp()
    if feature_map == "elu+1":
        maximum = q.detach().amax(-1, keepdim=True).clamp(max=0)
        return where(q > 0, q + 1, (q.clamp(max=0) - maximum).exp())
    return feature_map_of(feature_map)(q)


@with_shared_arguments(SHARED_ARGUMENTS_WITH_TRITON, RecurrenceOptions)
def linear_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    *,
    feature_map: FeatureMap = "elu+1",
    normalize: bool = True,
    scale: float = 1.0,
    **options: Unpack[RecurrenceOptions],
) -> tuple[Float[Tensor, "B O T E"], tuple[Tensor, ...]]:
    """Compute causal linear attention: the mean of the values, weighted by phi(q) . phi(k).

    S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t)
    o_t = S_t^T phi(q_t) / (z_t . phi(q_t))

    Without `normalize`, o_t = scale S_t^T phi(q_t). With as many value heads as key heads, query
    head h reads the state of key/value head h // (H/G); otherwise heads are as in `delta_rule`.
    Where the denominator is exactly 0, the output is 0. Untrained weights differ little: with elu+1
    and Gaussian q and k, the matching key gets 1.46 times the weight of another.

    Args:
        feature_map: phi, a name in `regard.linear.FEATURE_MAPS`, or a function of each token.
        normalize: whether the weights are divided by their sum.
        scale: the factor on the queries without `normalize`.
        state: the state of an earlier call: (S, z), or (S,), with S `[B, N, F, E]` and z `[B, G,
            F]` in fp32 (fp64 for fp64 inputs). None: zeros. It is not changed.

    >>> q, v = torch.randn(1, 2, 5, 4), torch.ones(1, 2, 5, 3)
    >>> out, (S, z) = linear_attention(q, q, v)
    >>> out.round(decimals=5).unique().tolist(), S.shape, z.shape  # the mean of ones is 1
    ([1.0], torch.Size([1, 2, 4, 3]), torch.Size([1, 2, 4]))

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 8 to 12 and 16 to 20.
    """
    all_options: ScaledOptions = {"scale": scale, **options}
    tokens = TokenInputs(q, k, v, all_options, forms=FORMS_WITH_TRITON)
    features, dtype, empty = feature_map_of(feature_map), tokens.dtype, tokens.empty
    q, k, v, N, G = tokens.q, tokens.k, tokens.v, tokens.N, tokens.G
    with without_autocast(q):
        keys = _checked_features(features, k.to(dtype))
        keys = zero_empty_slots(keys, empty)  # again, because phi(0) may differ from 0
        sizes = {"F": keys.shape[3]}
        if normalize:
            S, z = tokens.state(sizes=sizes, S="B N F E", z="B G F")
            queries = normalized_query_features(feature_map, q.to(dtype))
            # z is computed as one more column of S, for a value that is always 1
            S_and_z = torch.cat([S, z.repeat_interleave(N // G, 1)[..., None]], -1)  # [B,N,F,E+1]
            v_and_one = pad(v.to(dtype), (0, 1), value=1.0)
            out, S_and_z = linear_recurrence(
                queries,
                keys,
                v_and_one,
                None,
                S_and_z,
                form=tokens.form,
                chunk=tokens.chunk,
                dtype=k.dtype,
            )
            # z depends on the keys only, so that the value heads of a key head have the same
            after = (S_and_z[..., :-1], S_and_z[:, :: N // G, :, -1])
            return tokens.output(_normalized(out)), tuple(x.contiguous() for x in after)
        (S,) = tokens.state(sizes=sizes, S="B N F E")
        queries = features(q.to(dtype))
        out, S = linear_recurrence(
            queries, keys, v, None, S,
            form=tokens.form, chunk=tokens.chunk, scale=scale, dtype=k.dtype, out_dtype=q.dtype,
        )  # fmt: skip
    return tokens.output(out), (S,)


def _checked_features(features: Callable[[Tensor], Tensor], k: Tensor) -> Tensor:
    """Return the features `[B, G, T, F]` of keys `[B, G, T, D]`, after a check of their shape."""
    result = features(k)
    if result.ndim != 4 or result.shape[:3] != k.shape[:3]:
        raise ArgumentError(
            f"feature_map returned {tuple(result.shape)} for keys {tuple(k.shape)}; it may change "
            "the last dimension only"
        )
    return result


def _normalized(sums: Tensor) -> Tensor:
    """Divide by the sum of weights, the last column; 0 where it is 0, NaN where not finite."""
    nan_marker = 0 * sums.detach()
    sums = torch.where(sums.isfinite(), sums, 0)
    total = sums[..., -1:]
    is_zero = total == 0
    mean = (sums[..., :-1] / total.masked_fill(is_zero, 1)).masked_fill(is_zero, 0)
    return mean + nan_marker[..., :-1] + nan_marker[..., -1:]


@with_shared_arguments(SHARED_ARGUMENTS_WITH_TRITON, ScaledOptions)
def retention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    *,
    decay: Float[Tensor, " N"] | None = None,
    **options: Unpack[ScaledOptions],
) -> tuple[Float[Tensor, "B O T E"], tuple[Float[Tensor, "B N D E"]]]:
    """Compute retention: the sum of the values, weighted by q . k and gamma^(t - j).

    S_t = gamma_g S_{t-1} + k_t v_t^T
    o_t = scale S_t^T q_t = scale sum_{j <= t} gamma_g^(t - j) (q_t . k_j) v_j

    Each value head g has one gamma and one state; heads are as in `linear_attention`. The paper's
    rotary positions and norms are in `regard.nn.variants.retention`. Every token decays the state
    once, even where positions have gaps.

    Args:
        decay: gamma of each value head, `[N]`, from 0 to 1; None: 1 - 2^(-5-g).

    >>> one = torch.ones(1, 1, 3, 1)
    >>> retention(one, one, one, decay=torch.tensor([0.5]))[0].flatten().tolist()
    [1.0, 1.5, 1.75]

    Source: Sun et al. 2023 (arXiv 2307.08621), equations 5 to 8.
    """
    tokens = TokenInputs(q, k, v, options, forms=FORMS_WITH_TRITON)
    N, T, empty = tokens.N, tokens.T, tokens.empty
    if decay is None:
        g = default_log_decays(N, k.device, tokens.dtype)
    else:
        kind = "key/value" if N == tokens.G else "value"
        tokens.check(
            "decay", decay, "N", f"one factor per {kind} head, each of which has one state"
        )
        g = _to_float32_or_wider(decay).log().to(tokens.dtype)
    rows = 1 if empty is None else empty.shape[0]
    g = zero_empty_slots(g[None, :, None, None].expand(rows, N, T, 1), empty)
    return _decayed_sums(tokens, g)


def _decayed_sums(tokens: TokenInputs, g: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    """Compute the recurrence for checked decays g `[B or 1, N, T, 1 or D]`."""
    (S,) = tokens.state(S="B N D E")
    q, k, v = tokens.q, tokens.k, tokens.v
    out, S = linear_recurrence(
        q, k, v, g, S,
        form=tokens.form, chunk=tokens.chunk, scale=tokens.scale, dtype=k.dtype, out_dtype=q.dtype,
    )  # fmt: skip
    return tokens.output(out), (S,)


def default_log_decays(
    groups: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Float[Tensor, " G"]:
    """Return ln(1 - 2^(-5-g)) for g = 0 ... G-1, the decays of the heads in the paper.

    They are computed with log1p, which is below 0 even where 1 - 2^(-5-g) rounds to 1.

    Source: Sun et al. 2023 (arXiv 2307.08621), equation 8.
    """
    g = torch.arange(groups, device=device, dtype=dtype)
    return torch.log1p(-torch.exp2(-5 - g))


def _to_float32_or_wider(x: Tensor) -> Tensor:
    """Return x in fp64 if it is fp64, else in fp32."""
    return x if x.dtype == torch.float64 else x.float()


@with_shared_arguments(SHARED_ARGUMENTS_WITH_TRITON, ScaledOptions)
def gated_linear(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    log_decay: Float[Tensor, "B N T #D"],
    **options: Unpack[ScaledOptions],
) -> tuple[Float[Tensor, "B O T E"], tuple[Float[Tensor, "B N D E"]]]:
    """Compute gated linear attention: the state decays by token, then the token is added.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t

    Heads are as in `linear_attention`, which it is with g = 0, without features and norm; a
    constant g per head is retention; one per head and token, `[B, G, T, 1]`, is Mamba-2.

    Args:
        log_decay: g, the logarithm of the decay, `[B, N, T, D]` or `[B, N, T, 1]`, of any floating
            dtype. Above 0 the state may grow without bound; -inf clears it.

    >>> one = torch.ones(1, 1, 3, 1)
    >>> keep = torch.tensor([1.0, 0.5, 0.0]).log()[None, None, :, None]
    >>> gated_linear(one, one, one, keep)[0].flatten().tolist()
    [1.0, 1.5, 1.0]

    Source: Yang et al. 2023 (arXiv 2312.06635), equation 3 and section 4.
    """
    tokens = TokenInputs(q, k, v, options, forms=FORMS_WITH_TRITON)
    g = tokens.gate("log_decay", log_decay, "B N T D | B N T 1", DECAY_PER_CHANNEL)
    return _decayed_sums(tokens, g)


@with_shared_arguments(SHARED_ARGUMENTS, ScaledOptions)
def mlstm(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    log_input: Float[Tensor, "B N T"],
    log_forget: Float[Tensor, "B N T"],
    **options: Unpack[ScaledOptions],
) -> tuple[Float[Tensor, "B O T E"], tuple[Tensor, ...]]:
    """Compute the matrix memory of xLSTM (mLSTM).

    C_t = f_t C_{t-1} + i_t k_t v_t^T,  n_t = f_t n_{t-1} + i_t k_t
    o_t = scale C_t^T q_t / max(|scale n_t . q_t|, 1)

    C and n are kept divided by exp(m_t), m_t = max(log f_t + m_{t-1}, log i_t), so that no
    exponential overflows. Heads are as in `gated_linear`.

    Args:
        log_input: the logarithm of the input gate i, `[B, N, T]`, of any floating dtype.
        log_forget: the logarithm of the forget gate f, `[B, N, T]`, at most 0.
        state: (C, n, m) of an earlier call, C `[B, N, D, E]`, n `[B, N, D]`, m `[B, N]` in fp32
            (fp64 for fp64 inputs); None: zeros.

    >>> one, zeros = torch.ones(1, 1, 3, 1), torch.zeros(1, 1, 3)
    >>> mlstm(one, one, 6 * one, zeros, zeros)[0].flatten().tolist()  # a mean: no gate forgets
    [6.0, 6.0, 6.0]

    Source: Beck et al. 2024 (arXiv 2405.04517), equations 19 to 27.
    """
    tokens = TokenInputs(q, k, v, options)
    dtype, meaning = tokens.dtype, "one number per value head and token"
    write = tokens.gate("log_input", log_input, "B N T", meaning).to(dtype)
    forget = tokens.gate("log_forget", log_forget, "B N T", meaning).to(dtype)
    C, n, m = tokens.state(C="B N D E", n="B N D", m="B N")
    if tokens.empty is not None:
        write = write.masked_fill(tokens.empty[:, None, :, None], FLOOR)
    with without_autocast(q):
        first = m[..., None, None]  # [B,N,1,1]
        decays, logits = (
            torch.cat(x, 2).detach() for x in ((torch.zeros_like(first), forget), (first, write))
        )
        maximum = running_maximum(decays, logits)
        # The result does not depend on m, and neither does its gradient. The two maxima are
        # subtracted first, because they are the large numbers.
        g = forget + (maximum[:, :, :-1] - maximum[:, :, 1:])
        own = maximum[:, :, 1:]
        # n is one more column of C, for a value that is always 1
        values = F.pad(tokens.v.to(dtype), (0, 1), value=1.0) * (write - own).exp()
        queries = tokens.q.to(dtype) * tokens.scale
        both = torch.cat([C, n[..., None]], -1)
        out, both = linear_recurrence(
            queries, tokens.k, values, g, both, form=tokens.form, chunk=tokens.chunk
        )
        least = (-own).exp().repeat_interleave(out.shape[1] // tokens.N, 1)
        out = out[..., :-1] / torch.maximum(out[..., -1:].abs(), least)
    new = (both[..., :-1].contiguous(), both[..., -1].contiguous(), maximum[:, :, -1, 0])
    return tokens.output(out), new


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
