"""The plan of a call over several ranks: the bytes that it sends and the FLOPs of each rank.

`plan` starts no processes. `cheapest_method` is what calls with "auto" need, cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from regard import units
from regard.cost import machine_of
from regard.cost.roofline import LINKS
from regard.errors import ArgumentError
from regard.masks import Full, Mask
from regard.parallel.exchange import why_not_heads
from regard.parallel.shards import Shards, needed_keys
from regard.text_table import format_table
from regard.units import plural


@dataclass(frozen=True)
class MethodCost:
    """The cost of one method in a forward pass.

    Each rank sends `sent` bytes, computes `flops` (2 (D + E) per visible pair), and holds `memory`
    bytes besides its own tensors; `why_not` is "" if the method can run.
    """

    method: str
    sent: tuple[int, ...]
    flops: tuple[int, ...]
    memory: tuple[int, ...]
    why_not: str = ""


@dataclass(frozen=True)
class StepOverlap:
    """One step of "exchange": its messages travel while the step before is computed."""

    send_seconds: float
    compute_seconds: float

    @property
    def hidden(self) -> bool:
        """Whether no rank waits for the message."""
        return self.send_seconds <= self.compute_seconds


@dataclass(frozen=True)
class ParallelPlan:
    """The plan of a call of `regard.parallel.attend`; printing it shows a table.

    Args:
        method: the one that "auto" takes: the fewest bytes of the busiest rank.
        costs: the cost of every method.
        steps: for "exchange", the bytes that each rank sends, `[step][rank]`.
        efficiency: the mean number of query-key pairs of a rank, per those of the busiest.
        step_flops: for "exchange", the FLOPs `[step][rank]`; step 0 is of a rank's own keys.
        number_format: the name of the dtype in `regard.cost`, such as "bf16".
    """

    method: str
    costs: tuple[MethodCost, ...]
    steps: tuple[tuple[int, ...], ...]
    efficiency: float
    step_flops: tuple[tuple[int, ...], ...] = ()
    number_format: str = "fp32"

    def __getitem__(self, method: str) -> MethodCost:
        return {cost.method: cost for cost in self.costs}[method]

    def overlap(self, machine: str, *, link: float | None = None) -> tuple[StepOverlap, ...]:
        """Compare the time of each message of "exchange" with the work that hides it.

        Args:
            machine: a name of `regard.cost`, such as "h100-sxm".
            link: bytes per second that a rank sends; None is the link inside a node.

        Returns:
            One entry for each step from 1 on.

        Raises:
            ArgumentError: there is no such machine, or its link is not known.

        >>> shards = Shards.even(1 << 16, 4)
        >>> result = plan(shards, heads=(8, 8), dims=(64, 64), dtype=torch.bfloat16)
        >>> [step.hidden for step in result.overlap("h100-sxm")]
        [True, True, True]
        """
        rate = machine_of(machine).rate(self.number_format)
        if link is None and machine not in LINKS:
            raise ArgumentError(
                f"the bandwidth between ranks of {machine} is not known; give link= in bytes per "
                f"second. It is known of {', '.join(LINKS)}"
            )
        link = LINKS[machine][0] if link is None else link
        return tuple(
            StepOverlap(max(sent) / link, max(flops) / rate)
            for sent, flops in zip(self.steps, self.step_flops, strict=False)
        )

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


@dataclass(frozen=True)
class _CallSizes:
    """What the bytes of a call depend on.

    `heads` is (H, G) and `dims` (D, E); `itemsize` is times the batch size.
    """

    shards: Shards
    q_shards: Shards
    mask: Mask
    heads: tuple[int, int]
    dims: tuple[int, int]
    itemsize: int

    @property
    def key_value_bytes(self) -> int:
        """The bytes of the key and the value of one token, with all heads."""
        return self.itemsize * self.heads[1] * sum(self.dims)

    def steps(self) -> tuple[tuple[int, ...], ...]:
        """Return the bytes that each rank sends at each step of "exchange", `[step][rank]`."""
        W, spans, q_spans = self.shards.world, self.shards.spans, self.q_shards.spans
        return tuple(
            tuple(
                self.key_value_bytes
                * sum(
                    b - a for _, a, b in needed_keys(self.mask, q_spans((r + step) % W), spans(r))
                )
                for r in range(W)
            )
            for step in range(1, W)
        )

    def sent_by_heads(self) -> tuple[int, ...]:
        """Return the bytes that each rank sends by "heads": inputs, then outputs."""
        (H, G), (D, E), W = self.heads, self.dims, self.shards.world
        every_query = len(self.q_shards)
        return tuple(
            self.itemsize
            * (
                (W - 1) * (self.shards.count(r) * max(G, W) * (D + E) + queries * H * D) // W
                + H // W * E * (every_query - queries)
            )
            for r, queries in enumerate(map(self.q_shards.count, range(W)))
        )

    def memory_of_heads(self) -> int:
        """Return the bytes that each rank holds by "heads": all tokens of some heads."""
        (H, G), (D, E), W = self.heads, self.dims, self.shards.world
        keys, queries = max(G, W) // W * len(self.shards), H // W * len(self.q_shards)
        return self.itemsize * (D + E) * (keys + queries)


@lru_cache(maxsize=1024)
def cheapest_method(
    shards: Shards,
    q_shards: Shards,
    mask: Mask,
    heads: tuple[int, int],
    dims: tuple[int, int],
) -> str:
    """Return the method that "auto" takes, whose busiest rank sends the fewest bytes; "exchange" if
    they are equal. The arguments are those of `plan`.
    """
    if why_not_heads(*heads, shards.world):
        return "exchange"
    sizes = _CallSizes(shards, q_shards, mask, heads, dims, 1)
    exchange = max((sum(sent) for sent in zip(*sizes.steps(), strict=True)), default=0)
    return "heads" if max(sizes.sent_by_heads()) < exchange else "exchange"


_NUMBER_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


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
    """Compute what each method would send and compute in a forward pass.

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
    (H, G), W = heads, shards.world
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
    sizes = _CallSizes(shards, q_shards, mask, heads, dims, batch * dtype.itemsize)
    steps, step_flops = sizes.steps(), _step_flops(sizes, batch)
    flops = tuple(map(sum, zip(*step_flops, strict=True)))
    counts = [shards.count(r) for r in range(W)]
    costs = (
        MethodCost(
            "exchange",
            tuple(sum(step[r] for step in steps) for r in range(W)),
            flops,
            _bytes_in_flight(steps, W),
        ),
        MethodCost(
            "gather",
            tuple(sizes.key_value_bytes * n * (W - 1) for n in counts),
            flops,
            tuple(sizes.key_value_bytes * (sum(counts) - n) for n in counts),
        ),
        MethodCost(
            "heads",
            sizes.sent_by_heads(),
            (sum(flops) // W,) * W,
            (sizes.memory_of_heads(),) * W,
            why_not_heads(H, G, W),
        ),
    )
    efficiency = sum(flops) / (W * max(flops)) if any(flops) else 1.0
    number_format = _NUMBER_FORMATS.get(dtype, "fp32")
    method = cheapest_method(shards, q_shards, mask, heads, dims)
    return ParallelPlan(method, costs, steps, efficiency, step_flops, number_format)


def _step_flops(sizes: _CallSizes, batch: int) -> tuple[tuple[int, ...], ...]:
    """Return the FLOPs `[step][rank]` of "exchange", 2 (D + E) for each visible pair."""
    W, H = sizes.shards.world, sizes.heads[0]
    factor, masks = 2 * sum(sizes.dims) * batch * H, _counted_masks(sizes)
    return tuple(
        tuple(
            factor
            * sum(
                sizes.mask.count(x, y)
                for x in sizes.q_shards.spans(r)
                for y in sizes.shards.spans((r - step) % W)
            )
            // masks
            for r in range(W)
        )
        for step in range(W)
    )


def _bytes_in_flight(steps: tuple[tuple[int, ...], ...], W: int) -> tuple[int, ...]:
    """Return, for each rank, the bytes of the two largest blocks that it may hold at a time."""
    return tuple(
        max((step[(r - s) % W] for s, step in enumerate(steps, 1)), default=0) * 2 for r in range(W)
    )


def _counted_masks(sizes: _CallSizes) -> int:
    """Return the number of masks (batch rows times heads) whose pairs `mask.count` adds up."""
    first_keys = sizes.shards.spans(0)
    for spans in sizes.q_shards.ranks:
        for span in spans:
            visible = sizes.mask.visible(span, first_keys[0] if first_keys else span)
            return int(visible.shape[0] * visible.shape[1])
    return 1
