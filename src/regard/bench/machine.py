"""The machine: what it is, and the memory bandwidth and FLOPs that it reaches at most."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import regard
from regard.bench.timing import interleaved, median
from regard.huge_pages import to_huge_pages

FEATURES = (
    "avx2",
    "f16c",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "asimdhp",
    "bf16",
    "sve",
)
"""Flags of a CPU that decide which kernels run."""


def machine(device: torch.device) -> dict[str, Any]:
    """The processor, its threads and features, memory, and versions.

    >>> machine(torch.device("cpu"))["torch"] == torch.__version__
    True
    """
    said = _processor()
    found: dict[str, Any] = {
        "device": device.type,
        "processor": said.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": torch.get_num_threads() if not said else _cores(said),
        "threads": torch.get_num_threads(),
        "features": [flag for flag in FEATURES if flag in said.get("flags", "").split()],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "free_memory": free(torch.device("cpu")),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "regard": regard.__version__,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def free(device: torch.device) -> int:
    """Bytes of memory that a new allocation may have; 0 where the system does not say.

    >>> free(torch.device("cpu")) >= 0
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    path = Path("/proc/meminfo")
    if not path.exists():
        return 0
    for line in path.read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _processor() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    text = path.read_text("utf-8", errors="replace")
    pairs = [line.partition(":")[::2] for line in text.partition("\n\n")[0].splitlines()]
    return {
        **{key.strip(): value.strip() for key, value in pairs},
        "count": str(text.count("processor\t")),
    }


def _cores(said: dict[str, str]) -> int:
    return int(said["count"]) or torch.get_num_threads()


READ_BYTES = 1 << 28
"""More than any cache of a CPU holds."""

SMALLEST, SIDE = 256, 2048
"""Rows and columns of the matrices that are multiplied: from, to."""

LIMIT = 0.1
"""Seconds of a product behind which larger ones are not tried."""


@dataclass(frozen=True)
class Reading:
    """Reading memory once more, in turns with what is measured: some machines read at half the
    speed for seconds.

    Attributes:
        bytes: how many are read.
        step: reads them.
    """

    bytes: int
    step: Callable[[], object]


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second that all threads read from memory, and FLOPs per second of a matrix product,
    by dtype.

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
        """Measure both; reading is the best of several ways to read, since each may have a limit of
        its own.

        >>> small = {"rounds": 1, "read_bytes": 1 << 16, "side": 16}
        >>> top = Ceilings.measure([torch.float32], torch.device("cpu"), **small)
        >>> top.read > 0 and top.gemm[torch.float32] > 0
        True
        """
        x = to_huge_pages(torch.ones(read_bytes // 4, device=device))
        ways: dict[str, Callable[[], object]] = {
            "sum": x.sum,
            "max": x.amax,
            "dot": lambda: torch.dot(x, x),
            "whole": x.view(torch.int32).sum,
        }
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
    """The fastest of rising sizes: a dtype that the machine has no instructions for is not tried at
    those that take long.
    """
    best, n = 0.0, min(SMALLEST, side)
    while n <= side:
        a, b = torch.randn(2, n, n, device=device).to(dtype).unbind(0)
        times = interleaved(
            {"mm": partial(torch.mm, a, b)},
            rounds=rounds,
            limit=LIMIT,
            synchronise=synchroniser(device),
        )["mm"]
        best = max(best, 2 * n**3 / median(times))
        if median(times) > LIMIT:
            break
        n *= 2
    return best
