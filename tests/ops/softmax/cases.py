"""Calls for tests: each mask with its rule written a second time, each option, at shapes that do
not divide anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard import biases, masks
from regard.ops.softmax.call import Call, make_call
from regard.span import Positions, Span

Rule = Callable[
    [int, int, int, int], bool
]  # batch row, head, position of the query, position of the key


def _diffusion(i: int, j: int) -> bool:
    """Blocks of 4 of 17 noisy tokens, which see themselves and the clean blocks before them, and of
    17 clean ones, which see the clean blocks up to themselves.
    """
    if i < 17 and j < 17:
        return i // 4 == j // 4
    return j >= 17 and (j - 17) // 4 < (i // 4 if i < 17 else (i - 17) // 4 + 1)


COMMON: dict[str, tuple[Callable[[], Any], Rule]] = {
    "none": (lambda: None, lambda b, h, i, j: True),
    "causal": (masks.Causal, lambda b, h, i, j: j <= i),
    "window": (lambda: masks.Causal() & masks.Window(7), lambda b, h, i, j: i - 7 < j <= i),
    "sinks": (
        lambda: masks.Causal() & (masks.Window(5) | masks.Sinks(2)),
        lambda b, h, i, j: j <= i and (i - j < 5 or j < 2),
    ),
    "chunk": (lambda: masks.Chunk(8), lambda b, h, i, j: i // 8 == j // 8),
    "prefix": (lambda: masks.Causal() | masks.Prefix(6), lambda b, h, i, j: j <= i or j < 6),
    "future": (lambda: ~masks.Causal(), lambda b, h, i, j: j > i),
    "rows": (
        lambda: masks.Causal() & masks.Padding.right((3, 8)),
        lambda b, h, i, j: j <= i and j < (3, 8)[b],
    ),
    "heads": (
        lambda: masks.Heads((masks.Causal(), masks.Window(3), masks.Full(), ~masks.Full())),
        lambda b, h, i, j: (j <= i, i - j < 3, True, False)[h],
    ),
    "dilated": (
        lambda: masks.Causal() & masks.Dilated(4, 3),
        lambda b, h, i, j: j <= i and i - j < 12 and (i - j) % 3 == 0,
    ),
    "fn": (
        lambda: masks.Fn(lambda q, k: (q + k) % 5 != 0, "fifth"),
        lambda b, h, i, j: (i + j) % 5 != 0,
    ),
}
PATTERNS: dict[str, tuple[Callable[[], Any], Rule]] = {
    "dilated, two sides": (
        lambda: masks.Dilated(3, 2, ahead=1),
        lambda b, h, i, j: j in (i - 4, i - 2, i, i + 2),
    ),
    "block diffusion": (lambda: masks.BlockDiffusion(4, 17), lambda b, h, i, j: _diffusion(i, j)),
    "neighborhood": (
        lambda: masks.Neighborhood((3, 11), (2, 5)),
        lambda b, h, i, j: (
            j // 11 in ((0, 1) if i < 22 else (1, 2))
            and 0 <= j % 11 - min(max(i % 11 - 2, 0), 6) < 5
        ),
    ),
}
MASKS = COMMON | PATTERNS


@dataclass(frozen=True)
class Case:
    """One call and what it means.

    Positions are "" (the defaults), "shift" (a later Span) or "rows" (a tensor with holes). A
    `fixed_bias` has no gradient, whatever has one beside it.
    """

    mask: str = "none"
    shape: tuple[int, int, int, int, int, int, int] = (2, 4, 2, 19, 33, 8, 8)  # B H G T S D E
    bias: str = ""
    softcap: float | None = None
    sink: bool = False
    scale: float | None = None
    positions: str = ""
    size: float = 1.0
    seed: int = 0
    fixed_bias: bool = False

    def __str__(self) -> str:
        B, H, G, T, S, D, E = self.shape
        bias = f"fixed-{self.bias}" if self.bias and self.fixed_bias else self.bias
        words = [self.mask, f"B{B}H{H}G{G}T{T}S{S}D{D}E{E}", bias, self.positions]
        words += [f"cap{self.softcap}" if self.softcap else "", "sink" if self.sink else ""]
        words += [
            f"scale{self.scale}" if self.scale else "",
            f"x{self.size}" if self.size != 1 else "",
        ]
        return "-".join(word for word in words if word)


@dataclass
class Made:
    """The tensors of a case, and its meaning as dense tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    table: Tensor | None
    options: dict[str, Any]
    visible: Tensor
    bias: Tensor | None
    leaves: list[Tensor] = field(default_factory=list)

    def call(self, **more: Any) -> Call:
        return make_call(self.q, self.k, self.v, **self.options, **more)

    def plain(self) -> dict[str, Any]:
        keys = ("scale", "softcap", "sink")
        return {
            "visible": self.visible,
            "bias": self.bias,
            **{x: self.options.get(x) for x in keys},
        }


