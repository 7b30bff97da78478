"""Biases of the distance: ALiBi, KERPLE, FIRE and T5's buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from regard.argument_checks import check_number, check_tensor
from regard.biases.base import Bias
from regard.errors import ArgumentError, ArgumentTypeError
from regard.process_state import is_exporting_onnx


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head: 2^(-8h/n), h = 1..n, for n = 2^k heads.

    For other numbers: those of the next smaller power of two n, then every other one of 2n.

    Args:
        heads: the number of query heads.

    Returns:
        One slope per head.

    Raises:
        ArgumentError: heads is less than 1.

    >>> alibi_slopes(8)[:3]
    (0.5, 0.25, 0.125)
    >>> [round(m, 6) for m in alibi_slopes(12)[8:]]
    [0.707107, 0.353553, 0.176777, 0.088388]

    Source: Press et al. 2021 (arXiv 2108.12409), section 3, and its released code.
    """
    if heads < 1:
        raise ArgumentError(f"heads is {heads}; it must be at least 1")
    n = 1 << (heads.bit_length() - 1)
    finer = [2.0 ** (-4 * h / n) for h in range(1, 2 * n + 1, 2)]
    return (*(2.0 ** (-8 * h / n) for h in range(1, n + 1)), *finer[: heads - n])


@dataclass(frozen=True, eq=False, repr=False)
class ALiBi(Bias):
    """Attention with linear biases: bias_ij = -m_h (i - j), of the positions i and j.

    This is causal: for later keys it is **positive**, unless `symmetric=True` gives -m_h |i - j|.
    It is not simplified to m_h j, which would shift the log-sum-exp of a row.

    Args:
        heads: the number of query heads H; the slopes are those of `alibi_slopes`.
        slopes: H numbers, or a tensor `[H]`, which may be learned, instead of `heads`.
        symmetric: whether the bias penalizes distance in both directions.

    Raises:
        ArgumentError: not one of heads and slopes is given, or one does not fit.
        ArgumentTypeError: slopes is a tensor of integers.

    >>> from regard.span import Span
    >>> ALiBi(2).block(Span(2, 1), Span(0, 3))[0, :, 0].tolist()
    [[-0.125, -0.0625, -0.0], [-0.0078125, -0.00390625, -0.0]]

    Source: Press et al. 2021 (arXiv 2108.12409), section 3.
    """

    heads: int | None = None
    slopes: Sequence[float] | Tensor | None = None
    symmetric: bool = False

    def __post_init__(self) -> None:
        if (self.heads is None) == (self.slopes is None):
            raise ArgumentError(
                f"ALiBi(heads={self.heads}, "
                f"slopes={'given' if self.slopes is not None else None}): give one of the two"
            )
        if self.heads is not None and self.heads < 1:
            raise ArgumentError(f"heads is {self.heads}; it must be at least 1")
        if isinstance(self.slopes, Tensor):
            if self.slopes.ndim != 1:
                raise ArgumentError(
                    f"slopes is {tuple(self.slopes.shape)}; it must be 1-D, one number per query "
                    "head"
                )
            if not self.slopes.is_floating_point():
                raise ArgumentTypeError("slopes is a tensor of integers; use .float()")
        elif self.slopes is not None:
            object.__setattr__(self, "slopes", tuple(self.slopes))  # hashable
            for h, slope in enumerate(self.slopes):
                check_number(f"slopes[{h}]", slope, -float("inf"), float("inf"), "finite")

    def values(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Return -m (i - j), or -m |i - j|, never in half precision."""
        distance = (q - k).abs() if self.symmetric else q - k
        return -self.slopes_on(q.device, dtype)[:, None, None] * distance.to(dtype)

    def _heads(self) -> int:
        return self.heads if self.heads is not None else len(self.slopes)  # type: ignore[arg-type]

    def select_heads(self, heads: slice) -> ALiBi:
        """Return the bias with the slopes of these heads."""
        slopes = alibi_slopes(self._heads()) if self.slopes is None else self.slopes
        return ALiBi(slopes=slopes[heads], symmetric=self.symmetric)

    def slopes_on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the slopes as a tensor.

        Args:
            device: the device of the tensor.
            dtype: its dtype.

        Returns:
            The slopes m, `[H]`.
        """
        if isinstance(self.slopes, Tensor):
            return self.slopes.to(device, dtype)
        slopes = alibi_slopes(self._heads()) if self.slopes is None else self.slopes
        return torch.tensor(slopes, dtype=dtype, device=device)

    def plain_fields(self) -> dict[str, object]:
        """Return the slopes, also if they follow from `heads`, and the symmetry."""
        slopes = self.slopes_on(torch.device("cpu"), torch.float64)
        return {"slopes": slopes.detach(), "symmetric": self.symmetric}

    @classmethod
    def plain_arguments(cls, first: object, others: dict[str, object]) -> dict[str, object]:
        """Return the constructor arguments, of which the slopes come first."""
        return {"slopes": first, **others}

    def __str__(self) -> str:
        own = str(self.heads) if self.heads is not None else f"{self._heads()} slopes"
        return f"alibi({own}{', symmetric' * self.symmetric})"


@dataclass(frozen=True, eq=False, repr=False)
class Kerple(Bias):
    """KERPLE, logarithmic form: bias_ij = -|r1_h| ln(1 + |r2_h| |i - j|).

    Absolute values of r1 and r2 keep them in the range that the paper needs.

    Args:
        r1: how large the penalty is, a float tensor `[H]`, which may be learned.
        r2: how fast it grows near the query, likewise.

    Raises:
        ArgumentError: the tensors are not 1-D of one length.
        ArgumentTypeError: one is not a float tensor.

    >>> from regard.span import Span
    >>> bias = Kerple(torch.ones(1), torch.ones(1))
    >>> [round(x, 4) for x in bias.block(Span(3, 1), Span(0, 4)).flatten().tolist()]
    [-1.3863, -1.0986, -0.6931, -0.0]

    Source: Chi et al. 2022 (arXiv 2205.09921), section 4, equation 4.
    """

    r1: Tensor
    r2: Tensor

    def __post_init__(self) -> None:
        check_tensor("r1", self.r1)
        check_tensor("r2", self.r2)
        if self.r1.ndim != 1 or self.r1.shape != self.r2.shape:
            raise ArgumentError(
                f"r1 is {tuple(self.r1.shape)} and r2 is {tuple(self.r2.shape)}; both must be [H], "
                "one number per query head"
            )

    def values(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Return -|r1| ln(1 + |r2| |i - j|)."""
        r1, r2 = (x.to(q.device, dtype).abs()[:, None, None] for x in (self.r1, self.r2))
        return -r1 * torch.log1p(r2 * (q - k).abs().to(dtype))

    def _heads(self) -> int:
        return self.r1.shape[0]

    def select_heads(self, heads: slice) -> Kerple:
        """Return the bias with the numbers of these heads."""
        return replace(self, r1=self.r1[heads], r2=self.r2[heads])

    def __str__(self) -> str:
        return f"kerple({self.r1.shape[0]})"


@dataclass(frozen=True, eq=False, repr=False)
class FIRE(Bias):
    """FIRE: bias_ij = MLP(ln(|c| |i - j| + 1) / ln(|c| max(i, |L|) + 1)).

    The MLP is W2 relu(w1 x + b1) + b2, per head. x lies between 0 and 1 for every earlier key,
    however long the text is; a later key has the value of its distance.

    Args:
        c: how fast small distances grow, a float tensor with one number, which may be learned.
        L: the position up to which the divisor is constant, likewise.
        w1, b1: float `[N]`, the weights and biases of the hidden units.
        w2, b2: float `[H, N]` and `[H]`, those of the results.

    Raises:
        ArgumentError: the sizes do not fit one another.
        ArgumentTypeError: one is not a float tensor.

    >>> from regard.span import Span
    >>> one = torch.ones(1)  # a hidden unit that gives x
    >>> bias = FIRE(0.1 * one, 8 * one, one, 0 * one, one[None], 0 * one)
    >>> round(bias.block(Span(3, 1), Span(0, 1)).item(), 4)
    0.4464

    Source: Li et al. 2023 (arXiv 2310.04418), equations 6 and 19.
    """

    c: Tensor
    L: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    def __post_init__(self) -> None:
        for name in ("c", "L", "w1", "b1", "w2", "b2"):
            check_tensor(name, getattr(self, name))
        H, N = self.w2.shape if self.w2.ndim == 2 else (0, 0)
        shapes = {x: tuple(getattr(self, x).shape) for x in ("c", "L", "w1", "b1", "b2")}
        if shapes != {"c": (1,), "L": (1,), "w1": (N,), "b1": (N,), "b2": (H,)}:
            raise ArgumentError(
                f"{', '.join(f'{name} is {shape}' for name, shape in shapes.items())} and w2 is "
                f"{tuple(self.w2.shape)}; they must be c (1,), L (1,), w1 (N,), b1 (N,), b2 (H,) "
                "and w2 (H, N)"
            )

    def argument(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ln(|c| |i - j| + 1) / ln(|c| max(i, |L|) + 1).

        Args:
            q, k: positions of queries and keys, which broadcast.
            dtype: the dtype of the result.

        Returns:
            The argument of the MLP for each pair.
        """
        c, L = self.c.to(q.device, dtype).abs(), self.L.to(q.device, dtype).abs()
        divisor = torch.log1p(c * torch.maximum(q.clamp(min=0).to(dtype), L))
        # the first query divides by 0 if L is 0; its distance is 0, too
        return torch.log1p(c * (q - k).abs().to(dtype)) / divisor.clamp(min=torch.finfo(dtype).tiny)

    def values(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Apply the MLP to the argument of each pair, giving `[B or 1, H, t, s]`."""
        w1, b1, w2, b2 = (x.to(q.device, dtype) for x in (self.w1, self.b1, self.w2, self.b2))
        hidden = torch.relu(self.argument(q, k, dtype)[:, 0, :, :, None] * w1 + b1)
        return F.linear(hidden, w2, b2).permute(0, 3, 1, 2)

    def _heads(self) -> int:
        return self.w2.shape[0]

    def select_heads(self, heads: slice) -> FIRE:
        """Return the bias with the results of these heads."""
        return replace(self, w2=self.w2[heads], b2=self.b2[heads])

    def __str__(self) -> str:
        return f"fire({self.w2.shape[0]}, {self.w2.shape[1]} hidden units)"


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
