"""The catalogue under test: every mechanism that takes a sequence to a sequence, in fp64 with
random weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.nn.variants import VARIANTS, Variant
from regard.span import Positions, slice_positions

OTHER_SIGNATURE = ("cross", "additive")
"""Families whose modules take a second sequence: they have tests of their own."""

MIXERS = {name: v for name, v in VARIANTS.items() if v.family not in OTHER_SIGNATURE}
CAUSAL = {name: v for name, v in MIXERS.items() if v.causal}
DIM = 32


def randomize(module: nn.Module, seed: int) -> nn.Module:
    """Weights that make patterns far from uniform, and norm weights, biases and sinks that are not
    1 or 0.
    """
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=make, dtype=torch.float64)
            wide = parameter.ndim > 1
            value = noise * parameter.shape[-1] ** -0.5 * 1.5 if wide else parameter + 0.3 * noise
            parameter.copy_(value)
    return module


def random(module: nn.Module, seed: int = 0) -> Any:
    """The module with normal numbers in every parameter: with norm weights of 1 and biases of 0,
    several mistakes are invisible.
    """
    make = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.normal_(generator=make)
    return module


def in_chunks(
    module: Any,
    x: Tensor,
    sizes: Sequence[int],
    cache: Any = None,
    positions: Positions | None = None,
    **options: Any,
) -> Tensor:
    """The results of calls of these sizes, one behind the other, with one cache."""
    cache = module.new_cache() if cache is None else cache
    parts, stop = [], 0
    for part in x.split(list(sizes), 1):
        start, stop = stop, stop + part.shape[1]
        where = None if positions is None else slice_positions(positions, slice(start, stop))
        parts.append(module(part, where, cache, **options))
    return torch.cat(parts, 1)


def example(entry: Variant, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The small example of an entry, in evaluation mode."""
    return randomize(entry.example().to(torch.float64), seed).to(dtype).eval()


def tokens(T: int, B: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, DIM, generator=make, dtype=torch.float64).to(dtype)


def with_every_part(entries: Mapping[str, Variant]) -> list[str]:
    """Few names whose examples together have every class of module, mask, bias, score rule and
    cache, and every option of an `Attention`: always the one that brings most new parts.
    """
    parts = {name: {*_parts_of(entry)} for name, entry in entries.items()}
    missing, taken = set().union(*parts.values()), []
    while missing:
        taken.append(max(parts, key=lambda name: len(parts[name] & missing)))
        missing -= parts[taken[-1]]
    return [name for name in entries if name in taken]


def _parts_of(entry: Variant) -> Iterator[object]:
    """What a graph of a mechanism depends on: classes, and the options that are given."""
    module = entry.example()
    yield from (x for x in ("softcap", "sink", "bias") if getattr(module, x, None) is not None)
    if entry.causal:
        yield type(module.new_cache())
    for part in module.modules():
        yield from _classes_of(part)


def _classes_of(value: Any) -> Iterator[type]:
    """The class of a value of the package, and those of its attributes that are no modules."""
    if not type(value).__module__.startswith("regard."):
        return
    yield type(value)
    for x in getattr(value, "__dict__", {}).values():
        for member in x if isinstance(x, (list, tuple)) else [x]:
            yield from () if isinstance(member, nn.Module) else _classes_of(member)
