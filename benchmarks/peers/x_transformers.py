"""x-transformers: its `Attend` module, which calls torch's fused kernel."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from benchmarks.interfaces import Peer, PreparedCall
from benchmarks.problems import AttentionProblem, prepared_call


def attention(problem: AttentionProblem) -> PreparedCall:
    """Prepare `Attend`, with the query heads in the order that it expects.

    In x-transformers query head h attends to key/value head h % G, in regard to h // (H / G). So
    the query heads are reordered in advance.
    """
    s = problem.sizes
    module = importlib.import_module("x_transformers.attend").Attend(causal=True, flash=True)
    order = torch.arange(s.H, device=problem.device).view(s.G, -1).T.flatten()
    options: dict[str, object] = {}
    if s.window is not None or s.padded:
        visible = problem.visible()
        options["mask"] = visible | ~visible.any(dim=-1, keepdim=True)
    if s.alibi:
        options["attn_bias"] = problem.bias()[:, order]
    # in training the reordering is part of the call, since gradients are taken for the problem's q
    q = None if problem.train else problem.q[:, order].contiguous()

    def call() -> Tensor:
        out: Tensor = module(
            _ordered(problem, order) if q is None else q, problem.k, problem.v, **options
        )[0]
        return out

    inverse = order.argsort()
    return prepared_call(problem, call, lambda out: out[:, inverse])


def _ordered(problem: AttentionProblem, order: Tensor) -> Tensor:
    """Return the queries with their heads in the order of x-transformers."""
    return problem.q[:, order] if problem.sizes.G < problem.sizes.H else problem.q


def repeated_bytes(problem: AttentionProblem) -> int:
    """Return the memory in bytes of the keys and values of every head, and of the mask."""
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
