"""Conversion of the weights to another dtype."""

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
"""Name -> dtype."""


def to_dtype(checkpoint: Checkpoint, dtype: str) -> tuple[Checkpoint, ConversionStep]:
    """Convert the weights to another dtype, each rounded once; some families keep a few in float32.

    Args:
        checkpoint: a decoder.
        dtype: "float32", "float16", "bfloat16" or "float64".

    Returns:
        The converted checkpoint, and its errors.

    Raises:
        ArgumentError: the name is unknown, the weights have this dtype already, or one of them is
            too large for it.

    >>> import regard
    >>> tiny = regard.load("tiny")
    >>> after, step = to_dtype(Checkpoint(tiny.decoder, tiny.config), "bfloat16")
    >>> after.network.head.weight.dtype, step.layers[0].keys < 2**-8
    (torch.bfloat16, True)
    """
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype is {dtype!r}; it is one of {', '.join(DTYPES)}")
    wanted, its_family = DTYPES[dtype], family(checkpoint.model_type)
    assert its_family is not None
    before = checkpoint.weights()
    if all(x.dtype == its_family.dtype_of(name, wanted) for name, x in before.items()):
        raise ArgumentError(f"the weights are {dtype} already; choose another dtype")
    weights = {name: x.to(its_family.dtype_of(name, wanted)) for name, x in before.items()}
    for name, x in weights.items():
        if not bool(x.isfinite().all()) and bool(before[name].isfinite().all()):
            raise ArgumentError(
                f"{name} has the value {float(before[name].abs().max()):.3g}, which is too large "
                f"for {dtype}; use bfloat16"
            )
    after = rebuild(checkpoint.config, weights)
    return after, ConversionStep(f"weights to {dtype}", tuple(_errors(checkpoint, after)))


def _errors(before: Checkpoint, after: Checkpoint) -> list[LayerErrors]:
    """Return the rounding errors of keys and values per layer; [] without separate maps."""
    pairs = zip(layers_of(before.network), layers_of(after.network), strict=True)
    try:
        layers = [(AttentionMaps.of(a), AttentionMaps.of(b)) for (_, a), (_, b) in pairs]
    except ArgumentError:
        return []
    return [a.errors(a.k - b.k, a.v - b.v) for a, b in layers]
