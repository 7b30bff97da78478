"""The catalogue under test: every mechanism that takes a sequence to a sequence, in fp64 with
random weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.nn.variants import VARIANTS, Variant

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


def example(entry: Variant, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The small example of an entry, in evaluation mode."""
    return randomize(entry.example().to(torch.float64), seed).to(dtype).eval()


def tokens(T: int, B: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, DIM, generator=make, dtype=torch.float64).to(dtype)
