"""One attention layer stage by stage: the tensor that each stage computes, and its time.

`run_stages` runs a layer on its input. `run_layers` runs mechanisms of the catalogue on random
tokens, for `regard layer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from regard import Trace, attend, attention_weights
from regard.caches import Parts
from regard.caches.cross_layer import FirstValues
from regard.configs.suggested_sizes import DecoderSizes
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.explain.explanation import TensorSummary, to_json_value
from regard.masks import Mask
from regard.nn import Attention
from regard.nn.blocks.blocks import PostNorm
from regard.nn.variants.registry import named_options, sized_options
from regard.process_state import random_generator, seeded
from regard.span import Span

TIMING_ROUNDS = 5
"""Number of times that each stage is run; the shortest time is reported."""


MAX_SCORES = 2**22
"""The largest number of scores, over all heads, for which the stages of size H T^2 are computed."""
DROPOUT = 0.1
"""Dropout of the residual path in the reference run; it has no effect here, in evaluation mode."""


class Stage(NamedTuple):
    """One stage of a layer; `seconds` is the shortest time of several runs of it alone."""

    name: str
    equation: str
    values: Tensor
    seconds: float

    def summary(self) -> TensorSummary:
        """Return the shape, and the mean and standard deviation of the finite entries."""
        return summarize_tensor(self.name, self.equation, self.values, self.seconds)


def summarize_tensor(
    name: str, equation: str, values: Tensor, seconds: float | None
) -> TensorSummary:
    """Return the shape of a tensor, and the mean and standard deviation of its finite entries.

    >>> summarize_tensor("masked", "", torch.tensor([1.0, 3.0, -torch.inf]), None)[2:]
    ((3,), 2.0, 1.0, None)
    """
    finite = values[values.isfinite()].double()
    mean, std = (
        (float(finite.mean()), float(finite.std(correction=0))) if len(finite) else (0.0, 0.0)
    )
    return TensorSummary(name, equation, tuple(values.shape), mean, std, seconds)


@torch.no_grad()
def run_stages(
    attention: Attention,
    x: Float[Tensor, "B T M"],
    *,
    scores: bool = True,
    first_values: Float[Tensor, "B T C"] | None = None,
) -> tuple[Stage, ...]:
    """Run one layer of self-attention in evaluation mode, one stage at a time.

    q, k, v -> scores = scale q k^T (softcap, bias) -> masked -> weights = softmax(masked) -> z ->
    out = W_O [z_1 .. z_H]

    Scores and weights are computed from the definition, so that they can be shown; z comes from the
    kernel of the layer, which stores neither.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.
    """
    if type(attention) is not Attention:
        raise ArgumentTypeError(
            f"attention is a {type(attention).__name__}; stages can be shown only for "
            "regard.nn.Attention (softmax self-attention), such as regard.nn.variants.mha(512, 8)",
            argument="attention",
        )
    was_training = attention.training
    attention.eval()
    try:
        return tuple(_run_stages(attention, x, scores=scores, first_values=first_values))
    finally:
        attention.train(was_training)


def _run_stages(
    attention: Attention, x: Tensor, *, scores: bool, first_values: Tensor | None
) -> list[Stage]:
    positions, stages = Span(0, x.shape[1]), []
    project = attention.project.select_form(x.shape[1], x.shape[1])

    def stage(name: str, equation: str, run: Callable[[], Tensor]) -> Tensor:
        values, seconds = time_stage(run)
        stages.append(Stage(name, equation, values, seconds))
        return values

    q = stage(
        "q",
        "W_q x, in heads",
        lambda: project.adjust_query(project.query(x, positions), positions, positions),
    )

    def remember() -> Parts:
        return project.remember_carried(x, positions, FirstValues(first_values))

    memory = remember()
    both = project.recall(memory, positions)
    # one call computes both keys and values, so that both stages report its time
    _, seconds = time_stage(lambda: project.recall(remember(), positions)[0])
    k, v = both
    stages += [Stage("k", "W_k x, in heads", k, seconds), Stage("v", "W_v x, in heads", v, seconds)]
    scale = project.shape.D**-0.5 if attention.scale is None else attention.scale
    bias, own = attention._bias(), project.data_bias(x, q, memory, positions, positions)
    options: dict[str, Any] = {
        "bias": bias if own is None else own if bias is None else bias + own,
        "scale": scale,
        "softcap": attention.softcap,
        "score": attention._score(),
    }
    options |= {"q_positions": positions, "k_positions": positions}

    def scored(mask: Mask | None) -> Tensor:
        with Trace("scores") as trace:
            attend(q, k, v, mask=mask, backend="reference", **options)
        return trace["scores"]

    mask, sink = attention.mask, attention.sink
    if scores:
        rule = "" if attention.score is None else f", then {attention.score}"
        stage("scores", f"scale q k^T{rule}", lambda: scored(None))
        stage("masked", "-inf where the mask forbids", lambda: scored(mask))
        stage(
            "weights",
            "softmax(masked)" if attention.score is None else f"by {attention.score}",
            lambda: attention_weights(q, k, mask=mask, sink=sink, **options),
        )
    z = stage(
        "z",
        "weights v, by the layer's kernel",
        lambda: project.postprocess_at(
            attend(q, k, v, mask=mask, sink=sink, **options), x, positions
        ),
    )
    stage("out", "W_O [z_1 .. z_H]", lambda: attention.output(z.transpose(1, 2).flatten(2)))
    return stages


def time_stage(run: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Run a stage several times, and return its result and the shortest time in seconds.

    >>> time_stage(lambda: torch.ones(2))[0]
    tensor([1., 1.])
    """
    times = []
    for _ in range(TIMING_ROUNDS):
        start = time.perf_counter()
        values = run()
        if values.is_cuda:  # the call returns before the device has computed
            torch.cuda.synchronize(values.device)
        times.append(time.perf_counter() - start)
    return values, min(times)


