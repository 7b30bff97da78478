"""Masks given by a fixed pattern of positions, such as `Causal` and `Window`, and the
neighborhoods of a grid of 1, 2 or 3 dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.argument_checks import MAX_INT, check_int
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks.base import And, Mask, Not, Or, Reach, Refusal, check_ints
from regard.masks.tiling import EMPTY, UNBOUNDED, CallSlice, Intervals
from regard.span import Span
from regard.units import plural


@dataclass(frozen=True, eq=False)
class Full(Mask):
    """Every query sees every key.

    >>> from regard.span import Span
    >>> Full().count(Span(0, 4), Span(0, 4))
    16
    """

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return True for each pair."""
        return torch.ones((1,) * max(q.ndim, k.ndim), dtype=torch.bool, device=q.device)

    def _intervals(self, q: Tensor) -> Intervals:
        return Intervals(torch.zeros_like(q), torch.full_like(q, UNBOUNDED))

    def causal_from(self) -> int:
        """Return `UNBOUNDED`: every later key is visible."""
        return UNBOUNDED


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """A query sees its own position and all earlier ones: k <= q.

    Positions are absolute: in chunked prefill and decoding it is the bottom-right triangle.

    >>> from regard.span import Span
    >>> Causal().visible(Span(2, 2), Span(0, 4)).tolist()
    [[[3, 4]]]
    """

    why_hidden = ("future", "future")

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return k <= q for each pair."""
        return k <= q

    def _intervals(self, q: Tensor) -> Intervals:
        return Intervals(torch.zeros_like(q), q + 1)

    def causal_from(self) -> int:
        """Return 0: no later key is visible."""
        return 0


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """A query sees the last `size` keys, its own included: q - k < size.

    Later keys are not restricted without `Causal()` or `ahead`. `causal & window(4)` is Mistral's,
    `Window(9, ahead=8)` Longformer's window of 16 (arXiv 2004.05150).

    Args:
        size: the number of visible keys up to the query's own.
        ahead: the largest distance of a visible later key; None does not restrict them.

    Raises:
        ArgumentError, ArgumentTypeError: size is below 1, ahead is below 0, or one is not an int.

    >>> from regard.span import Span
    >>> (Causal() & Window(8)).count(Span(0, 64), Span(0, 64))
    484
    """

    size: int
    ahead: int | None = None

    def __post_init__(self) -> None:
        check_int(
            "Window size",
            self.size,
            1,
            "a query always sees itself; leave the window out to see all",
        )
        if self.ahead is not None:
            check_int("Window ahead", self.ahead, 0, "0 is causal, None is no limit")

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return q - k < size, and k - q <= ahead if `ahead` is given."""
        in_window = q - k < self.size
        return in_window if self.ahead is None else in_window & (k - q <= self.ahead)

    def _intervals(self, q: Tensor) -> Intervals:
        stops = torch.full_like(q, UNBOUNDED) if self.ahead is None else q + (self.ahead + 1)
        return Intervals(q - (self.size - 1), stops)

    def causal_from(self) -> int:
        """Return 0 with `ahead=0`; other windows show later keys at every position."""
        return 0 if self.ahead == 0 else UNBOUNDED

    def reach(self) -> Reach:
        """Return a reach of the last `size` keys."""
        return Reach(self.size)

    def refusal(self) -> Refusal:
        """Explain that the key is outside the window."""
        ahead = "" if self.ahead is None else f", {self.ahead} ahead"
        return Refusal(f"outside window {self.size}{ahead}", "outside", str(self))

    def near_misses(self) -> tuple[Mask, ...]:
        """Return windows of one key less and one more, since libraries count differently."""
        return tuple(
            replace(self, size=size) for size in (self.size - 1, self.size + 1) if size > 0
        )


