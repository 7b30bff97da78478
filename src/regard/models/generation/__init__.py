"""Continuing a text: samplers, stop strings, batches, beam search, prompts that are read once."""

from regard.models.generation.beam import Found, Hypothesis, beam_search, greedy, search
from regard.models.generation.context import Context, Reading
from regard.models.generation.generate import Batch, Continuation, Generation, Options, Stops
from regard.models.generation.room import Room
from regard.models.generation.sampling import Sampler, Sampling, distribution

__all__ = [
    "Batch",
    "Context",
    "Continuation",
    "Found",
    "Generation",
    "Hypothesis",
    "Options",
    "Reading",
    "Room",
    "Sampler",
    "Sampling",
    "Stops",
    "beam_search",
    "distribution",
    "greedy",
    "search",
]
