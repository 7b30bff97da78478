"""Conversion of score rules from and to the `score_mod` of `torch.nn.attention.flex_attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from regard.errors import ArgumentError
from regard.scores.base import PairRule, ScoreRule
from regard.scores.pairs import FnScore
from regard.span import Positions, as_tensor

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of a score, and of the indices of its batch row, query head, query and key."""


def from_score_mod(
    score_mod: Callable[..., Tensor], parameters: Sequence[Tensor] = (), name: str = ""
) -> FnScore:
    """Convert a `score_mod` of FlexAttention to a rule.

    s'_ij = score_mod(s_ij, b, h, i, j, *parameters), with the indices i and j of query and key in
    the call

    FlexAttention calls the function with one score at a time, and regard with tensors that
    broadcast; a function of elementwise operations and lookups means the same in both. A -inf that
    it returns hides a key there; here, give a mask as well, so that kernels can skip what is
    hidden.

    Args:
        score_mod: the function `(score, b, h, q_idx, kv_idx) -> score`.
        parameters: tensors with gradients that it takes as further arguments.
        name: the text of the rule in messages.

    Returns:
        The rule, for `attend(..., score=rule)`.

    Raises:
        ArgumentTypeError: the function is not callable, or a parameter is not a tensor.

    >>> import torch, regard
    >>> def relative(score, b, h, q_idx, kv_idx):
    ...     return score + (q_idx - kv_idx)
    >>> q = torch.randn(1, 2, 5, 8)
    >>> regard.attend(q, q, q, score=regard.scores.from_score_mod(relative)).shape
    torch.Size([1, 2, 5, 8])
    """
    return FnScore(score_mod, tuple(parameters), slots=True, name=name)


def to_score_mod(rule: ScoreRule, q_positions: Positions, k_positions: Positions) -> ScoreMod:
    """Convert a rule to a `score_mod` of FlexAttention, for calls with these positions.

    FlexAttention has no softcap and no bias of its own: they are not part of the rule.

    Args:
        rule: a rule of the scope "pair" that changes scores only, such as `Temperature`.
        q_positions: positions of the queries: a `Span`, or a tensor `[B or 1, T]`.
        k_positions: positions of the keys: a `Span`, or a tensor `[B or 1, S]`.

    Returns:
        The function `(score, b, h, q_idx, kv_idx) -> score`.

    Raises:
        ArgumentError: a step of the rule has another scope, or changes more than scores.

    >>> import torch, regard
    >>> rule = regard.scores.Temperature(2.0)
    >>> mod = regard.scores.to_score_mod(rule, regard.Span(0, 4), regard.Span(0, 4))
    >>> mod(torch.tensor(3.0), *torch.zeros(4, dtype=torch.int64)).item()
    1.5
    """
    steps = []
    for step in rule.steps():
        if not isinstance(step, PairRule):
            raise ArgumentError(
                f"{step} cannot be a score_mod, which is given one score at a time; pass the rule "
                "to regard.attend(score=...)"
            )
        steps.append(step)
    q, k = as_tensor(q_positions), as_tensor(k_positions)
    q_row, k_row = int(q.shape[0] > 1), int(k.shape[0] > 1)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for step in steps:
            if step.by_slot:
                score = step.pair(score, b, h, q_idx, kv_idx)
            else:
                score = step.pair(score, b, h, q[b * q_row, q_idx], k[b * k_row, kv_idx])
        return score

    return score_mod