def make(
    case: Case, dtype: torch.dtype, *, like: torch.dtype | None = None, gradient: bool = False
) -> Made:
    """The tensors of a case in a dtype, holding numbers that `like` can hold: the same ones in
    both.
    """
    B, H, G, T, S, D, E = case.shape
    draw = torch.Generator().manual_seed(case.seed)

    def leaf(*shape: int, size: float = 1.0) -> Tensor:
        x = torch.randn(*shape, generator=draw, dtype=torch.float64) * size
        return x.to(like or dtype).to(dtype).requires_grad_(gradient)

    q, k, v = leaf(B, H, T, D, size=case.size), leaf(B, G, S, D, size=case.size), leaf(B, G, S, E)
    sink = leaf(H) if case.sink else None
    q_positions, k_positions = _positions(case, draw)
    qp, kp = _listed(q_positions, B), _listed(k_positions, B)
    least = 0 if case.positions else -T  # nobody said that a query is empty
    visible = _visible(case.mask, H, least, qp, kp)
    bias, table, dense = None, None, None
    if case.bias:
        table = leaf(
            *{"t5": (8, H), "dense": (1, H, T, S), "key": (B, 1, 1, S), "fn": (H,), "alibi": (H,)}[
                case.bias
            ]
        ).requires_grad_(gradient and not case.fixed_bias)
        dense = _dense_bias(case.bias, table, torch.tensor(qp), torch.tensor(kp))
        bias = _bias(case.bias, table)
    options = {
        "mask": MASKS[case.mask][0](),
        "bias": bias,
        "scale": case.scale,
        "softcap": case.softcap,
        "sink": sink,
        "q_positions": q_positions if case.positions else None,
        "k_positions": k_positions if case.positions else None,
    }
    learned = None if case.fixed_bias else table
    leaves = [x for x in (q, k, v, sink, learned) if x is not None]
    return Made(q, k, v, sink, table, options, visible, dense, leaves)


def _positions(case: Case, draw: torch.Generator) -> tuple[Positions, Positions]:
    B, _, _, T, S, _, _ = case.shape
    if case.positions == "shift":
        return Span(100 + S - T, T), Span(100, S)
    if case.positions == "rows":  # unordered keys with holes, queries anywhere, some nowhere
        k = torch.stack([torch.randperm(S, generator=draw) for _ in range(B)])
        k[torch.rand(B, S, generator=draw) < 0.2] = -1
        q = torch.randint(0, S, (B, T), generator=draw)
        q[torch.rand(B, T, generator=draw) < 0.2] = -1
        return q, k
    return Span(S - T, T), Span(0, S)


Rows = tuple[tuple[int, ...], ...]


@cache  # the same for every dtype, size and option of a call
def _visible(mask: str, H: int, least: int, qp: Rows, kp: Rows) -> Tensor:
    """The rule, pair by pair."""
    rule = MASKS[mask][1]
    rows = zip(qp, kp, strict=True)
    return torch.tensor(
        [
            [
                [[i >= least and j >= 0 and rule(b, h, i, j) for j in js] for i in is_]
                for h in range(H)
            ]
            for b, (is_, js) in enumerate(rows)
        ]
    )


def _listed(positions: Positions, B: int) -> Rows:
    """The positions of each row of a batch."""
    if isinstance(positions, Span):
        return (tuple(range(positions.start, positions.start + positions.length)),) * B
    return tuple(map(tuple, positions.tolist()))


