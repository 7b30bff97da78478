"""Machines and the roofline model: the least time that a model needs on a machine, and whether it
fits in its memory.

The rates of GPUs are those of dense matrix products in the vendor's data sheet. If the data sheet
gives the doubled rate of sparse matrices, the table has half of it. The memory of a GPU is the
total that its driver reports (`memory.total` of nvidia-smi, or the pool that rocminfo lists), in
MiB, with ECC in its default state. This is neither the number in the data sheet times 10^9 nor that
number times 2^30: a GPU that is sold with 141 GB reports 143,771 MiB, which is 140.4 GiB, and a GPU
that is sold with 80 GB reports 79.6 GiB (H100) or 80 GiB (A100). CUDA itself takes a few hundred
MiB of it. The numbers of CPUs are channels x transfers per second x 8 bytes, and cores x FLOPs per
cycle x base clock, which no program reaches; `regard cost --machine here` measures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from regard.cost.memory_fit import MemoryFit, Runtime, largest_that_fits
from regard.cost.report import CostReport
from regard.did_you_mean import suggest
from regard.errors import ArgumentError

COMPUTE_FORMAT = {
    **dict.fromkeys(("int2", "int4", "int8", "fp8", "fp16"), "bf16"),
    "bf16": "fp32",
}
"""Format -> the format in which its products are computed if a machine has no rate for it: integer
codes are dequantized first, and fp16 is as fast as bf16.
"""


_TABLE = json.loads(Path(__file__).with_name("machines.json").read_text(encoding="utf-8"))
LINKS: dict[str, tuple[float, str]] = {
    name: (rate * 1e9, source) for name, (rate, source) in _TABLE["links"].items()
}
"""Bytes per second that one rank sends to others inside a node, by machine, with the source."""


@dataclass(frozen=True)
class Machine:
    """A processor: bytes per second, FLOPs per second by number format, and bytes of memory (0 if
    they are not known), with the sources of these numbers; and the program that runs models on it.

    Attributes:
        cards: how many such processors divide each matrix and the heads of attention (tensor
            parallelism).
        link: bytes per second that each of them sends; None takes that of `LINKS`.
        host: bytes per second at which experts are read that stay in the memory of the host; None
            keeps them on the cards.
    """

    name: str
    bandwidth: float
    flops: Mapping[str, float]
    memory: int
    source: str
    memory_source: str = ""
    runtime: Runtime = field(default_factory=Runtime)
    cards: int = 1
    link: float | None = None
    host: float | None = None

    @property
    def label(self) -> str:
        """The name, with the number of cards if there are several."""
        return self.name if self.cards == 1 else f"{self.cards} x {self.name}"

    @property
    def link_rate(self) -> float | None:
        """Bytes per second that a card sends to the others; None if that is not known."""
        return self.link or LINKS.get(self.name, (None,))[0]

    def rate(self, dtype: str) -> float:
        """Return the FLOPs per second in a number format, or in the one it is computed in."""
        while dtype not in self.flops:
            dtype = COMPUTE_FORMAT.get(dtype, next(iter(self.flops)))
        return self.flops[dtype]


def _gpu(
    bandwidth: float, advertised_gb: int, memory_mib: int, source: str, **teraflops: float
) -> tuple[float, dict[str, float], int, str, str]:
    """Return the fields of a GPU from GB/s, the GB that it is sold with, the MiB that its driver
    reports (0 if no report is known to us), the source, and TFLOP/s by format.
    """
    tool = "rocminfo" if source.startswith("AMD") else "nvidia-smi"
    memory = f"{memory_mib:,} MiB in all by {tool}, sold as {advertised_gb} GB"
    if not memory_mib:
        # the smaller reading of "GB", because what the driver reports is not confirmed
        memory_mib = advertised_gb * 10**9 >> 20
        memory = (
            f"the vendor's {advertised_gb} GB (10^9 bytes); what its driver reports is unconfirmed"
        )
    rates = {k: v * 1e12 for k, v in teraflops.items()}
    return bandwidth * 1e9, rates, memory_mib << 20, source, memory


def _cpu(
    channels: int, rate: int, cores: int, per_cycle: int, clock: float, source: str
) -> tuple[float, dict[str, float], int, str, str]:
    """Return a CPU's fields from memory channels, MT/s, cores, FLOPs per cycle and core, GHz."""
    formula = (
        f"{channels} x {rate} MT/s x 8 bytes; {cores} cores x {per_cycle} fp32 FLOPs x {clock} GHz"
    )
    rates = {"fp32": cores * per_cycle * clock * 1e9}
    return channels * rate * 8e6, rates, 0, f"{source}: {formula}", ""


