"""Inference of a published architecture, built with random weights by its public library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.interfaces import MinimumWork, Outputs, Problem, ProblemSizes
from regard.process_state import seeded
from regard.units import plural


class BuiltModel(NamedTuple):
    """A model of a public library.

    Attributes:
        module: the model; its parameters are converted to the dtype of the problem.
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
        batch: the number of batch rows.
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
        """Return the sizes with another number of tokens or of batch rows."""
        tokens = (length or self.tokens) if self.tokens else 0
        return replace(self, tokens=tokens, batch=batch or self.batch)

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the estimate of the memory that the builder of the sizes gave."""
        return self.memory

    def problem(self, dtype: torch.dtype, device: torch.device) -> PublicModelProblem:
        """Build the model with the same random weights each time, and return the problem."""
        return PublicModelProblem(self, dtype, device)

    def __str__(self) -> str:
        widths = "a few dims" if self.narrow else self.widths
        length = f" S{self.tokens}" if self.tokens else ""
        return f"{widths}, {plural(self.layers, 'layer')}, B{self.batch}{length}"


class PublicModelProblem(Problem):
    """One forward pass or one decoding step of a model with random weights.

    The output is "out". Its reference is the same model with its parameters in a wider dtype.

    Args:
        sizes: the sizes.
        dtype, device: the dtype and the device of the parameters.

    >>> layer = nn.Linear(2, 2)
    >>> built = BuiltModel(layer, lambda dtype: lambda: layer(torch.ones(1, 2, dtype=dtype)))
    >>> sizes = PublicModelSizes(lambda sizes: built, "a linear map", layers=1)
    >>> problem = sizes.problem(torch.bfloat16, torch.device("cpu"))
    >>> problem.step().dtype, problem.reference()["out"].dtype
    (torch.bfloat16, torch.float32)
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

    @property
    def work(self) -> MinimumWork:
        """No work is counted for a model whose operations are not ours."""
        return MinimumWork(0, 0)

    def reference(self) -> Outputs:
        """Return the output of the model in fp64, or in fp32 for half types."""
        wide = torch.float64 if self.dtype == torch.float32 else torch.float32
        with torch.no_grad(), _converted(self.module, wide):
            return {"out": self._prepare(wide)()}

    def plain(self) -> Outputs:
        """Return the output of the model as its library computes it; {} in fp32, where the allowed
        error does not depend on it.
        """
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
