"""Inference of public libraries' architectures, with and without `regard.accelerate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import regard
from benchmarks.interfaces import (
    Outputs,
    Peer,
    PreparedCall,
    Problem,
    ProblemSizes,
)
from regard.integrations.pytorch import CallCounts
from regard.process_state import seeded
from regard.units import plural


class BuiltModel(NamedTuple):
    """A model of a public library.

    Attributes:
        prepare: a function that creates the inputs, and the cache where there is one, in a dtype,
            and returns the step that is timed. A step leaves its inputs and its cache unchanged.
    """

    module: nn.Module
    prepare: Callable[[torch.dtype], Callable[[], Tensor]]


@dataclass(frozen=True)
class PublicModelSizes(ProblemSizes):
    """The sizes of a model of a public library.

    Args:
        build: a function that builds the model in fp32 for these sizes.
        widths: which published model has these widths; shown in tables.
        layers: the number of layers; fewer than the published model has.
        tokens: the number of tokens, or of cached tokens in a decoding step; 0 where the model
            fixes it.
        narrow: whether widths are reduced to a few dims, for a run of milliseconds.
        memory: an estimate of the memory of the problem and its reference in bytes.
    """

    build: Callable[[PublicModelSizes], BuiltModel]
    widths: str
    layers: int
    tokens: int = 0
    batch: int = 1
    narrow: bool = False
    memory: int = 3 << 30

    def resized(self, *, length: int | None = None, batch: int | None = None) -> PublicModelSizes:
        tokens = (length or self.tokens) if self.tokens else 0
        return replace(self, tokens=tokens, batch=batch or self.batch)

    def bytes(self, dtype: torch.dtype) -> int:
        return self.memory

    def problem(self, dtype: torch.dtype, device: torch.device) -> PublicModelProblem:
        return PublicModelProblem(self, dtype, device)

    def __str__(self) -> str:
        widths = "a few dims" if self.narrow else self.widths
        length = f" S{self.tokens}" if self.tokens else ""
        return f"{widths}, {plural(self.layers, 'layer')}, B{self.batch}{length}"


class PublicModelProblem(Problem):
    """One forward pass or one decoding step of a model with random weights.

    The output is "out". Its reference is the same model with its parameters in a wider dtype.
    """

    def __init__(self, sizes: PublicModelSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        with seeded(0):
            built = sizes.build(sizes)
        self.module, self._prepare = built.module.eval().to(dtype), built.prepare
        self._step = self._prepare(dtype)

    def step(self) -> Tensor:
        """Run the model once without gradients, and return its output."""
        with torch.no_grad():
            return self._step()

    def reference(self) -> Outputs:
        """Return the output of the model in fp64, or in fp32 for half types."""
        wide = torch.float64 if self.dtype == torch.float32 else torch.float32
        with torch.no_grad(), _converted(self.module, wide):
            return {"out": self._prepare(wide)()}

    def plain(self) -> Outputs:
        """Return the output of the library's model; {} in fp32, whose bound does not need it."""
        return {} if self.dtype == torch.float32 else {"out": self.step()}


@contextmanager
def _converted(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Convert the parameters to a wider dtype for a block; the conversion back is exact."""
    before = next(module.parameters()).dtype
    module.to(dtype)
    try:
        yield
    finally:
        module.to(before)


ACCELERATED, PLAIN = "regard.accelerate", "torch"
"""The names of the two peers."""


class _Step(nn.Module):
    """A module whose forward pass is the step of a problem."""

    def __init__(self, problem: PublicModelProblem) -> None:
        super().__init__()
        self.problem = problem

    def forward(self) -> Tensor:
        return self.problem.step()


def accelerated(problem: PublicModelProblem) -> PreparedCall:
    """Prepare the step under `regard.accelerate`; the kernel is the counts of its calls."""
    step = regard.accelerate(_Step(problem))
    with regard.accelerate() as calls:
        problem.step()
    return PreparedCall(step, _output, describe_calls(calls))


class AttentionTimer(TorchFunctionMode):
    """A mode that measures the time in `F.scaled_dot_product_attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run a function of torch; the time of an attention call is added."""
        timed = func is _TORCH_ATTENTION
        if not timed:
            return func(*args, **(kwargs or {}))
        start = time.perf_counter()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.seconds += time.perf_counter() - start


# not F.scaled_dot_product_attention, which may be replaced already
_TORCH_ATTENTION = torch._C._nn.scaled_dot_product_attention


def plain(problem: PublicModelProblem) -> PreparedCall:
    """Prepare the step; the kernel is the share of attention, which fused layers hide."""
    problem.step()
    with AttentionTimer() as timer:
        start = time.perf_counter()
        problem.step()
        share = timer.seconds / (time.perf_counter() - start)
    return PreparedCall(problem.step, _output, f"{share:.0%} in attention" if share else "")


def describe_calls(calls: CallCounts) -> str:
    """Return how many calls ran on each kernel, and how many torch ran, with the reasons.

    >>> from collections import Counter
    >>> describe_calls(CallCounts(taken=Counter(cpu=2), left=Counter({"it is small": 1})))
    'cpu 2; torch 1 (it is small)'
    >>> describe_calls(CallCounts(left=Counter({"it is small": 4})))
    '4 calls left to torch because it is small'
    >>> describe_calls(CallCounts())
    'no attention call was seen'
    """
    taken = ", ".join(f"{name} {n}" for name, n in calls.taken.most_common())
    number = sum(calls.left.values())
    reasons = "; ".join(why for why, _ in calls.left.most_common())
    if not number:
        return taken or "no attention call was seen"
    if not taken:
        return f"{plural(number, 'call')} left to torch because {reasons}"
    return f"{taken}; torch {number} ({reasons})"


def _output(out: Tensor) -> Outputs:
    return {"out": out}


def accelerated_peers(*needs: str) -> tuple[Peer[PublicModelProblem], Peer[PublicModelProblem]]:
    """Return the two peers for models that need some modules."""
    source = f" Models of {', '.join(needs)}." if needs else " Models of torch."
    make = partial(Peer[PublicModelProblem], needs=needs)
    return (
        make(ACCELERATED, f"The model under regard.accelerate.{source}", accelerated),
        make(PLAIN, f"The model as it is.{source}", plain),
    )
