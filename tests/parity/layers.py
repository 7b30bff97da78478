"""One attention layer of a transformers model with random weights: what goes in, what comes out,
and how far ours may be from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from tests.models.small import randomize

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="parity needs the transformers extra")

SHARE = 1e-5
"""Of the largest output, in fp32: about 170 roundings, which is what a score of some tens, its
exponential and the sums behind it may collect in another order. Every comparison has this bound,
and no other."""
FAR = 100
"""A wrong variant differs by so many times the bound at least."""
LAYERS = 2
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
