"""Blocks of encoders and decoders with LayerNorms and biases, as in the first Transformer, and
their initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from regard.masks import Causal
from regard.models.assembly.building_blocks import activation
from regard.nn import (
    Attention,
    Block,
    CrossAttention,
    DecoderBlock,
    FeedForward,
    HeadProjection,
    PostNorm,
    SeparateQKV,
)
from regard.nn.blocks.blocks import Residual
from regard.nn.variants.projections import output_projection


@dataclass(frozen=True)
class LayerSizes:
    """The sizes and the kind of the layers of one stack."""

    dim: int
    heads: int
    hidden: int
    activation: str
    eps: float = 1e-5
    key_bias: bool = True
    residual: type[Residual] = PostNorm

    def attention_parts(self) -> tuple[SeparateQKV, nn.Linear]:
        """Return the projection of queries, keys and values, and the output map."""
        M, H = self.dim, self.heads
        q, k, v = (HeadProjection(M, H, M // H, bias=bias) for bias in (True, self.key_bias, True))
        return SeparateQKV(q, k, v), output_projection(M, H, M // H, bias=True)

    def feed_forward(self) -> FeedForward:
        """Return the feed-forward layer, with biases in both maps."""
        return FeedForward(self.dim, self.hidden, activation(self.activation))

    def norm(self) -> nn.LayerNorm:
        """Return a norm of the model dim."""
        return nn.LayerNorm(self.dim, eps=self.eps)

    def residuals(self, count: int) -> list[Residual]:
        """Return the residual connections of a block."""
        return [self.residual(self.norm()) for _ in range(count)]


def encoder_blocks(sizes: LayerSizes, count: int) -> list[Block]:
    """Build the blocks of an encoder."""
    return [
        Block(Attention(*sizes.attention_parts()), sizes.feed_forward(), *sizes.residuals(2))
        for _ in range(count)
    ]


def decoder_blocks(sizes: LayerSizes, count: int) -> list[DecoderBlock]:
    """Build the blocks of a decoder."""
    return [
        DecoderBlock(
            Attention(*sizes.attention_parts(), mask=Causal()),
            CrossAttention(*sizes.attention_parts()),
            sizes.feed_forward(),
            *sizes.residuals(3),
        )
        for _ in range(count)
    ]


def initialize_normal(model: nn.Module) -> None:
    """Draw initial weights in place: normal (standard deviation 0.02), and biases 0."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
