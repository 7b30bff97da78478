"""The public functions of the delta rule: a call is checked, padding is emptied, and a form is chosen."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.arguments import check_finite
from regard.ops.linear.call import (
    check_call,
    check_shape,
    chunk_of,
    emptied,
    empty_slots,
    first_state,
)
from regard.ops.linear.delta_rule.chunk import chunked
from regard.ops.linear.delta_rule.recurrent import recurrent
from regard.span import Positions


def delta_rule(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    beta: Float[Tensor, "B G T"] | Float[Tensor, "B G T 1"],
    *,
    scale: float | None = None,
    state: tuple[Float[Tensor, "B G D E"], ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B H T E"], tuple[Float[Tensor, "B G D E"]]]:
    """The delta rule: each token corrects what the state holds under its key, instead of adding to it.

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T;  o_t = scale S_t^T q_t

    Query head h reads the state of key/value head h // (H/G). With beta 1 and |k| = 1 the value under k is replaced, with
    beta 0 nothing is written. **Keys must be of a length with 0 <= beta |k|^2 <= 2**, else the state grows without
    bound: a step multiplies what stands under k by 1 - beta |k|^2. Models normalise k (and q) to length 1; this
    function does not.

    Args:
        q, k, v: queries, keys and values of the same T tokens; G divides H.
        beta: how much of the correction is written, of any floating dtype; [B,G,T] or [B,G,T,1].
        scale: on the queries; None is 1/sqrt(D).
        state: (S,), what a call before this one returned, fp32 (fp64 for fp64); None is 0. It is not changed.
        k_positions: slots at -1 are no tokens: they write nothing, and their outputs are 0.
        form: "recurrent" is the definition, "chunk" solves a triangular system per chunk, "parallel" is one chunk of length T,
            "auto" takes "recurrent" for a few tokens, else "chunk".
        chunk: tokens in a chunk, at least 1; T need not be a multiple.

    Returns:
        The output in the dtype of q, and the state behind the last token. Sums are in fp32 (fp64 for fp64).

    Raises:
        ArgumentError, ArgumentTypeError: an argument does not fit; raised before anything is computed.

    >>> k = torch.eye(2)[[0, 1, 0]][None, None]  # the third token has the key of the first
    >>> v = torch.tensor([[3.0], [5.0], [7.0]])[None, None]
    >>> out, (state,) = delta_rule(k, k, v, torch.ones(1, 1, 3), scale=1.0)
    >>> out.flatten().tolist(), state.flatten().tolist()
    ([3.0, 5.0, 7.0], [7.0, 5.0])

    Source: Schlag et al. 2021 (arXiv 2102.11174), section 4.2; in chunks: Yang et al. 2024 (arXiv 2406.06484).
    """
    check_call(q, k, v, scale, k_positions, form, chunk)
    return _run(q, k, v, {"beta": beta}, scale, state, k_positions, form, chunk)


def gated_delta_rule(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    beta: Float[Tensor, "B G T"] | Float[Tensor, "B G T 1"],
    log_decay: Float[Tensor, "B G T"] | Float[Tensor, "B G T D"],
    *,
    scale: float | None = None,
    state: tuple[Float[Tensor, "B G D E"], ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B H T E"], tuple[Float[Tensor, "B G D E"]]]:
    """The gated delta rule: the state decays, then the token corrects what is left under its key.

    S' = diag(exp(g_t)) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale S_t^T q_t

    With one decay per head this is Gated DeltaNet; with one per key channel it is Kimi Delta Attention, and the update rule
    "gated_delta" of ONNX's LinearAttention, which has both.

    Args:
        log_decay: g, of any floating dtype: [B,G,T], one number per head, or [B,G,T,D], one per key channel. At most 0 if the
            state is to stay bounded; 0 is the delta rule, -inf empties the state, or the channel, in front of the token.
        chunk: as for `delta_rule`; with a decay per channel it is rounded up to a power of 2.

    All else, and what is raised, is as for `delta_rule`; padding does not decay the state.

    >>> k = torch.eye(2)[None, None]
    >>> v = torch.tensor([[3.0], [5.0]])[None, None]
    >>> half = torch.full((1, 1, 2), 0.5).log()
    >>> gated_delta_rule(k, k, v, torch.ones(1, 1, 2), half, scale=1.0)[1][0].flatten().tolist()
    [1.5, 5.0]
    >>> second_channel = torch.tensor([0.0, float("-inf")]).expand(1, 1, 2, 2)  # the first one is kept
    >>> gated_delta_rule(k, k, v, torch.ones(1, 1, 2, 1), second_channel)[1][0].flatten().tolist()
    [3.0, 5.0]

    Source: Yang et al. 2024 (arXiv 2412.06464), equation 10; a decay per channel: Kimi Team 2025 (arXiv 2510.26692),
    equation 1; ONNX operator LinearAttention, version 27.
    """
    check_call(q, k, v, scale, k_positions, form, chunk)
    gates = {"beta": beta, "log_decay": log_decay}
    return _run(q, k, v, gates, scale, state, k_positions, form, chunk)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor],
    scale: float | None,
    state: tuple[Tensor, ...] | None,
    positions: Positions | None,
    form: str,
    chunk: int,
) -> tuple[Tensor, tuple[Tensor]]:
    """Both rules; the caller has held q, k, v and the options against one another."""
    (B, G, T, D), E = k.shape, v.shape[3]
    wide = {"beta": 1, "log_decay": D}
    for name, gate in gates.items():
        meaning = "one number per key/value head and token"
        meaning += ", or one per key channel as well" * (name == "log_decay")
        check_shape(name, gate, ((B, G, T), (B, G, T, wide[name])), meaning, k)
    (S,) = first_state(state, {"S": (B, G, D, E)}, k)
    empty = empty_slots(positions, q)
    q, k, v = (emptied(x, empty) for x in (q, k, v))
    check_finite(query=q, key=k, value=v)
    columns = (x if x.ndim == 4 else x[..., None] for x in gates.values())
    beta, *decay = (emptied(x, empty).to(S.dtype) for x in columns)
    g = decay[0] if decay else None  # [B,G,T,1 or D]
    queries = (q.to(S.dtype) * (D**-0.5 if scale is None else scale)).unflatten(1, (G, -1))
    k, v, size = k.to(S.dtype), v.to(S.dtype), chunk_of(form, chunk, T)
    with torch.autocast(q.device.type, enabled=False):
        if size is None:
            out, S = recurrent(queries, k, v, beta, g, S)
        else:
            out, S = chunked(queries, k, v, beta, g, S, size)
    return emptied(out.flatten(1, 2).to(q.dtype), empty), (S,)
