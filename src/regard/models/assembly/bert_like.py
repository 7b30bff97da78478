"""Parts of encoders like BERT: post-norm blocks with LayerNorms, a pooler, and a head for masked
language modelling whose matrix is the embedding.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from regard.argument_checks import resolve_head_dim
from regard.models.assembly.building_blocks import activation
from regard.models.encoder import Encoder, HeadedEncoder
from regard.nn import Attention, Block, FeedForward, InputEmbedding, PostNorm
from regard.nn.linear import Linear
from regard.nn.variants.projections import output_projection, separate_qkv


@dataclass(frozen=True)
class EncoderSizes:
    """The sizes of an encoder like BERT.

    Attributes:
        dim, hidden, layers, heads: M, the hidden size of the feed-forward layers, the number of
            layers, and H.
        activation: the activation's name in config.json.
        eps: the eps of the norms.
    """

    dim: int
    hidden: int
    layers: int
    heads: int
    activation: str
    eps: float


def norm(sizes: EncoderSizes) -> nn.LayerNorm:
    """Build a LayerNorm of the model dim."""
    return nn.LayerNorm(sizes.dim, eps=sizes.eps)


def encoder(
    sizes: EncoderSizes, embed: InputEmbedding, *, pooler: bool, masked_words: bool
) -> HeadedEncoder:
    """Build an encoder with initial weights: normal (0.02), biases 0, norms 1."""
    M = sizes.dim
    pool = _chain(dense=Linear(M, M), activation=nn.Tanh()) if pooler else None
    head = _head(sizes, embed.embedding) if masked_words else None
    blocks = [_block(sizes) for _ in range(sizes.layers)]
    model = HeadedEncoder(Encoder(embed, blocks, nn.Identity()), pool, head)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return model


def _block(sizes: EncoderSizes) -> Block:
    M, H = sizes.dim, sizes.heads
    D = resolve_head_dim(M, H, None)
    attention = Attention(
        separate_qkv(M, H, H, D, bias=True), output_projection(M, H, D, bias=True)
    )
    feed_forward = FeedForward(M, sizes.hidden, activation(sizes.activation))
    return Block(attention, feed_forward, PostNorm(norm(sizes)), PostNorm(norm(sizes)))


def _head(sizes: EncoderSizes, embedding: nn.Embedding) -> nn.Sequential:
    M, f = sizes.dim, activation(sizes.activation)
    words = Linear(M, embedding.num_embeddings)
    words.weight = embedding.weight
    return _chain(dense=Linear(M, M), activation=f, norm=norm(sizes), words=words)


def _chain(**steps: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(steps))


LAYER_PARTS = {
    "attention.self.query": "attention.project.q.linear",
    "attention.self.key": "attention.project.k.linear",
    "attention.self.value": "attention.project.v.linear",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_residual.norm",
    "intermediate.dense": "feed_forward.up",
    "output.dense": "feed_forward.down",
    "output.LayerNorm": "feed_forward_residual.norm",
}
"""BERT's name of a part of a layer -> its name in the network."""
