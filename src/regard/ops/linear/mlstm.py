"""The matrix memory of xLSTM: exponential input gates, divided by a sum of the keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.ops.linear.call import SHARED_ARGUMENTS, TokenInputs, without_autocast
from regard.ops.linear.chunks import FLOOR, running_maximum
from regard.ops.linear.linear_recurrence import linear_recurrence
from regard.ops.shared_arguments import with_shared_arguments
from regard.span import Positions


@with_shared_arguments(SHARED_ARGUMENTS)
def mlstm(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B N T E"],
    log_input: Float[Tensor, "B N T"],
    log_forget: Float[Tensor, "B N T"],
    *,
    scale: float | None = None,
    state: tuple[Tensor, ...] | None = None,
    k_positions: Positions | None = None,
    form: str = "auto",
    chunk: int = 64,
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
    tokens = TokenInputs(q, k, v, scale, k_positions, form, chunk)
    dtype, meaning = tokens.dtype, "one number per value head and token"
    write = tokens.gate("log_input", log_input, "B N T", meaning).to(dtype)
    forget = tokens.gate("log_forget", log_forget, "B N T", meaning).to(dtype)
    C, n, m = tokens.state(state, C="B N D E", n="B N D", m="B N")
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
        out, both = linear_recurrence(queries, tokens.k, values, g, both, form=form, chunk=chunk)
        least = (-own).exp().repeat_interleave(out.shape[1] // tokens.N, 1)
        out = out[..., :-1] / torch.maximum(out[..., -1:].abs(), least)
    new = (both[..., :-1].contiguous(), both[..., -1].contiguous(), maximum[:, :, -1, 0])
    return tokens.output(out), new
