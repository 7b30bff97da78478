"""Continuing a text: samplers, stop strings, batches, beam search, prompts that are read once."""

from regard.models.generation.batch import Batch, Continuation, Options
from regard.models.generation.beam import Hypothesis, beam_search
from regard.models.generation.context import Context
from regard.models.generation.greedy import greedy
from regard.models.generation.reading import Reading
from regard.models.generation.room import Room
from regard.models.generation.sampling import Sampler, Sampling, distribution
from regard.models.generation.search import Found, search
from regard.models.generation.single import Generation
from regard.models.generation.stops import Stops

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
