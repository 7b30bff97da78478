"""Attention over several ranks: regard's, one process, a forwarding ring, an all-gather, and
ring-flash-attention. Each peer's function runs on every rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from regard.masks import Mask
from regard.ops.softmax import Partial, attend, attend_partial, merge
from regard.parallel import Shards
from regard.parallel import attend as attend_over_ranks
from regard.parallel.communication import traffic
from regard.span import Span


@dataclass(frozen=True, eq=False)
class RankInputs:
    """What one rank holds of a problem.

    Args:
        q, k, v: its queries, keys and values, `[B, heads, n, D]`.
        shards: which rank holds which tokens.
        mask: the mask.
        rank: the number of the rank.
        group: the process group; None is the default group.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    shards: Shards
    mask: Mask
    rank: int
    group: dist.ProcessGroup | None = None


RankStep: TypeAlias = Callable[[RankInputs], Tensor]
"""A function that computes the output of the rank's queries, `[B, H, n, D]`."""


def regard_parallel(inputs: RankInputs) -> Tensor:
    """Compute the output with `regard.parallel.attend`."""
    x = inputs
    return attend_over_ranks(x.q, x.k, x.v, shards=x.shards, mask=x.mask, group=x.group)


def one_process(inputs: RankInputs) -> Tensor:
    """Compute `regard.attend` over all tokens, on the only rank."""
    return attend(inputs.q, inputs.k, inputs.v, mask=inputs.mask)


def forwarding_ring(inputs: RankInputs) -> Tensor:
    """Send all keys and values around a ring: at each step a rank forwards the block that it has
    just received, whether or not the next rank's queries see it.
    """
    x, W = inputs, inputs.shards.world
    block = torch.stack([x.k, x.v])
    parts = {span: list[Partial]() for span in x.shards.spans(x.rank)}
    for step in range(W):
        source, works = (x.rank - step) % W, []
        received = torch.empty_like(block)
        if step + 1 < W:
            traffic.add("ring", block)
            operations = [
                dist.P2POp(dist.isend, block, group=x.group, group_peer=(x.rank + 1) % W),
                dist.P2POp(dist.irecv, received, group=x.group, group_peer=(x.rank - 1) % W),
            ]
            works = dist.batch_isend_irecv(operations)
        for q_span, q in _rows(x.q, x.shards.spans(x.rank)):
            for k_span, kv in _rows(block, x.shards.spans(source)):
                if x.mask.count(q_span, k_span):
                    k, v = kv
                    part = attend_partial(
                        q, k, v, mask=x.mask, q_positions=q_span, k_positions=k_span
                    )
                    parts[q_span].append(part)
        for work in works:
            work.wait()
        block = received
    return torch.cat([merge(of_span).out for of_span in parts.values()], 2)


def all_gather(inputs: RankInputs) -> Tensor:
    """Gather all keys and values on every rank, then attend to them."""
    x, W = inputs, inputs.shards.world
    block = torch.stack([x.k, x.v])
    blocks = [torch.empty_like(block) for _ in range(W)]
    traffic.add("all-gather", block.expand(W - 1, *block.shape))
    dist.all_gather(blocks, block, group=x.group)
    k, v = x.shards.join(blocks, 3)
    every = Span(0, k.shape[2])
    outs = [
        attend(q, k, v, mask=x.mask, q_positions=span, k_positions=every)
        for span, q in _rows(x.q, x.shards.spans(x.rank))
    ]
    return torch.cat(outs, 2)


def ring_flash_attention(inputs: RankInputs) -> Tensor:
    """Compute ring-flash-attention's zigzag ring, whose layout is `[B, n, heads, D]`."""
    function = importlib.import_module("ring_flash_attn").zigzag_ring_flash_attn_func
    q, k, v = (x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v))
    out: Tensor = function(q, k, v, causal=True, group=inputs.group)
    return out.transpose(1, 2)


def _rows(x: Tensor, spans: tuple[Span, ...]) -> list[tuple[Span, Tensor]]:
    """Return each span with its tokens, which lie along the last dimension but one of x."""
    return list(zip(spans, x.split([len(span) for span in spans], -2), strict=True))
