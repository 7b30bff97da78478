"""Position embeddings (sinusoidal, learned, rotary), and scalings of rotary frequencies."""

from regard.positions.multi_axis import (
    MultiAxisRotary,
    multi_axis_positions,
    next_text_positions,
)
from regard.positions.rotary import Rotary, rope_frequencies, rotate
from regard.positions.scalings import (
    NTK,
    DynamicNTK,
    DynamicYaRN,
    LinearScaling,
    Llama3,
    LongRoPE,
    RopeFrequencies,
    Scaling,
    YaRN,
    base_reaches,
    critical_base,
    critical_dimension,
    extrapolation_length,
    long_term_decay,
    pair_index,
    small_bases,
    yarn_mscale,
)
from regard.positions.sinusoidal import LearnedPositions, sinusoidal
from regard.positions.xpos import XPos, xpos_reach, xpos_zeta

__all__ = [
    "NTK",
    "DynamicNTK",
    "DynamicYaRN",
    "LearnedPositions",
    "LinearScaling",
    "Llama3",
    "LongRoPE",
    "MultiAxisRotary",
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
    "multi_axis_positions",
    "next_text_positions",
    "pair_index",
    "rope_frequencies",
    "rotate",
    "sinusoidal",
    "small_bases",
    "xpos_reach",
    "xpos_zeta",
    "yarn_mscale",
]
