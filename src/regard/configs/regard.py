"""`RegardConfig`, for decoders with any causal mechanism of `regard.nn.variants`, and SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regard.configs.base import ModelConfig, check_sizes
from regard.cost.mechanisms import mechanism_spec
from regard.cost.model import DenseSpec, LayerSpec, ModelSpec
from regard.cost.spec import ParameterCounts
from regard.errors import ArgumentError

DECODER_OPTIONS = ("is_causal", "bidirectional")
"""Options of a mechanism that the decoder sets."""


@dataclass(frozen=True)
class RegardConfig(ModelConfig):
    """The keys of config.json for `model_type` "regard".

    Attributes:
        attention: the name of a mechanism in `regard.nn.variants`.
        attention_options: the options of its constructor, as plain values.
        position: "catalogue" (as the mechanism has them), "rope", "alibi", "learned", "sinusoidal"
            or "none".
        window: None, or the number of keys that a query sees, its own included.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    attention: str
    attention_options: Mapping[str, Any] = field(default_factory=dict)
    position: str = "catalogue"
    window: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    model_types = ("regard",)
    family_file = "regard"

    def __post_init__(self) -> None:
        check_sizes(self)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder."""
        M, H = self.hidden_size, self.num_attention_heads
        options = {k: v for k, v in self.attention_options.items() if k not in DECODER_OPTIONS}
        if self.window is not None:
            options["window"] = self.window
        if self.attention == "mha" and options.pop("bias", False):
            raise ArgumentError("mha with bias is not counted; gpt2 has the same shape")
        layers = tuple(
            LayerSpec(
                mechanism_spec(self.attention, M, H, {**options, "layer": i}),
                DenseSpec(M, self.intermediate_size),
                ParameterCounts(norms=2 * M),
            )
            for i in range(self.num_hidden_layers)
        )
        rows = self.max_position_embeddings if self.position == "learned" else 0
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            layers,
            positions=rows * M,
            position_rows=int(rows > 0),
            max_context=rows or None,
            norms=ParameterCounts(norms=M),
            tied=self.tie_word_embeddings,
            dtype="fp32",
        )
