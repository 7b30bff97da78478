"""Models made of regard's parts, their checkpoints, tokenizer and generation."""

from regard.models.encoder import Encoder, HeadedEncoder
from regard.models.encoder_decoder import EncoderDecoder, transformer
from regard.models.generation import (
    Batch,
    Found,
    Generation,
    Hypothesis,
    Reading,
    Sampling,
    Stops,
    beam_search,
    distribution,
    greedy,
)
from regard.models.load import load
from regard.models.model import Model
from regard.models.rnn import RecurrentEncoderDecoder, recurrent
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import Pooling, TextEncoder

__all__ = [
    "Batch",
    "Encoder",
    "EncoderDecoder",
    "Found",
    "Generation",
    "HeadedEncoder",
    "Hypothesis",
    "Model",
    "Pooling",
    "Reading",
    "RecurrentEncoderDecoder",
    "Sampling",
    "Seq2Seq",
    "Stops",
    "TextEncoder",
    "beam_search",
    "distribution",
    "greedy",
    "load",
    "recurrent",
    "transformer",
]
