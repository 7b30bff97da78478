"""The plan of a call over several ranks: the bytes that it sends and the FLOPs of each rank.

`plan` starts no processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard import units
from regard.errors import ArgumentError
from regard.masks import Full, Mask
from regard.parallel.head_exchange import why_not_heads
from regard.parallel.shards import Shards, needed_keys
from regard.text_table import format_table
from regard.units import plural


@dataclass(frozen=True)
class MethodCost:
    """The cost of one method in a forward pass.

    Args:
        method: the name of the method.
        sent: the bytes that each rank sends.
        flops: the FLOPs of each rank: 2 (D + E) for each visible query-key pair.
        memory: the bytes that each rank holds besides its own q, k, v and out: blocks that are
            being sent, or all keys and values.
        why_not: why the method cannot run; "" if it can.
    """

    method: str
    sent: tuple[int, ...]
    flops: tuple[int, ...]
    memory: tuple[int, ...]
    why_not: str = ""


@dataclass(frozen=True)
class ParallelPlan:
    """The plan of a call of `regard.parallel.attend`; printing it shows a table.

    Args:
        method: the method that `method="auto"` takes: of the methods that can run, the one whose
            busiest rank sends the fewest bytes; "exchange" if they are equal.
        costs: the cost of every method.
        steps: for the method "exchange", the bytes that each rank sends at each step, [step][rank].
        efficiency: the mean number of query-key pairs of a rank, divided by that of the busiest
            rank.
    """

    method: str
    costs: tuple[MethodCost, ...]
    steps: tuple[tuple[int, ...], ...]
    efficiency: float

    def __getitem__(self, method: str) -> MethodCost:
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
        return f"{text}\nmean work of a rank / work of the busiest rank: {self.efficiency:.2f}"


def plan(
    shards: Shards,
    mask: Mask | None = None,
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    q_shards: Shards | None = None,
) -> ParallelPlan:
    """Compute what each method would send and compute in a forward pass, and which one "auto"
    takes.

    Args:
        shards: which rank holds which keys.
        mask: the mask; None means that every query sees every key.
        heads: (H, G), the numbers of query heads and of key/value heads.
        dims: (D, E), the features of one key and of one value.
        dtype: the dtype of q, k and v.
        batch: the batch size B.
        q_shards: which rank holds which queries; None means `shards`.

    Returns:
        The cost of each method, and the method that "auto" takes.

    Raises:
        ArgumentError: G does not divide H, or the shards are for different numbers of ranks.

    >>> from regard.masks import Causal, Window
    >>> shards = Shards.even(65536, 4)
    >>> result = plan(shards, Causal() & Window(512), heads=(8, 2), dims=(64, 64))
    >>> result.method, result["exchange"].sent
    ('exchange', (523264, 523264, 523264, 0))
    """
    mask, q_shards = Full() if mask is None else mask, shards if q_shards is None else q_shards
    (H, G), (D, E), W = heads, dims, shards.world
    if H % G:
        raise ArgumentError(
            f"{plural(H, 'query head')} cannot be divided among {plural(G, 'key/value head')}; "
            "the number of query heads must be a multiple of that of key/value heads"
        )
    if q_shards.world != W:
        raise ArgumentError(
            f"the shards of the queries are for {plural(q_shards.world, 'rank')}, and those of the "
            f"keys for {W}; they must be for the same number"
        )
    element_bytes = dtype.itemsize
    key_value_bytes = batch * G * (D + E) * element_bytes
    key_counts = [shards.count(r) for r in range(W)]
    query_counts = [q_shards.count(r) for r in range(W)]
    keys_received = [
        [
            sum(b - a for _, a, b in needed_keys(mask, q_shards.spans(i), shards.spans(j)))
            for j in range(W)
        ]
        for i in range(W)
    ]
    steps = tuple(
        tuple(key_value_bytes * keys_received[(r + step) % W][r] for r in range(W))
        for step in range(1, W)
    )
    sent = tuple(sum(step[r] for step in steps) for r in range(W))
    pairs = [
        sum(mask.count(x, y) for x in q_shards.spans(r) for s in range(W) for y in shards.spans(s))
        for r in range(W)
    ]
    per_head = _counted_masks(mask, q_shards, shards)
    flops = tuple(2 * (D + E) * batch * H * n // per_head for n in pairs)
    in_flight = tuple(
        max((step[(r - s) % W] for s, step in enumerate(steps, 1)), default=0) * 2 for r in range(W)
    )
    exchange = MethodCost("exchange", sent, flops, in_flight)
    gather = MethodCost(
        "gather",
        tuple(key_value_bytes * n * (W - 1) for n in key_counts),
        flops,
        tuple(key_value_bytes * (sum(key_counts) - n) for n in key_counts),
    )
    why = why_not_heads(H, G, W)
    G_moved = max(G, W)
    heads_cost = MethodCost(
        "heads",
        tuple(
            batch
            * element_bytes
            * (W - 1)
            * (key_counts[r] * G_moved * (D + E) + query_counts[r] * H * D)
            // W
            + batch * element_bytes * (H // W) * E * (sum(query_counts) - query_counts[r])
            for r in range(W)
        ),
        (sum(flops) // W,) * W,
        tuple(
            batch
            * element_bytes
            * (G_moved // W * (D + E) * sum(key_counts) + H // W * (D + E) * sum(query_counts))
            for _ in range(W)
        ),
        why,
    )
    costs = (exchange, gather, heads_cost)
    able = [cost for cost in costs if not cost.why_not and cost.method != "gather"]
    best = min(able, key=lambda cost: (max(cost.sent), cost.method != "exchange"))
    work = q_shards.work(mask) if q_shards is shards else tuple(pairs)
    efficiency = sum(work) / (W * max(work)) if any(work) else 1.0
    return ParallelPlan(best.method, costs, steps, efficiency)


def _counted_masks(mask: Mask, q_shards: Shards, shards: Shards) -> int:
    """Return the number of masks (batch rows times heads) whose pairs `mask.count` adds up."""
    for spans in q_shards.ranks:
        for span in spans:
            visible = mask.visible(span, shards.spans(0)[0] if shards.spans(0) else span)
            return int(visible.shape[0] * visible.shape[1])
    return 1
