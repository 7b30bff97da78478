"""Writing a model as a checkpoint folder that loads again, here and in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.models.checkpoint import write
from regard.models.families import family, type_of


def save(network: nn.Module, config: Any, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json and model.safetensors of a family's model into a folder that exists."""
    name = type_of(config)
    found = family(name)
    assert found is not None
    write(network, config, folder, dtype, name=name, family=found)
