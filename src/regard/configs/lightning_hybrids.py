"""The config of MiniMax-Text-01, which mixes layers of lightning attention and layers of softmax
attention.

Source of the keys: Hugging Face checkpoints, and transformers' configuration classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from regard.configs.base import FULL, Raw, rename_keys
from regard.configs.hybrid import LINEAR, HybridConfig, Names, named_kinds
from regard.configs.llama import MixtralConfig
from regard.cost.spec import Spec
from regard.cost.state_space import lightning_attention


@dataclass(frozen=True)
class MiniMaxConfig(MixtralConfig, HybridConfig):
    """The keys of MiniMax-Text-01: lightning attention in most layers, softmax attention in the
    others, and a mixture of experts in each.
    """

    layer_types: Names = None

    model_types: ClassVar[tuple[str, ...]] = ("minimax",)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama; attn_type_list has a 1 for each layer with softmax."""
        keys = super().normalize_keys(rename_keys(raw, {"attn_type_list": "layer_types"}))
        names = keys.get("layer_types")
        if isinstance(names, list):
            keys["layer_types"] = [
                FULL if name == 1 else LINEAR if name == 0 else name for name in names
            ]
        return keys

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of `layer_types`; without them every second layer has attention."""
        if self.layer_types is not None:
            return named_kinds(self.layer_types, self.num_hidden_layers)
        return tuple(FULL if i % 2 == 0 else LINEAR for i in range(self.num_hidden_layers))

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of lightning attention."""
        return lightning_attention(self.hidden_size, self.num_attention_heads, self.head_dim)
