"""Parts and checkpoint names of the Gemmas: norms with weight 1 + w, a scaled embedding, GeGLU, and
from Gemma 2 on norms before and after each sublayer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from regard import masks
from regard.configs.gemma import GemmaConfig
from regard.models.assembly import building_blocks, llama_like
from regard.models.assembly.building_blocks import initialize_weights
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, InputEmbedding, OffsetRMSNorm, SandwichNorm
from regard.nn.embedding import CappedLogits
from regard.nn.feed_forward import GatedFeedForward
from regard.nn.linear import Linear
from regard.positions import Rotary

SANDWICH = {
    STORED_LAYER + "input_layernorm.weight": MODEL_LAYER + "attention_residual.norm.weight",
    STORED_LAYER + "post_attention_layernorm.weight": MODEL_LAYER
    + "attention_residual.after.weight",
    STORED_LAYER + "pre_feedforward_layernorm.weight": MODEL_LAYER
    + "feed_forward_residual.norm.weight",
    STORED_LAYER + "post_feedforward_layernorm.weight": MODEL_LAYER
    + "feed_forward_residual.after.weight",
}
HEAD_NORMS = {
    STORED_LAYER + "self_attn.q_norm.weight": MODEL_LAYER + "attention.project.q.steps.0.weight",
    STORED_LAYER + "self_attn.k_norm.weight": MODEL_LAYER + "attention.project.k.steps.0.weight",
}
NAMES = (
    llama_like.EMBEDDING_AND_HEAD
    | llama_like.ATTENTION
    | llama_like.FEED_FORWARD
    | SANDWICH
    | HEAD_NORMS
)
"""Stored name of Gemma 2 or 3 -> parameter name; {} is the layer. Entries of parts that a model
lacks are ignored.
"""


def decoder(config: GemmaConfig, layers: Sequence[Block], cap: float | None = None) -> Decoder:
    """Build a decoder with initial weights: the embedding times sqrt(M), the layers, a norm and a
    head.
    """
    M, V = config.hidden_size, config.vocab_size
    embedding = nn.Embedding(V, M)
    head = Linear(M, V, bias=False) if cap is None else CappedLogits(M, V, cap=cap)
    if config.tie_word_embeddings:
        head.weight = embedding.weight
    embed = InputEmbedding(embedding, scale=M**0.5)
    return initialize_weights(Decoder(embed, layers, norm(config), head))


def attention(
    config: GemmaConfig,
    rotary: Rotary,
    window: int | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    head_norms: bool = False,
) -> Attention:
    """Build causal grouped-query attention, with a window if there is one.

    With `head_norms`, each head of queries and keys has a norm.
    """
    M, D, H, G = (
        config.hidden_size,
        config.head_dim,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    q_norm, k_norm = ([norm(config, D)] if head_norms else [] for _ in range(2))
    bias = config.attention_bias
    project = building_blocks.rotary_heads(
        M, H, G, D, rotary, q_steps=q_norm, k_steps=k_norm, bias=bias
    )
    output = Linear(H * D, M, bias=bias)
    mask = masks.Causal() if window is None else masks.Causal() & masks.Window(window)
    return Attention(project, output, mask=mask, scale=scale, softcap=softcap)


def feed_forward(config: GemmaConfig) -> GatedFeedForward:
    """Build a GeGLU with the tanh approximation of GELU."""
    return GatedFeedForward(config.hidden_size, config.intermediate_size, nn.GELU("tanh"))


def sandwich(config: GemmaConfig, mixer: Attention) -> Block:
    """Build a block with a norm before and after the attention and the feed-forward layer."""
    residuals = [SandwichNorm(norm(config), norm(config)) for _ in range(2)]
    return Block(mixer, feed_forward(config), *residuals)


def norm(config: GemmaConfig, dim: int | None = None) -> OffsetRMSNorm:
    """Build a norm of the model dim, or of another dim, with the config's eps."""
    return OffsetRMSNorm(config.hidden_size if dim is None else dim, eps=config.rms_norm_eps)
