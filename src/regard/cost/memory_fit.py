"""Whether a model runs in a memory: its weights, its caches, and what the program that runs it
takes beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from regard.cost.model import DenseSpec, LayerSpec, MoESpec
from regard.cost.report import BITS, CostReport
from regard.errors import ArgumentError

LIBRARIES = 350 << 20
"""Bytes that the driver's context and the libraries of CUDA take. vLLM's logs name 160 to 350 MiB
on one card ("non_torch_memory"), and more where several cards exchange messages.
"""
SAMPLING_BYTES = 40
"""Bytes for each logit while tokens are chosen: ten numbers of 4 bytes, for logits, probabilities,
their logarithms and sorted copies with 64-bit indices. vLLM's logs give 35 to 41.
"""
FITS, TIGHT, DOES_NOT_FIT = "fits", "tight", "does not fit"


@dataclass(frozen=True)
class Runtime:
    """What a program that serves a model takes of a memory beside weights and caches.

    The defaults are those of vLLM: `gpu_memory_utilization` 0.9 and `max_num_batched_tokens` 2048.

    Attributes:
        utilization: the share of the memory that the program may use; the rest is for CUDA graphs,
            fragmentation and other programs.
        chunk: the most tokens of prompts that are computed at once.
        reserve: bytes besides weights and caches; None counts libraries and activations.
    """

    utilization: float = 0.9
    chunk: int = 2048
    reserve: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise ArgumentError(
                f"utilization is {self.utilization}; it must be above 0 and at most 1",
                argument="utilization",
                value=self.utilization,
            )
        for name in ("chunk", "reserve"):
            value, least = getattr(self, name), 1 if name == "chunk" else 0
            if value is not None and value < least:
                raise ArgumentError(
                    f"{name} is {value}; it must be at least {least}", argument=name, value=value
                )

    def bytes_for(self, report: CostReport, shares: int = 1) -> int:
        """Return the bytes that a program takes to run a model in a setting.

        A chunk of a prompt is held as the residual stream, the input and the output of a layer, and
        as what its feed-forward layer computes between them; then the logits of the batch are
        chosen from. The larger of the two counts, and the libraries.

        Args:
            report: the model and its setting.
            shares: the ranks that divide the feed-forward layers among themselves.

        Returns:
            `reserve`, or libraries + max(chunk x activations, batch x logits).
        """
        if self.reserve is not None:
            return self.reserve
        setting, model = report.setting, report.model
        value_bytes = max(16, int(BITS[setting.dtype])) // 8
        tokens = min(self.chunk, setting.context * setting.batch)
        widest = max((_between(layer) for layer in model.layers), default=0)
        activations = tokens * (3 * model.dim + -(-widest // shares)) * value_bytes
        logits = setting.batch * model.vocab * SAMPLING_BYTES if model.decodes else 0
        return LIBRARIES + max(activations, logits)


def _between(layer: LayerSpec) -> int:
    """Return how many numbers a feed-forward layer holds for a token: its up and gate projections
    and their product; those of every expert that a token uses, with the output of each.
    """
    feed = layer.feed_forward
    if isinstance(feed, MoESpec):
        shared = 0 if feed.shared is None else _hidden(feed.shared)
        return feed.active * (_hidden(feed.expert) + feed.expert.dim) + shared
    return _hidden(feed) if isinstance(feed, DenseSpec) else 0


def _hidden(feed: DenseSpec) -> int:
    return (3 if feed.gated else 2) * feed.hidden


@dataclass(frozen=True)
class MemoryFit:
    """Whether weights and caches (`needed` bytes) fit in a memory, 0 if it is not known, beside the
    `runtime_bytes` of the program that runs them.
    """

    needed: int
    memory: int
    runtime_bytes: int = 0
    runtime: Runtime = field(default_factory=Runtime)

    @property
    def total(self) -> int:
        """The bytes of weights, caches and the program."""
        return self.needed + self.runtime_bytes

    @property
    def usable(self) -> int:
        """The bytes of the memory that the program may use."""
        return int(self.memory * self.runtime.utilization)

    @property
    def verdict(self) -> str | None:
        """`FITS`; `TIGHT`, if it needs more of the memory than the program may use; `DOES_NOT_FIT`;
        or None if the size of the memory is not known.
        """
        if not self.memory:
            return None
        if self.total <= self.usable:
            return FITS
        return TIGHT if self.total <= self.memory else DOES_NOT_FIT


def largest_that_fits(fit_of: Callable[[int], MemoryFit], limit: int) -> int | None:
    """Return the largest number up to a limit whose setting fits, by bisection; 0 if none does, and
    None if the size of the memory is not known.

    >>> largest_that_fits(lambda n: MemoryFit(n << 20, 1 << 30), 4096)
    921
    """

    def fits(n: int) -> bool:
        return fit_of(n).verdict == FITS

    if fit_of(1).verdict is None:
        return None
    if fits(limit):
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
