"""The parts of a model as sizes: each mechanism tells its parameters, what it keeps, and what it computes."""

from regard.cost.mixers.base import Mixer
from regard.cost.mixers.feed_forward import Dense, Experts, FeedForward
from regard.cost.mixers.heads import Cross, Heads
from regard.cost.mixers.infini import Infini
from regard.cost.mixers.latent import Form, Latent
from regard.cost.mixers.nsa import NSA
from regard.cost.mixers.recurrent import Recurrent
from regard.cost.mixers.weights import Memory, Weights

__all__ = [
    "NSA", "Cross", "Dense", "Experts", "FeedForward", "Form", "Heads", "Infini", "Latent", "Memory",
    "Mixer", "Recurrent", "Weights",
]  # fmt: skip
