"""A bias as data for a GPU kernel: slopes, numbers per bucket of distances, or a table.

ALiBi becomes slopes and T5's bias weights of buckets, without a T x S tensor; any other bias is a
table. Autograd carries the gradient of a form to the tensors of the bias.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.biases import ALiBi, Bias, DenseBias, T5Relative
from regard.biases.distance import t5_bucket
from regard.ops.softmax.bias_gradient import bias_terms
from regard.ops.softmax.call import Call

MAX_TABLE_BYTES = 2**32
"""The largest table that a bias without a closed form is written to."""

MAX_DISTANCES = 2**16
"""The largest number of distances whose bucket is stored."""


class BiasData(NamedTuple):
    """A bias in three parts, whose sum it is; a part that is None is 0.

    Args:
        slopes: m in -m (i - j), fp32 `[H]`.
        symmetric: whether the slopes multiply |i - j| instead.
        buckets: the bucket of each distance j - i from -M to M, int32 `[2 M + 1]`.
        weights: the bias of each bucket, fp32 `[H, buckets]`.
        table: the bias of each pair, `[B or 1, H or 1, T or 1, S]`.
    """

    slopes: Tensor | None = None
    symmetric: bool = False
    buckets: Tensor | None = None
    weights: Tensor | None = None
    table: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The parts that may have a gradient."""
        return self.slopes, self.weights, self.table


def why_no_bias_data(call: Call) -> list[str]:
    """Return why the bias of a call cannot be written as data, without reading a tensor."""
    others = [x for x in _split(call.bias)[2] if not isinstance(x, DenseBias)]
    size = call.B * call.H * call.T * call.S * 4
    if others and size > MAX_TABLE_BYTES:
        names = " and ".join(map(str, others))
        return [f"a table of {names} may take {size / 2**30:.3g} GiB; limit 4.00 GiB"]
    return []


def bias_data(call: Call, bias: Bias | None) -> BiasData:
    """Return a bias of the sizes and positions of a call as data on its device."""
    alibi, t5, others = _split(bias)
    device, result = call.q.device, BiasData()
    if alibi is not None:
        slopes = alibi.slopes_on(device, torch.float32)
        result = result._replace(slopes=slopes, symmetric=alibi.symmetric)
    if t5 is not None:
        weights = t5.table.to(device, torch.float32).T
        n = int(t5.table.shape[0])
        matching = _bucket_table(n, t5.max_distance, device, bidirectional=t5.bidirectional)
        result = result._replace(buckets=matching, weights=weights)
    if others:
        result = result._replace(table=sum_of_tables(call, others))
    return result


def sum_of_tables(call: Call, others: list[Bias]) -> Tensor:
    """Return the sum of biases that have no closed form, `[B or 1, H or 1, T or 1, S]`."""
    device = call.q.device
    if len(others) == 1 and isinstance(others[0], DenseBias):
        table = others[0].tensor
        return (table if table.ndim == 4 else table[None, None]).to(device)
    positions = call.q_positions, call.k_positions
    blocks = (x.block(*positions, dtype=torch.float32, device=device) for x in others)
    total = next(blocks)
    for block in blocks:
        total = total + block
    return total


def _split(bias: Bias | None) -> tuple[ALiBi | None, T5Relative | None, list[Bias]]:
    """Return one ALiBi, one T5 bias, and the other terms of a bias."""
    alibi: ALiBi | None = None
    t5: T5Relative | None = None
    others: list[Bias] = []
    for term in bias_terms(bias):
        if type(term) is ALiBi and alibi is None:
            alibi = term
        elif type(term) is T5Relative and t5 is None and term.max_distance <= MAX_DISTANCES:
            t5 = term
        else:
            others.append(term)
    return alibi, t5, others


@lru_cache(8)
def _bucket_table(
    buckets: int, max_distance: int, device: torch.device, *, bidirectional: bool
) -> Tensor:
    """Return the bucket of each distance from -max_distance to max_distance."""
    distances = torch.arange(-max_distance, max_distance + 1, device=device)
    matching = t5_bucket(
        distances, buckets=buckets, bidirectional=bidirectional, max_distance=max_distance
    )
    return matching.to(torch.int32)
