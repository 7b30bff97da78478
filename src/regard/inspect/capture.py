"""One run of a model on a text, with everything that one layer computed kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.models.model import Model
from regard.nn import Block
from regard.span import Span
from regard.tap import Trace

TAPS = ("q", "k", "v", "scores", "pattern", "z", "out")


@dataclass(frozen=True, eq=False)
class Capture:
    """What one layer computed on ids [1,T], each without its batch dimension.

    q [H,T,D], k [G,T,D], v [G,T,E], scores and pattern [H,T,T], z [H,T,E], out [T,M]: the taps. embedding, entering, normed,
    residual [T,M]: the hidden state embedded, entering the layer, after its norm, and with attention added. logits [T,V].
    kernel: the largest difference of the logits to those of the kernel that the model uses when nobody looks.
    """

    ids: Tensor
    positions: Span
    layer: int
    block: Block
    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    pattern: Tensor
    z: Tensor
    out: Tensor
    embedding: Tensor
    entering: Tensor
    normed: Tensor
    residual: Tensor
    logits: Tensor
    kernel: float


def capture(model: Model, ids: Tensor, layer: int) -> Capture:
    """Run ids [1,T] through the model on the reference kernel, and listen to one layer."""
    block = model.decoder.layers[layer]
    assert isinstance(block, Block)
    kept: dict[str, Tensor] = {}
    names = [f"layers.{layer}.{name}" for name in TAPS]
    with torch.inference_mode(), ExitStack() as hooks:
        for module, keep in _keepers(model, block, kept):
            hooks.callback(module.register_forward_hook(keep).remove)
        with Trace(*names) as trace:
            logits = model.forward(ids, backend="reference")
        hooks.close()  # the second run is the one that nobody looks at
        usual = model.forward(ids)
        kernel = float((usual.double() - logits.double()).abs().max())
    tapped = {name: trace[full][0] for name, full in zip(TAPS, names, strict=True)}
    hidden = {name: x[0] for name, x in kept.items()}
    return Capture(
        ids[0],
        Span(0, ids.shape[1]),
        layer,
        block,
        logits=logits[0],
        kernel=kernel,
        **tapped,
        **hidden,
    )


Hook = Callable[[nn.Module, tuple[Any, ...], Any], None]


def _keepers(model: Model, block: Block, kept: dict[str, Tensor]) -> list[tuple[nn.Module, Hook]]:
    """Modules, and the hooks that keep what enters or leaves them."""

    def keep(entering: str | None, leaving: str | None) -> Hook:
        def hook(_module: nn.Module, given: tuple[Any, ...], found: Any) -> None:
            if entering is not None:
                kept[entering] = given[0].detach()
            if leaving is not None:
                kept[leaving] = found.detach()

        return hook

    return [
        (model.decoder.embed, keep(None, "embedding")),
        (block.around_attention.norm, keep("entering", "normed")),
        (block.around_feed_forward.norm, keep("residual", None)),
    ]