@dataclass(frozen=True, eq=False)
class Chunk(Mask):
    """A query sees the keys of its own chunk of `size` positions: q // size == k // size (Llama 4).

    Args:
        size: positions per chunk.

    Raises:
        ArgumentError, ArgumentTypeError: size is below 1 or not an int.

    >>> from regard.span import Span
    >>> (Causal() & Chunk(3)).visible(Span(0, 5), Span(0, 5)).tolist()
    [[[1, 2, 3, 1, 2]]]
    """

    why_hidden = ("other chunk of {size}", "chunk")

    size: int

    def __post_init__(self) -> None:
        check_int("Chunk size", self.size, 1)

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return q // size == k // size for each pair."""
        return q // self.size == k // self.size

    def _intervals(self, q: Tensor) -> Intervals:
        start = q // self.size * self.size
        return Intervals(start, start + self.size)

    def reach(self) -> Reach:
        """Return a reach of `size` keys: a chunk begins at most size - 1 keys before the query."""
        return Reach(self.size)


@dataclass(frozen=True, eq=False)
class EarlierChunks(Mask):
    """A query sees the keys of the chunks that are `first` to `last` chunks before its own.

    first <= q // size - k // size <= last

    Args:
        size: positions per chunk.
        first: the nearest chunk, from 1, the one before the query's own.
        last: the farthest chunk; None is every earlier one.

    Raises:
        ArgumentError, ArgumentTypeError: a number is below 1 or not an int, or last is below first.

    >>> from regard.span import Span
    >>> EarlierChunks(2, 1, 1).block(Span(0, 6), Span(0, 6))[0, 0, 4].int().tolist()
    [0, 0, 1, 1, 0, 0]

    Source: An et al. 2024 (arXiv 2402.17463), section 3: the parts of dual chunk attention.
    """

    why_hidden = ("not in these earlier chunks of {size}", "chunk")

    size: int
    first: int = 1
    last: int | None = None

    def __post_init__(self) -> None:
        check_int("EarlierChunks size", self.size, 1)
        check_int("EarlierChunks first", self.first, 1, "the query's own chunk is Chunk(size)")
        if self.last is not None:
            check_int("EarlierChunks last", self.last, 1)
            if self.last < self.first:
                raise ArgumentError(
                    f"EarlierChunks first is {self.first} and last is {self.last}; last must be at "
                    "least first, or None for every earlier chunk"
                )

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return whether the chunk of k is one of these chunks before that of q."""
        before = q // self.size - k // self.size
        is_early = before >= self.first
        return is_early if self.last is None else is_early & (before <= self.last)

    def _intervals(self, q: Tensor) -> Intervals:
        chunk = q // self.size
        stop = (chunk - self.first + 1) * self.size
        if self.last is None:
            return Intervals(torch.zeros_like(q), stop)
        return Intervals((chunk - self.last) * self.size, stop)

    def causal_from(self) -> int:
        """Return 0: a later key is in no earlier chunk."""
        return 0

    def reach(self) -> Reach:
        """Return a reach of all tokens, or of the farthest chunk with the query's own."""
        return super().reach() if self.last is None else Reach((self.last + 1) * self.size)


