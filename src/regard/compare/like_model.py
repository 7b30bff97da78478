"""Compare mechanisms at the sizes of a real model, if this machine has the memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from regard import units
from regard.compare.mechanisms import Shape, count_parameters
from regard.compare.speed_and_memory import Timing
from regard.configs.published import model_of
from regard.cost.latent import LatentSpec
from regard.cost.model import DenseSpec
from regard.cost.softmax import SoftmaxSpec
from regard.errors import ArgumentError
from regard.models.families.regard import Config
from regard.timing.machine import free_memory

DEFAULT_WINDOW = 4096
"""The window if the model has none: that of Mistral 7B (arXiv 2310.06825)."""

BYTES_TO_RUN = 4
"""Bytes of a parameter in float32."""
BYTES_TO_TRAIN = 16
"""Bytes of a parameter with its gradient and the two moments of AdamW, all in float32."""
LOGITS_IN_TRAINING = 3
"""How many tensors as large as the logits a training step holds: logits, probabilities and their
gradient.
"""


def shape_like(name: str, window: int | None = None) -> Shape:
    """Return the sizes of a published model, or of a config.json, for a comparison."""
    model = model_of(name)
    feeds = {layer.feed_forward for layer in model.layers}
    (feed,) = feeds if len(feeds) == 1 else (None,)
    if not isinstance(feed, DenseSpec):
        raise ArgumentError(
            f"{model.name} does not have one dense feed-forward layer for all layers, as the "
            "decoders of regard compare have; give the sizes as --dim --layers --heads --hidden"
        )
    mixers = list(model.mixers)
    heads = {_heads(mixer) for mixer in mixers}
    (sizes,) = heads if len(heads) == 1 else (None,)
    if sizes is None:
        raise ArgumentError(
            f"the layers of {model.name} are {', '.join(model.attention_kinds)}, and regard "
            "compare replaces attention by one mechanism with the same heads in every layer; give "
            "the sizes as --dim --layers --heads --hidden"
        )
    H, G, D = sizes
    if model.dim != D * H:
        raise ArgumentError(
            f"{model.name} has heads of {D}, but the decoders of regard compare have heads of dim "
            f"/ heads = {model.dim} / {H}; give another model, or the sizes as --dim --layers "
            "--heads --hidden"
        )
    windows = [m.window for m in mixers if isinstance(m, SoftmaxSpec) and m.window is not None]
    own = windows[0] if windows else DEFAULT_WINDOW
    return Shape(
        model.dim,
        len(model.layers),
        H,
        feed.hidden,
        vocabulary=model.vocab,
        window=own if window is None else window,
        groups=G,
        tied=model.tied,
        like=model.name,
    )


def _heads(mixer: object) -> tuple[int, int, int] | None:
    """Return H, G and the width of a head; None for a mechanism without such heads."""
    if isinstance(mixer, SoftmaxSpec):
        return mixer.shape.heads, mixer.shape.groups, mixer.shape.head_dim
    if isinstance(mixer, LatentSpec):
        return mixer.heads, mixer.heads, mixer.value_dim
    return None


def needed_memory(configs: Mapping[str, Config], timing: Timing) -> int:
    """Return an estimate of the bytes that a comparison of models in memory needs.

    That is 4 bytes a parameter, or 16 in a training step, with one model's logits; not caches.
    """
    parameters = sum(map(count_parameters, configs.values()))
    if not timing.training:
        return BYTES_TO_RUN * parameters
    vocabulary = max(config.vocab_size for config in configs.values())
    logits = BYTES_TO_RUN * LOGITS_IN_TRAINING * timing.batch * timing.length * vocabulary
    return BYTES_TO_TRAIN * parameters + logits


def check_fits(
    configs: Mapping[str, Config], timing: Timing, name: str, free: int | None = None
) -> None:
    """Check that the machine has the memory for a comparison at the sizes of a model."""
    free = free_memory(torch.device(timing.device)) if free is None else free
    needed = needed_memory(configs, timing)
    if free and needed > free:
        rest = needed_memory(configs, Timing(training=False))
        less = f"without training steps (--no-training) {units.size(rest)}, and "
        raise ArgumentError(
            f"{units.plural(len(configs), 'model')} like {name} need {units.size(needed)} of "
            f"memory at once, and {units.size(free)} is free; {less if timing.training else ''}"
            "fewer mechanisms at a time need less"
        )
