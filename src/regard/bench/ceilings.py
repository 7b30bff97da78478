"""What the machine can do at most: reading memory, and products of matrices; measured in the run that is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from regard.bench.timing import interleaved, median
from regard.pages import settled

READ_BYTES = 1 << 28
"""More than any cache of a CPU holds."""

SMALLEST, SIDE = 256, 2048
"""Rows and columns of the matrices that are multiplied: from, to."""

LIMIT = 0.1
"""Seconds of a product behind which larger ones are not tried."""


@dataclass(frozen=True)
class Reading:
    """Reading memory once more, in turns with what is measured: some machines read at half the speed for seconds.

    Attributes:
        bytes: how many are read.
        step: reads them.
    """

    bytes: int
    step: Callable[[], object]


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second that all threads read from memory, and FLOPs per second of a matrix product, by dtype.

    `reading` is the way to read that was the fastest; None where shares are of `read`.

    >>> top = Ceilings(4e10, {torch.float32: 2e11})
    >>> top.of_read(2e10), top.of_gemm(1e11, torch.float32), top.of_gemm(1e11, torch.float16)
    (0.5, 0.5, None)
    """

    read: float
    gemm: dict[torch.dtype, float] = field(default_factory=dict)
    reading: Reading | None = field(default=None, compare=False, repr=False)

    @classmethod
    def measure(
        cls,
        dtypes: Iterable[torch.dtype],
        device: torch.device,
        *,
        rounds: int = 5,
        read_bytes: int = READ_BYTES,
        side: int = SIDE,
    ) -> Ceilings:
        """Measure both; reading is the best of several ways to read, since each may have a limit of its own.

        >>> top = Ceilings.measure([torch.float32], torch.device("cpu"), rounds=1, read_bytes=1 << 16, side=16)
        >>> top.read > 0 and top.gemm[torch.float32] > 0
        True
        """
        x = settled(torch.ones(read_bytes // 4, device=device))
        ways: dict[str, Callable[[], object]] = {
            "sum": x.sum, "max": x.amax, "dot": lambda: torch.dot(x, x),
            "whole": x.view(torch.int32).sum,
        }  # fmt: skip
        times = interleaved(ways, rounds=rounds, synchronise=synchroniser(device))
        best = min(ways, key=lambda name: median(times[name]))
        gemm = {dtype: _gemm(dtype, device, rounds, side) for dtype in dtypes}
        return cls(read_bytes / median(times[best]), gemm, Reading(read_bytes, ways[best]))

    def of_read(self, bytes_per_second: float) -> float:
        """The share of the reading speed."""
        return bytes_per_second / self.read

    def of_gemm(self, flops_per_second: float, dtype: torch.dtype) -> float | None:
        """The share of a matrix product's speed; None for a dtype that was not measured."""
        top = self.gemm.get(dtype)
        return None if top is None else flops_per_second / top


def synchroniser(device: torch.device) -> Callable[[], object]:
    """What waits for a device.

    >>> synchroniser(torch.device("cpu"))()
    """
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def _gemm(dtype: torch.dtype, device: torch.device, rounds: int, side: int) -> float:
    """The fastest of rising sizes: a dtype that the machine has no instructions for is not tried at those that take long."""
    best, n = 0.0, min(SMALLEST, side)
    while n <= side:
        a, b = torch.randn(2, n, n, device=device).to(dtype).unbind(0)
        times = interleaved(
            {"mm": partial(torch.mm, a, b)}, rounds=rounds, limit=LIMIT,
            synchronise=synchroniser(device),
        )["mm"]  # fmt: skip
        best = max(best, 2 * n**3 / median(times))
        if median(times) > LIMIT:
            break
        n *= 2
    return best
