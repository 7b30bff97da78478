"""Saving a model as a checkpoint folder."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.models.checkpoint.names import bind
from regard.models.families import family, type_of


def save(network: nn.Module, config: Any, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json and model.safetensors of a family's model into a folder that exists.

    A shared parameter is written under its first name. A decoder without a head is written as a
    base model is: the names have no prefix, from which a reader knows it.

    Args:
        network: made by the family's builder.
        config: the config of its family.
        folder: where to write.
        dtype: of the weights.
    """
    name = type_of(config)
    found = family(name)
    assert found is not None
    parameters = dict(network.named_parameters(remove_duplicate=False))
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    bindings = bind(network, found.names)
    bare = found.head is not None and found.head not in bindings
    for theirs, binding in bindings.items():
        ids = {id(parameters[ours]) for ours in binding.ours}
        if ids & seen:
            continue
        seen |= ids
        parts = [parameters[o].detach().to(found.dtype_of(o, dtype)) for o in binding.ours]
        stored = theirs.removeprefix(found.prefixes[0]) if bare else theirs
        tensors[stored] = binding.rule.give(parts).contiguous()
    raw = {"model_type": name, **asdict(config), "torch_dtype": str(dtype).removeprefix("torch.")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", "utf-8")
