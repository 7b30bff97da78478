"""The lightning indexer of DeepSeek-V3.2: `index_scores` of pairs, and `index_mask` of keys."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.argument_checks import check_positions, check_sizes, check_tensor
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Causal, Dense, Mask
from regard.ops.selection.position_blocks import (
    MAX_CHUNK_BYTES,
    in_query_chunks,
    top_k_mask,
    without_gradient,
)
from regard.span import Positions, Span, as_tensor


def index_scores(
    q: Float[Tensor, "B J T d"], k: Float[Tensor, "B 1 S d"], w: Float[Tensor, "B T J"]
) -> Float[Tensor, "B T S"]:
    """Compute the index score of every query-key pair, in fp32 or better; differentiable.

    I_ts = sum_j w_tj relu(q_tj . k_s)

    Args:
        q: queries of the J index heads `[B, J, T, d]`.
        k: one index key per token `[B, 1, S, d]`.
        w: the weight of each head for each query `[B, T, J]`, of any sign.

    Returns:
        The scores `[B, T, S]`.

    Raises:
        ArgumentError: the shapes do not fit together.

    >>> q, k, w = torch.ones(1, 2, 1, 3), torch.ones(1, 1, 4, 3), torch.tensor([[[2.0, -1.0]]])
    >>> index_scores(q, k, w).tolist()
    [[[3.0, 3.0, 3.0, 3.0]]]

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), equation 1.
    """
    J, T = check_index_sizes(q, k, w)
    dtype = torch.float32
    for x in (q, k, w):  # their dtypes may differ under autocast
        dtype = torch.promote_types(dtype, x.dtype)
    dots = torch.unflatten(q.to(dtype).flatten(1, 2) @ k[:, 0].to(dtype).mT, 1, (J, T))
    return (dots.relu() * w.to(dtype).transpose(1, 2)[..., None]).sum(1)


def check_index_sizes(q: Tensor, k: Tensor, w: Tensor) -> tuple[int, int]:
    """Check that q, k and w fit together; return the number of index heads and of queries."""
    sizes = check_sizes(q=(q, "B J T d"), k=(k, "B 1 S d"), w=(w, "B T J"))
    for name, x in (("q", q), ("k", k), ("w", w)):
        check_tensor(f"index {name}", x)
    return sizes["J"], sizes["T"]


def index_mask(
    q: Float[Tensor, "B J T d"],
    k: Float[Tensor, "B 1 S d"],
    w: Float[Tensor, "B T J"],
    *,
    topk: int,
    q_positions: Positions,
    k_positions: Positions,
    max_bytes: int = MAX_CHUNK_BYTES,
) -> Mask:
    """Select for each query the `topk` keys with the largest index scores, up to its position.

    Among equal scores the earlier position is chosen. No gradient flows through the choice.

    Args:
        q: queries of the J index heads `[B, J, T, d]`.
        k: one index key per token `[B, 1, S, d]`.
        w: the weight of each head for each query `[B, T, J]`.
        topk: the number of keys per query, at least 1.
        q_positions: the positions of the queries.
        k_positions: the positions of the keys.
        max_bytes: the memory in bytes for the scores of a chunk of queries.

    Returns:
        A mask that is the same for all heads of the attention.

    Raises:
        ArgumentError: topk is below 1, or the shapes do not fit together.

    >>> q, k, w = torch.randn(1, 2, 5, 3), torch.randn(1, 1, 5, 3), torch.randn(1, 5, 2)
    >>> mask = index_mask(q, k, w, topk=2, q_positions=Span(0, 5), k_positions=Span(0, 5))
    >>> mask.table.sum(-1).tolist()
    [[[1, 2, 2, 2, 2]]]

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), equations 1 and 2.
    """
    check_topk(topk)
    J, T = check_index_sizes(q, k, w)
    B, S = len(q), k.shape[2]
    check_positions("q_positions", q_positions, B, T)
    check_positions("k_positions", k_positions, B, S)
    with without_gradient(q.device):
        q, k, w = q.detach(), k.detach(), w.detach()
        table = in_query_chunks(
            lambda rows: _select_keys(
                index_scores(q[:, :, rows], k, w[:, rows]), q_positions, k_positions, rows, topk
            ),
            T,
            B * (J + 4) * S * 8,
            max_bytes,
        )
    return Dense(table)


def check_topk(topk: int) -> None:
    """Check that topk, the number of keys per query, is at least 1."""
    if topk < 1:
        raise ArgumentError(f"topk is {topk}; it must be 1 or more")


def _select_keys(
    scores: Tensor, q_positions: Positions, k_positions: Positions, rows: slice, topk: int
) -> Tensor:
    """Return the selected keys `[B, 1, t, S]` (True = selected) for scores `[B, t, S]`."""
    allowed = Causal().block(q_positions, k_positions, rows, device=scores.device)  # [B,1,t,S]
    s = scores[:, None].masked_fill(~allowed, -torch.inf)
    if isinstance(k_positions, Span):
        return top_k_mask(s, topk)
    # Slots may be in any order. They are sorted by position, because `top_k_mask` chooses the first
    # of equal scores, which has to be the earliest position.
    p = as_tensor(k_positions, s.device).expand(s.shape[0], -1)
    by_position = p.argsort(dim=-1, stable=True)[:, None, None].expand(s.shape)
    chosen = top_k_mask(s.gather(-1, by_position), topk)
    return torch.zeros_like(chosen).scatter(-1, by_position, chosen)


def indexer_loss(
    scores: Float[Tensor, "B T S"],
    pattern: Float[Tensor, "B H T S"],
    visible: Bool[Tensor, "B T S"],
) -> Float[Tensor, "B T"]:
    """Compute the loss of an indexer: the KL divergence from the main attention weights.

    p_t = sum_h pattern_ht over the visible keys, divided by its sum
    loss_t = KL(p_t || softmax(scores_t))

    The dense stage passes all earlier keys as `visible`, the sparse stage the selected ones.
    Without visible weights the loss is 0. No gradient flows into the pattern.

    Args:
        scores: the result of `index_scores` `[B, T, S]`, which gets the gradient.
        pattern: the weights of the main attention over the same keys `[B, H, T, S]`.
        visible: the keys to compare, bool `[B, T, S]`.

    Returns:
        The loss of each query `[B, T]`.

    Raises:
        ArgumentError: the shapes do not fit together.
        ArgumentTypeError: `visible` is not bool.

    >>> pattern, visible = torch.full((1, 2, 1, 4), 0.25), torch.ones(1, 1, 4, dtype=torch.bool)
    >>> indexer_loss(torch.zeros(1, 1, 4), pattern, visible).tolist()
    [[0.0]]

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), equations 3 and 4.
    """
    check_sizes(scores=(scores, "B T S"), pattern=(pattern, "B H T S"), visible=(visible, "B T S"))
    check_tensor("scores", scores)
    check_tensor("pattern", pattern)
    if visible.dtype != torch.bool:
        raise ArgumentTypeError(
            f"visible is {visible.dtype}; it must be bool, with True = visible: use visible.bool()"
        )
    p = pattern.detach().to(scores.dtype).sum(1).masked_fill(~visible, 0)
    row_sum = p.sum(-1, keepdim=True)
    p = p / row_sum.masked_fill(row_sum == 0, 1)
    sees_nothing = ~visible.any(-1, keepdim=True)
    log_q = scores.masked_fill(~visible & ~sees_nothing, -torch.inf).log_softmax(-1)
    positive = p > 0
    return (p * (p.masked_fill(~positive, 1).log() - log_q.masked_fill(~positive, 0))).sum(-1)
