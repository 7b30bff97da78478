"""The public functions of softmax attention."""

from __future__ import annotations

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from regard.biases import Bias
from regard.errors import ArgumentTypeError
from regard.masks import Mask
from regard.ops.softmax.call import AttentionOptions, Call, Partial, make_call
from regard.ops.softmax.dispatch import run_call, zero_empty_slots
from regard.ops.softmax.reference import (
    BLOCK_BYTES,
    add_sink,
    join_sums,
    scores,
    softmax_sum,
    softmax_weights,
)
from regard.span import Positions


def attend(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    *,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, " H"] | None = None,
    dropout: float = 0.0,
    q_positions: Positions | None = None,
    k_positions: Positions | None = None,
    backend: str = "auto",
) -> Float[Tensor, "B H T E"]:
    """Softmax attention: each query's weighted mean of the values of the keys that it may see.

    s = softcap(scale q k^T) + bias, -inf where masked
    out = softmax(s) v, with exp(sink) in the denominator as well

    Query head h reads key/value head h // (H/G). `Options` says what each option is. A row that
    sees nothing gives 0.

    Raises:
        ArgumentError, ArgumentTypeError: an argument does not fit; raised before anything is
            computed.
        KernelRefusal: the backend asked for cannot run this call; the message has its reasons.

    >>> import torch, regard
    >>> q, k, v = torch.randn(3, 2, 8, 16, 32).unbind(0)
    >>> regard.attend(q, k, v, mask=regard.masks.Causal() & regard.masks.Window(4)).shape
    torch.Size([2, 8, 16, 32])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 1; sinks: OpenAI 2025 (arXiv
    2508.10925), section 2.2.
    """
    call = make_call(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sink=sink,
        dropout=dropout,
        q_positions=q_positions,
        k_positions=k_positions,
    )
    return run_call(call, backend).out


def attend_partial(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    *,
    backend: str = "auto",
    **options: Unpack[AttentionOptions],
) -> Partial:
    """Attention over a part of the keys, as (out, lse), for `merge`; options as in `attend`, but
    dropout and sink.

    lse_i = ln sum_j exp(s_ij), natural log, fp32 or fp64, -inf for a row that sees nothing;
    differentiable.

    Raises:
        ArgumentTypeError: dropout or sink is given: a sink is counted once, by `merge`.
        ArgumentError, KernelRefusal: as `attend`.

    >>> import torch, regard
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 8).unbind(0)
    >>> regard.attend_partial(q, k, v).lse[0, 0, 0].exp().round().item()
    4.0

    Source: Dao 2022 (arXiv 2205.14135), section 3.1.
    """
    for name in ("dropout", "sink"):
        given = options.get(name)
        if given is not None and not (name == "dropout" and given == 0):
            raise ArgumentTypeError(
                f"attend_partial takes no {name}; "
                + (
                    "give it to regard.merge, which counts it once"
                    if name == "sink"
                    else "use attend"
                )
            )
    result = run_call(make_call(q, k, v, wants_lse=True, **options), backend)
    assert result.lse is not None, "a kernel that was asked for the lse returned none"
    return Partial(result.out, result.lse)


def attention_weights(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    *,
    rows: slice | int | None = None,
    columns: slice | int | None = None,
    **options: Unpack[AttentionOptions],
) -> Float[Tensor, "B H t s"]:
    """Any block of the exact weights [B,H,t,s], whatever the length: p_ij = exp(s_ij) / sum_j
    exp(s_ij).

    Each row is normalised over all its keys, also those outside the block; with a sink a row sums
    to less than 1. Memory grows with t * s and with t, not with T * S.

    Args:
        rows, columns: the queries and keys of the block: a slice, one index, or None for all.

    Raises:
        ArgumentTypeError: dropout is given (weights are shown without), or rows or columns are
            something else.
        ArgumentError: as `attend`.

    >>> import torch, regard
    >>> q = torch.randn(1, 2, 1000, 8)
    >>> causal = regard.masks.Causal()
    >>> regard.attention_weights(q, q, mask=causal, rows=-1, columns=slice(0, 4)).shape
    torch.Size([1, 2, 1, 4])
    """
    if options.get("dropout"):
        raise ArgumentTypeError("attention_weights takes no dropout: weights are shown without it")
    call = zero_empty_slots(make_call(q, k, k, **options))
    shown, block = _as_slice("rows", rows, call.T), _as_slice("columns", columns, call.S)
    with torch.autocast(q.device.type, enabled=False):
        return _block_of_weights(call, shown, block)


def _block_of_weights(call: Call, shown: slice, block: slice) -> Tensor:
    rows = len(range(*shown.indices(call.T)))
    step = max(1, BLOCK_BYTES // max(1, call.B * call.H * rows * 8))
    if step >= call.S:
        every, _ = scores(call, shown, slice(0, call.S))
        return softmax_weights(every[..., block], add_sink(softmax_sum(every), call.sink))
    totals = [
        softmax_sum(scores(call, shown, slice(i, min(i + step, call.S)))[0])
        for i in range(0, call.S, step)
    ]
    s, _ = scores(call, shown, block)
    return softmax_weights(s, add_sink(join_sums(totals), call.sink))


def _as_slice(name: str, which: slice | int | None, length: int) -> slice:
    if which is None:
        return slice(0, length)
    if isinstance(which, slice) and which.step in (None, 1):
        return slice(*which.indices(length)[:2])
    if isinstance(which, int) and -length <= which < length:
        return slice(which % length, which % length + 1)
    raise ArgumentTypeError(
        f"{name} is {which!r}; it must be a slice of step 1, an index from {-length} to "
        f"{length - 1}, or None"
    )
