"""What is timed for an implementation in torch: the call, or the call and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.bench.case import Outputs, Way
from regard.bench.problems import AttentionProblem


def way(
    problem: AttentionProblem,
    attention: Callable[[], Any],
    out: Callable[[Any], Tensor] = lambda found: found,
    kernel: str = "",
) -> Way:
    """The call, and in training the gradients of q, k and v.

    Args:
        problem: whose q, k and v the call reads.
        attention: the call.
        out: its result -> [B,H,T,D]; timed in training only, where the gradient comes through it.
        kernel: its name.

    >>> from regard.bench.problems import AttentionSizes
    >>> sizes = AttentionSizes(B=1, H=1, G=1, D=2, S=3, train=True)
    >>> problem = sizes.problem(torch.float32, torch.device("cpu"))
    >>> found = way(problem, lambda: problem.q + problem.k + problem.v)
    >>> sorted(found.read(found.step()))
    ['dk', 'dq', 'dv', 'out']
    """
    if not problem.train:

        def call() -> Any:
            with torch.no_grad():
                return attention()

        return Way(call, lambda found: {"out": out(found)}, kernel)
    inputs = (problem.q, problem.k, problem.v)

    def step() -> tuple[Tensor, ...]:
        z = out(attention())
        return (z, *torch.autograd.grad(z, inputs, problem.d_out))

    return Way(step, _named, kernel)


def _named(found: tuple[Tensor, ...]) -> Outputs:
    return dict(zip(("out", "dq", "dk", "dv"), found, strict=True))
