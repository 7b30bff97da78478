"""What a call over several ranks moves and computes: `plan` needs no processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard import units
from regard.errors import ArgumentError
from regard.masks import Full, Mask
from regard.parallel.shards import Shards, needed
from regard.text_table import format_table


@dataclass(frozen=True)
class Cost:
    """What one method does in a forward pass.

    Attributes:
        method: its name.
        sent: the bytes that each rank sends.
        flops: 2 (D + E) for each visible query-key pair, for each rank.
        memory: the bytes that each rank holds besides its own q, k, v and out: blocks in flight, or
            all keys and values.
        why_not: why it cannot run; empty if it can.
    """

    method: str
    sent: tuple[int, ...]
    flops: tuple[int, ...]
    memory: tuple[int, ...]
    why_not: str = ""


@dataclass(frozen=True)
class Plan:
    """What `regard.parallel.attend` would do; printing it gives the table.

    Attributes:
        method: what `method="auto"` takes: of the methods that can run, the one that sends the
            fewest bytes at its busiest rank; the exchange where they are equal.
        costs: every method's answer.
        steps: of the exchange, the bytes that each rank sends at each step, [step][rank].
        efficiency: the mean work of a rank over that of the busiest one.
    """

    method: str
    costs: tuple[Cost, ...]
    steps: tuple[tuple[int, ...], ...]
    efficiency: float

    def __getitem__(self, method: str) -> Cost:
        return {cost.method: cost for cost in self.costs}[method]

    def __str__(self) -> str:
        rows = [["", "method", "most sent", "most memory", "most FLOPs", "why not"]]
        for cost in self.costs:
            mark = ">" if cost.method == self.method else ""
            most = units.size(max(cost.sent)), units.size(max(cost.memory))
            work = units.count(max(cost.flops), "FLOP")
            cells = [units.ABSENT] * 3 if cost.why_not else [*most, work]
            rows.append([mark, cost.method, *cells, cost.why_not])
        text = format_table(rows, left=(0, 1, 5), gap=2)
        return f"{text}\nthe ranks' work is balanced to {self.efficiency:.2f}"


def plan(
    shards: Shards,
    mask: Mask | None = None,
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    q_shards: Shards | None = None,
) -> Plan:
    """Say what each method would send and compute in a forward pass, and which one "auto" takes.

    Args:
        shards: who holds which keys.
        mask: None sees everything.
        heads: (H, G), query heads and key/value heads.
        dims: (D, E) of one head.
        dtype: of q, k and v.
        batch: B.
        q_shards: who holds which queries; None is `shards`.

    Raises:
        ArgumentError: G does not divide H, or the shards are for different numbers of ranks.

    >>> from regard.masks import Causal, Window
    >>> shards = Shards.even(65536, 4)
    >>> found = plan(shards, Causal() & Window(512), heads=(8, 2), dims=(64, 64))
    >>> found.method, found["exchange"].sent
    ('exchange', (523264, 523264, 523264, 0))
    """
    from regard.parallel.attend import why_not_heads

    mask, q_shards = Full() if mask is None else mask, shards if q_shards is None else q_shards
    (H, G), (D, E), W = heads, dims, shards.world
    if H % G:
        raise ArgumentError(f"{G} key/value heads do not divide {H} query heads")
    if q_shards.world != W:
        raise ArgumentError(f"{q_shards.world} shards of the queries for {W} of the keys")
    number = dtype.itemsize
    key = batch * G * (D + E) * number
    keys = [shards.count(r) for r in range(W)]
    queries = [q_shards.count(r) for r in range(W)]
    moved = [
        [
            sum(b - a for _, a, b in needed(mask, q_shards.spans(i), shards.spans(j)))
            for j in range(W)
        ]
        for i in range(W)
    ]
    steps = tuple(tuple(key * moved[(r + step) % W][r] for r in range(W)) for step in range(1, W))
    sent = tuple(sum(step[r] for step in steps) for r in range(W))
    pairs = [
        sum(mask.count(x, y) for x in q_shards.spans(r) for s in range(W) for y in shards.spans(s))
        for r in range(W)
    ]
    per_head = _heads_told_apart(mask, q_shards, shards)
    flops = tuple(2 * (D + E) * batch * H * n // per_head for n in pairs)
    in_flight = tuple(
        max((step[(r - s) % W] for s, step in enumerate(steps, 1)), default=0) * 2 for r in range(W)
    )
    exchange = Cost("exchange", sent, flops, in_flight)
    gather = Cost(
        "gather",
        tuple(key * n * (W - 1) for n in keys),
        flops,
        tuple(key * (sum(keys) - n) for n in keys),
    )
    why = why_not_heads(H, G, W)
    G_moved = max(G, W)
    heads_cost = Cost(
        "heads",
        tuple(
            batch * number * (W - 1) * (keys[r] * G_moved * (D + E) + queries[r] * H * D) // W
            + batch * number * (H // W) * E * (sum(queries) - queries[r])
            for r in range(W)
        ),
        (sum(flops) // W,) * W,
        tuple(
            batch * number * (G_moved // W * (D + E) * sum(keys) + H // W * (D + E) * sum(queries))
            for _ in range(W)
        ),
        why,
    )
    costs = (exchange, gather, heads_cost)
    able = [cost for cost in costs if not cost.why_not and cost.method != "gather"]
    best = min(able, key=lambda cost: (max(cost.sent), cost.method != "exchange"))
    work = q_shards.work(mask) if q_shards is shards else tuple(pairs)
    efficiency = sum(work) / (W * max(work)) if any(work) else 1.0
    return Plan(best.method, costs, steps, efficiency)


def _heads_told_apart(mask: Mask, q_shards: Shards, shards: Shards) -> int:
    """Over how many batch rows and heads `mask.count` counts."""
    for held in q_shards.ranks:
        for span in held:
            seen = mask.visible(span, shards.spans(0)[0] if shards.spans(0) else span)
            return int(seen.shape[0] * seen.shape[1])
    return 1
