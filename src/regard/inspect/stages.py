"""One layer of attention stage by stage: the tensor that each makes, its shape, mean and deviation,
and the time that it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard import Trace, attend, attention_weights
from regard.errors import ArgumentTypeError
from regard.inspect.parts import Tensors
from regard.masks import Mask
from regard.nn import Attention
from regard.nn.projections import aimed, facing
from regard.span import Span

ROUNDS = 5
"""Each stage is timed so often, and the fastest counts."""


class Stage(NamedTuple):
    """What one stage made.

    name: q, k, v, scores, masked, weights, z or out.
    equation: how it follows from the stages before it.
    values: the tensor.
    seconds: the fastest of some runs of this stage alone.

    >>> Stage("q", "W_q x", torch.zeros(1, 2, 3, 4), 1e-3).told()
    Tensors(name='q', equation='W_q x', shape=(1, 2, 3, 4), mean=0.0, std=0.0, seconds=0.001)
    """

    name: str
    equation: str
    values: Tensor
    seconds: float

    def told(self) -> Tensors:
        """The stage in numbers: mean and deviation of what is finite, since masked scores are minus
        infinity.
        """
        return told(self.name, self.equation, self.values, self.seconds)


def told(name: str, equation: str, values: Tensor, seconds: float | None) -> Tensors:
    """A tensor in numbers: its shape, and the mean and the deviation of its finite entries.

    >>> told("masked", "", torch.tensor([1.0, 3.0, -torch.inf]), None)[2:]
    ((3,), 2.0, 1.0, None)
    """
    finite = values[values.isfinite()].double()
    mean, std = (
        (float(finite.mean()), float(finite.std(correction=0))) if len(finite) else (0.0, 0.0)
    )
    return Tensors(name, equation, tuple(values.shape), mean, std, seconds)


@torch.no_grad()
def stages(
    attention: Attention, x: Float[Tensor, "B T M"], *, scores: bool = True
) -> tuple[Stage, ...]:
    """Run one layer of self-attention in evaluation mode, a stage at a time, and keep what each of
    them makes.

    q, k, v -> scores = scale q k^T (softcap, bias) -> masked -> weights = softmax(masked) -> z ->
    out = W_O [z_1 .. z_H]

    The middle is computed from the definition so that it can be shown; z comes from the kernel that
    the layer uses anyway, which makes no scores or weights of its own.

    Args:
        attention: an assembled softmax attention.
        x: its input, at positions from 0.
        scores: whether the stages of size H T^2 are made: scores, masked and weights.

    Raises:
        ArgumentTypeError: the module is no softmax attention over its own input.

    >>> from regard.nn.variants import mha
    >>> [stage.name for stage in stages(mha(8, 2), torch.zeros(1, 3, 8))]
    ['q', 'k', 'v', 'scores', 'masked', 'weights', 'z', 'out']

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.
    """
    if type(attention) is not Attention:
        raise ArgumentTypeError(
            f"attention is a {type(attention).__name__}; its stages are known of "
            "regard.nn.Attention, "
            "softmax attention over its own input: give one, such as regard.nn.variants.mha(512, 8)"
        )
    was_training = attention.training
    attention.eval()
    try:
        return tuple(_made(attention, x, scores=scores))
    finally:
        attention.train(was_training)


def _made(attention: Attention, x: Tensor, *, scores: bool) -> list[Stage]:
    at, found = Span(0, x.shape[1]), []
    project = facing(attention.project, x.shape[1], x.shape[1])

    def stage(name: str, equation: str, run: Callable[[], Tensor]) -> Tensor:
        values, seconds = timed(run)
        found.append(Stage(name, equation, values, seconds))
        return values

    q = stage("q", "W_q x, in heads", lambda: aimed(project, project.query(x, at), at, at))
    memory = project.remember(x, at)
    both = project.recall(memory, at)
    # keys and values come of one call: each is told with the time of both
    _, seconds = timed(lambda: project.recall(project.remember(x, at), at)[0])
    k, v = both
    found += [Stage("k", "W_k x, in heads", k, seconds), Stage("v", "W_v x, in heads", v, seconds)]
    scale = project.shape.D**-0.5 if attention.scale is None else attention.scale
    options: dict[str, Any] = {
        "bias": attention._bias(),
        "scale": scale,
        "softcap": attention.softcap,
    }
    options |= {"q_positions": at, "k_positions": at}

    def scored(mask: Mask | None) -> Tensor:
        with Trace("scores") as trace:
            attend(q, k, v, mask=mask, backend="reference", **options)
        return trace["scores"]

    mask, sink = attention.mask, attention.sink
    if scores:
        stage("scores", "scale q k^T", lambda: scored(None))
        stage("masked", "-inf where the mask says no", lambda: scored(mask))
        stage(
            "weights",
            "softmax(masked)",
            lambda: attention_weights(q, k, mask=mask, sink=sink, **options),
        )
    z = stage(
        "z",
        "weights v, by the layer's kernel",
        lambda: project.finish(attend(q, k, v, mask=mask, sink=sink, **options), x),
    )
    stage("out", "W_O [z_1 .. z_H]", lambda: attention.output(z.transpose(1, 2).flatten(2)))
    return found


def timed(run: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What a stage makes, and the seconds of the fastest of some runs.

    >>> timed(lambda: torch.ones(2))[0]
    tensor([1., 1.])
    """
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        values = run()
        times.append(time.perf_counter() - start)
    return values, min(times)


MOST_PAIRS = 2**22
"""Scores, over all heads, up to which the stages of their size are made."""


def tensors_of(
    attention: Any,
    hidden: Mapping[str, Tensor],
    taps: Mapping[str, Tensor],
    *,
    own: bool,
    most_pairs: int = MOST_PAIRS,
) -> tuple[Tensors, ...]:
    """The tensors of a layer that ran, in numbers: of a softmax attention over its own input all
    stages, with their times.

    Of other mechanisms those that were listened to, without times; of long texts no stage of size H
    T^2.

    Args:
        attention: the module.
        hidden: `Capture.hidden`: `x` is what it was given.
        taps: `Capture.taps`.
        own: whether its keys come from its own input.
        most_pairs: scores, over all heads, up to which stages of their size are made.

    >>> [one.name for one in tensors_of(None, {}, {"q": torch.zeros(2, 3, 4)}, own=True)]
    ['q']
    """
    x = hidden.get("x")
    if type(attention) is Attention and own and x is not None and x.shape[0] == taps["q"].shape[1]:
        heads, tokens = taps["q"].shape[:2]
        made = stages(attention, x[None], scores=heads * tokens**2 <= most_pairs)
        return tuple(stage.told() for stage in made)
    return tuple(told(name, "as the layer had it", x, None) for name, x in taps.items())