@dataclass(frozen=True, eq=False)
class Dilated(Mask):
    """A window with gaps: a query sees its own key and every `step`-th before it, `size` in all.

    The rule is q - k < size * step and (q - k) % step == 0 (Longformer, arXiv 2004.05150). Later
    keys are not restricted without `Causal()` or `ahead`; `Dilated(9, 2, ahead=8)` is symmetric.

    Args:
        size: the number of visible keys up to the query's own.
        step: the distance between visible keys.
        ahead: the number of visible later keys, k - q <= ahead * step; None does not restrict them.

    Raises:
        ArgumentError, ArgumentTypeError: size or step below 1, ahead below 0, or not ints.

    >>> from regard.span import Span
    >>> (Causal() & Dilated(2, 3)).block(Span(6, 1), Span(0, 8)).int().tolist()
    [[[[0, 0, 0, 1, 0, 0, 1, 0]]]]
    """

    why_hidden = ("outside the steps of {}", "outside")

    size: int
    step: int
    ahead: int | None = None

    def __post_init__(self) -> None:
        check_int("Dilated size", self.size, 1)
        check_int("Dilated step", self.step, 1, "1 is a plain window")
        if self.ahead is not None:
            check_int("Dilated ahead", self.ahead, 0, "0 is causal, None is no limit")

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return (q - k) % step == 0 and -ahead <= (q - k) / step < size for each pair."""
        back = q - k
        steps = back // self.step  # a quotient, because size * step may not fit into 64 bits
        visible = (steps < self.size) & (back % self.step == 0)
        return visible if self.ahead is None else visible & (steps >= -self.ahead)

    def _states_without_intervals(self, part: CallSlice, bk: int) -> Tensor:
        # a tile that is empty for the window without gaps is empty for this mask too
        ahead = None if self.ahead is None else min(self.ahead * self.step, MAX_INT)
        window = Window(min(self.size * self.step, MAX_INT), ahead)._states(part, bk)
        return torch.where(window == EMPTY, window, super()._states_without_intervals(part, bk))

    def reach(self) -> Reach:
        """Return a reach of the window with its gaps."""
        return Reach(self.size * self.step)


@dataclass(frozen=True, eq=False)
class Sinks(Mask):
    """Every query sees the first n positions: k < n, as StreamingLLM keeps them (arXiv 2309.17453).

    Combine it: `causal & (window(8) | sinks(4))`. The `sink=` of `attend` is a logit instead.

    Args:
        n: the number of positions.

    Raises:
        ArgumentError, ArgumentTypeError: n is below 0 or not an int.

    >>> from regard.span import Span
    >>> (Causal() & (Window(8) | Sinks(4))).count(Span(0, 64), Span(0, 64))
    702
    """

    why_hidden = ("after the first {n}", "outside")

    n: int

    def __post_init__(self) -> None:
        check_int("Sinks n", self.n, 0)

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return k < n for each pair."""
        return k < self.n

    def _intervals(self, q: Tensor) -> Intervals:
        return Intervals(torch.zeros_like(q), torch.full_like(q, self.n))

    def causal_from(self) -> int:
        """Return n: only the first n positions are visible to earlier queries."""
        return self.n

    def reach(self) -> Reach:
        """Return a reach of the first n positions only."""
        return Reach(0, self.n)