def summarize_layer(
    attention: object,
    hidden: Mapping[str, Tensor],
    taps: Mapping[str, Tensor],
    *,
    own: bool,
    most_pairs: int = MAX_SCORES,
) -> tuple[TensorSummary, ...]:
    """Summarize the tensors of a layer: of softmax self-attention all stages, with times.

    Of other mechanisms these are the taps; long texts leave out the stages of size H T^2.
    """
    x = hidden.get("x")
    if type(attention) is Attention and own and x is not None and x.shape[0] == taps["q"].shape[1]:
        heads, tokens = taps["q"].shape[:2]
        first = hidden.get("first_values")
        stages = run_stages(
            attention,
            x[None],
            scores=heads * tokens**2 <= most_pairs,
            first_values=None if first is None else first[None],
        )
        return tuple(stage.summary() for stage in stages)
    return tuple(
        summarize_tensor(name, "as the layer computed it", x, None) for name, x in taps.items()
    )


@dataclass(frozen=True, eq=False)
class LayerStages:
    """One layer of a mechanism on x `[B, T, M]`, and its stages; block is LayerNorm(x + out)."""

    name: str
    x: Tensor
    mask: Mask | None
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage:
        """Return the stage of a given name."""
        return {stage.name: stage for stage in self.stages}[name]

    @property
    def allowed(self) -> NDArray[np.int64]:
        """Return the mask as `[T, T]` integers: 1 where a query may see a key."""
        T = self.x.shape[1]
        if self.mask is None:
            return np.ones((T, T), np.int64)
        return self.mask.block(Span(0, T), Span(0, T))[0, 0].long().numpy()

    def as_dict(self) -> dict[str, object]:
        """Return plain values for JSON: tensors with statistics, minus infinity as None."""
        return {
            "name": self.name,
            "mask": str(self.mask),
            "input": list(self.x.shape),
            "allowed": self.allowed.tolist(),
            "stages": [
                to_json_value(stage.summary()) | {"values": to_json_value(stage.values.numpy())}
                for stage in self.stages
            ],
        }


def run_layers(
    names: Sequence[str],
    *,
    dim: int = 512,
    heads: int = 8,
    batch: int = 2,
    tokens: int = 4,
    mask: Mask | None = None,
    seed: int = 0,
    options: Mapping[str, object] | None = None,
    device: torch.device | str | None = None,
) -> list[LayerStages]:
    """Run one layer of each mechanism on the same random tokens, in evaluation mode."""
    x = torch.randn(batch, tokens, dim, generator=random_generator(seed))
    return [run_layer(name, x, heads, mask, seed, options, device) for name in names]


def run_layer(
    name: str,
    x: Tensor,
    heads: int,
    mask: Mask | None,
    seed: int,
    options: Mapping[str, object] | None = None,
    device: torch.device | str | None = None,
) -> LayerStages:
    """Run one layer of a mechanism on tokens x `[B, T, M]`; it raises what `run_layers` raises."""
    entry, named = named_options(name)
    dim = x.shape[2]
    own = sized_options(entry, {**named, **(options or {})}, DecoderSizes.of(dim, heads))
    with seeded(seed):
        module = entry.build(dim, heads, **own)
    if type(module) is not Attention:
        raise ArgumentError(
            f"{name} is a {type(module).__name__}, not a softmax self-attention; choose a "
            "mechanism "
            f"such as mha, gpt, gqa or mla, or run regard explain TEXT --attention {name}",
            argument="names",
            value=name,
        )
    module.mask = mask
    stages = run_block_stages(module.to(device), x.to(device))
    on_cpu = tuple(stage._replace(values=stage.values.cpu()) for stage in stages)
    return LayerStages(name, x, mask, on_cpu)


def run_block_stages(module: Attention, x: Tensor) -> tuple[Stage, ...]:
    """Run the stages of a layer, then a post-norm residual block on its output."""
    stages = run_stages(module, x)
    path = PostNorm(nn.LayerNorm(x.shape[2]), dropout=DROPOUT).eval().to(x.device, x.dtype)
    with torch.no_grad():
        block, seconds = time_stage(lambda: path(x, lambda _: stages[-1].values))
    return (*stages, Stage("block", "LayerNorm(x + out)", block, seconds))
