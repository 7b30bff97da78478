"""Another dtype of the weights."""

from __future__ import annotations

import torch

from regard.errors import ArgumentError
from regard.models.convert.attention_maps import (
    AttentionMaps,
    Checkpoint,
    ConversionStep,
    LayerErrors,
    layers_of,
    rebuild,
)
from regard.models.families import family

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
"""By name."""


def to_dtype(held: Checkpoint, dtype: str) -> tuple[Checkpoint, ConversionStep]:
    """A model with weights of another dtype, each rounded once; those that its family keeps wide
    stay so.

    Args:
        held: a decoder.
        dtype: float32, float16, bfloat16 or float64.

    Raises:
        ArgumentError: the name is unknown, the weights have it already, or one of them is too large
            for it.

    >>> import regard
    >>> tiny = regard.load("tiny")
    >>> after, step = to_dtype(Checkpoint(tiny.decoder, tiny.config), "bfloat16")
    >>> after.network.head.weight.dtype, step.layers[0].keys < 2**-8
    (torch.bfloat16, True)
    """
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype is {dtype!r}; it is one of {', '.join(DTYPES)}")
    wanted, found = DTYPES[dtype], family(held.model_type)
    assert found is not None
    before = held.weights()
    if all(x.dtype == found.dtype_of(name, wanted) for name, x in before.items()):
        raise ArgumentError(f"the weights are {dtype} already; nothing is to be converted")
    weights = {name: x.to(found.dtype_of(name, wanted)) for name, x in before.items()}
    for name, x in weights.items():
        if not bool(x.isfinite().all()) and bool(before[name].isfinite().all()):
            raise ArgumentError(
                f"{name} holds {float(before[name].abs().max()):.3g}, which is too large for "
                f"{dtype}; use bfloat16"
            )
    after = rebuild(held.config, weights)
    return after, ConversionStep(f"weights to {dtype}", tuple(_errors(held, after)))


def _errors(before: Checkpoint, after: Checkpoint) -> list[LayerErrors]:
    """What rounding does to keys and values, where they have maps of their own."""
    pairs = zip(layers_of(before.network), layers_of(after.network), strict=True)
    try:
        layers = [(AttentionMaps.of(a), AttentionMaps.of(b)) for (_, a), (_, b) in pairs]
    except ArgumentError:
        return []
    return [a.errors(a.k - b.k, a.v - b.v) for a, b in layers]