def _chip(
    bandwidth: float, source: str, **teraflops: float
) -> tuple[float, dict[str, float], int, str, str]:
    """Return the fields of a chip whose memory is not known."""
    return bandwidth * 1e9, {k: v * 1e12 for k, v in teraflops.items()}, 0, source, ""


def _apple(
    bandwidth: float, cores: int, clock: float, memory: int, year: int
) -> tuple[float, dict[str, float], int, str, str]:
    """Return the fields of an Apple chip from GB/s, GPU cores, their GHz, and the largest GiB."""
    source = (
        f"Apple press release ({year}) for the bandwidth; {cores} GPU cores x 256 fp32 FLOPs x "
        f"{clock} GHz, a clock that others measured, because Apple gives no rate"
    )
    note = (
        f"the largest that Apple sells, {memory} GB, shared with the CPU; macOS leaves about three "
        "quarters to the GPU: --utilization 0.75"
    )
    return bandwidth * 1e9, {"fp32": cores * 256 * clock * 1e9}, memory << 30, source, note


_KINDS: dict[str, Callable[..., tuple[float, dict[str, float], int, str, str]]] = {
    "gpu": _gpu,
    "cpu": _cpu,
    "chip": _chip,
    "apple": _apple,
}
MACHINES = {
    name: Machine(name, *_KINDS[row.pop("kind")](**row)) for name, row in _TABLE["machines"].items()
}
"""The processors of `machines.json` by name."""


def machine_of(name: str) -> Machine:
    """Return a processor of the table by its name.

    Args:
        name: a name that `regard cost --list` prints, such as "h100-sxm", or "8xh100-sxm" for
            several.

    Returns:
        Its bandwidth, rates and memory, with their sources.

    Raises:
        ArgumentError: there is no processor of this name.

    >>> machine_of("a100-80gb").bandwidth / 1e9
    2039.0
    """
    if several := re.fullmatch(r"([1-9]\d{0,3})x(.+)", name):
        return replace(machine_of(several[2]), cards=int(several[1]))
    if name in MACHINES:
        return MACHINES[name]
    hint = suggest(name.lower(), MACHINES, most=3, cutoff=0.4, otherwise=".")
    raise ArgumentError(
        f"machine {name!r} is not known{hint} Known machines are {', '.join(MACHINES)}, and "
        "'here' measures this machine; for another machine give --bandwidth and --flops",
        argument="machine",
        value=name,
    )


@dataclass(frozen=True)
class RooflineBound:
    """A lower bound on a time: max(bytes / bandwidth, FLOPs / rate), as memory and arithmetic
    overlap, and the seconds of messages between cards and of reading experts from the host, which
    follow one another. Source: Williams et al. 2009, "Roofline".
    """

    flops: float
    bytes: float
    bandwidth: float
    rate: float
    messages: float = 0.0
    host: float = 0.0

    @property
    def _times(self) -> dict[str, float]:
        times = {"memory": self.bytes / self.bandwidth, "compute": self.flops / self.rate}
        return times | {"messages": self.messages, "host": self.host}

    @property
    def seconds(self) -> float:
        """The larger of the two times, with the messages and the host, in seconds."""
        times = self._times
        return max(times["memory"], times["compute"]) + self.messages + self.host

    @property
    def by(self) -> str:
        """Which of the times is the largest: "memory", "compute", "messages" or "host"."""
        return max(self._times, key=self._times.__getitem__)

    @property
    def intensity(self) -> float:
        """The arithmetic intensity, in FLOPs per byte."""
        return arithmetic_intensity(self.flops, self.bytes)


def arithmetic_intensity(flops: float, moved: float) -> float:
    """Return the FLOPs for each of the `moved` bytes, or 0 if no bytes are moved."""
    return flops / moved if moved else 0.0


