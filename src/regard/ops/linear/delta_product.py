"""DeltaProduct: several corrections of the state per token, after one decay."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_positions, check_sizes
from regard.ops.linear.delta_rule import gated_delta_rule
from regard.span import Positions, find_empty_slots


def delta_product(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T n D"],
    v: Float[Tensor, "B N T n E"],
    beta: Float[Tensor, "B N T n"],
    log_decay: Float[Tensor, "B N T"] | None = None,
    *,
    scale: float | None = None,
    state: tuple[Float[Tensor, "B N D E"], ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B O T E"], tuple[Float[Tensor, "B N D E"]]]:
    """Compute the delta rule with n corrections per token: the state decays once, then each key of
    the token corrects the value that is stored for it, one after the other.

    S' = exp(g_t) S_{t-1};  S' <- S' + beta_ti k_ti (v_ti - S'^T k_ti)^T for i = 1..n;
    S_t = S';  o_t = scale S_t^T q_t

    It is the gated delta rule over n T keys, whose decay is 0 for all but the first key of a token,
    read after the last one. With n corrections the matrix that multiplies the state can be any
    product of n reflections, such as a rotation (n = 2); with n = 1 it is the gated delta rule.

    Args:
        q: queries `[B, H, T, D]`.
        k: n keys per token `[B, G, T, n, D]`; G divides H.
        v: n values per token `[B, N, T, n, E]`; G divides N.
        beta: the fraction of each correction that is written, `[B, N, T, n]`.
        log_decay: g, the logarithm of the decay factor of a token, `[B, N, T]`; None: no decay.
        scale: the factor on the queries; None: 1/sqrt(D).
        state: (S,) as an earlier call returned it, S `[B, N, D, E]` in fp32 (fp64 for fp64 inputs);
            None: zeros. It is not changed.
        k_positions: positions of the tokens; slots at -1 are empty, and their outputs are 0.
        form: "auto", "recurrent", "chunk" or "parallel", as in `delta_rule`.
        chunk: the number of keys in a chunk, at least 1.

    Returns:
        The output `[B, max(H, N), T, E]` in the dtype of q, and the state after the last token.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid; raised before anything is
            computed.

    >>> k = torch.eye(2)[None, None, None]  # one token with two keys
    >>> v = torch.tensor([[3.0], [5.0]])[None, None, None]
    >>> out, _ = delta_product(torch.ones(1, 1, 1, 2), k, v, torch.ones(1, 1, 1, 2), scale=1.0)
    >>> out.flatten().tolist()
    [8.0]

    Source: Siems et al. 2025 (arXiv 2502.10297), equation 4 and section 3.
    """
    tensors = {"q": (q, "B H T D"), "k": (k, "B G T n D"), "v": (v, "B N T n E")}
    tensors["beta"] = (beta, "B N T n")
    if log_decay is not None:
        tensors["log_decay"] = (log_decay, "B N T")
    sizes = check_sizes(**tensors)
    T, n = sizes["T"], sizes["n"]
    positions = k_positions
    if positions is not None:
        check_positions("k_positions", positions, sizes["B"], T)
        empty = find_empty_slots(positions, q.device)
        positions = None if empty is None else -empty.long().repeat_interleave(n, 1)
    first = beta.new_zeros(*beta.shape)
    if log_decay is not None:
        rest = log_decay.new_zeros(*log_decay.shape, n - 1)
        first = torch.cat([log_decay[..., None], rest], -1) if n else first
    out, S = gated_delta_rule(
        q.repeat_interleave(n, 2),
        k.flatten(2, 3),
        v.flatten(2, 3),
        beta.flatten(2),
        first.flatten(2),
        scale=scale,
        state=state,
        k_positions=positions,
        form=form,
        chunk=chunk,
    )
    return out[:, :, n - 1 :: n], S
