"""The parts of a benchmark: a case has sizes, sizes create a problem, peers solve problems."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

Outputs: TypeAlias = Mapping[str, Tensor]
"""The outputs of a solution by name, in the layout of the problem."""


class MinimumWork(NamedTuple):
    """The least work that a problem takes.

    Attributes:
        flops: floating-point operations.
        bytes: bytes that are read and written.
    """

    flops: int
    bytes: int


class Problem(ABC):
    """The inputs of a computation, and its right outputs.

    Attributes:
        train: whether the outputs include the gradients.
        dtype, device: the dtype and the device of the inputs.
    """

    train: bool = False
    dtype: torch.dtype
    device: torch.device

    @property
    @abstractmethod
    def work(self) -> MinimumWork:
        """The least work that the problem takes."""

    @abstractmethod
    def reference(self) -> Outputs:
        """Compute the right outputs from the definition in a wider dtype.

        Returns:
            The outputs by name.
        """

    @abstractmethod
    def plain(self) -> Outputs:
        """Compute the outputs in a straightforward way in the problem's own dtype.

        Returns:
            The outputs by name.
        """

    def checked(self, outputs: Outputs) -> Outputs:
        """Select the part of a peer's outputs that the reference has values for.

        Args:
            outputs: the peer's outputs by name.

        Returns:
            The outputs to compare with the reference.
        """
        return outputs


class ProblemSizes(ABC):
    """The sizes of a problem; a subclass is a frozen dataclass."""

    @abstractmethod
    def resized(self, *, length: int | None = None, batch: int | None = None) -> ProblemSizes:
        """Return the sizes with another number of tokens or of batch rows.

        Args:
            length: tokens; None changes nothing.
            batch: batch rows; None changes nothing.

        Returns:
            The new sizes.
        """

    @abstractmethod
    def bytes(self, dtype: torch.dtype) -> int:
        """Estimate the memory that the problem and its reference take.

        Args:
            dtype: the dtype of the inputs.

        Returns:
            The memory in bytes.
        """

    @abstractmethod
    def problem(self, dtype: torch.dtype, device: torch.device) -> Problem:
        """Create a problem of these sizes, with the same random inputs each time.

        Args:
            dtype, device: the dtype and the device of the inputs.

        Returns:
            The problem.
        """


P = TypeVar("P", bound=Problem)


class PreparedCall(NamedTuple):
    """The call with which a peer solves one problem, with inputs in the layout of the peer.

    Attributes:
        step: the function that is timed.
        read: converts the result of `step` to outputs by name.
        kernel: the name of the kernel that runs, or "".
        figures: returns further figures of the steps by name, after they have been timed; None if
            there are none.
        settle: waits until the threads of a peer in a process of its own sleep; None for a peer in
            this process.
    """

    step: Callable[[], object]
    read: Callable[[Any], Outputs]
    kernel: str = ""
    figures: Callable[[], Mapping[str, float]] | None = None
    settle: Callable[[], object] | None = None


def always_supported(_: object) -> str | None:
    """Accept every problem; the default of `Peer.why_not`.

    Args:
        _: the problem, which is not used.

    Returns:
        None.
    """
    return None


def no_extra_bytes(_: object) -> int:
    """Need no memory beyond the problem; the default of `Peer.bytes`.

    Args:
        _: the problem, which is not used.

    Returns:
        0.
    """
    return 0


@dataclass(frozen=True)
class Peer(Generic[P]):
    """An implementation that solves problems.

    Args:
        name: the name in tables.
        description: one sentence.
        prepare: a function that converts a problem's inputs to the peer's layout and returns the
            prepared call.
        needs: the names of the modules that the peer imports.
        why_not: a function that returns why the peer cannot solve a problem, or None if it can.
        bytes: a function that returns how much memory the peer needs beyond the problem, in bytes.
        own_process: whether it is timed in a process of its own (`own_process`), because its
            threads would slow down the other peers.

    >>> prepare = lambda problem: PreparedCall(int, dict)
    >>> Peer("x", "Nothing.", prepare, needs=("no_such_module",)).missing()
    'no module no_such_module'
    """

    name: str
    description: str
    prepare: Callable[[P], PreparedCall]
    needs: tuple[str, ...] = ()
    why_not: Callable[[P], str | None] = always_supported
    bytes: Callable[[P], int] = no_extra_bytes
    own_process: bool = False

    def missing(self) -> str | None:
        """Find the modules that the peer needs and that are not installed.

        Returns:
            A sentence with their names, or None if all are installed.
        """
        absent = [name for name in self.needs if not _installed(name)]
        return f"no module {', '.join(absent)}" if absent else None


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
        name, description: shown in tables.
        sizes: the sizes "small", "default" and "paper".
        dtypes: the dtypes that are measured unless others are asked for.
        peers: the peers; ratios are relative to the first one, which is regard.
        devices: the types of devices on which the case is measured.
    """

    name: str
    description: str
    sizes: Mapping[str, ProblemSizes]
    dtypes: tuple[torch.dtype, ...]
    peers: tuple[Peer[Any], ...]
    devices: tuple[str, ...] = ("cpu", "cuda")

    def why_not(self, device: torch.device) -> str:
        """Return why the case is not measured on a device, or "".

        Args:
            device: the device.

        Returns:
            A sentence without a period.
        """
        if device.type in self.devices:
            return ""
        return f"{self.name} is measured on {' or '.join(self.devices)} only"
