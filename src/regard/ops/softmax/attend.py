"""The public functions of attention, and the gradients of a part (`part_gradients`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from regard.biases import Bias
from regard.errors import ArgumentError, ArgumentTypeError
from regard.ops.shared_arguments import meanings_of, with_shared_arguments
from regard.ops.softmax.call import AttentionOptions, Call, Partial, checked_call, make_call
from regard.ops.softmax.definition import (
    add_sink,
    join_sums,
    scores,
    softmax_sum,
    softmax_weights,
    weights_of_rows,
)
from regard.ops.softmax.dispatch import choose_kernel, zero_empty_slots
from regard.ops.softmax.operators import run_call
from regard.ops.softmax.reference import BLOCK_BYTES
from regard.sequence_scope import current_scope


@with_shared_arguments(meanings_of(AttentionOptions), options=AttentionOptions)
def attend(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    *,
    backend: str = "auto",
    **options: Unpack[AttentionOptions],
) -> Float[Tensor, "B H T E"]:
    """Compute softmax attention: for each query, the weighted mean of the values of its visible
    keys.

    s_ij = c tanh(scale (q_i . k_j) / c) + bias_ij, and -inf where the mask hides key j from query i
    out_i = sum_j p_ij v_j,  p_ij = exp(s_ij) / (sum_j exp(s_ij) + exp(sink))

    Without `softcap` the score is scale (q_i . k_j) + bias_ij; without `sink` there is no
    exp(sink). A rule `score` changes the scores before the mask, and may select keys, replace the
    softmax, or change p_ij. Query head h uses key/value head h // (H/G). A query that sees no key
    gets the output 0. Scores and softmax are in fp32 (fp64 for fp64 inputs).

    Args:
        q: queries `[B, H, T, D]`: batch, query heads, queries, head dimension.
        k: keys `[B, G, S, D]`, in the dtype and on the device of `q`; G divides H.
        v: values `[B, G, S, E]`, in the dtype and on the device of `q`.
        backend: "cpu", "sdpa", "tiled", "flex", "gemm", "triton", "reference", or a registered
            kernel. "auto" takes the fastest that supports the call (`regard.plan`).

    Returns:
        The output `[B, H, T, E]` in the dtype of `q`.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid, or does not fit the others.
        KernelRefusal: the requested backend cannot run this call; the message lists its reasons.

    >>> import torch, regard
    >>> q, k, v = torch.randn(3, 2, 8, 16, 32).unbind(0)
    >>> regard.attend(q, k, v, mask=regard.masks.Causal() & regard.masks.Window(4)).shape
    torch.Size([2, 8, 16, 32])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 1; sinks: OpenAI 2025 (arXiv
    2508.10925), section 2.2.
    """
    if _is_proxy(q):
        tracer: Any = q.tracer  # type: ignore[attr-defined]
        known = {**options, "backend": backend}
        node: Tensor = tracer.create_proxy("call_function", attend, (q, k, v), known)
        return node
    return run_call(checked_call(q, k, v, options), backend).out


def _is_proxy(x: object) -> bool:
    """Return whether `torch.fx.symbolic_trace` runs this code, for which `attend` is one node."""
    return isinstance(x, torch.fx.Proxy)


def attend_partial(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    *,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
    **options: Unpack[AttentionOptions],
) -> Partial:
    """Compute attention over some of the keys, with the log-sum-exp that `merge` needs.

    lse_i = ln sum_j exp(s_ij), with the scores s_ij of `attend`

    Args:
        q: queries `[B, H, T, D]`.
        k: keys `[B, G, S, D]` of this part.
        v: values `[B, G, S, E]` of this part.
        backend: the kernel, as in `attend`.
        out_dtype: the dtype of `out`: that of `q` (None), or that of the lse, so that the output is
            rounded once, after the parts are joined; "sdpa" and "flex" refuse the latter.
        **options: `mask`, `bias`, `score`, `scale`, `softcap`, `q_positions` and `k_positions`, as
            in `attend`; parts other than the first one usually need `k_positions`.

    Returns:
        A `Partial` with `out` `[B, H, T, E]`, and `lse` `[B, H, T]` in fp32 (fp64 for fp64 inputs),
        -inf for a query that sees no key of this part; both are differentiable.

    Raises:
        ArgumentTypeError: `dropout` or `sink` is given; a sink is counted once, by `merge`.
        ArgumentError: `score` cannot be merged from parts, or as in `attend`.
        KernelRefusal: as in `attend`.

    >>> import torch, regard
    >>> q, k, v = torch.zeros(3, 1, 1, 4, 8).unbind(0)
    >>> regard.attend_partial(q, k, v).lse[0, 0, 0].exp().round().item()
    4.0

    Source: Dao 2022 (arXiv 2205.14135), section 3.1.
    """
    for name in ("dropout", "sink"):
        value = options.get(name)
        if value is not None and not (name == "dropout" and value == 0):
            raise ArgumentTypeError(
                f"attend_partial does not accept {name}; "
                + (
                    "pass it to regard.merge, which counts it once"
                    if name == "sink"
                    else "use regard.attend"
                )
            )
    call = checked_call(q, k, v, options, wants_lse=True)
    if out_dtype not in (None, call.q.dtype):
        if out_dtype != call.score_dtype:
            raise ArgumentError(
                f"out_dtype is {out_dtype}; it must be {call.q.dtype} (that of q) or "
                f"{call.score_dtype} (that of the lse)"
            )
        call = replace(call, out_dtype=out_dtype)
    result = run_call(call, backend)
    assert result.lse is not None, "the kernel returned no lse although the call requested one"
    return Partial(result.out, result.lse)


def part_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whole: Partial,
    gradients: tuple[Tensor, Tensor | None],
    *,
    bias: Bias | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of attention over some of the keys, a part that `merge` joins.

    With the joined lse and output O, each part is on its own, so that nothing else is saved:

    p = exp(s - lse)    dv = p^T dO    ds = p (dO v^T - dO . O + d_lse)    dq = ds k    dk = ds^T q
    """
    d_out, d_lse = gradients
    with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        if bias is not None:
            bias = bias.with_tensors(
                [x.detach().requires_grad_(x.requires_grad) for x in bias.tensors()]
            )
        call = make_call(q, k, v, bias=bias, wants_lse=True, **options)
        if out_dtype not in (None, call.q.dtype):
            call = replace(call, out_dtype=out_dtype)
        kernel, call = choose_kernel(call, backend)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return kernel.part_gradients(call, whole, d_out, d_lse)


