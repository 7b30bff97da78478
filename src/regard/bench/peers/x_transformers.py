"""x-transformers: its `Attend`, with torch's fused kernel inside."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from regard.bench.interfaces import Peer, Way
from regard.bench.problems import AttentionProblem, way


def attention(problem: AttentionProblem) -> Way:
    """Its query head h reads key/value head h % G, where ours is h // (H/G): heads are put into its
    order ahead.
    """
    s = problem.sizes
    module = importlib.import_module("x_transformers.attend").Attend(causal=True, flash=True)
    order = torch.arange(s.H, device=problem.device).view(s.G, -1).T.flatten()
    options: dict[str, Any] = {}
    if s.window is not None or s.padded:
        seen = problem.visible()
        options["mask"] = seen | ~seen.any(dim=-1, keepdim=True)
    if s.alibi:
        options["attn_bias"] = problem.bias()[:, order]
    # in training the reordering is part of the call: gradients are of the problem's q
    q = None if problem.train else problem.q[:, order].contiguous()

    def call() -> Tensor:
        found: Tensor = module(
            _ordered(problem, order) if q is None else q, problem.k, problem.v, **options
        )[0]
        return found

    inverse = order.argsort()
    return way(problem, call, lambda out: out[:, inverse])


def _ordered(problem: AttentionProblem, order: Tensor) -> Tensor:
    return problem.q[:, order] if problem.sizes.G < problem.sizes.H else problem.q


def repeated_bytes(problem: AttentionProblem) -> int:
    """Keys and values repeated for every head; a mask is spread over them."""
    s = problem.sizes
    mask = s.B * s.H * s.queries * s.S * 8 if s.window or s.padded or s.alibi else 0
    return 2 * s.B * s.H * s.S * s.D * problem.dtype.itemsize + mask


ATTENTION = Peer(
    "x-transformers",
    "x_transformers.attend.Attend, flash.",
    attention,
    needs=("x_transformers",),
    bytes=repeated_bytes,
)
