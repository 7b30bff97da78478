"""Machines and the roofline: the least time that a model needs on a machine, and whether it fits.

Each number of a machine says where it is from.

The rates of GPUs are those of dense matrix products on the vendor's data sheet; where it prints
the doubled rate of sparse matrices, half of it. The memory of a GPU is what its driver reports
(`memory.total` of nvidia-smi, the pool that rocminfo lists), in MiB with ECC as the card is
delivered. It is neither the data sheet's number times 10^9 nor that times 2^30: what is sold as
141 GB reports 143,771 MiB, which is 140.4 GiB, and what is sold as 80 GB reports 79.6 GiB (H100)
or 80 GiB (A100). CUDA itself takes some hundred MiB of that.

The numbers of CPUs are channels x transfers per second x 8 bytes, and cores x FLOPs per cycle x
base clock, from the vendor's product page. No program reaches these; `regard cost --machine here`
measures what one does reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard.cost.report import CostReport
from regard.errors import ArgumentError
from regard.suggest import suggest

COMPUTE_FORMAT = {
    "int2": "bf16",
    "int4": "bf16",
    "int8": "bf16",
    "fp8": "bf16",
    "fp16": "bf16",
    "bf16": "fp32",
}
"""What a format is computed in where a machine names no rate: codes are opened first; fp16 is as
fast as bf16.
"""


@dataclass(frozen=True)
class Machine:
    """A processor.

    Attributes:
        name: what it is called.
        bandwidth: bytes per second.
        flops: FLOPs per second, by format.
        memory: bytes of its memory, or 0 where that is not known.
        source: where bandwidth and rates are from.
        memory_source: which number the memory is, and where from; empty where it is not known.

    >>> MACHINES["h100-sxm"].rate("int4") == MACHINES["h100-sxm"].flops["bf16"]
    True
    """

    name: str
    bandwidth: float
    flops: Mapping[str, float]
    memory: int
    source: str
    memory_source: str = ""

    def rate(self, dtype: str) -> float:
        """FLOPs per second with weights in a format; where the machine names none, those of what it
        is computed in.
        """
        while dtype not in self.flops:
            dtype = COMPUTE_FORMAT.get(dtype, next(iter(self.flops)))
        return self.flops[dtype]


def _gpu(
    bandwidth: float, sold: int, mib: int, source: str, **tera: float
) -> tuple[float, dict[str, float], int, str, str]:
    """GB/s, GB as it is sold, MiB as its driver reports, source, TFLOP/s by format."""
    tool = "rocminfo" if source.startswith("AMD") else "nvidia-smi"
    memory = f"{mib:,} MiB in all by {tool}, sold as {sold} GB"
    rates = {k: v * 1e12 for k, v in tera.items()}
    return bandwidth * 1e9, rates, mib << 20, source, memory


def _cpu(
    channels: int, rate: int, cores: int, per_cycle: int, clock: float, source: str
) -> tuple[float, dict[str, float], int, str, str]:
    """Channels of 8 bytes, MT/s, cores, fp32 FLOPs per cycle and core, GHz."""
    formula = (
        f"{channels} x {rate} MT/s x 8 bytes; {cores} cores x {per_cycle} fp32 FLOPs x {clock} GHz"
    )
    return (
        channels * rate * 8e6,
        {"fp32": cores * per_cycle * clock * 1e9},
        0,
        f"{source}: {formula}",
        "",
    )


_NUMBERS = {
    "v100-sxm": _gpu(
        900,
        32,
        32510,
        "NVIDIA V100 data sheet (2020), SXM2 32 GB",
        fp16=125,
        fp32=15.7,
    ),
    "t4": _gpu(
        320,
        16,
        15360,
        "NVIDIA T4 data sheet (2019), memory of 256 bits at 10 Gbit/s",
        fp16=65,
        fp32=8.1,
    ),
    "a100-40gb": _gpu(
        1555,
        40,
        40960,
        "NVIDIA A100 data sheet (2021), 40 GB SXM",
        bf16=312,
        fp32=19.5,
    ),
    "a100-80gb": _gpu(
        2039,
        80,
        81920,
        "NVIDIA A100 data sheet (2021), 80 GB SXM",
        bf16=312,
        fp32=19.5,
    ),
    "l4": _gpu(
        300,
        24,
        23034,
        "NVIDIA L4 data sheet (2023), half of the sparse rates",
        bf16=121,
        fp8=242.5,
        fp32=30.3,
    ),
    "l40s": _gpu(864, 48, 46068, "NVIDIA L40S data sheet (2023)", bf16=362.05, fp8=733, fp32=91.6),
    "h100-pcie": _gpu(
        2000,
        80,
        81559,
        "NVIDIA H100 data sheet (2023), PCIe, half of the sparse rates",
        bf16=756.5,
        fp8=1513,
        fp32=51,
    ),
    "h100-sxm": _gpu(
        3350,
        80,
        81559,
        "NVIDIA H100 data sheet (2023), SXM, half of the sparse rates",
        bf16=989.5,
        fp8=1979,
        fp32=67,
    ),
    "h200-sxm": _gpu(
        4800,
        141,
        143771,
        "NVIDIA H200 data sheet (2024), SXM, half of the sparse rates",
        bf16=989.5,
        fp8=1979,
        fp32=67,
    ),
    "b200": _gpu(
        8000,
        180,
        183359,
        "NVIDIA DGX B200 data sheet (2024), an eighth, half of the sparse rates",
        bf16=2250,
        fp8=4500,
    ),
    "rtx-3090": _gpu(
        936,
        24,
        24576,
        "NVIDIA Ampere GA102 whitepaper (2020), appendix, fp32 accumulation",
        bf16=71,
        fp32=35.6,
    ),
    "rtx-4090": _gpu(
        1008,
        24,
        24564,
        "NVIDIA Ada whitepaper (2022), appendix A, fp32 accumulation",
        bf16=165.2,
        fp8=330.3,
        fp32=82.6,
    ),
    "mi300x": _gpu(
        5300,
        192,
        196592,
        "AMD Instinct MI300X data sheet (2023)",
        bf16=1307.4,
        fp8=2614.9,
        fp32=163.4,
    ),
    "xeon-8380": _cpu(
        8,
        3200,
        40,
        64,
        2.3,
        "Intel product page of Xeon Platinum 8380, two AVX-512 FMA units",
    ),
    "xeon-8480": _cpu(
        8,
        4800,
        56,
        64,
        2.0,
        "Intel product page of Xeon Platinum 8480+, two AVX-512 FMA units, without AMX",
    ),
    "epyc-7763": _cpu(8, 3200, 64, 32, 2.45, "AMD product page of EPYC 7763, two AVX2 FMA units"),
    "epyc-9654": _cpu(
        12,
        4800,
        96,
        32,
        2.4,
        "AMD product page of EPYC 9654, AVX-512 over two 256-bit FMA units",
    ),
    "ryzen-7950x": _cpu(
        2,
        5200,
        16,
        32,
        4.5,
        "AMD product page of Ryzen 9 7950X, two 256-bit FMA units",
    ),
    "i9-13900k": _cpu(
        2,
        5600,
        8,
        32,
        3.0,
        "Intel product page of Core i9-13900K, the 8 performance cores, two AVX2 FMA units",
    ),
}
MACHINES = {name: Machine(name, *numbers) for name, numbers in _NUMBERS.items()}
"""Name -> processor."""


def machine_of(name: str) -> Machine:
    """A processor of the table.

    Raises:
        ArgumentError: there is none of this name.

    >>> machine_of("a100-80gb").bandwidth / 1e9
    2039.0
    """
    if name in MACHINES:
        return MACHINES[name]
    hint = suggest(name.lower(), MACHINES, most=3, cutoff=0.4, otherwise=".")
    raise ArgumentError(
        f"machine {name!r} is not known{hint} Known are {', '.join(MACHINES)}, and 'here', "
        "which is measured; "
        "for another one give --bandwidth and --flops"
    )


@dataclass(frozen=True)
class RooflineBound:
    """A lower bound on the time of some work: max(bytes / bandwidth, FLOPs / rate), moving and
    computing at once.

    >>> bound = RooflineBound(flops=2e12, bytes=1e9, bandwidth=1e12, rate=1e14)
    >>> bound.seconds, bound.by, bound.intensity
    (0.02, 'compute', 2000.0)

    Source: Williams et al. 2009, "Roofline: an insightful visual performance model for multicore
    architectures".
    """

    flops: float
    bytes: float
    bandwidth: float
    rate: float

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.bytes / self.bandwidth, self.flops / self.rate)

    @property
    def by(self) -> str:
        """Which of the two it is."""
        return "compute" if self.flops / self.rate > self.bytes / self.bandwidth else "memory"

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return arithmetic_intensity(self.flops, self.bytes)


def arithmetic_intensity(flops: float, moved: float) -> float:
    """FLOPs per byte that is moved; 0 where nothing is.

    >>> arithmetic_intensity(10, 4), arithmetic_intensity(0, 0)
    (2.5, 0.0)
    """
    return flops / moved if moved else 0.0


def roofline_bounds(report: CostReport, machine: Machine) -> dict[str, RooflineBound]:
    """Return the roofline bounds of the prompt and of one decoded token.

    >>> from regard.cost import CostReport, Setting, machine_of, model_of
    >>> found = roofline_bounds(CostReport(model_of("llama-3-8b"), Setting(8192)), machine_of("h100-sxm"))
    >>> {what: bound.by for what, bound in found.items()}
    {'prefill': 'compute', 'decode': 'memory'}
    """
    rate = machine.rate(report.setting.dtype)
    work = {"prefill": (report.prefill_flops, report.prefill_bytes)}
    if report.model.decodes:
        work["decode"] = report.decode_flops, report.decode_bytes
    return {
        what: RooflineBound(flops, moved, machine.bandwidth, rate)
        for what, (flops, moved) in work.items()
    }


@dataclass(frozen=True)
class MemoryFit:
    """Whether weights and caches fit a machine's memory: bytes that they need, and bytes that there
    are (0: not known).

    >>> MemoryFit(needed=3, memory=4).fits, MemoryFit(needed=5, memory=4).fits, MemoryFit(needed=5, memory=0).fits
    (True, False, None)
    """

    needed: int
    memory: int

    @property
    def fits(self) -> bool | None:
        """None where the memory is not known. Activations and what the driver keeps are not
        counted.
        """
        return self.needed <= self.memory if self.memory else None


def memory_fit(report: CostReport, machine: Machine) -> MemoryFit:
    """Weights and the caches of the whole batch, against the memory of one machine.

    >>> from regard.cost import CostReport, Setting, machine_of, model_of
    >>> report = CostReport(model_of("llama-3-70b"), Setting(4096))
    >>> memory_fit(report, machine_of("h200-sxm")).fits, memory_fit(report, machine_of("h100-sxm")).fits
    (True, False)
    """
    return MemoryFit(report.weight_bytes + report.kv_bytes, machine.memory)


def as_json(report: CostReport, machine: Machine) -> dict[str, Any]:
    """The machine, the bounds, and whether weights and caches fit its memory; null where that is
    not known.
    """
    room = memory_fit(report, machine)
    return {
        "machine": machine.name,
        "source": machine.source,
        "bandwidth": machine.bandwidth,
        "flops": machine.rate(report.setting.dtype),
        "fits": room.fits,
        "needed_bytes": room.needed,
        "memory_bytes": machine.memory or None,
        "memory_source": machine.memory_source or None,
        **{
            what: {"seconds": bound.seconds, "bound_by": bound.by}
            for what, bound in roofline_bounds(report, machine).items()
        },
    }
