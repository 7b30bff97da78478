"""GPT-2: learned positions, LayerNorm in front, one fused matrix for queries, keys and values,
GELU, a tied head.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; key names as in
Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from regard import masks
from regard.arguments import check_number
from regard.models.assembly.shared import (
    activation,
    embedding_and_head,
    ready_for_training,
    respelled,
)
from regard.models.checkpoint.family import Family, Raw, check_sizes
from regard.models.checkpoint.names import Names, transposed
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, Embed, FeedForward, Fused, PreNorm
from regard.nn.linear import Linear
from regard.nn.variants.parts import head_size
from regard.positions import Learned


@dataclass(frozen=True)
class Config:
    """The keys of a GPT-2 config.json that shape the model.

    Raises:
        ArgumentError: a size is less than 1, the norms' eps is not above 0, n_head does not divide
            n_embd, or the activation is not known.
    """

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)
        check_number("layer_norm_epsilon", self.layer_norm_epsilon, 0, float("inf"), "above 0")
        head_size(self.n_embd, self.n_head, None)
        activation(self.activation_function, "activation_function")


def plain(raw: Raw) -> dict[str, Any]:
    """The general names of sizes are understood, too."""
    names = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    return respelled(raw, names)


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""
    M = config.n_embd
    embedding, head = embedding_and_head(config.vocab_size, M, tied=config.tie_word_embeddings)
    embed = Embed(embedding, Learned(config.n_positions, M))
    layers = [_block(config, i) for i in range(config.n_layer)]
    return ready_for_training(Decoder(embed, layers, _norm(config), head))


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)


def _block(config: Config, layer: int) -> Block:
    M, H = config.n_embd, config.n_head
    D = head_size(M, H, None)
    scale = D**-0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= layer + 1
    project = Fused(M, H, H, D, order="parts")
    attention = Attention(project, Linear(M, M), mask=masks.Causal(), scale=scale)
    hidden = 4 * M if config.n_inner is None else config.n_inner
    feed_forward = FeedForward(M, hidden, activation(config.activation_function))
    return Block(attention, feed_forward, PreNorm(_norm(config)), PreNorm(_norm(config)))


LAYER, OURS = "transformer.h.{}.", "layers.{}."
NAMES: Names = {
    "transformer.wte.weight": "embed.embedding.weight",
    "transformer.wpe.weight": "embed.positional.weight",
    "transformer.ln_f.weight": "norm.weight",
    "transformer.ln_f.bias": "norm.bias",
    "lm_head.weight": "head.weight",
    LAYER + "ln_1.weight": OURS + "around_attention.norm.weight",
    LAYER + "ln_1.bias": OURS + "around_attention.norm.bias",
    LAYER + "attn.c_attn.weight": transposed(OURS + "attention.project.linear.weight"),
    LAYER + "attn.c_attn.bias": OURS + "attention.project.linear.bias",
    LAYER + "attn.c_proj.weight": transposed(OURS + "attention.output.weight"),
    LAYER + "attn.c_proj.bias": OURS + "attention.output.bias",
    LAYER + "ln_2.weight": OURS + "around_feed_forward.norm.weight",
    LAYER + "ln_2.bias": OURS + "around_feed_forward.norm.bias",
    LAYER + "mlp.c_fc.weight": transposed(OURS + "feed_forward.up.weight"),
    LAYER + "mlp.c_fc.bias": OURS + "feed_forward.up.bias",
    LAYER + "mlp.c_proj.weight": transposed(OURS + "feed_forward.down.weight"),
    LAYER + "mlp.c_proj.bias": OURS + "feed_forward.down.bias",
}
"""Checkpoint name -> name here; {} is the layer. Matrices are stored as [in, out]."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    ignored=frozenset({"n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn"}),
    plain=plain,
    prefixes=("transformer.",),
    head="lm_head.weight",
    buffers=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)
