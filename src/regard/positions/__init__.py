"""Positions: sinusoids, learned tables, rotary with its scalings, XPos, and how far rotary reaches."""

from regard.positions.extrapolation import (
    base_reaches,
    critical_base,
    critical_dimension,
    extrapolation_length,
    long_term_decay,
    small_bases,
)
from regard.positions.frequencies import rope_frequencies
from regard.positions.longrope import LongRoPE
from regard.positions.rotary import Rotary, rotate
from regard.positions.scalings import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    RopeFrequencies,
    Scaling,
)
from regard.positions.sinusoidal import Learned, sinusoidal
from regard.positions.xpos import XPos, xpos_reach, xpos_zeta
from regard.positions.yarn import DynamicYaRN, YaRN, pair_index, yarn_mscale

__all__ = [
    "NTK",
    "DynamicNTK",
    "DynamicYaRN",
    "Learned",
    "Linear",
    "Llama3",
    "LongRoPE",
    "RopeFrequencies",
    "Rotary",
    "Scaling",
    "XPos",
    "YaRN",
    "base_reaches",
    "critical_base",
    "critical_dimension",
    "extrapolation_length",
    "long_term_decay",
    "pair_index",
    "rope_frequencies",
    "rotate",
    "sinusoidal",
    "small_bases",
    "xpos_reach",
    "xpos_zeta",
    "yarn_mscale",
]
