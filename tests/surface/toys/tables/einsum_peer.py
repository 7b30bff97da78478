"""Attention in three lines of torch: einsum, softmax, einsum."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.attention import AttentionProblem, prepared_call
from benchmarks.interfaces import Peer, PreparedCall


def attention(problem: AttentionProblem) -> PreparedCall:
    """Prepare the three lines, in float32 or better."""
    s = problem.sizes
    visible = problem.visible()
    bias = problem.bias() if s.alibi else 0.0

    def call() -> Tensor:
        dtype = torch.promote_types(problem.dtype, torch.float32)
        k, v = (x.repeat_interleave(s.H // s.G, 1).to(dtype) for x in (problem.k, problem.v))
        scores = torch.einsum("bhtd,bhsd->bhts", problem.q.to(dtype), k) / s.D**0.5 + bias
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
        return torch.einsum("bhts,bhse->bhte", weights, v).to(problem.dtype)

    return prepared_call(problem, call)


def score_bytes(problem: AttentionProblem) -> int:
    """Return the bytes of the scores and of the repeated keys and values."""
    s = problem.sizes
    return s.B * s.H * (3 * s.queries * s.S + 2 * s.S * s.D) * 8


ATTENTION = Peer("einsum", "torch.einsum and softmax.", attention, bytes=score_bytes)