@dataclass(frozen=True, eq=False)
class Global(Mask):
    """Some positions see every key and are seen by every query (Longformer, arXiv 2004.05150).

    Args:
        positions: the global positions.

    Raises:
        ArgumentError, ArgumentTypeError: a position is below 0 or not an int.

    >>> from regard.span import Span
    >>> (Window(9, ahead=8) | Global((0, 1))).count(Span(0, 64), Span(0, 64))
    1234
    """

    why_hidden = ("not global", "outside")

    positions: Sequence[int]

    def __post_init__(self) -> None:
        positions = check_ints("Global positions", self.positions, 0)
        object.__setattr__(self, "positions", tuple(sorted(set(positions))))

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return whether q or k is a global position."""
        return self.has(q) | self.has(k)

    def has(self, x: Tensor) -> Tensor:
        """Return which positions are global.

        Args:
            x: an integer tensor of positions.

        Returns:
            A bool tensor with the shape of `x`.
        """
        positions = torch.tensor(self.positions, dtype=x.dtype, device=x.device)
        return (x[..., None] == positions).any(-1)  # isin does not support vmap

    def _intervals(self, q: Tensor) -> Intervals:
        runs: list[list[int]] = []
        for p in self.positions:
            if runs and runs[-1][1] == p:
                runs[-1][1] = p + 1
            else:
                runs.append([p, p + 1])
        bounds = torch.tensor(runs or [[0, 0]], device=q.device)  # [n, 2]
        everything = torch.zeros_like(bounds)
        everything[0, 1] = UNBOUNDED
        ranges = torch.where(self.has(q)[..., None], everything, bounds)  # [B,1,t,n,2]
        return Intervals(ranges[..., 0], ranges[..., 1])


@dataclass(frozen=True, eq=False)
class Strided(Mask):
    """The two patterns of the Sparse Transformer (arXiv 1904.10509).

    It is q - k < stride or (q - k) % stride == 0; with c columns, q // stride == k // stride or k %
    stride >= stride - c, the last c columns of every block.

    Args:
        stride: the stride, or the size of a block.
        fixed: the number of columns c of the fixed pattern; None selects the strided pattern.

    Raises:
        ArgumentError, ArgumentTypeError: stride below 1, fixed outside 1 to stride, or not ints.

    >>> from regard.span import Span
    >>> keys = Span(0, 64)
    >>> (Causal() & Strided(8)).count(keys, keys)
    708
    >>> (Causal() & Strided(8, fixed=1)).count(keys, keys)
    512
    """

    stride: int
    fixed: int | None = None

    def __post_init__(self) -> None:
        check_int("Strided stride", self.stride, 1)
        if self.fixed is not None and check_int("Strided fixed", self.fixed, 1) > self.stride:
            check_int(
                "Strided stride",
                self.stride,
                self.fixed,
                f"a block must have at least fixed={self.fixed} columns",
            )

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return the strided pattern, or the fixed one if `fixed` is given."""
        if self.fixed is None:
            return (q - k < self.stride) | ((q - k) % self.stride == 0)
        same = q // self.stride == k // self.stride
        return same | (k % self.stride >= self.stride - self.fixed)


def period(mask: Mask) -> int | None:
    """Return the number of positions by which a query and a key may move together."""
    if isinstance(mask, Full | Causal | Window | Dilated):
        return 1
    if isinstance(mask, Strided):
        return 1 if mask.fixed is None else mask.stride
    if isinstance(mask, Chunk):
        return mask.size
    if not isinstance(mask, And | Or | Not):
        return None
    periods = [period(member) for member in mask.members()]
    known = [P for P in periods if P is not None]
    return math.lcm(*known) if len(known) == len(periods) else None


