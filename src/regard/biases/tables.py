"""Biases given by numbers or a function: dense ones, of forget gates, and by query and distance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from regard.argument_checks import check_tensor
from regard.biases.base import Bias, Pairs
from regard.errors import ArgumentError, ArgumentTypeError
from regard.span import slot_count


@dataclass(frozen=True, eq=False, repr=False)
class DenseBias(Bias):
    """A bias given by a tensor: bias_ij = tensor[..., i, j].

    i and j are indices of the query and the key in the call, not positions.

    Args:
        tensor: a float tensor `[T, S]` or `[B or 1, H or 1, T or 1, S]`, not of three dimensions.

    Raises:
        ArgumentError: the tensor is not 2-D or 4-D; in a call, the shape does not fit.
        ArgumentTypeError: `tensor` is not a float tensor.

    >>> from regard.span import Span
    >>> DenseBias(torch.arange(6.0).view(2, 3)).block(Span(0, 2), Span(0, 3), slice(1, 2)).tolist()
    [[[[3.0, 4.0, 5.0]]]]
    """

    kind: ClassVar[str] = "dense"
    by_slot: ClassVar[bool] = True

    tensor: Tensor

    def __post_init__(self) -> None:
        check_tensor("bias", self.tensor)
        if self.tensor.ndim not in (2, 4):
            raise ArgumentError(
                f"bias has {self.tensor.ndim} dimensions, {tuple(self.tensor.shape)}; it must be "
                "[T, S] or [B or 1, H or 1, T or 1, S]: index with [:, None] if it is [B, T, S], "
                "with [None] if it is [H, T, S]"
            )

    def _block(self, pairs: Pairs) -> Tensor:
        """Return the rows and columns of the tensor."""
        x = self.tensor if self.tensor.ndim == 4 else self.tensor[None, None]
        if x.shape[2] == 1:
            x = x.expand(-1, -1, slot_count(pairs.q_positions), -1)
        return x[:, :, pairs.rows, pairs.columns].to(device=pairs.device, dtype=pairs.dtype)

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that the shape of the tensor fits the call."""
        shape = tuple(self.tensor.shape)
        if self.tensor.ndim == 2:
            fits = shape == (T, S)
        else:
            b, h, t, s = shape
            fits = b in (1, B) and h in (1, H) and t in (1, T) and s == S
        if not fits:
            raise ArgumentError(
                f"bias is {shape}; for this call it must be ({T}, {S}) or ({B} or 1, {H} or 1, {T} "
                f"or 1, {S})"
            )

    def __str__(self) -> str:
        return f"dense({'x'.join(map(str, self.tensor.shape))})"