def _bias(kind: str, table: Tensor) -> Any:
    if kind == "t5":
        return biases.T5Relative(table, bidirectional=True, max_distance=16)
    if kind == "fn":
        return biases.FnBias(
            lambda q, k, w: w[:, None, None] * torch.cos((q - k).to(w.dtype)), (table,)
        )
    if kind == "alibi":
        return biases.ALiBi(slopes=table, symmetric=True)
    return table


def _dense_bias(kind: str, table: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The bias written out, with plain operations."""
    distance = k[:, None, None, :] - q[:, None, :, None]  # [B,1,T,S]
    slope = table[:, None, None]
    if (
        kind == "t5"
    ):  # 8 buckets, 4 a direction: distances 0, 1, then [2, 6) and from 6 on (2 sqrt(16 / 2) = 5.7)
        one = (distance.abs() >= 1).long() + (distance.abs() >= 2) + (distance.abs() >= 6)
        return table[(one + 4 * (distance > 0))[:, 0]].permute(0, 3, 1, 2)
    if kind == "fn":
        return slope * torch.cos(-distance.to(table.dtype))
    if kind == "alibi":
        return -slope * distance.abs().to(table.dtype)
    return table


SMALL = (2, 4, 2, 7, 9, 4, 5)
ORACLE = [
    *(Case(mask, SMALL, seed=i) for i, mask in enumerate(MASKS)),
    *(
        Case("causal", SMALL, bias=bias, softcap=2.0, seed=20)
        for bias in ("t5", "dense", "key", "fn", "alibi")
    ),
    *(
        Case(mask, SMALL, sink=True, positions="rows", seed=21)
        for mask in ("none", "causal", "window")
    ),
    *(Case("window", SMALL, size=size, sink=True, seed=22) for size in (0.1, 8.0, 40.0)),
    *(
        Case("causal", (1, 6, G, 5, 3, 4, 1), scale=-0.7, softcap=0.5, seed=23)
        for G in (1, 2, 3, 6)
    ),
    *(
        Case(mask, (2, 4, 2, T, S, 3, 2), seed=24)
        for mask in ("none", "causal")
        for T, S in ((1, 1), (1, 8), (8, 1))
    ),
    Case("sinks", SMALL, positions="shift", bias="t5", sink=True, seed=25),
]

WIDE = (1, 4, 2, 19, 33, 8, 8)
LONG = (1, 2, 1, 70, 300, 16, 16)
CONTRACT = [
    *(Case(mask, seed=i) for i, mask in enumerate(COMMON)),
    *(
        Case(mask, positions="rows", seed=i)
        for i, mask in enumerate(("none", "causal", "window", "prefix", "fn"))
    ),
    *(
        Case(mask, positions="shift", sink=True, seed=i)
        for i, mask in enumerate(("causal", "window", "chunk"))
    ),
    *(Case("causal", WIDE, bias=bias, seed=30) for bias in ("t5", "dense", "fn", "alibi")),
    *(
        Case("window", bias=bias, softcap=1.5, sink=True, seed=31)
        for bias in ("t5", "dense", "key", "fn", "alibi")
    ),
    *(Case("causal", softcap=cap, seed=32) for cap in (0.5, 30.0)),
    *(Case("causal", (1, 6, G, 17, 17, 8, 8), sink=True, seed=33) for G in (1, 2, 3, 6)),
    *(
        Case("causal", (1, 2, 1, 20, 20, D, E), seed=34)
        for D, E in ((8, 3), (3, 8), (1, 1), (17, 32))
    ),
    *(
        Case(mask, (1, 2, 2, T, S, 8, 8), seed=35)
        for mask in ("none", "causal", "window")
        for T, S in ((1, 40), (40, 16), (40, 40), (3, 17))
    ),
    *(
        Case(mask, LONG, sink=True, seed=36)
        for mask in ("causal", "window", "sinks", "prefix", "future")
    ),
    *(Case("causal", size=size, seed=37) for size in (0.1, 4.0, 8.0)),
    *(Case("causal", scale=scale, seed=38) for scale in (-0.5, 2.0)),
    Case("rows", (2, 2, 1, 40, 150, 8, 8), sink=True, softcap=3.0, seed=39),
    Case("heads", (1, 4, 1, 40, 150, 8, 8), sink=True, seed=40),
    *(Case(mask, seed=41) for mask in PATTERNS),
]
