"""Models of public libraries, with `regard.accelerate` and without."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import regard
from benchmarks.interfaces import Outputs, Peer, PreparedCall
from benchmarks.problems.public_model import PublicModelProblem
from regard.integrations.pytorch import CallCounts
from regard.units import plural

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
    """Prepare the step as a model under `regard.accelerate`; the kernel is the counts of its
    attention calls.
    """
    step = regard.accelerate(_Step(problem))
    with regard.accelerate() as calls:
        problem.step()
    return PreparedCall(step, _output, describe_calls(calls))


class AttentionTimer(TorchFunctionMode):
    """A mode that measures the time in `F.scaled_dot_product_attention`.

    Attributes:
        seconds: the time in attention calls.
    """

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
    """Prepare the step as it is; the kernel is the share of attention in the time of a step.

    torch's fused layers do not call the attention function, so that nothing is said of them.
    """
    problem.step()
    with AttentionTimer() as timer:
        start = time.perf_counter()
        problem.step()
        share = timer.seconds / (time.perf_counter() - start)
    return PreparedCall(problem.step, _output, f"{share:.0%} in attention" if share else "")


def describe_calls(calls: CallCounts) -> str:
    """Return how many calls ran on each kernel, and how many torch ran, with the reasons.

    Args:
        calls: the counts.

    Returns:
        One line.

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


def peers(*needs: str) -> tuple[Peer[PublicModelProblem], Peer[PublicModelProblem]]:
    """Return the two peers for models that need some modules.

    Args:
        needs: the names of the modules that build the models.

    Returns:
        The peer with `regard.accelerate`, and the one without.
    """
    source = f" Models of {', '.join(needs)}." if needs else " Models of torch."
    make = partial(Peer[PublicModelProblem], needs=needs)
    return (
        make(ACCELERATED, f"The model under regard.accelerate.{source}", accelerated),
        make(PLAIN, f"The model as it is.{source}", plain),
    )
