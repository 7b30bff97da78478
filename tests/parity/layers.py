"""One attention layer of a transformers model beside ours with the same weights: the checks that
every family has.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.span import Span
from tests.models.small import randomize

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="parity needs the transformers extra")

SHARE = 1e-5
"""Of the largest output, in fp32: about 170 roundings, which is what a score of some tens, its
exponential and the sums behind it may collect in another order. Every comparison has this bound,
and no other."""
FAR = 100
"""A wrong variant differs by so many times the bound at least."""
LENGTH, LAYERS = 26, 2
Change = Callable[[Any], Any]


def distance(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference, as a multiple of the bound."""
    assert mine.shape == theirs.shape, f"{tuple(mine.shape)}, not {tuple(theirs.shape)}"
    assert mine.isfinite().all(), "mine is not finite"
    assert theirs.isfinite().all(), "theirs is not finite"
    return float((mine - theirs).abs().max()) / (SHARE * float(theirs.abs().max()))


def assert_near(mine: Tensor, theirs: Tensor) -> None:
    assert distance(mine, theirs) <= 1, f"{distance(mine, theirs):.3g} times the bound"


def assert_far(mine: Tensor, theirs: Tensor) -> None:
    assert distance(mine, theirs) >= FAR, f"only {distance(mine, theirs):.3g} times the bound"


@dataclass(frozen=True)
class Family:
    """How a family is built on both sides.

    Attributes:
        name: `<name>Config` and `<name>Model` are the classes of transformers.
        config: what its configuration is given.
        inlet: the attention module of a layer, as a path with the layer's number left out.
        names: parameter of theirs -> ours.
        build: (config, layer) -> our module.
        outlet: below the inlet, the module whose output is compared; "" is the attention itself.
        positioned: whether the model takes position_ids.
        transposed: whether its matrices are [in, out].
    """

    name: str
    config: dict[str, Any]
    inlet: str
    names: dict[str, str]
    build: Callable[[Any, int], nn.Module] = field(repr=False)
    outlet: str = ""
    positioned: bool = True
    transposed: bool = False


def model(name: str, config: dict[str, Any], seed: int = 3) -> Any:
    """A small random model, every parameter drawn, norms and sinks too."""
    made = getattr(transformers, f"{name}Config")(**config)
    made._attn_implementation = "eager"
    theirs = getattr(transformers, f"{name}Model")(made).eval().requires_grad_(False)
    randomize(theirs, seed)
    return theirs


def copy_weights(
    theirs: nn.Module, ours: Any, names: dict[str, str], transposed: bool = False
) -> Any:
    """Ours with the weights of theirs: all of theirs are used, all of ours are set."""
    state = theirs.state_dict()
    assert set(state) == set(names), f"theirs has {sorted(state)}"
    ours.load_state_dict(
        {names[n]: x.T if transposed and x.ndim == 2 else x for n, x in state.items()}
    )
    return ours.eval().requires_grad_(False)


