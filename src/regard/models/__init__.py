"""Models made of regard's parts, their checkpoints, tokenizer and generation."""

from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder, transformer
from regard.models.greedy import greedy
from regard.models.load import load
from regard.models.model import Model
from regard.models.rnn import RecurrentEncoderDecoder, recurrent

__all__ = [
    "Encoder",
    "EncoderDecoder",
    "Model",
    "RecurrentEncoderDecoder",
    "greedy",
    "load",
    "recurrent",
    "transformer",
]
