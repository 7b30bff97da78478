"""The config of MiniMax-Text-01, which mixes layers of lightning attention and layers of softmax
attention.

Source of the keys: Hugging Face checkpoints, and transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from regard.configs.base import FULL, Raw, rename_keys
from regard.configs.hybrid import LINEAR, HybridConfig, Names, named_kinds
from regard.configs.llama import MixtralConfig
from regard.configs.rope import RopeSettings, rotated_share
from regard.cost.spec import Spec
from regard.cost.state_space import lightning_attention

MAKERS_NAMES = {"attn_type_list": "layer_types"} | {
    f"layernorm_{theirs}_{factor}": f"{ours}_{factor}_factor"
    for theirs, ours in (
        ("full_attention", "full_attn"),
        ("linear_attention", "linear_attn"),
        ("mlp", "mlp"),
    )
    for factor in ("alpha", "beta")
}
"""Key in the makers' files -> its name in transformers."""


@dataclass(frozen=True)
class MiniMaxConfig(MixtralConfig, HybridConfig):
    """The keys of MiniMax-Text-01: lightning attention in most layers, softmax attention in the
    others, and a mixture of experts in each.
    """

    layer_types: Names = None
    partial_rotary_factor: float = 1.0
    full_attn_alpha_factor: float = 1.0
    full_attn_beta_factor: float = 1.0
    linear_attn_alpha_factor: float = 1.0
    linear_attn_beta_factor: float = 1.0
    mlp_alpha_factor: float = 1.0
    mlp_beta_factor: float = 1.0

    model_types: ClassVar[tuple[str, ...]] = ("minimax",)
    ignored: ClassVar[frozenset[str]] = frozenset({"block_size"})  # of other code's loops
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "postnorm": (True,),
        "shared_intermediate_size": (0,),
    }

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama, also with the names of the makers' code.

        attn_type_list has a 1 for each layer with softmax attention, and rotary_dim is the number
        of rotated dims of a head.
        """
        keys = super().normalize_keys(rename_keys(raw, MAKERS_NAMES))
        keys = rotated_share(keys)
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

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings: only the first part of each head is rotated."""
        return super().rope._replace(partial=self.partial_rotary_factor)

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer with softmax attention; None for the others."""
        return tuple(self.rope if kind == FULL else None for kind in self.kinds())

    def mixer(self, kind: str) -> Spec:
        """Return the sizes of lightning attention, or of softmax attention with its window."""
        return self.attention(self.sliding_window) if kind == FULL else self.recurrent()

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of lightning attention."""
        return lightning_attention(self.hidden_size, self.num_attention_heads, self.head_dim)
