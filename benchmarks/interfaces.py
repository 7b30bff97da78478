"""The parts of a benchmark: a case has sizes, sizes create a problem, peers solve problems."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SIZES = ("small", "default", "paper")
"""The names of the sizes: "small" takes about a second, "default" is measured in
docs/benchmarks.md, and "paper" is the largest size that papers report.
"""
Outputs: TypeAlias = Mapping[str, Tensor]
"""The outputs of a solution by name, in the layout of the problem."""


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


class MinimumWork(NamedTuple):
    """The least work that a problem takes, in FLOPs and bytes."""

    flops: int
    bytes: int


class Problem(ABC):
    """The inputs of a computation, and its right outputs."""

    train: bool = False
    dtype: torch.dtype
    device: torch.device

    @property
    def work(self) -> MinimumWork:
        """The least work that the problem takes; 0 where nothing is counted."""
        return MinimumWork(0, 0)

    @abstractmethod
    def reference(self) -> Outputs:
        """Compute the right outputs by name from the definition, in a wider dtype."""

    @abstractmethod
    def plain(self) -> Outputs:
        """Compute the outputs plainly in the problem's dtype, or {} if no bound needs them."""

    def checked(self, outputs: Outputs) -> Outputs:
        """Return the part of a peer's outputs that the reference has values for."""
        return outputs


@dataclass(frozen=True)
class ProblemSizes(ABC):
    """The sizes of a problem; a subclass is a frozen dataclass, whose text is shown in tables."""

    def resized(self, *, length: int | None = None, batch: int | None = None) -> Self:
        """Return the sizes with another number of tokens S or of batch rows B, if they have it."""
        wanted: dict[str, Any] = {"S": length, "B": batch}
        return replace(self, **{k: n for k, n in wanted.items() if n and hasattr(self, k)})

    @abstractmethod
    def bytes(self, dtype: torch.dtype) -> int:
        """Estimate the memory in bytes that the problem and its reference take."""

    @abstractmethod
    def problem(self, dtype: torch.dtype, device: torch.device) -> Problem:
        """Create a problem of these sizes, with the same random inputs each time."""


P = TypeVar("P", bound=Problem)


class PreparedCall(NamedTuple):
    """The call with which a peer solves one problem, with inputs in the layout of the peer.

    Attributes:
        read: converts the result of `step` to outputs by name.
        kernel: the name of the kernel that runs, or "".
        figures: returns further figures of the steps by name, after they have been timed; None if
            there are none.
        settle: waits until the threads of a peer in a process of its own sleep; None for a peer in
            this process.
        owner: an object that must live as long as the call, such as the folder of a model.
    """

    step: Callable[[], object]
    read: Callable[[Any], Outputs]
    kernel: str = ""
    figures: Callable[[], Mapping[str, float]] | None = None
    settle: Callable[[], object] | None = None
    owner: object = None


@dataclass(frozen=True)
class Peer(Generic[P]):
    """An implementation that solves problems.

    Args:
        prepare: a function that converts a problem's inputs to the peer's layout and returns the
            prepared call.
        devices: the types of devices on which the peer can compute.
        dtypes: the dtypes that the peer has; None is all.
        why_not: a function that returns why the peer cannot solve a problem, or None if it can;
            None accepts every problem.
        bytes: a function that returns how much memory the peer needs beyond the problem, in bytes.
        own_process: whether it is timed in a process of its own (`runner.PeerProcess`), because its
            threads would slow down the other peers.
    """

    name: str
    description: str
    prepare: Callable[[P], PreparedCall]
    needs: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] | None = None
    why_not: Callable[[P], str | None] | None = None
    bytes: Callable[[P], int] | None = None
    own_process: bool = False

    def missing(self) -> str | None:
        """Return which modules that the peer needs are not installed, or None."""
        absent = [name for name in self.needs if not _installed(name)]
        return f"no module {', '.join(absent)}" if absent else None

    def refusal(self, problem: P) -> str | None:
        """Return why the peer cannot solve a problem, or None if it can."""
        if problem.device.type not in self.devices:
            return f"runs on {' or '.join(self.devices)} only"
        if self.dtypes is not None and problem.dtype not in self.dtypes:
            return f"has no {name_of(problem.dtype)}"
        return None if self.why_not is None else self.why_not(problem)

    def extra_bytes(self, problem: P) -> int:
        """Return how much memory the peer needs beyond the problem, in bytes."""
        return 0 if self.bytes is None else self.bytes(problem)


def _installed(name: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec, which a test has put into sys.modules
        return True


@dataclass(frozen=True)
class Case:
    """A comparison of several peers on one kind of problem.

    Args:
        sizes: the sizes "small", "default" and "paper".
        dtypes: the dtypes that are measured unless others are asked for.
        peers: the peers; ratios are relative to the first one, which is regard.
    """

    name: str
    description: str
    sizes: Mapping[str, ProblemSizes]
    dtypes: tuple[torch.dtype, ...]
    peers: tuple[Peer[Any], ...]
    devices: tuple[str, ...] = ("cpu", "cuda")

    def why_not(self, device: torch.device) -> str:
        """Return why the case is not measured on a device, or ""."""
        if device.type in self.devices:
            return ""
        return f"{self.name} is measured on {' or '.join(self.devices)} only"
