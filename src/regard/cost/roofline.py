"""How fast a machine could be at best: it must move the bytes, and compute the FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.cost.bill import Bill
from regard.cost.machines import Machine


@dataclass(frozen=True)
class Bound:
    """A lower bound on the time of some work: max(bytes / bandwidth, FLOPs / rate), moving and computing at once.

    >>> bound = Bound(flops=2e12, bytes=1e9, bandwidth=1e12, rate=1e14)
    >>> bound.seconds, bound.by, bound.intensity
    (0.02, 'compute', 2000.0)

    Source: Williams et al. 2009, "Roofline: an insightful visual performance model for multicore architectures".
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
        return intensity(self.flops, self.bytes)


def intensity(flops: float, moved: float) -> float:
    """FLOPs per byte that is moved; 0 where nothing is.

    >>> intensity(10, 4), intensity(0, 0)
    (2.5, 0.0)
    """
    return flops / moved if moved else 0.0


def bounds(bill: Bill, machine: Machine) -> dict[str, Bound]:
    """Of the prompt, and of one decoded token.

    >>> from regard.cost import Bill, Setting, machine_of, model_of
    >>> found = bounds(Bill(model_of("llama-3-8b"), Setting(8192)), machine_of("h100-sxm"))
    >>> {what: bound.by for what, bound in found.items()}
    {'prefill': 'compute', 'decode': 'memory'}
    """
    rate = machine.rate(bill.setting.dtype)
    work = {"prefill": (bill.prefill_flops, bill.prefill_bytes)}
    if bill.model.decodes:
        work["decode"] = bill.decode_flops, bill.decode_bytes
    return {
        what: Bound(flops, moved, machine.bandwidth, rate) for what, (flops, moved) in work.items()
    }


@dataclass(frozen=True)
class Fit:
    """Whether weights and caches fit a machine's memory: bytes that they need, and bytes that there are (0: not known).

    >>> Fit(needed=3, memory=4).fits, Fit(needed=5, memory=4).fits, Fit(needed=5, memory=0).fits
    (True, False, None)
    """

    needed: int
    memory: int

    @property
    def fits(self) -> bool | None:
        """None where the memory is not known. Activations and what the driver keeps are not counted."""
        return self.needed <= self.memory if self.memory else None


def fit(bill: Bill, machine: Machine) -> Fit:
    """Weights and the caches of the whole batch, against the memory of one machine.

    >>> from regard.cost import Bill, Setting, machine_of, model_of
    >>> bill = Bill(model_of("llama-3-70b"), Setting(4096))
    >>> fit(bill, machine_of("h200-sxm")).fits, fit(bill, machine_of("h100-sxm")).fits
    (True, False)
    """
    return Fit(bill.weight_bytes + bill.kv_bytes, machine.memory)


def as_json(bill: Bill, machine: Machine) -> dict[str, Any]:
    """The machine, the bounds, and whether weights and caches fit its memory; null where that is not known."""
    room = fit(bill, machine)
    return {
        "machine": machine.name, "source": machine.source, "bandwidth": machine.bandwidth,
        "flops": machine.rate(bill.setting.dtype), "fits": room.fits, "needed_bytes": room.needed,
        "memory_bytes": machine.memory or None, "memory_source": machine.memory_source or None,
        **{
            what: {"seconds": bound.seconds, "bound_by": bound.by}
            for what, bound in bounds(bill, machine).items()
        },
    }  # fmt: skip
