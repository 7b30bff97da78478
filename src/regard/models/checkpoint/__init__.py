"""Checkpoint folders: config.json, safetensors and tokenizer.json, with Hugging Face's names; files
are hostile data.
"""

from regard.models.checkpoint.config import read_config, read_raw
from regard.models.checkpoint.family import Family
from regard.models.checkpoint.names import Rule, rows, transposed
from regard.models.checkpoint.weights import fill
from regard.models.checkpoint.write import write

__all__ = [
    "Family",
    "Rule",
    "fill",
    "read_config",
    "read_raw",
    "rows",
    "transposed",
    "write",
]
