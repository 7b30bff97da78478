"""The lightning indexer: a small score of every pair, and the keys with the largest ones."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.argument_checks import check_positions, check_sizes, check_tensor
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Causal, Dense, Mask
from regard.ops.selection.blocks import by_rows, top, undifferentiated
from regard.span import Positions, Span, as_tensor


def index_scores(
    q: Float[Tensor, "B J T d"],
    k: Float[Tensor, "B 1 S d"],
    w: Float[Tensor, "B T J"],
) -> Float[Tensor, "B T S"]:
    """How much a query wants each key: I_ts = sum_j w_tj relu(q_tj . k_s), in fp32 or better;
    differentiable.

    Args:
        q: the queries of J small heads.
        k: their one key per token.
        w: the weights of the heads, of any sign.

    Raises:
        ArgumentError: the shapes do not fit one another.

    >>> q, k, w = torch.ones(1, 2, 1, 3), torch.ones(1, 1, 4, 3), torch.tensor([[[2.0, -1.0]]])
    >>> index_scores(q, k, w).tolist()
    [[[3.0, 3.0, 3.0, 3.0]]]

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), equation 1.
    """
    J, T = _check(q, k, w)
    kind = torch.float32
    for x in (q, k, w):  # under autocast they come in several dtypes
        kind = torch.promote_types(kind, x.dtype)
    dots = torch.unflatten(q.to(kind).flatten(1, 2) @ k[:, 0].to(kind).mT, 1, (J, T))
    return (dots.relu() * w.to(kind).transpose(1, 2)[..., None]).sum(1)


def _check(q: Tensor, k: Tensor, w: Tensor) -> tuple[int, int]:
    """The small heads fit one another; how many there are, and how many queries."""
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
) -> Mask:
    """The topk keys of each query by `index_scores` among those not behind it, as a mask for all
    heads.

    Fewer where fewer may be seen; of equal scores the earlier position. No gradient flows through
    the choice.

    Raises:
        ArgumentError: topk is below 1, or the shapes do not fit.

    >>> q, k, w = torch.randn(1, 2, 5, 3), torch.randn(1, 1, 5, 3), torch.randn(1, 5, 2)
    >>> mask = index_mask(q, k, w, topk=2, q_positions=Span(0, 5), k_positions=Span(0, 5))
    >>> mask.table.sum(-1).tolist()
    [[[1, 2, 2, 2, 2]]]

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), equations 1 and 2.
    """
    check_topk(topk)
    J, T = _check(q, k, w)
    B, S = len(q), k.shape[2]
    check_positions("q_positions", q_positions, B, T)
    check_positions("k_positions", k_positions, B, S)
    with undifferentiated(q.device):
        q, k, w = q.detach(), k.detach(), w.detach()
        table = by_rows(
            lambda rows: _choose(
                index_scores(q[:, :, rows], k, w[:, rows]), q_positions, k_positions, rows, topk
            ),
            T,
            B * (J + 4) * S * 8,
        )
    return Dense(table)


def check_topk(topk: int) -> None:
    """At least one key."""
    if topk < 1:
        raise ArgumentError(f"topk is {topk}; it must be 1 or more")


def _choose(
    scores: Tensor, q_positions: Positions, k_positions: Positions, rows: slice, topk: int
) -> Tensor:
    """[B,1,t,S], True = chosen, from scores [B,t,S]."""
    allowed = Causal().block(q_positions, k_positions, rows, device=scores.device)  # [B,1,t,S]
    s = scores[:, None].masked_fill(~allowed, -torch.inf)
    if isinstance(k_positions, Span):
        return top(s, topk)
    # equal scores go by position, and slots may stand in any order
    p = as_tensor(k_positions, s.device).expand(s.shape[0], -1)
    by_position = p.argsort(dim=-1, stable=True)[:, None, None].expand(s.shape)
    chosen = top(s.gather(-1, by_position), topk)
    return torch.zeros_like(chosen).scatter(-1, by_position, chosen)


def indexer_loss(
    scores: Float[Tensor, "B T S"],
    pattern: Float[Tensor, "B H T S"],
    visible: Bool[Tensor, "B T S"],
) -> Float[Tensor, "B T"]:
    """What an indexer learns from: its distance from what attention looked at, per query.

    p_t = sum_h pattern_ht over the visible keys, divided by its sum
    loss_t = KL(p_t || softmax(scores_t))

    With all past keys visible this is the dense warm-up, with the chosen keys the sparse stage. A
    query that sees nothing, or whose pattern is 0 there, has loss 0. No gradient flows into the
    pattern.

    Args:
        scores: of `index_scores`, with its gradient.
        pattern: the weights of the main attention over the same keys.
        visible: the keys to compare over.

    Raises:
        ArgumentError: the shapes do not fit one another.

    >>> pattern, seen = torch.full((1, 2, 1, 4), 0.25), torch.ones(1, 1, 4, dtype=torch.bool)
    >>> indexer_loss(torch.zeros(1, 1, 4), pattern, seen).tolist()
    [[0.0]]

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), equations 3 and 4.
    """
    check_sizes(scores=(scores, "B T S"), pattern=(pattern, "B H T S"), visible=(visible, "B T S"))
    check_tensor("scores", scores)
    check_tensor("pattern", pattern)
    if visible.dtype != torch.bool:
        raise ArgumentTypeError(
            f"visible is {visible.dtype}; it must be bool, True = may be seen: use visible.bool()"
        )
    p = pattern.detach().to(scores.dtype).sum(1).masked_fill(~visible, 0)
    whole = p.sum(-1, keepdim=True)
    p = p / whole.masked_fill(whole == 0, 1)
    blind = ~visible.any(-1, keepdim=True)
    log_q = scores.masked_fill(~visible & ~blind, -torch.inf).log_softmax(-1)
    seen = p > 0
    return (p * (p.masked_fill(~seen, 1).log() - log_q.masked_fill(~seen, 0))).sum(-1)
