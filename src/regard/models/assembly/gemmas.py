"""What the Gemmas share: norms with weight 1 + w, a scaled embedding, GeGLU, and from Gemma 2 on
norms on either side.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from regard import masks
from regard.configs.gemma import GemmaConfig
from regard.models.assembly import grouped, rope
from regard.models.assembly.grouped import OURS, THEIRS
from regard.models.assembly.parts import ready_for_training
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, InputEmbedding, OffsetRMSNorm, SandwichNorm
from regard.nn.embedding import CappedLogits
from regard.nn.feed_forward import GatedFeedForward
from regard.nn.linear import Linear
from regard.positions import Rotary

SANDWICH = {
    THEIRS + "input_layernorm.weight": OURS + "attention_residual.norm.weight",
    THEIRS + "post_attention_layernorm.weight": OURS + "attention_residual.after.weight",
    THEIRS + "pre_feedforward_layernorm.weight": OURS + "feed_forward_residual.norm.weight",
    THEIRS + "post_feedforward_layernorm.weight": OURS + "feed_forward_residual.after.weight",
}
HEAD_NORMS = {
    THEIRS + "self_attn.q_norm.weight": OURS + "attention.project.q.steps.0.weight",
    THEIRS + "self_attn.k_norm.weight": OURS + "attention.project.k.steps.0.weight",
}
NAMES = grouped.OUTSIDE | grouped.ATTENTION | grouped.FEED_FORWARD | SANDWICH | HEAD_NORMS
"""Name in a checkpoint of Gemma 2 or 3 -> name here; {} is the layer. What a model does not have
drops out.
"""


def decoder(config: GemmaConfig, layers: Sequence[Block], cap: float | None = None) -> Decoder:
    """A decoder with fresh weights: the embedding times sqrt(M), the layers, a norm, and a head,
    capped or not.
    """
    M, V = config.hidden_size, config.vocab_size
    embedding = nn.Embedding(V, M)
    head = Linear(M, V, bias=False) if cap is None else CappedLogits(M, V, cap=cap)
    if config.tie_word_embeddings:
        head.weight = embedding.weight
    embed = InputEmbedding(embedding, scale=M**0.5)
    return ready_for_training(Decoder(embed, layers, norm(config), head))


def attention(
    config: GemmaConfig,
    rotary: Rotary,
    window: int | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    head_norms: bool = False,
) -> Attention:
    """Grouped queries, causal, within a window if there is one, with a norm on each head of queries
    and keys or not.
    """
    M, D, H, G = (
        config.hidden_size,
        config.head_dim,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    q_norm, k_norm = ([norm(config, D)] if head_norms else [] for _ in range(2))
    bias = config.attention_bias
    project = rope.heads(M, H, G, D, rotary, q_steps=q_norm, k_steps=k_norm, bias=bias)
    output = Linear(H * D, M, bias=bias)
    mask = masks.Causal() if window is None else masks.Causal() & masks.Window(window)
    return Attention(project, output, mask=mask, scale=scale, softcap=softcap)


def feed_forward(config: GemmaConfig) -> GatedFeedForward:
    """GeGLU, with the form of GELU that has a tanh."""
    return GatedFeedForward(config.hidden_size, config.intermediate_size, nn.GELU("tanh"))


def sandwich(config: GemmaConfig, mixer: Attention) -> Block:
    """A block with a norm on either side of the attention and of the feed-forward layer."""
    paths = [SandwichNorm(norm(config), norm(config)) for _ in range(2)]
    return Block(mixer, feed_forward(config), *paths)


def norm(config: GemmaConfig, dim: int | None = None) -> OffsetRMSNorm:
    """A norm of the model's vectors, or of others, with the config's eps."""
    return OffsetRMSNorm(config.hidden_size if dim is None else dim, eps=config.rms_norm_eps)
