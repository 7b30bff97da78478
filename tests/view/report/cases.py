"""Recordings that a page must show rightly, each with the definition's own weights in fp64, from
loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.inspect import Recorder, Recording
from tests.inspect import fp64_patterns

Sees = Callable[[int, int, int], bool]
Adds = Callable[[int, int, int], float]


class Case(NamedTuple):
    """A call, and the rule in plain Python: does head h at position p see position r; what does it
    add?
    """

    name: str
    H: int
    G: int
    T: int
    S: int
    sees: Sees
    options: dict[str, Any]
    adds: Adds = lambda h, p, r: 0.0
    cap: float | None = None
    sink: tuple[float, ...] | None = None
    q_positions: tuple[int, ...] | None = None
    k_positions: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float64
    size: float = 2.0


TABLE = torch.randn(3, 9, 9, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
CAUSAL = {"mask": masks.Causal()}
PADDED = (-1, -1, -1, 0, 1, 2, 3, 4, 5)


def causal(h: int, p: int, r: int) -> bool:
    return r <= p


CASES = (
    Case("causal", 2, 2, 9, 9, causal, CAUSAL),
    Case("everything", 2, 1, 6, 11, lambda h, p, r: True, {}),
    Case("float32", 2, 2, 9, 9, causal, CAUSAL, dtype=torch.float32),
    Case("bfloat16", 2, 2, 9, 9, causal, CAUSAL, dtype=torch.bfloat16),
    Case(
        "groups, window, first keys, softcap, sinks", 4, 2, 11, 11,
        lambda h, p, r: (r <= p and p - r < 3) or r < 1,
        {"mask": masks.Causal() & masks.Window(3) | masks.Sinks(1)},
        cap=1.5, sink=(0.5, -1.0, 3.0, 0.0), size=4.0,
    ),
    Case(
        "alibi behind left padding", 4, 4, 9, 9, causal, CAUSAL | {"bias": biases.ALiBi(4)},
        lambda h, p, r: -(2.0 ** (-2 * (h + 1))) * (p - r),
        q_positions=PADDED, k_positions=PADDED,
    ),
    Case(
        "a dense bias", 3, 3, 9, 9, causal, CAUSAL | {"bias": biases.DenseBias(TABLE[None])},
        lambda h, p, r: TABLE[h, p, r].item(),
    ),
    Case(
        "a mask for each head", 2, 2, 9, 9, lambda h, p, r: r <= p and (h == 0 or p - r < 2),
        {"mask": masks.Heads((masks.Causal(), masks.Causal() & masks.Window(2)))},
    ),
    Case(
        "rows that see no key", 2, 2, 7, 7, lambda h, p, r: r < p - 1,
        {"mask": ~masks.Window(2) & masks.Causal()},
    ),
    Case(
        "later queries, keys out of order", 2, 1, 3, 8, lambda h, p, r: r <= p and p - r < 4,
        {"mask": masks.Causal() & masks.Window(4)},
        q_positions=(7, 8, 9), k_positions=(8, 9, 2, 3, 4, 5, 6, 7),
    ),
)  # fmt: skip


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a case."""
    make = torch.Generator().manual_seed(len(case.name))
    D, E = 6, 5
    shapes = (case.H, case.T, D), (case.G, case.S, D), (case.G, case.S, E)
    q, k, v = (
        torch.randn(1, *shape, generator=make, dtype=torch.float64).to(case.dtype)
        for shape in shapes
    )
    return q * case.size, k, v


def recorded(case: Case) -> Recording:
    """The call, on the kernel that takes it; once for each case of `CASES`."""
    return _recorded(CASES.index(case)) if case in CASES else _run(case)


@functools.cache
def _recorded(number: int) -> Recording:
    return _run(CASES[number])


def _run(case: Case) -> Recording:
    q, k, v = inputs(case)
    sink = None if case.sink is None else torch.tensor(case.sink, dtype=case.dtype)
    at = {
        name: torch.tensor([value])
        for name, value in (("q_positions", case.q_positions), ("k_positions", case.k_positions))
        if value is not None
    }
    with torch.inference_mode(), Recorder() as recorder:
        regard.attend(q, k, v, softcap=case.cap, sink=sink, **at, **case.options)
    return recorder.recording(pieces=tuple(f"t{n}" for n in range(max(case.T, case.S))))


def defined(case: Case, h: int, i: int) -> tuple[list[float], list[float]]:
    """Scores and weights of one row, from the definition: loops over Python floats."""
    q, k, _ = inputs(case)
    at = case.q_positions or range(case.S - case.T, case.S)
    keys = case.k_positions or range(case.S)
    sink = None if case.sink is None else torch.tensor(case.sink)
    rule = fp64_patterns.Case(
        q, k, [[*at]], [[*keys]], partial(case.sees, h), case.adds, softcap=case.cap, sink=sink
    )
    scores, weights = rule.pattern(0, h, slice(i, i + 1))
    return scores[0].tolist(), weights[0].tolist()