def count_pairs(mask: Mask, n: int) -> int:
    """Count the visible pairs of the first n positions, in the head that has the most."""
    # a rule gives the same answer after both positions move by P, so that P rows give the sum
    P = period(mask)
    has_ranges = mask.intervals(Span(0, 1)) is not None  # counted from the bounds of each row
    if P is None or has_ranges or n <= 2 * P:
        return int(mask.visible(Span(0, n), Span(0, n)).sum(-1).max())
    start = -(-n // P) * P
    # of the keys start - n + 1, ..., start + n - 1
    distances = torch.arange(n - 1, -n, -1, device="cpu")
    first, end = distances.clamp(min=0), (n + distances).clamp(max=n)
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for r in range(P):
        keys = Span(start + r - n + 1, 2 * n - 1)
        sees = mask.block(Span(start + r, 1), keys).reshape(-1, keys.length)
        queries = (end - r + P - 1) // P - (first - r + P - 1) // P
        total = total + (sees * queries).sum(-1)
    return int(total.max())


MAX_RANGES = 256
"""The most key ranges per query that `Neighborhood` returns; beyond, pairs are evaluated."""


@dataclass(frozen=True, eq=False)
class Neighborhood(Mask):
    """Neighborhood attention: a query sees a window of keys around it in each dimension of a grid.

    Positions are row-major indices of the grid. The window of a query near a border is shifted into
    the grid, so that it has `kernel_size` keys; under a causal dimension, fewer at the start.

    In each dimension, with i the query's index, n the length, K the kernel size and s the stride:

    - the centre is i, or with a stride the middle of the query's group of s neighbouring queries,
      min(i // s * s + s // 2, n - 1): all queries of a group have the same window;
    - the window is K keys from start = min(max(centre - K // 2, 0), n - K);
    - in a causal dimension it is the keys from max(last - K + 1, 0) to i, where last is the last
      query of the group;
    - with a dilation d, only the indices i % d, i % d + d, ... take part, and i, n and the window
      count these.

    Positions outside the grid see nothing and are not visible; keys without a place in it, such as
    a class token, are a call of their own (`merge`).

    Args:
        shape: the 1 to 3 lengths of the grid, such as (height, width), or an int.
        kernel_size, stride, dilation, is_causal: one for all dimensions or one for each;
            kernel_size is K, the visible keys; stride is s, of queries that share a window;
            dilation is d; in a causal dimension later indices are hidden.

    Raises:
        ArgumentError, ArgumentTypeError: an argument has a wrong type or number of entries, or the
            sizes do not fit the grid or a call.

    >>> from regard.span import Span
    >>> grid = Span(0, 16)
    >>> mask = Neighborhood((4, 4), 3)
    >>> mask.visible(grid, grid).unique().tolist()  # every query sees 3 x 3 keys
    [9]
    >>> mask.block(grid, grid)[0, 0, 0].view(4, 4).int().tolist()  # those of the top left corner
    [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]

    Source: Hassani et al. 2023 (arXiv 2204.07143), equations 1 to 3; dilated: Hassani and Shi 2022
    (arXiv 2209.15001); stride and causal dimensions: Hassani et al. 2025 (arXiv 2504.16922), as
    the library NATTEN computes them.
    """

    shape: int | Sequence[int]
    kernel_size: int | Sequence[int]
    stride: int | Sequence[int] = 1
    dilation: int | Sequence[int] = 1
    is_causal: bool | Sequence[bool] = False

    def __post_init__(self) -> None:
        for name in ("shape", "kernel_size", "stride", "dilation"):
            value = getattr(self, name)
            checked = (
                check_int(f"Neighborhood {name}", value, 1)
                if isinstance(value, int)
                else check_ints(f"Neighborhood {name}", value, 1)
            )
            object.__setattr__(self, name, checked)
        causal: object = self.is_causal
        if not isinstance(causal, bool):
            if not isinstance(causal, (tuple, list)) or not all(
                isinstance(x, bool) for x in causal
            ):
                raise ArgumentTypeError(
                    f"Neighborhood is_causal is {causal!r}; it must be a bool, or one per dimension"
                )
            object.__setattr__(self, "is_causal", tuple(causal))
        if not 1 <= len(self._shape) <= 3:
            raise ArgumentError(
                f"Neighborhood shape is {self.shape}; it must have 1, 2 or 3 dimensions"
            )
        if math.prod(self._shape) > MAX_INT:
            raise ArgumentError(
                f"Neighborhood shape is {self.shape}; it must have at most "
                f"{plural(MAX_INT, 'position')}"
            )
        for dim in range(len(self._shape)):
            self._check_dimension(dim)
        for name in ("kernel_size", "stride", "dilation", "is_causal"):
            values = self._of(name)  # one entry if all are equal, so that equal masks compare equal
            object.__setattr__(self, name, values[0] if len(set(values)) == 1 else values)
        object.__setattr__(self, "shape", self._shape[0] if len(self._shape) == 1 else self._shape)

    def _check_dimension(self, dim: int) -> None:
        """Check the numbers of one dimension of the grid."""
        n, K, s, d = (
            x[dim]
            for x in (
                self._shape,
                self._of("kernel_size"),
                self._of("stride"),
                self._of("dilation"),
            )
        )
        self._of("is_causal")
        if s > K:
            raise ArgumentError(
                f"Neighborhood stride is {s} in dimension {dim}; it must be at most the kernel "
                f"size, {K}, or some queries would not see themselves"
            )
        if K * d > n:
            raise ArgumentError(
                f"Neighborhood kernel_size {K} times dilation {d} is {K * d} in dimension {dim}; "
                f"it must be at most the length of the grid, {n}"
            )

    @property
    def _shape(self) -> tuple[int, ...]:
        """The lengths of the grid, one per dimension."""
        return (self.shape,) if isinstance(self.shape, int) else tuple(self.shape)

    def _of(self, name: str) -> tuple[int, ...]:
        """Return an argument with one entry per dimension."""
        value, dims = getattr(self, name), len(self._shape)
        if isinstance(value, int):
            return (value,) * dims
        if len(value) != dims:
            raise ArgumentError(
                f"Neighborhood {name} is {value}; it must have one entry, or {dims} for the "
                f"{plural(dims, 'dimension')} of the grid {self.shape}"
            )
        return tuple(value)

    def _coordinates(self, x: Tensor) -> list[Tensor]:
        """Return the index in each dimension of the grid of each position."""
        indices = []
        for n in reversed(self._shape):
            indices.append(x % n)
            x = x // n
        return indices[::-1]

    def _windows(self, q: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return for each dimension the first visible index of each query, and that behind."""
        windows = []
        arguments = zip(
            self._coordinates(q),
            self._shape,
            *map(self._of, ("kernel_size", "stride", "dilation", "is_causal")),
            strict=True,
        )
        for index, n, K, s, d, causal in arguments:
            residue, i = index % d, index // d
            length = (n - 1 - residue) // d + 1  # how many indices of the grid have this residue
            group = i // s * s
            if causal:
                start = (torch.minimum(group + (s - 1), length - 1) - (K - 1)).clamp(min=0)
                stop = i + 1
            else:
                centre = torch.minimum(group + s // 2, length - 1)
                start = torch.minimum((centre - K // 2).clamp(min=0), length - K)
                stop = start + K
            windows.append((residue + start * d, residue + stop * d))
        return windows

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return whether the key is in the query's window in every dimension of the grid."""
        positions = math.prod(self._shape)
        visible = (q >= 0) & (q < positions) & (k >= 0) & (k < positions)
        for (start, stop), index, d in zip(
            self._windows(q), self._coordinates(k), self._of("dilation"), strict=True
        ):
            visible = visible & (index >= start) & (index < stop)
            if d > 1:
                visible = visible & ((index - start) % d == 0)
        return visible

    def _intervals(self, q: Tensor) -> Intervals | None:
        sizes, dilations = self._of("kernel_size"), self._of("dilation")
        # Keys that are neighbours in the last dimension are neighbours as positions, too.
        joined = dilations[-1] == 1
        if math.prod(sizes[:-1] if joined else sizes) > MAX_RANGES:
            return None
        *outer, (start, stop) = self._windows(q)
        if joined:
            starts, stops = start, stop
        else:
            starts = start + torch.arange(sizes[-1], device=q.device) * dilations[-1]
            stops = torch.where(starts < stop, starts + 1, starts)
        step = self._shape[-1]  # how far apart two neighbours of this dimension are as positions
        for (first, end), K, d, n in reversed(
            list(zip(outer, sizes[:-1], dilations[:-1], self._shape[:-1], strict=True))
        ):
            indices = first + torch.arange(K, device=q.device) * d  # [B,1,t,K]
            moved = indices[..., None] * step
            hidden = (indices >= end)[..., None]
            starts, stops = (
                (x[..., None, :] + moved).masked_fill(hidden, 0).flatten(-2)
                for x in (starts, stops)
            )
            step *= n
        outside = (q < 0) | (q >= math.prod(self._shape))
        return Intervals(starts, stops.masked_fill(outside, 0))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that the grid covers all keys of the call."""
        if (positions := math.prod(self._shape)) < S:
            raise ArgumentError(
                f"Neighborhood has a grid of {' x '.join(map(str, self._shape))} = "
                f"{plural(positions, 'position')}, but there are {plural(S, 'key')}; give the "
                "shape of the grid whose tokens are the keys"
            )