@dataclass(frozen=True, eq=False, repr=False)
class FnBias(Bias):
    """A bias given by a function of positions: bias_ij = fn(q, k, *parameters).

    Args:
        fn: a function of the positions q `[B or 1, 1, t, 1]` and k `[B or 1, 1, 1, s]` and of the
            parameters to a 4-D float tensor that broadcasts to `[B, H, t, s]`, pair by pair.
        parameters: tensors that are passed to `fn` and that receive gradients.

    Raises:
        ArgumentTypeError: an argument or the result has a wrong type.
        ArgumentError: the result has another shape.

    >>> from regard.span import Span
    >>> bias = FnBias(lambda q, k, w: w * (q - k), (torch.tensor(-0.5),))
    >>> bias.block(Span(2, 1), Span(0, 3)).tolist()
    [[[[-1.0, -0.5, -0.0]]]]
    """

    kind: ClassVar[str] = "fn"

    fn: Callable[..., Tensor]
    parameters: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ArgumentTypeError(
                f"fn is {type(self.fn).__name__}; it must be a function fn(q, k, ...)"
            )
        for i, x in enumerate(self.parameters):
            if not isinstance(x, Tensor):
                raise ArgumentTypeError(
                    f"parameters[{i}] is {type(x).__name__}; it must be a tensor"
                )
        object.__setattr__(self, "parameters", tuple(self.parameters))

    def values(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Call the function and check its result."""
        x = self.fn(q, k, *self.parameters)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentTypeError(f"{self} returned {got}; it must return a float tensor")
        if x.ndim != 4 or x.shape[2] not in (1, q.shape[2]) or x.shape[3] not in (1, k.shape[3]):
            raise ArgumentError(
                f"{self} returned {tuple(x.shape)} for positions {tuple(q.shape)} and "
                f"{tuple(k.shape)}; it must return [B or 1, H or 1, t or 1, s or 1]"
            )
        return x.to(dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the parameters of the function."""
        return self.parameters

    def with_tensors(self, tensors: Sequence[Tensor]) -> FnBias:
        """Return the same function with other parameters."""
        self._check_count(tensors, len(self.parameters))
        return replace(self, parameters=tuple(tensors))

    def __str__(self) -> str:
        return f"fn({getattr(self.fn, '__name__', type(self.fn).__name__)})"


@dataclass(frozen=True, eq=False, repr=False)
class ForgetBias(Bias):
    """The bias of forget gates: bias_ij = c_i - c_j, c the running sum of their logarithms.

    The term c_i cancels in the softmax, but belongs to the log-sum-exp, and the difference is
    rounded once. The sums may be large, so give them in float64.

    Args:
        queries: c of the queries, a float tensor `[B or 1, H or 1, T]`.
        keys: c of the keys, `[B or 1, H or 1, S]`.

    Raises:
        ArgumentError: a tensor is not 3-D; in a call, a size differs.
        ArgumentTypeError: a tensor is not a float tensor.

    >>> from regard.span import Span
    >>> c = torch.tensor([[[-1.0, -3.0, -3.5]]])
    >>> ForgetBias(c[..., 2:], c).block(Span(2, 1), Span(0, 3)).flatten().tolist()
    [-2.5, -0.5, 0.0]

    Source: Lin et al. 2025 (arXiv 2503.02130), equation 8.
    """

    kind: ClassVar[str] = "forget"
    by_slot: ClassVar[bool] = True

    queries: Tensor
    keys: Tensor

    def __post_init__(self) -> None:
        for name, x in (("queries", self.queries), ("keys", self.keys)):
            check_tensor(name, x)
            if x.ndim != 3:
                raise ArgumentError(f"{name} is {tuple(x.shape)}; it must be [B or 1, H or 1, L]")

    def _block(self, pairs: Pairs) -> Tensor:
        """Return the differences, rounded once."""
        difference = self.queries[:, :, pairs.rows, None] - self.keys[:, :, None, pairs.columns]
        return difference.to(device=pairs.device, dtype=pairs.dtype)

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that both tensors fit the call."""
        for name, x, L in (("queries", self.queries, T), ("keys", self.keys, S)):
            b, h, n = x.shape
            if b not in (1, B) or h not in (1, H) or n != L:
                raise ArgumentError(
                    f"{name} of {self} is {tuple(x.shape)}; for this call it must be ({B} or 1, "
                    f"{H} or 1, {L})"
                )

    def select_heads(self, heads: slice) -> ForgetBias:
        """Return the bias with the sums of these heads."""
        own = (x if x.shape[1] == 1 else x[:, heads] for x in (self.queries, self.keys))
        return replace(self, **dict(zip(("queries", "keys"), own, strict=True)))

    def __str__(self) -> str:
        return f"forget({'x'.join(map(str, self.keys.shape))})"


def deberta_bucket(
    distance: Int[Tensor, "*L"], *, buckets: int, max_distance: int
) -> Int[Tensor, "*L"]:
    """Return DeBERTa's logarithmic bucket of each distance i - j (query minus key).

    With m = buckets // 2, a distance |d| <= m is its own bucket, and a larger one has the bucket
    m + ceil((m - 1) ln(|d| / m) / ln((max_distance - 1) / m)), with the sign of d.

    Args:
        distance: query positions minus key positions, integers of any shape.
        buckets: the number of buckets of one direction.
        max_distance: the distance whose bucket is the last one of the table.

    Returns:
        The buckets; a distance beyond `max_distance` has one outside of the table.

    Raises:
        ArgumentError: buckets is below 4, or max_distance is not above it.

    >>> far = torch.tensor([-200, 5, 129, 200, 300, 511])
    >>> deberta_bucket(far, buckets=256, max_distance=512).tolist()
    [-169, 5, 129, 169, 207, 255]

    Source: He et al. 2020 (arXiv 2006.03654) and the released code of DeBERTa-v2.
    """
    check_log_buckets(buckets, max_distance)
    m = buckets // 2
    far = distance.abs().clamp(min=m).double()
    log = torch.log(far / m) / math.log((max_distance - 1) / m) * (m - 1)
    return torch.where(
        distance.abs() <= m, distance, distance.sign() * (torch.ceil(log).long() + m)
    )


def check_log_buckets(buckets: int, max_distance: int) -> None:
    """Raise unless there are at least 4 buckets, and max_distance is above them."""
    if buckets < 4 or max_distance <= buckets:
        raise ArgumentError(
            f"buckets is {buckets} and max_distance is {max_distance}; there must be at least 4 "
            "buckets, and max_distance must be above their number"
        )


@dataclass(frozen=True, eq=False, repr=False)
class RelativeLogits(Bias):
    """A bias from a table of numbers by distance that every query (or every key) has for itself.

    bias_ij = logits[..., i, clip(first + i - j)], or with `of_keys` logits[..., j, ...], where the
    row is a slot of the call, and i - j is of positions

    Shaw's relative keys, DeBERTa's terms and learned banks of biases are such tables.

    Args:
        logits: float `[B or 1, H or 1, T or S, N]`, a number for each query (or key) and entry.
        first: the entry of the distance 0.
        of_keys: whether the rows of the table belong to keys.
        outside: a distance outside of the table has the nearest entry ("clip") or 0 ("zero").
        buckets, max_distance: as for `deberta_bucket`; None uses distances themselves.

    Raises:
        ArgumentError: logits is not 4-D, or an argument or a size in a call does not fit.
        ArgumentTypeError: logits is not a float tensor.

    >>> from regard.span import Span
    >>> bias = RelativeLogits(torch.tensor([[10.0, 20.0, 30.0]]).view(1, 1, 1, 3), outside="zero")
    >>> bias.block(Span(3, 1), Span(0, 5)).flatten().tolist()
    [0.0, 30.0, 20.0, 10.0, 0.0]

    Source: Shaw et al. 2018 (arXiv 1803.02155), equation 5; He et al. 2020 (arXiv 2006.03654),
    equation 4.
    """

    kind: ClassVar[str] = "relative"
    by_slot: ClassVar[bool] = True

    logits: Tensor
    first: int = 0
    of_keys: bool = False
    outside: str = "clip"
    buckets: int | None = None
    max_distance: int | None = None

    def __post_init__(self) -> None:
        check_tensor("logits", self.logits)
        if self.logits.ndim != 4:
            raise ArgumentError(
                f"logits is {tuple(self.logits.shape)}; it must be [B or 1, H or 1, T or S, N]"
            )
        if not 0 <= self.first < self.logits.shape[3]:
            raise ArgumentError(
                f"first is {self.first}; it must be an entry from 0 to {self.logits.shape[3] - 1}"
            )
        if self.outside not in ("clip", "zero"):
            raise ArgumentError(f"outside is {self.outside!r}; it must be 'clip' or 'zero'")
        if (self.buckets is None) != (self.max_distance is None):
            raise ArgumentError(
                f"buckets is {self.buckets} and max_distance is {self.max_distance}; give both, or "
                "none"
            )
        if self.buckets is not None and self.max_distance is not None:
            check_log_buckets(self.buckets, self.max_distance)

    def _block(self, pairs: Pairs) -> Tensor:
        """Look up the entry of each pair in the row of its query or its key."""
        q, k = pairs.positions()
        distance, own = q - k, pairs.columns if self.of_keys else pairs.rows
        if self.buckets is not None and self.max_distance is not None:
            distance = deberta_bucket(
                distance, buckets=self.buckets, max_distance=self.max_distance
            )
        entry, last = distance + self.first, self.logits.shape[3] - 1
        table = self.logits[:, :, own].to(device=q.device, dtype=pairs.dtype)
        b = max(table.shape[0], entry.shape[0])
        index = entry.clamp(0, last).expand(b, table.shape[1], -1, -1)
        table = table.expand(b, -1, -1, -1)
        if self.of_keys:
            values = table.gather(3, index.transpose(-1, -2)).transpose(-1, -2)
        else:
            values = table.gather(3, index)
        return values if self.outside == "clip" else values * ((entry >= 0) & (entry <= last))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that the table fits the call."""
        b, h, n, _ = self.logits.shape
        own = S if self.of_keys else T
        if b not in (1, B) or h not in (1, H) or n != own:
            raise ArgumentError(
                f"logits is {tuple(self.logits.shape)}; for this call it must be ({B} or 1, {H} or "
                f"1, {own}, entries)"
            )

    def select_heads(self, heads: slice) -> RelativeLogits:
        """Return the bias with the tables of these heads."""
        return self if self.logits.shape[1] == 1 else replace(self, logits=self.logits[:, heads])

    def __str__(self) -> str:
        own = ", keys" * self.of_keys
        return f"relative({'x'.join(map(str, self.logits.shape))}{own})"
