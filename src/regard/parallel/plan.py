"""The plan of a call over several ranks: the bytes that it sends and the FLOPs of each rank.

`plan` starts no processes. `cheapest_method` is the part of it that each call with the method
"auto" needs: the bytes alone, which are computed once for equal arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from regard import units
from regard.cost import machine_of
from regard.cost.ranks import LINKS
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
class StepOverlap:
    """How one step of the method "exchange" overlaps with computing: its messages travel while the
    blocks of the step before are computed.

    Args:
        send_seconds: the time of the largest message of the step.
        compute_seconds: the time in which the slowest rank computes the step before.
    """

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
        method: the method that `method="auto"` takes: of the methods that can run, the one whose
            busiest rank sends the fewest bytes; "exchange" if they are equal.
        costs: the cost of every method.
        steps: for the method "exchange", the bytes that each rank sends at each step,
            `[step][rank]`.
        efficiency: the mean number of query-key pairs of a rank, divided by that of the busiest
            rank.
        step_flops: for the method "exchange", the FLOPs of each rank at each step,
            `[step][rank]`; in step 0 a rank computes its own keys.
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
        """Compare the time of each message of the method "exchange" with the time of the work that
        hides it, at the full rates of a machine.

        Args:
            machine: a name of `regard.cost`, such as "h100-sxm".
            link: bytes per second that a rank sends; None takes the link of the machine inside a
                node.

        Returns:
            One entry for each step from 1 on.

        Raises:
            ArgumentError: there is no such machine, or its link is not known and none is given.

        >>> shards = Shards.even(1 << 16, 4)
        >>> result = plan(shards, heads=(8, 8), dims=(64, 64), dtype=torch.bfloat16)
        >>> [step.hidden for step in result.overlap("h100-sxm")]
        [True, True, True]
        >>> [step.hidden for step in result.overlap("h100-sxm", link=1e9)]
        [False, False, False]
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

    Args:
        shards: which rank holds which keys.
        q_shards: which rank holds which queries.
        mask: the mask.
        heads: (H, G).
        dims: (D, E).
        itemsize: the bytes of a number, times the batch size.
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
        """Return the bytes that each rank sends by "heads": queries, keys and values, then the
        outputs.
        """
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
def _cheapest_method(sizes: _CallSizes) -> str:
    """Return the method whose busiest rank sends the fewest bytes; "exchange" if they are equal."""
    H, G = sizes.heads
    if why_not_heads(H, G, sizes.shards.world):
        return "exchange"
    exchange = max((sum(sent) for sent in zip(*sizes.steps(), strict=True)), default=0)
    return "heads" if max(sizes.sent_by_heads()) < exchange else "exchange"


def cheapest_method(
    shards: Shards,
    q_shards: Shards,
    mask: Mask,
    heads: tuple[int, int],
    dims: tuple[int, int],
) -> str:
    """Return the method that "auto" takes; the arguments are those of `plan`."""
    return _cheapest_method(_CallSizes(shards, q_shards, mask, heads, dims, 1))


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
    return ParallelPlan(
        _cheapest_method(sizes), costs, steps, efficiency, step_flops, number_format
    )


def _step_flops(sizes: _CallSizes, batch: int) -> tuple[tuple[int, ...], ...]:
    """Return the FLOPs of each rank at each step of "exchange", `[step][rank]`: 2 (D + E) for each
    visible query-key pair.
    """
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
