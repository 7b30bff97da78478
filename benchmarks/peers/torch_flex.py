"""torch's FlexAttention, compiled, with a block mask that is created in advance."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from benchmarks.interfaces import Peer, PreparedCall
from benchmarks.problems import AttentionProblem, prepared_call
from benchmarks.problems.attention import SINK_KEYS

COMPILERS = ("c++", "g++", "clang++")


def attention(problem: AttentionProblem) -> PreparedCall:
    """Prepare compiled FlexAttention. The first call compiles it, which is not timed."""
    s, T = problem.sizes, problem.sizes.queries
    offset, pads = s.S - T, torch.tensor(problem.pads, device=problem.device)

    def visible(b: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
        i = i + offset
        allowed = i >= j
        if s.window is not None:
            allowed = allowed & (i - j < s.window)
        if s.pattern == "sinks":
            allowed = allowed | ((j < SINK_KEYS) & (i >= j))
        elif s.pattern == "prefix":
            allowed = allowed | (j < s.prefix)
        elif s.pattern == "documents":
            allowed = allowed & (i // s.document == j // s.document)
        return allowed & (j >= pads[b]) & (i >= pads[b]) if s.padded else allowed

    blocks = None
    if T > 1:
        B = s.B if s.padded else None
        blocks = flex.create_block_mask(visible, B, None, T, s.S, device=problem.device.type)
    options: dict[str, object] = {"block_mask": blocks, "enable_gqa": s.G != s.H}
    if s.alibi or s.softcap is not None:
        slopes = problem.slopes.to(problem.device, torch.float32)

        def change_score(score: Tensor, _: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if s.softcap is not None:
                score = s.softcap * torch.tanh(score / s.softcap)
            return score + slopes[h] * (j - i - offset) if s.alibi else score

        options["score_mod"] = change_score
    call = _compiled()
    return prepared_call(problem, lambda: call(problem.q, problem.k, problem.v, **options))


def _compiled() -> Callable[..., object]:
    """Return torch's flex_attention in compiled form."""
    # after a number of compilations torch runs the function uncompiled, with a warning: reset the
    # compiler for each case
    torch.compiler.reset()
    compiled: Callable[..., object] = torch.compile(flex.flex_attention, dynamic=False)
    return compiled


def why_not(problem: AttentionProblem, compilers: Sequence[str] = COMPILERS) -> str | None:
    """Return why FlexAttention does not support the problem, or None."""
    if problem.sizes.sink:
        return "returns no output with a sink"
    if problem.device.type != "cpu":
        return None
    if problem.train:
        return "has no gradient on a CPU"
    if not any(map(shutil.which, compilers)):
        return "needs a C++ compiler"
    return None


ATTENTION = Peer(
    "torch FlexAttention", "torch.compile(flex_attention).", attention, why_not=why_not
)
