"""How calls are timed in turns, how peak memory is measured, and what this machine can do."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch

import regard
from regard.errors import RegardError
from regard.huge_pages import to_huge_pages


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 25,
    sample: float = 0.02,
    limit: float | None = None,
    into: dict[str, list[float]] | None = None,
    synchronize: Callable[[], object] = lambda: None,
    clock: Callable[[], float] | None = None,
    settle: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Time functions in turns, so that the machine's speed changes for all of them.

    Each is called twice before the first round, and timed when the threads of the one before sleep;
    each round begins with another one.
    """
    clock = time.perf_counter if clock is None else clock
    settle = wait_until_idle if settle is None else settle
    times = {} if into is None else into
    times.update({name: [] for name in cases})
    repeats = {
        name: _calibrate_repeats(case, sample, synchronize, clock) for name, case in cases.items()
    }
    names, start = list(cases), time.perf_counter()
    try:
        for index in range(rounds):
            if index and limit is not None and time.perf_counter() - start > limit:
                break
            for name in rotated_order(names, index):
                settle()
                times[name].append(_time_calls(cases[name], repeats[name], synchronize, clock))
    finally:
        complete = min(map(len, times.values()), default=0)
        for seconds in times.values():
            del seconds[complete:]
    return times


def wait_until_idle(pause: float = 0.002, limit: float = 1.0) -> None:
    """Wait until no thread of this process computes.

    Those of OpenMP, ONNX Runtime and others look for work for up to 0.2 seconds after a call.
    """
    start = time.perf_counter()
    while True:
        before = time.process_time()
        time.sleep(pause)
        if time.process_time() - before < pause / 4 or time.perf_counter() - start >= limit:
            return


def rotated_order(names: Sequence[str], by: int) -> list[str]:
    """Return the names in round `by`: from the next one, and reversed after each turn."""
    if not names:
        return []
    turn, first = divmod(by, len(names))
    step = -1 if turn % 2 else 1
    return [names[(first + step * i) % len(names)] for i in range(len(names))]


def median_ratio(times: Mapping[str, Sequence[float]], of: str, to: str) -> float:
    """Return the median over rounds of the ratio of two functions' times."""
    return median(round_ratios(times[of], times[to]))


def round_ratios(own: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of two functions' times in each round."""
    return [a / b for a, b in zip(own, others, strict=True)]


def median(times: Sequence[float]) -> float:
    """Return the median of times in seconds."""
    return statistics.median(times)


def quartiles(times: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; a single number is both."""
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def _calibrate_repeats(
    case: Callable[[], object],
    sample: float,
    synchronize: Callable[[], object],
    clock: Callable[[], float],
) -> int:
    """Return how many calls take about `sample` seconds."""
    case()
    return max(1, int(sample / max(_time_calls(case, 1, synchronize, clock), 1e-9)))


def _time_calls(
    case: Callable[[], object],
    repeats: int,
    synchronize: Callable[[], object],
    clock: Callable[[], float],
) -> float:
    """Return the seconds of one call, averaged over `repeats` calls."""
    synchronize()
    start = clock()
    for _ in range(repeats):
        case()
    synchronize()
    return (clock() - start) / repeats


ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment variables with which glibc returns freed tensors to the system at once."""

PROCESS = Path("/proc/self")


def resident_bytes(field: str = "VmRSS", process: Path = PROCESS) -> int | None:
    """Return the resident memory of this process."""
    return _bytes_of(process / "status", field)


def _bytes_of(path: Path, field: str) -> int | None:
    """Return a field of a file of Linux that counts in KiB; None without the file or the field."""
    lines = path.read_text("ascii", errors="replace").splitlines() if path.exists() else []
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith(f"{field}:")), None)


def peak_bytes(work: Callable[[], object], process: Path = PROCESS) -> int | None:
    """Return how far the resident memory rises above a reset peak while a function runs.

    Freed memory that the process kept would hide a part of it; `ALLOCATOR` prevents this.
    """
    gc.collect()
    before = resident_bytes(process=process)
    try:
        (process / "clear_refs").write_text("5")
    except OSError:
        return None
    work()
    after = resident_bytes("VmHWM", process)
    return None if before is None or after is None else max(0, after - before)


