"""Text generation: sampling, stop strings, batches, beam search, prefix caching, cache kinds."""

from regard.models.generation.beam_search import (
    BeamCompletion,
    Hypothesis,
    beam_search,
    beam_search_text,
    greedy,
)
from regard.models.generation.cache_config import CacheConfig
from regard.models.generation.captured_step import CapturedSession
from regard.models.generation.conversation import Conversation
from regard.models.generation.decode_session import DecodeSession, PrefixCache
from regard.models.generation.generate import (
    BatchGeneration,
    Continuation,
    Generation,
    GenerationOptions,
    StopStrings,
)
from regard.models.generation.sampling import Sampler, SamplingParams, distribution

__all__ = [
    "BatchGeneration",
    "BeamCompletion",
    "CacheConfig",
    "CapturedSession",
    "Continuation",
    "Conversation",
    "DecodeSession",
    "Generation",
    "GenerationOptions",
    "Hypothesis",
    "PrefixCache",
    "Sampler",
    "SamplingParams",
    "StopStrings",
    "beam_search",
    "beam_search_text",
    "distribution",
    "greedy",
]
