"""Score rules: steps between the scores and the weights of attention.

A rule changes scores after scale, softcap and bias, before the mask; selects keys; replaces the
softmax; or changes the weights. `a >> b` is first a, then b. Its `scope` is what one result depends
on: "pair", "heads", or "row" (the default: only the reference computes it).
"""

from regard.registry import import_all
from regard.scores.base import SCORES, Chain, PairRule, ScoreBlock, ScoreRule
from regard.scores.convert import from_score_mod, to_score_mod
from regard.scores.normalizers import Entmax, ReLU, Sigmoid, SignedSoftmax, Softpick, StickBreaking
from regard.scores.rules import (
    CoPE,
    FnScore,
    ScalableSoftmax,
    SoftClamp,
    TalkingHeads,
    Temperature,
    TopK,
)

__all__ = [
    "SCORES",
    "Chain",
    "CoPE",
    "Entmax",
    "FnScore",
    "PairRule",
    "ReLU",
    "ScalableSoftmax",
    "ScoreBlock",
    "ScoreRule",
    "Sigmoid",
    "SignedSoftmax",
    "SoftClamp",
    "Softpick",
    "StickBreaking",
    "TalkingHeads",
    "Temperature",
    "TopK",
    "from_score_mod",
    "to_score_mod",
]

# Rules in other files of this folder become `regard.scores.<Name>` without an entry here.
import_all(__name__, __path__)
globals().update(
    (kind.__name__, kind) for _, kind in SCORES if kind.__module__.startswith(f"{__name__}.")
)
