"""Models: decoders, encoders and encoder-decoders, their checkpoints, tokenizer and generation.

Loading builds a network on the device "meta", compares names and shapes with the checked headers,
and only then reads, tensor by tensor.
"""

from regard.models.encoder import Encoder, HeadedEncoder
from regard.models.encoder_decoder import EncoderDecoder, transformer
from regard.models.generation import (
    BatchGeneration,
    BeamCompletion,
    Generation,
    Hypothesis,
    PrefixCache,
    SamplingParams,
    StopStrings,
    beam_search,
    distribution,
    greedy,
)
from regard.models.load import load
from regard.models.model import Model
from regard.models.rnn import RecurrentEncoderDecoder, recurrent
from regard.models.sentence_settings import Pooling
from regard.models.seq2seq import Seq2Seq
from regard.models.speech_to_text import SpeechToText
from regard.models.text_encoder import TextEncoder

__all__ = [
    "BatchGeneration",
    "BeamCompletion",
    "Encoder",
    "EncoderDecoder",
    "Generation",
    "HeadedEncoder",
    "Hypothesis",
    "Model",
    "Pooling",
    "PrefixCache",
    "RecurrentEncoderDecoder",
    "SamplingParams",
    "Seq2Seq",
    "SpeechToText",
    "StopStrings",
    "TextEncoder",
    "beam_search",
    "distribution",
    "greedy",
    "load",
    "recurrent",
    "transformer",
]
