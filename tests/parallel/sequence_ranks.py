"""What the ranks of the tests of `sequence` do: functions that processes import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError
from regard.nn.variants import build
from regard.parallel import Shards, sequence
from regard.span import Span
from tests.parallel.ranks import LENGTHS, S

DIM, HEADS = 32, 4

MECHANISMS: dict[str, dict[str, Any]] = {
    "gqa": {"groups": 2},
    "mla": {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8},
    "sliding_window": {"window": 5, "groups": 2},
    "alibi": {},
    "learned_sink": {"groups": 2},
    "differential": {},
    "linear_attention": {},
    "retention": {},
    "gated_linear": {},
    "delta_net": {},
    "gated_delta_net": {},
    "infini": {"segment": 6},
}


def mechanism(name: str) -> nn.Module:
    """A mechanism in fp64, with the same weights on every rank."""
    torch.manual_seed(3)
    return build(name, DIM, HEADS, **MECHANISMS[name]).double()


def hidden_states(seed: int = 0) -> Tensor:
    """x of the whole sequence."""
    return torch.randn(
        2, S, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def mechanisms_over_ranks(
    rank: int, cases: list[tuple[str, str]]
) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
    """Output, gradient of x and gradients of the parameters for each (mechanism, lengths)."""
    results = []
    for name, lengths in cases:
        shards = LENGTHS[lengths](dist.get_world_size())
        module = mechanism(name)
        x = shards.take(hidden_states(), rank, 1).requires_grad_()
        with sequence(shards):
            z = module(x, shards.positions(rank))
        (z * shards.take(hidden_states(1), rank, 1)).sum().backward()
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()
        ]
        results.append((z.detach(), x.grad, gradients))
    return results
