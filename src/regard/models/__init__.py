"""Models made of regard's parts, their checkpoints, tokenizer and generation."""

from regard.models.load import load
from regard.models.model import Model

__all__ = ["Model", "load"]