def call_in_subprocess(
    function: str, settings: object, *, advice: str = "", command: Sequence[str] | None = None
) -> Any:
    """Call a function in a new process, whose allocator returns freed memory to the system."""
    module, _, name = function.partition(":")
    code = f"import json, sys; from {module} import {name}; "
    code += f"print(json.dumps({name}(json.load(sys.stdin))))"
    process = subprocess.run(  # noqa: S603 (our own function, by the path of this Python)
        command or [sys.executable, "-c", code],
        input=json.dumps(settings),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ALLOCATOR, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if process.returncode:
        last_line = (process.stderr.strip() or "no output").splitlines()[-1]
        raise RegardError(
            f"the process that measures memory ended with exit code {process.returncode}: "
            f"{last_line}"
            f"{advice and '; '}{advice}"
        )
    return json.loads(process.stdout.splitlines()[-1])


CPU_FEATURES = (
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
"""The flags of a CPU that decide which kernels run."""


class MachineFacts(TypedDict):
    """The facts about a machine that `describe_machine` returns, by name."""

    device: str
    processor: str
    architecture: str
    cores: int
    threads: int
    features: list[str]
    capability: str
    free_memory: int
    system: str
    python: str
    torch: str
    regard: str
    gpu: NotRequired[str]


def describe_machine(device: torch.device) -> MachineFacts:
    """Return the processor, its threads and features, the free memory, and versions."""
    cpuinfo = _read_cpuinfo()
    facts: MachineFacts = {
        "device": device.type,
        "processor": cpuinfo.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": torch.get_num_threads() if not cpuinfo else _count_cores(cpuinfo),
        "threads": torch.get_num_threads(),
        "features": [flag for flag in CPU_FEATURES if flag in cpuinfo.get("flags", "").split()],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "free_memory": free_memory(torch.device("cpu")),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "regard": regard.__version__,
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def free_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes; 0 if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _bytes_of(Path("/proc/meminfo"), "MemAvailable") or 0


def _read_cpuinfo() -> dict[str, str]:
    """Return the entries of the first processor in /proc/cpuinfo; {} if there is no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    text = path.read_text("utf-8", errors="replace")
    pairs = [line.partition(":")[::2] for line in text.partition("\n\n")[0].splitlines()]
    return {
        **{key.strip(): value.strip() for key, value in pairs},
        "count": str(text.count("processor\t")),
    }


def _count_cores(cpuinfo: dict[str, str]) -> int:
    """Return the number of processors, or of torch's threads if it is unknown."""
    return int(cpuinfo["count"]) or torch.get_num_threads()


READ_BYTES = 1 << 30
"""The number of bytes that are read to measure the bandwidth, more than any CPU cache has (of a
quarter of it, a cache of 480 MiB served a part); less where little memory is free.
"""

GEMM_MIN_SIDE, GEMM_MAX_SIDE = 256, 2048
"""The smallest and the largest side of the square matrices that are multiplied."""

GEMM_SECONDS = 0.1
"""If one product takes longer than this many seconds, larger ones are not tried."""


@dataclass(frozen=True)
class BandwidthProbe:
    """A read of memory, timed in turns with the peers, since some machines' speed varies."""

    bytes: int
    step: Callable[[], object]


@dataclass(frozen=True)
class Ceilings:
    """The largest rates of the machine, to which measured rates are compared.

    Args:
        read: the memory bandwidth of all threads, in bytes per second.
        probe: the fastest way to read memory; with None, shares are relative to `read`.
    """

    read: float
    gemm: dict[torch.dtype, float] = field(default_factory=dict)
    probe: BandwidthProbe | None = field(default=None, compare=False, repr=False)

    @classmethod
    def measure(
        cls,
        dtypes: Iterable[torch.dtype],
        device: torch.device,
        *,
        rounds: int = 5,
        read_bytes: int = READ_BYTES,
        side: int = GEMM_MAX_SIDE,
    ) -> Ceilings:
        """Measure the FLOP rates, and the memory bandwidth, of which the fastest way counts."""
        free = free_memory(device)
        if free:
            read_bytes = min(read_bytes, free // 8)
        x = to_huge_pages(torch.ones(read_bytes // 4, device=device))
        readers: dict[str, Callable[[], object]] = {
            "sum": x.sum,
            "max": x.amax,
            "dot": lambda: torch.dot(x, x),
            "whole": x.view(torch.int32).sum,
        }
        times = interleaved(readers, rounds=rounds, synchronize=partial(wait_for, device))
        fastest = min(readers, key=lambda name: median(times[name]))
        gemm = {dtype: _gemm_flops_per_second(dtype, device, rounds, side) for dtype in dtypes}
        return cls(
            read_bytes / median(times[fastest]), gemm, BandwidthProbe(read_bytes, readers[fastest])
        )

    def of_read(self, bytes_per_second: float) -> float:
        """Return a bandwidth as a share of the machine's."""
        return bytes_per_second / self.read

    def of_gemm(self, flops_per_second: float, dtype: torch.dtype) -> float | None:
        """Return a FLOP rate as a share of the rate of a matrix product."""
        ceiling = self.gemm.get(dtype)
        return None if ceiling is None else flops_per_second / ceiling


def wait_for(device: torch.device) -> None:
    """Wait until a device has computed what was queued; a CPU has no queue.

    >>> wait_for(torch.device("cpu"))
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes_on(device: torch.device, work: Callable[[], object]) -> int | None:
    """Return how far work raises a process's memory, or torch's on CUDA; None if unknown."""
    if device.type == "cpu":
        return peak_bytes(work)
    if device.type != "cuda":
        return None
    wait_for(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    wait_for(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def _gemm_flops_per_second(
    dtype: torch.dtype, device: torch.device, rounds: int, side: int
) -> float:
    """Return the best FLOP rate over products of increasing size, while they are fast."""
    best, n = 0.0, min(GEMM_MIN_SIDE, side)
    while n <= side:
        a, b = torch.randn(2, n, n, device=device).to(dtype).unbind(0)
        times = interleaved(
            {"mm": partial(torch.mm, a, b)},
            rounds=rounds,
            limit=GEMM_SECONDS,
            synchronize=partial(wait_for, device),
        )["mm"]
        best = max(best, 2 * n**3 / median(times))
        if median(times) > GEMM_SECONDS:
            break
        n *= 2
    return best


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Set the number of torch's threads for a block, and restore the former number afterwards."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
