"""What the encoders with sparse attention share: their sizes, and where their parts are."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.parity import layers

M, H = 24, 3
SIZES = {
    "vocab_size": 8,
    "hidden_size": M,
    "num_attention_heads": H,
    "intermediate_size": 16,
    "num_hidden_layers": layers.LAYERS,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def paths(layer: int) -> tuple[str, str]:
    """What attention is given, and its output projection, before residual and norm."""
    where = f"encoder.layer.{layer}.attention"
    return f"{where}.self", f"{where}.output.dense"


def parts(theirs: Any, layer: int) -> nn.Module:
    inlet, outlet = (theirs.get_submodule(path) for path in paths(layer))
    return nn.ModuleDict({"self": inlet, "dense": outlet})


def names(kinds: dict[str, str]) -> dict[str, str]:
    """self.query<ending>.weight -> <ours>.q.linear.weight and so on, and the output."""
    made = {
        f"self.{name}{ending}.{end}": f"{ours}.{name[0]}.linear.{end}"
        for ending, ours in kinds.items()
        for name in ("query", "key", "value")
        for end in ("weight", "bias")
    }
    return made | {f"dense.{end}": f"output.{end}" for end in ("weight", "bias")}
