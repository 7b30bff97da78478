"""The relative position bias of T5: a learned number for each head and bucket of distances."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from regard.argument_checks import check_tensor
from regard.biases.base import Bias
from regard.errors import ArgumentError, ArgumentTypeError
from regard.process_state import is_exporting_onnx


def t5_bucket(
    relative: Int[Tensor, "*L"],
    *,
    buckets: int = 32,
    bidirectional: bool = True,
    max_distance: int = 128,
) -> Int[Tensor, "*L"]:
    """Return the bucket of each relative position j - i (key minus query).

    For n buckets per direction and e = n // 2, a distance d < e has bucket d, and a larger one has
    bucket min(n - 1, e + floor((n - e) ln(d / e) / ln(max_distance / e))). If the bias is
    bidirectional, n = buckets / 2, and keys after the query (j > i) use the upper half. Otherwise n
    = buckets, and all keys after the query have bucket 0.

    Bounds are compared in integers; a logarithm in fp32 may round to either side.

    Args:
        relative: key positions minus query positions, an integer tensor of any shape.
        buckets: the number of buckets.
        bidirectional: whether keys after the query have buckets of their own.
        max_distance: from this distance on, all keys share the last bucket.

    Returns:
        Bucket numbers in the shape of `relative`.

    Raises:
        ArgumentError: buckets or max_distance is out of range.
        ArgumentTypeError: relative is not a tensor of integers.

    >>> t5_bucket(torch.tensor([-128, -16, -1, 0, 1, 16])).tolist()
    [15, 10, 1, 0, 17, 26]

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1, and its released code.
    """
    if not isinstance(relative, Tensor) or relative.is_floating_point():
        raise ArgumentTypeError(
            "relative must be a tensor of integers, key positions minus query positions"
        )
    check_buckets(buckets, bidirectional=bidirectional, max_distance=max_distance)
    n = buckets // 2 if bidirectional else buckets
    return _bucket(relative, bucket_starts(n, max_distance), bidirectional=bidirectional)


def _bucket(relative: Tensor, starts: tuple[int, ...], *, bidirectional: bool) -> Tensor:
    distance = relative.abs() if bidirectional else (-relative).clamp(min=0)
    bounds = torch.tensor(starts[1:], device=relative.device)
    if is_exporting_onnx():  # ONNX has no bucketize
        bucket = (distance[..., None] >= bounds).sum(-1)
    else:
        bucket = torch.bucketize(distance, bounds, right=True)
    return bucket + len(starts) * (relative > 0) if bidirectional else bucket


def bucket_starts(buckets: int, max_distance: int) -> tuple[int, ...]:
    """Return the smallest distance of each bucket of one direction.

    Bucket e + m starts at the smallest d with (d / e)^(n - e) >= (max_distance / e)^m.
    """
    e = buckets // 2
    n = buckets - e
    starts = list(range(e))
    for m in range(n):
        bound = max_distance**m * e ** (n - m)
        # the logarithm is an estimate; the search below is exact
        estimate = e * math.exp(m / n * math.log(max_distance / e))
        low, high = int(estimate * (1 - 1e-9)), int(estimate * (1 + 1e-9)) + 2
        while low < high:  # a bisection; dynamo cannot trace the bisect module
            middle = (low + high) // 2
            low, high = (low, middle) if middle**n >= bound else (middle + 1, high)
        starts.append(low)
    return tuple(starts)


MAX_BUCKETS = 1 << 10
"""The largest number of buckets; T5 has 32. The bounds of n buckets need integers of n digits."""
MAX_DISTANCE = 1 << 53
"""The largest max_distance that is allowed; positions are smaller."""


@dataclass(frozen=True, eq=False, repr=False)
class T5Relative(Bias):
    """T5's relative position bias: bias_ij = table[bucket(j - i), h].

    T5 multiplies scores by 1: pass `scale=1.0`. Its layers share one table.

    Args:
        table: a learned float tensor `[buckets, H]`.
        bidirectional: True in an encoder, False in a decoder.
        max_distance: from this distance on, all keys share the last bucket.

    Raises:
        ArgumentError: table is not 2-D, or its number of buckets does not fit the other arguments.
        ArgumentTypeError: table is not a float tensor.

    >>> from regard.span import Span
    >>> bias = T5Relative(torch.arange(32.0)[:, None], bidirectional=False)
    >>> bias.block(Span(2, 1), Span(0, 4)).flatten().tolist()
    [2.0, 1.0, 0.0, 0.0]

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1.
    """

    kind: ClassVar[str] = "t5"

    table: Tensor
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        check_tensor("table", self.table)
        if self.table.ndim != 2:
            raise ArgumentError(
                f"table is {tuple(self.table.shape)}; it must be [buckets, query heads]"
            )
        check_buckets(
            self.table.shape[0], bidirectional=self.bidirectional, max_distance=self.max_distance
        )
        buckets = int(self.table.shape[0])  # a tensor while torch.jit.trace runs
        n = buckets // 2 if self.bidirectional else buckets
        # cached, since every block needs it; not a field, since it follows from the fields
        object.__setattr__(self, "_starts", bucket_starts(n, self.max_distance))

    def values(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up the table at the bucket of each pair, giving `[B or 1, H, t, s]`."""
        starts: tuple[int, ...] = self._starts  # type: ignore[attr-defined]
        bucket = _bucket((k - q).squeeze(1), starts, bidirectional=self.bidirectional)
        return F.embedding(bucket, self.table).permute(0, 3, 1, 2).to(dtype)

    def _heads(self) -> int:
        return self.table.shape[1]

    def select_heads(self, heads: slice) -> T5Relative:
        """Return the bias with the columns of these heads."""
        return replace(self, table=self.table[:, heads])

    def __str__(self) -> str:
        both = ", bidirectional" * self.bidirectional
        return f"t5_relative({self.table.shape[0]} buckets{both})"


def check_buckets(buckets: int, *, bidirectional: bool, max_distance: int) -> None:
    """Raise unless the numbers that define the buckets fit together."""
    if bidirectional and (buckets < 4 or buckets % 2):
        raise ArgumentError(
            f"buckets is {buckets}; with bidirectional it must be even and at least 4"
        )
    if buckets < 2:
        raise ArgumentError(f"buckets is {buckets}; it must be at least 2")
    if buckets > MAX_BUCKETS:
        raise ArgumentError(f"buckets is {buckets}; it must be at most {MAX_BUCKETS}")
    exact = (buckets // 2 if bidirectional else buckets) // 2
    if max_distance <= exact:
        raise ArgumentError(
            f"max_distance is {max_distance}; it must be above {exact}, the distances that have a "
            "bucket of their own"
        )
    if max_distance > MAX_DISTANCE:
        raise ArgumentError(f"max_distance is {max_distance}; it must be at most {MAX_DISTANCE}")