def attention_weights(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    *,
    rows: slice | int | None = None,
    columns: slice | int | None = None,
    **options: Unpack[AttentionOptions],
) -> Float[Tensor, "B H t s"]:
    """Compute a block of the exact attention weights, for a sequence of any length.

    p_ij = exp(s_ij) / (sum_j exp(s_ij) + exp(sink)), with the scores s_ij of `attend`

    Each row is normalized over all its keys, also those outside the block. Memory grows with the
    block, not with T S.

    Args:
        q: queries `[B, H, T, D]`.
        k: keys `[B, G, S, D]`.
        rows: the queries of the block: a slice of step 1, one index, or None for all queries.
        columns: the keys of the block: a slice of step 1, one index, or None for all keys.
        **options: `mask`, `bias`, `score`, `scale`, `softcap`, `sink`, `q_positions` and
            `k_positions`, as in `attend`.

    Returns:
        The weights `[B, H, t, s]` of the block, in fp32 (fp64 for fp64 inputs).

    Raises:
        ArgumentTypeError: `dropout` is given, or `rows` or `columns` has another type.
        ArgumentError: as in `attend`.

    >>> import torch, regard
    >>> q = torch.randn(1, 2, 1000, 8)
    >>> causal = regard.masks.Causal()
    >>> regard.attention_weights(q, q, mask=causal, rows=-1, columns=slice(0, 4)).shape
    torch.Size([1, 2, 1, 4])
    """
    if options.get("dropout"):
        raise ArgumentTypeError(
            "attention_weights does not accept dropout: it returns the weights before dropout"
        )
    if current_scope() is not None:
        raise ArgumentError(
            "attention_weights sees the keys of this rank only, and regard.parallel.sequence is "
            "open; call it outside, or use a model that does not ask for attention weights"
        )
    call = zero_empty_slots(checked_call(q, k, k, options))
    row_slice, column_slice = _as_slice("rows", rows, call.T), _as_slice("columns", columns, call.S)
    with torch.autocast(q.device.type, enabled=False):
        return _block_of_weights(call, row_slice, column_slice)


def _block_of_weights(call: Call, rows: slice, columns: slice) -> Tensor:
    """Compute the weights `[B, H, t, s]` of a block, the sum of a row in chunks of keys."""
    if call.score is not None and not call.score.is_pairwise_softmax:
        every, visible = scores(call, rows)
        return weights_of_rows(call, rows, every, visible, softmax_sum(every))[..., columns]
    row_count = len(range(*rows.indices(call.T)))
    chunk = max(1, BLOCK_BYTES // max(1, call.B * call.H * row_count * 8))
    if chunk >= call.S:
        every, _ = scores(call, rows, slice(0, call.S))
        return softmax_weights(every[..., columns], add_sink(softmax_sum(every), call.sink))
    totals = [
        softmax_sum(scores(call, rows, slice(i, min(i + chunk, call.S)))[0])
        for i in range(0, call.S, chunk)
    ]
    s, _ = scores(call, rows, columns)
    return softmax_weights(s, add_sink(join_sums(totals), call.sink))


def _as_slice(name: str, which: slice | int | None, length: int) -> slice:
    """Return the argument `rows` or `columns` as a slice with non-negative ends."""
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