def capture(theirs: nn.Module, inlet: str, outlet: str, **call: Any) -> tuple[Tensor, Tensor]:
    """What went into one module and what came out of another, in one call of the model."""
    seen: dict[str, Tensor] = {}

    def enter(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen["x"] = (given[0] if given else named["hidden_states"]).clone()

    def leave(_: nn.Module, __: Any, made: Any) -> None:
        seen["y"] = (made if isinstance(made, Tensor) else made[0]).clone()

    hooks = (
        theirs.get_submodule(inlet).register_forward_pre_hook(enter, with_kwargs=True),
        theirs.get_submodule(outlet).register_forward_hook(leave),
    )
    try:
        theirs(**call)
    finally:
        for hook in hooks:
            hook.remove()
    return seen["x"], seen["y"]


class Pair:
    """A layer of theirs and ours."""

    def __init__(self, family: Family, layer: int = 0, **change: Any) -> None:
        self.family, self.layer = family, layer
        self.theirs = model(family.name, family.config | change)
        self.config = self.theirs.config
        self.inlet = family.inlet.format(layer)
        self.outlet = f"{self.inlet}.{family.outlet}".rstrip(".")
        attention = self.theirs.get_submodule(self.inlet)
        made = family.build(self.config, layer)
        self.ours = copy_weights(attention, made, family.names, family.transposed)

    def tokens(self, B: int = 2, T: int = LENGTH) -> Tensor:
        make = torch.Generator().manual_seed(1)
        return torch.randn(B, T, self.config.hidden_size, generator=make)

    def run(self, embeds: Tensor, positions: Tensor | None = None, **call: Any) -> Any:
        """Input and output of their layer."""
        if positions is not None and self.family.positioned:
            call["position_ids"] = positions.clamp(min=0)
        return capture(self.theirs, self.inlet, self.outlet, inputs_embeds=embeds, **call)

    def cache(self) -> Any:
        return transformers.DynamicCache(config=self.config)

    def wrong(self, change: Change) -> Any:
        """Ours, changed."""
        other = copy.deepcopy(self.ours)
        return change(other) or other


def assert_prefill(pair: Pair) -> None:
    x, y = pair.run(pair.tokens(), use_cache=False)
    for backend in ("auto", "reference"):
        assert_near(pair.ours(x, backend=backend), y)
    assert_near(pair.ours(x, torch.arange(LENGTH).expand(2, -1)), y)


def assert_chunks(pair: Pair, chunks: Sequence[int] = (3, 11, 1, 1, 7, 1, 1, 1)) -> None:
    """Both sides in chunks with their own caches, and both equal to one pass."""
    assert sum(chunks) == LENGTH
    embeds, start = pair.tokens(), 0
    whole_x, whole = pair.run(embeds, use_cache=False)
    cache, both, theirs_cache = pair.ours.new_cache(), pair.ours.new_cache(), pair.cache()
    for n in chunks:
        at = slice(start, start + n)
        x, y = pair.run(embeds[:, at], past_key_values=theirs_cache, use_cache=True)
        assert_near(pair.ours(x, cache=both), y)
        assert_near(pair.ours(whole_x[:, at], cache=cache), whole[:, at])
        start += n


def assert_left_padding(pair: Pair) -> None:
    """Rows of all, 17 and 1 tokens; NaN in our padding reaches nothing, in one pass and with a
    cache.
    """
    keep = torch.arange(LENGTH) >= LENGTH - torch.tensor([LENGTH, 17, 1])[:, None]
    positions = torch.where(keep, keep.long().cumsum(1) - 1, -1)
    x, y = pair.run(pair.tokens(3), positions, attention_mask=keep.long(), use_cache=False)
    x = x.masked_fill(~keep[..., None], math.nan)
    assert_near(pair.ours(x, positions)[keep], y[keep])
    cache, half = pair.ours.new_cache(), LENGTH // 2
    pair.ours(x[:, :half], positions[:, :half], cache)
    for t in range(half, LENGTH):
        z = pair.ours(x[:, t : t + 1], positions[:, t : t + 1], cache)
        assert_near(z[:, 0][keep[:, t]], y[:, t][keep[:, t]])


def assert_offset(pair: Pair, start: int = 1000) -> None:
    """Far from the origin, in one pass and from a cache: as theirs there."""
    positions = torch.arange(start, start + LENGTH)[None]
    x, y = pair.run(pair.tokens(), positions, use_cache=False)
    assert_near(pair.ours(x, Span(start, LENGTH)), y)
    cache, half = pair.ours.new_cache(), LENGTH // 2
    assert_near(pair.ours(x[:, :half], Span(start, half), cache), y[:, :half])
    assert_near(pair.ours(x[:, half:], cache=cache), y[:, half:])


def assert_shift(pair: Pair, start: int = 100_000) -> None:
    """Ours very far from the origin as theirs at it: only differences of positions count."""
    x, y = pair.run(pair.tokens(), use_cache=False)
    assert_near(pair.ours(x, Span(start, LENGTH)), y)


def assert_wrong(pair: Pair, change: Change) -> None:
    """The right one is near, the changed one far."""
    x, y = pair.run(pair.tokens(), use_cache=False)
    assert_near(pair.ours(x), y)
    assert_far(pair.wrong(change)(x), y)
