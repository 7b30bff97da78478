"""One layer of attention stage by stage: the tensor that each stage makes, and the time that it
takes.

`stages` runs a layer on its input; `layers` runs mechanisms of the catalogue on random tokens,
which is what `regard layer` prints.
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
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.explain.explanation import Tensors, plain
from regard.masks import Mask
from regard.nn import Attention
from regard.nn.blocks import PostNorm
from regard.nn.projections import adjust_query, select_form
from regard.nn.variants.registry import find_variant
from regard.process import seeded
from regard.span import Span

ROUNDS = 5
"""Each stage is timed so often, and the fastest counts."""


MOST_PAIRS = 2**22
"""Scores, over all heads, up to which the stages of their size are made."""
DROPOUT = 0.1
"""Of the residual path, as in the notes' run; in evaluation mode, which is what is shown, it does
nothing.
"""


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
        return summary(self.name, self.equation, self.values, self.seconds)


def summary(name: str, equation: str, values: Tensor, seconds: float | None) -> Tensors:
    """A tensor in numbers: its shape, and the mean and the deviation of its finite entries.

    >>> summary("masked", "", torch.tensor([1.0, 3.0, -torch.inf]), None)[2:]
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
    project = select_form(attention.project, x.shape[1], x.shape[1])

    def stage(name: str, equation: str, run: Callable[[], Tensor]) -> Tensor:
        values, seconds = timed(run)
        found.append(Stage(name, equation, values, seconds))
        return values

    q = stage("q", "W_q x, in heads", lambda: adjust_query(project, project.query(x, at), at, at))
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
        lambda: project.postprocess(attend(q, k, v, mask=mask, sink=sink, **options), x),
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
        most_pairs: the scores, over all heads, up to which the stages of their size are made.

    >>> [one.name for one in tensors_of(None, {}, {"q": torch.zeros(2, 3, 4)}, own=True)]
    ['q']
    """
    x = hidden.get("x")
    if type(attention) is Attention and own and x is not None and x.shape[0] == taps["q"].shape[1]:
        heads, tokens = taps["q"].shape[:2]
        made = stages(attention, x[None], scores=heads * tokens**2 <= most_pairs)
        return tuple(stage.told() for stage in made)
    return tuple(summary(name, "as the layer had it", x, None) for name, x in taps.items())


@dataclass(frozen=True)
class Layer:
    """One layer of a mechanism and what it computed.

    Attributes:
        name: the mechanism's, of the catalogue.
        x: the input [B, T, M].
        mask: the mask, or None: every key.
        stages: q, k, v, scores, masked, weights, z, out, and block, which is LayerNorm(x + out).
    """

    name: str
    x: Tensor
    mask: Mask | None
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage:
        """The stage of a name.

        Raises:
            KeyError: there is none.
        """
        return {stage.name: stage for stage in self.stages}[name]

    @property
    def blocked(self) -> NDArray[np.int64]:
        """The mask as the notes print it, [T, T]: 1 where a query may not see a key."""
        T = self.x.shape[1]
        if self.mask is None:
            return np.zeros((T, T), np.int64)
        return (~self.mask.block(Span(0, T), Span(0, T))[0, 0]).long().numpy()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: every tensor with its numbers, minus infinity as None."""
        return {
            "name": self.name,
            "mask": str(self.mask),
            "input": list(self.x.shape),
            "blocked": self.blocked.tolist(),
            "stages": [
                plain(stage.told()) | {"values": plain(stage.values.numpy())}
                for stage in self.stages
            ],
        }


def options_of(name: str, dim: int, heads: int) -> dict[str, Any]:
    """The options of a mechanism at a size: those that `regard compare` gives it, or else those of
    its small example.

    >>> options_of("mla", 512, 8)
    {'kv_rank': 128, 'nope_dim': 64, 'rope_dim': 32, 'value_dim': 64}
    """
    entry = find_variant(name)
    if name == "mla":
        D = dim // heads
        return {"kv_rank": 2 * D, "nope_dim": D, "rope_dim": max(2, D // 4 * 2), "value_dim": D}
    return dict(entry.example_options)


def layers(
    names: Sequence[str],
    *,
    dim: int = 512,
    heads: int = 8,
    batch: int = 2,
    tokens: int = 4,
    mask: Mask | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> list[Layer]:
    """Run one layer of each mechanism on the same random tokens, in evaluation mode.

    Args:
        names: of the catalogue: softmax attention over its own input.
        dim, heads, batch, tokens: M, H, B and T.
        mask: what every mechanism sees by; None is every key.
        seed: of the tokens and of the weights; the weights of each mechanism are drawn anew from
            it.
        options: of the mechanisms; None is `options_of` each.

    Raises:
        ArgumentError: a name is not in the catalogue, or is no softmax attention over its own
            input, or a size does not fit.

    >>> from regard.masks import Causal
    >>> (one,) = layers(["mha"], mask=Causal())
    >>> one.stage("weights").values.shape, one.blocked.tolist()[0]
    (torch.Size([2, 8, 4, 4]), [0, 1, 1, 1])
    """
    x = torch.randn(batch, tokens, dim, generator=torch.Generator().manual_seed(seed))
    return [layer(name, x, heads, mask, seed, options) for name in names]


def layer(
    name: str,
    x: Tensor,
    heads: int,
    mask: Mask | None,
    seed: int,
    options: Mapping[str, Any] | None = None,
) -> Layer:
    """Run one layer of a mechanism on tokens x [B, T, M]: as `layers`, which says what it raises.

    >>> layer("gqa", torch.zeros(1, 3, 8), 4, None, 0, {"groups": 2}).stage("k").values.shape
    torch.Size([1, 2, 3, 2])
    """
    entry, dim = find_variant(name), x.shape[2]
    own = options_of(name, dim, heads) if options is None else dict(options)
    with seeded(seed):
        module = entry.build(dim, heads, **own)
    if type(module) is not Attention:
        raise ArgumentError(
            f"{name} is a {type(module).__name__}, which has no pattern of one softmax over its "
            "own input to show; "
            "give one that has, such as mha, gpt, gqa or mla, or look at it with regard explain "
            f"TEXT --attention {name}"
        )
    module.mask = mask
    return Layer(name, x, mask, with_block(module, x))


def with_block(module: Attention, x: Tensor) -> tuple[Stage, ...]:
    """The stages of a layer, and behind them what a block of the first Transformers makes of its
    output.

    >>> from regard.nn.variants import mha
    >>> with_block(mha(8, 2), torch.zeros(1, 3, 8))[-1].name
    'block'
    """
    found = stages(module, x)
    path = PostNorm(nn.LayerNorm(x.shape[2]), dropout=DROPOUT).eval().to(x.dtype)
    with torch.no_grad():
        block, seconds = timed(lambda: path(x, lambda _: found[-1].values))
    return (*found, Stage("block", "LayerNorm(x + out)", block, seconds))
