"""One softmax attention call, with or without its gradient, and its definition in any dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.bench.interfaces import Outputs, Problem, Sizes, Way, Work
from regard.caches import Quantised
from regard.caches.base import Parts
from regard.cost import attention_flops
from regard.cost.softmax import (
    attention_bytes,
    causal_pairs,
    training_bytes,
    training_flops,
    window_pairs,
)
from regard.pages import settled
from regard.span import Span

BLOCK_BYTES = 1 << 27
"""Scores that are held at once."""


def straight(problem: AttentionProblem, dtype: torch.dtype, groups: list[int]) -> Outputs:
    """softmax(q k^T / sqrt(D) + bias, -inf where not seen) v of some key/value heads; in training
    its gradients too.

    A block of queries at a time; gradients of keys and values are summed in fp32 or better.
    """
    s, ratio = problem.sizes, problem.sizes.H // problem.sizes.G
    found: dict[str, list[Tensor]] = {}
    for g in groups:
        heads = slice(g * ratio, (g + 1) * ratio)
        q = problem.q.detach()[:, heads].to(dtype)
        k, v = (x.detach()[:, g : g + 1].to(dtype) for x in (problem.k, problem.v))
        d_out = None if problem.d_out is None else problem.d_out[:, heads].to(dtype)
        step = max(1, problem.block_bytes // (s.B * ratio * s.S * dtype.itemsize))
        for name, x in _blocks(problem, q, k, v, d_out, heads, step).items():
            found.setdefault(name, []).append(x)
    return {name: torch.cat(parts, dim=1) for name, parts in found.items()}


def _blocks(
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor | None,
    heads: slice,
    step: int,
) -> dict[str, Tensor]:
    """All queries of some heads, which share one key/value head; gradients too if there is
    d_out.
    """
    outs, d_q = [], []
    sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v)]
    for start in range(0, q.shape[2], step):
        rows = slice(start, min(start + step, q.shape[2]))
        inputs = [x.detach().requires_grad_(d_out is not None) for x in (q[:, :, rows], k, v)]
        with torch.set_grad_enabled(d_out is not None):
            out = _attend(problem, *inputs, rows=rows, heads=heads)
        outs.append(out.detach())
        if d_out is not None:
            gradient, *others = torch.autograd.grad(out, inputs, d_out[:, :, rows])
            d_q.append(gradient)
            for total, part in zip(sums, others, strict=True):
                total += part
    found = {"out": torch.cat(outs, dim=2)}
    if d_out is not None:
        d_k, d_v = (total.to(k.dtype) for total in sums)
        found |= {"dq": torch.cat(d_q, dim=2), "dk": d_k, "dv": d_v}
    return found


def _attend(
    problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, *, rows: slice, heads: slice
) -> Tensor:
    """A block of queries [B,R,t,D] against one key/value head [B,1,S,D]."""
    scores = (q @ k.mT) * problem.sizes.D**-0.5
    if problem.sizes.alibi:
        scores = scores + problem.bias_rows(rows, q.dtype)[:, heads]
    seen = problem.visible_rows(rows)
    scores = scores.masked_fill(~seen, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    # a row that sees nothing: 0, not the softmax's NaN
    weights = torch.where(seen.any(dim=-1, keepdim=True), weights, 0)
    return weights @ v


PAIRS = 1 << 29
"""Query-key pairs that are computed in fp64 for a check: as many key/value heads as fit, one at
least.
"""


@dataclass(frozen=True)
class AttentionSizes(Sizes):
    """The last T of S tokens attend causally.

    Attributes:
        B, H, G, D: batch rows, query heads, key/value heads, and their dim.
        S, T: keys and queries; T None is as many queries as keys.
        window: how many keys a query sees, its own included; None is all.
        alibi: scores are less by slope times distance.
        bits: keys and values are what a cache of so many bits gives back; None is any numbers.
        padded: row b has b S / (2 B) slots on the left that hold nothing.
        train: with the gradient.

    >>> print(AttentionSizes(B=1, H=32, G=8, D=128, S=32768, T=1))
    B1 H32 G8 D128 S32768 T1
    """

    B: int
    H: int
    G: int
    D: int
    S: int
    T: int | None = None
    window: int | None = None
    alibi: bool = False
    padded: bool = False
    train: bool = False
    bits: int | None = None

    def resized(self, *, length: int | None = None, batch: int | None = None) -> AttentionSizes:
        """The same with another S, or B."""
        return replace(self, S=length or self.S, B=batch or self.B)

    @property
    def queries(self) -> int:
        """T as a number."""
        return self.S if self.T is None else self.T

    def bytes(self, dtype: torch.dtype) -> int:
        """Inputs, outputs and gradients, fp64 copies of what is checked, and the scores of a block
        of queries.
        """
        tensors = self.B * (2 * self.queries * self.H + 2 * self.S * self.G) * self.D
        copies = 2 if self.train else 1
        return tensors * copies * (dtype.itemsize + 8) + 5 * BLOCK_BYTES

    def problem(self, dtype: torch.dtype, device: torch.device) -> AttentionProblem:
        """Random numbers, the same for a size each time."""
        return AttentionProblem(self, dtype, device)

    def __str__(self) -> str:
        rest = [
            *([f"T{self.T}"] if self.T is not None else []),
            *([f"W{self.window}"] if self.window is not None else []),
            *([f"{self.bits} bits"] if self.bits is not None else []),
        ]
        return " ".join([f"B{self.B} H{self.H} G{self.G} D{self.D} S{self.S}", *rest])


class AttentionProblem(Problem):
    """q [B,H,T,D], k and v [B,G,S,D]; the answer is "out" [B,H,T,D] and in training "dq", "dk" and
    "dv".

    coded: keys and values as the cache holds them, where there is one.
    pads: how many slots hold nothing, for each row; queries in such slots have no right answer.
    block_bytes, checked_pairs: what the reference holds at once, and how much it computes.

    >>> sizes = AttentionSizes(B=1, H=2, G=1, D=4, S=3)
    >>> problem = sizes.problem(torch.float32, torch.device("cpu"))
    >>> problem.visible()[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    >>> problem.checked({"out": problem.q})["out"].shape
    torch.Size([1, 2, 3, 4])
    """

    block_bytes: int = BLOCK_BYTES
    checked_pairs: int = PAIRS

    def __init__(self, sizes: AttentionSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device, self.train = sizes, dtype, device, sizes.train
        self.coded: Parts | None = None
        generator = torch.Generator().manual_seed(0)
        B, H, G, D, S, T = sizes.B, sizes.H, sizes.G, sizes.D, sizes.S, sizes.queries
        shapes = {"q": (B, H, T, D), "k": (B, G, S, D), "v": (B, G, S, D), "d": (B, H, T, D)}
        made = {
            name: settled(torch.randn(shape, generator=generator).to(device, dtype))
            for name, shape in shapes.items()
            if name != "d" or sizes.train
        }
        if sizes.bits is not None:
            self.coded, (made["k"], made["v"]) = _coded(made["k"], made["v"], sizes.bits)
        self.q, self.k, self.v = (made[name].requires_grad_(sizes.train) for name in "qkv")
        self.d_out = made.get("d")
        self.pads = [b * S // (2 * B) if sizes.padded else 0 for b in range(B)]

    @property
    def slopes(self) -> Tensor:
        """ALiBi's slope of each head [H], 2^(-8 h / H), for H a power of two; 0 without ALiBi."""
        h = torch.arange(1, self.sizes.H + 1, dtype=torch.float64)
        return (2.0 ** (-8 * h / self.sizes.H)) * self.sizes.alibi

    def visible(self) -> Bool[Tensor, "b 1 T S"]:
        """What each query may see, as a dense mask; b is 1 unless rows are padded."""
        return self.visible_rows(slice(0, self.sizes.queries))

    def visible_rows(self, rows: slice) -> Bool[Tensor, "b 1 t S"]:
        """The same for some of the queries."""
        S, T, W = self.sizes.S, self.sizes.queries, self.sizes.window
        i = torch.arange(S - T, S, device=self.device)[rows, None]
        j = torch.arange(S, device=self.device)[None]
        seen = j <= i
        if W is not None:
            seen = seen & (j > i - W)
        if not any(self.pads):
            return seen[None, None]
        pads = torch.tensor(self.pads, device=self.device)[:, None, None]
        return (seen & (j >= pads) & (i >= pads))[:, None]

    def bias(self) -> Float[Tensor, "1 H T S"]:
        """ALiBi's bias, -slope (i - j), in the problem's dtype."""
        return self.bias_rows(slice(0, self.sizes.queries), self.dtype)

    def bias_rows(self, rows: slice, dtype: torch.dtype) -> Float[Tensor, "1 H t S"]:
        """The same for some of the queries."""
        S, T = self.sizes.S, self.sizes.queries
        i, j = torch.arange(S - T, S)[rows, None], torch.arange(S)[None]
        return (self.slopes[:, None, None] * (j - i))[None].to(self.device, dtype)

    @cached_property
    def pairs(self) -> int:
        """Query-key pairs that are seen, over all rows and heads."""
        s, T = self.sizes, self.sizes.queries
        each = []
        for pad in self.pads:
            S, n = s.S - pad, min(T, s.S - pad)
            each.append(causal_pairs(n, S) if s.window is None else window_pairs(n, S, s.window))
        return s.H * sum(each)

    @property
    def work(self) -> Work:
        """Pairs that are seen; every tensor moved once."""
        s = self.sizes
        sizes = {"B": s.B, "H": s.H, "G": s.G, "T": s.queries, "S": s.S, "D": s.D, "E": s.D}
        sizes["itemsize"] = self.dtype.itemsize
        if self.train:
            return Work(training_flops(self.pairs, s.D, s.D), training_bytes(**sizes))
        return Work(attention_flops(self.pairs, s.D, s.D), attention_bytes(**sizes))

    @cached_property
    def groups(self) -> list[int]:
        """The key/value heads that are checked: all, or the first and some evenly behind it."""
        n = max(1, min(self.sizes.G, self.checked_pairs * self.sizes.G // max(1, self.pairs)))
        return sorted({math.floor(i * self.sizes.G / n) for i in range(n)})

    def reference(self) -> Outputs:
        """In fp64."""
        return self.checked_rows(straight(self, torch.float64, self.groups))

    def plain(self) -> Outputs:
        """In the problem's dtype; nothing where the rule does not ask for it."""
        if self.dtype in (torch.float32, torch.float64):
            return {}
        return self.checked_rows(straight(self, self.dtype, self.groups))

    def checked(self, found: Outputs) -> Outputs:
        """The heads that are checked, and 0 for queries that are none."""
        ratio = self.sizes.H // self.sizes.G
        heads = [g * ratio + r for g in self.groups for r in range(ratio)]
        expected = {"out": self.q.shape, "dq": self.q.shape, "dk": self.k.shape, "dv": self.v.shape}
        part = {}
        for name, x in found.items():
            if x.shape == expected[name]:
                x = x.detach()[:, heads if name in ("out", "dq") else self.groups]
            part[name] = x
        return self.checked_rows(part)

    def checked_rows(self, found: Outputs) -> Outputs:
        """Outputs with 0 in the rows of queries that are none."""
        if not any(self.pads):
            return found
        real = torch.arange(self.sizes.S - self.sizes.queries, self.sizes.S, device=self.device)
        real = real >= torch.tensor(self.pads, device=self.device)[:, None]
        return {name: torch.where(real[:, None, :, None], x, 0) for name, x in found.items()}


def _coded(k: Tensor, v: Tensor, bits: int) -> tuple[Parts, Parts]:
    """Keys and values in codes, all of them, and as the numbers that the codes mean."""
    S, channels = k.shape[2], k.shape[3]
    cache = Quantised(bits, group=min(128, channels) if bits == 8 else 32, residual=0)
    coded, _ = cache.update((k, v), Span(0, S))
    again, _ = cache.update((k[:, :, :0], v[:, :, :0]), Span(S, 0))
    return coded, tuple(settled(x.clone()) for x in again)


def way(
    problem: AttentionProblem,
    attention: Callable[[], Any],
    out: Callable[[Any], Tensor] = lambda found: found,
    kernel: str = "",
) -> Way:
    """A call made ready to be timed; in training with the gradients of q, k and v.

    Args:
        problem: whose q, k and v the call reads.
        attention: the call.
        out: its result -> [B,H,T,D]; timed in training only, where the gradient comes through it.
        kernel: its name.

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

    return Way(step, _outputs_of_training, kernel)


def _outputs_of_training(found: tuple[Tensor, ...]) -> Outputs:
    return dict(zip(("out", "dq", "dk", "dv"), found, strict=True))
