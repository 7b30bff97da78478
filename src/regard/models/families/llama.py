"""Llama: RMS norm, rotary in halves, grouped queries, SwiGLU.

Source: Touvron et al. 2023 (arXiv 2307.09288); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from regard import masks
from regard.arguments import check_groups
from regard.models import rope
from regard.models.checkpoint.family import Family, Raw, check_sizes
from regard.models.decoder import Decoder
from regard.models.init import ready_for_training
from regard.nn import Attention, Block, Embed, PreNorm, RMSNorm, SwiGLU


@dataclass(frozen=True)
class Config:
    """The keys of a Llama config.json that shape the model.

    Raises:
        ArgumentError: a size is less than 1, num_key_value_heads does not divide num_attention_heads, or rope_scaling is
            not understood.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        check_sizes(self)
        check_groups(self.num_attention_heads, self.num_key_value_heads)
        self.rotary()

    def rotary(self) -> nn.Module:
        """The rotary positions of every layer."""
        return rope.rotary(
            self.head_dim, self.rope_theta, self.rope_scaling, self.max_position_embeddings
        )


def plain(raw: Raw) -> dict[str, Any]:
    """Older files lack head_dim, or num_key_value_heads; newer ones nest what rotary needs."""
    found = rope.plain(raw)
    heads, size = found.get("num_attention_heads"), found.get("hidden_size")
    if isinstance(heads, int) and isinstance(size, int) and heads > 0:
        for key, value in (("num_key_value_heads", heads), ("head_dim", size // heads)):
            if found.get(key) is None:
                found[key] = value
    return found


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""
    embedding = nn.Embedding(config.vocab_size, config.hidden_size)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    if config.tie_word_embeddings:
        head.weight = embedding.weight
    rotary = config.rotary()
    layers = [_block(config, rotary) for _ in range(config.num_hidden_layers)]
    decoder = Decoder(Embed(embedding), layers, _norm(config), head)
    return ready_for_training(decoder)


def _norm(config: Config) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


def _block(config: Config, rotary: nn.Module) -> Block:
    M, D, H, G = (
        config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads,
    )  # fmt: skip
    project = rope.heads(M, H, G, D, rotary, bias=config.attention_bias)
    output = nn.Linear(H * D, M, bias=config.attention_bias)
    attention = Attention(project, output, mask=masks.Causal())
    feed_forward = SwiGLU(M, config.intermediate_size, bias=config.mlp_bias)
    return Block(attention, feed_forward, PreNorm(_norm(config)), PreNorm(_norm(config)))


LAYER, OURS = "model.layers.{}.", "layers.{}."
NAMES = {
    "model.embed_tokens.weight": "embed.embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    LAYER + "input_layernorm.weight": OURS + "around_attention.norm.weight",
    LAYER + "self_attn.q_proj.weight": OURS + "attention.project.q.linear.weight",
    LAYER + "self_attn.k_proj.weight": OURS + "attention.project.k.linear.weight",
    LAYER + "self_attn.v_proj.weight": OURS + "attention.project.v.linear.weight",
    LAYER + "self_attn.o_proj.weight": OURS + "attention.output.weight",
    LAYER + "self_attn.q_proj.bias": OURS + "attention.project.q.linear.bias",
    LAYER + "self_attn.k_proj.bias": OURS + "attention.project.k.linear.bias",
    LAYER + "self_attn.v_proj.bias": OURS + "attention.project.v.linear.bias",
    LAYER + "self_attn.o_proj.bias": OURS + "attention.output.bias",
    LAYER + "post_attention_layernorm.weight": OURS + "around_feed_forward.norm.weight",
    LAYER + "mlp.gate_proj.weight": OURS + "feed_forward.gate.weight",
    LAYER + "mlp.up_proj.weight": OURS + "feed_forward.up.weight",
    LAYER + "mlp.down_proj.weight": OURS + "feed_forward.down.weight",
    LAYER + "mlp.gate_proj.bias": OURS + "feed_forward.gate.bias",
    LAYER + "mlp.up_proj.bias": OURS + "feed_forward.up.bias",
    LAYER + "mlp.down_proj.bias": OURS + "feed_forward.down.bias",
}
"""Checkpoint name -> name here; {} is the layer."""

FAMILY = Family(
    Config, build, NAMES,
    fixed={"hidden_act": ("silu",)},
    plain=plain,
    buffers=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)  # fmt: skip