def roofline_bounds(report: CostReport, machine: Machine) -> dict[str, RooflineBound]:
    """Return the roofline bounds of the prompt and of one decoded token; of several cards, each of
    which computes its part of both, with the sums that they exchange.
    """
    cards, batch = machine.cards, report.setting.batch
    work = {"prefill": (report.prefill_flops, report.prefill_bytes(cards), report.prompt_tokens)}
    if report.model.decodes:
        work["decode"] = report.decode_flops, report.decode_bytes(cards), batch
    return {
        what: card_bound(report, machine, flops, moved, tokens)
        for what, (flops, moved, tokens) in work.items()
    }


def card_bound(
    report: CostReport, machine: Machine, flops: int, moved: int, tokens: int
) -> RooflineBound:
    """Return the bound of one card that moves so many bytes, of work for so many tokens."""
    cards, link, host = machine.cards, machine.link_rate, 0.0
    if machine.host is not None:
        experts = report.expert_bytes(tokens)
        moved, host = moved - experts // cards, experts / machine.host
    sent = 0.0
    if cards > 1 and link is not None:
        # two sums of a ring in each layer: after attention, and after the feed-forward layer
        one = ring_bytes(tokens * report.model.dim * 2, cards)
        sent = len(report.model.layers) * 2 * one / link
    rate = machine.rate(report.compute_format)
    return RooflineBound(flops / cards, moved, machine.bandwidth, rate, sent, host)


def ring_bytes(size: int, cards: int) -> float:
    """Return the bytes that a card sends to sum so many bytes over a ring: 2 (n - 1) / n of them.
    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms".
    """
    return 2 * (cards - 1) * size / cards


def memory_fit(report: CostReport, machine: Machine, *, by_sequence: bool = False) -> MemoryFit:
    """Return whether a model with the caches of the batch runs in the memory of a machine, or in
    that of each of its cards; `by_sequence` is that of `CostReport.held_bytes`.
    """
    cards, runtime = machine.cards, machine.runtime
    needed = report.held_bytes(cards, by_sequence=by_sequence)
    if machine.host is not None:
        needed -= -(-report.expert_bytes() // cards)
    taken = runtime.bytes_for(report, cards)
    return MemoryFit(needed, machine.memory, taken, runtime)


MAX_BATCH = 1 << 20
"""The largest batch that is tried; what fits more has no limit in practice."""
MAX_CONTEXT = 1 << 30
"""The longest context that is tried, likewise."""


def largest_batch(report: CostReport, machine: Machine, *, by_sequence: bool = False) -> int | None:
    """Return the largest batch of a model at its context that fits in a machine's memory."""

    def fit(batch: int) -> MemoryFit:
        one = CostReport(report.model, replace(report.setting, batch=batch))
        return memory_fit(one, machine, by_sequence=by_sequence)

    return largest_that_fits(fit, MAX_BATCH)


def largest_context(report: CostReport, machine: Machine) -> int | None:
    """Return the longest context of a model at its batch that fits in a machine's memory."""

    def fit(context: int) -> MemoryFit:
        prefix = min(report.setting.shared_prefix, context - 1)
        setting = replace(report.setting, context=context, shared_prefix=prefix)
        return memory_fit(CostReport(report.model, setting), machine)

    return largest_that_fits(fit, report.model.max_context or MAX_CONTEXT)


def as_json(report: CostReport, machine: Machine) -> dict[str, object]:
    """Return the machine, the bounds, and whether the memory suffices: "fits", "tight", "does not
    fit", or null if its size is not known.
    """
    memory = memory_fit(report, machine)
    return {
        "machine": machine.name,
        "cards": machine.cards,
        "source": machine.source,
        "bandwidth": machine.bandwidth,
        "flops": machine.rate(report.compute_format),
        "fit": memory.verdict,
        "needed_bytes": memory.needed,
        "runtime_bytes": memory.runtime_bytes,
        "usable_bytes": memory.usable or None,
        "memory_bytes": machine.memory or None,
        "memory_source": machine.memory_source or None,
        **{
            work: {"seconds": bound.seconds, "bound_by": bound.by}
            for work, bound in roofline_bounds(report, machine).items()
        },
    }
