"""GPT-NeoX and Pythia: rotary on a part of each head, attention and feed-forward side by side, a
head of its own.

Source: Black et al. 2022 (arXiv 2204.06745); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from regard import masks
from regard.arguments import check_number
from regard.models.assembly import rope
from regard.models.assembly.shared import (
    activation,
    embedding_and_head,
    ready_for_training,
    respelled,
)
from regard.models.checkpoint.family import Family, Raw, check_sizes
from regard.models.checkpoint.names import both
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, Embed, FeedForward, Fused, ParallelBlock, PreNorm
from regard.nn.linear import Linear
from regard.nn.variants.parts import head_size
from regard.positions import Rotary

OLD_NAMES = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
"""This family's names of two keys that others have, too."""


@dataclass(frozen=True)
class Config:
    """The keys of a GPT-NeoX config.json that shape the model.

    Raises:
        ArgumentError: a size is less than 1, the norms' eps is not above 0, num_attention_heads
            does not divide hidden_size, the activation is not known, or what is said of rotary
            positions is not understood.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    rotary_emb_base: float = 10000.0
    rotary_pct: float = 0.25
    rope_scaling: Mapping[str, Any] | None = None
    use_parallel_residual: bool = True
    attention_bias: bool = True
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        check_sizes(self)
        check_number("layer_norm_eps", self.layer_norm_eps, 0, float("inf"), "above 0")
        activation(self.hidden_act)
        self.rotary()

    def rotary(self) -> Rotary:
        """The rotary positions of every layer."""
        head_dim = head_size(self.hidden_size, self.num_attention_heads, None)
        return rope.rotary(
            head_dim,
            self.rotary_emb_base,
            self.rope_scaling,
            self.max_position_embeddings,
            partial=self.rotary_pct,
        )


def plain(raw: Raw) -> dict[str, Any]:
    """Base and part of the rotary positions have their general names in newer files, or are
    nested.
    """
    found = rope.plain(respelled(raw, OLD_NAMES))
    return respelled(found, {general: own for own, general in OLD_NAMES.items()})


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""
    embedding, head = embedding_and_head(
        config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    rotary = config.rotary()
    layers = [_block(config, rotary) for _ in range(config.num_hidden_layers)]
    return ready_for_training(Decoder(Embed(embedding), layers, _norm(config), head))


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def _block(config: Config, rotary: Rotary) -> Block:
    M, H, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
    project = Fused(M, H, H, M // H, order="heads", steps=[rotary], bias=bias)
    attention = Attention(project, Linear(M, M, bias=bias), mask=masks.Causal())
    feed_forward = FeedForward(M, config.intermediate_size, activation(config.hidden_act))
    paths = [PreNorm(_norm(config)) for _ in range(2)]
    kind = ParallelBlock if config.use_parallel_residual else Block
    return kind(attention, feed_forward, *paths)


LAYER, OURS = "gpt_neox.layers.{}.", "layers.{}."
PARTS = {
    "input_layernorm": "around_attention.norm",
    "attention.query_key_value": "attention.project.linear",
    "attention.dense": "attention.output",
    "post_attention_layernorm": "around_feed_forward.norm",
    "mlp.dense_h_to_4h": "feed_forward.up",
    "mlp.dense_4h_to_h": "feed_forward.down",
}
NAMES = {
    "gpt_neox.embed_in.weight": "embed.embedding.weight",
    "gpt_neox.final_layer_norm.weight": "norm.weight",
    "gpt_neox.final_layer_norm.bias": "norm.bias",
    "embed_out.weight": "head.weight",
} | {
    name: parameter
    for theirs, ours in PARTS.items()
    for name, parameter in both(LAYER + theirs, OURS + ours).items()
}
"""Checkpoint name -> name here; {} is the layer."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    plain=plain,
    # a head that is missing is missing: this family ties none unless config.json says so
    settle=lambda config, _raw, _stored: config,
    prefixes=("gpt_neox.",),
    head="embed_out.weight",
    buffers=(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    respell=lambda name: "embed_out.weight" if name == "lm_head.weight" else name,
)
