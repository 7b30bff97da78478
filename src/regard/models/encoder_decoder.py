"""An encoder and a decoder that attends to it: the first Transformer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.argument_checks import resolve_head_dim
from regard.caches import rollback_on_error
from regard.errors import ArgumentError
from regard.masks import Causal
from regard.models.encoder import Encoder
from regard.nn.attention import Attention
from regard.nn.blocks import Block, BlockCaches, DecoderBlock, PostNorm, PreNorm, Residual
from regard.nn.embedding import InputEmbedding, SinusoidalPositions
from regard.nn.feed_forward import FeedForward
from regard.nn.linear import Linear
from regard.nn.variants.cross import cross_attention
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.process_state import is_compiling
from regard.span import Positions, Span
from regard.tracing import named_scope


class EncoderDecoder(nn.Module):
    """source ids -> encoder -> memory;  target ids, memory -> decoder -> logits for the token after
    each.

    Args:
        encoder: an `Encoder`.
        embed: the `InputEmbedding` of the target; it may be the encoder's.
        layers: decoder blocks.
        norm: behind the last of them, as in `Encoder`.
        head: a module [B,T,M] -> [B,T,V]; give it the weight of the embedding to tie them.

    Raises:
        ArgumentError: ids are not [B,T]; caches are not one per layer; there is no memory, or two.

    >>> import torch
    >>> model = transformer(11, 8, 2, 1)
    >>> source, target = torch.tensor([[3, 4, 5]]), torch.tensor([[1, 2]])
    >>> model(source, target).shape
    torch.Size([1, 2, 11])
    >>> caches = model.new_caches()
    >>> memory = model.encode(source)
    >>> first = model.decode(target[:, :1], caches, memory=memory)
    >>> second = model.decode(target[:, 1:], caches)

    Source: Vaswani et al. 2017 (arXiv 1706.03762), figure 1.
    """

    def __init__(
        self,
        encoder: Encoder,
        embed: InputEmbedding,
        layers: Sequence[DecoderBlock],
        norm: nn.Module,
        head: nn.Module,
    ) -> None:
        super().__init__()
        self.encoder, self.embed, self.layers = encoder, embed, nn.ModuleList(layers)
        self.norm, self.head = norm, head

    def forward(
        self,
        source_ids: Int[Tensor, "B S"],
        target_ids: Int[Tensor, "B T"],
        source_positions: Positions | None = None,
        target_positions: Positions | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B T V"]:
        """Logits [B,T,V] for the token after each of target_ids [B,T], given the source [B,S]; -1
        marks padding in both.
        """
        memory = self.encode(source_ids, source_positions, backend=backend)
        return self.decode(
            target_ids,
            positions=target_positions,
            memory=memory,
            memory_positions=source_positions,
            backend=backend,
        )

    def encode(
        self,
        ids: Int[Tensor, "B S"],
        positions: Positions | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B S M"]:
        """What the decoder reads of a source [B,S]; slots at position -1 are padding."""
        with named_scope("encoder"):
            states: Tensor = self.encoder(ids, positions, backend=backend)
            return states

    def decode(
        self,
        ids: Int[Tensor, "B T"],
        caches: Sequence[BlockCaches] | None = None,
        *,
        positions: Positions | None = None,
        memory: Float[Tensor, "B S M"] | None = None,
        memory_positions: Positions | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T V"]:
        """Logits for the token after each of ids [B,T]. With caches, ids go on from them, and only
        the first call gives memory.

        A call that is refused leaves the caches as they were.
        """
        if caches is not None and len(caches) != len(self.layers):
            raise ArgumentError(
                f"{len(caches)} caches for {len(self.layers)} layers; new_caches() gives one pair "
                "per layer"
            )
        if positions is None:
            positions = (
                caches[0].self_attention.next(ids.shape[-1]) if caches else Span(0, ids.shape[-1])
            )
        if not caches or is_compiling():
            return self._decode(ids, caches, positions, memory, memory_positions, backend)
        with rollback_on_error(*(cache for pair in caches for cache in pair), layers=True):
            return self._decode(ids, caches, positions, memory, memory_positions, backend)

    def _decode(
        self,
        ids: Tensor,
        caches: Sequence[BlockCaches] | None,
        positions: Positions,
        memory: Tensor | None,
        memory_positions: Positions | None,
        backend: str,
    ) -> Tensor:
        x = self.embed(ids, positions)
        for i, layer in enumerate(self.layers):
            pair = caches[i] if caches is not None else None
            with named_scope(f"decoder.layers.{i}"):
                x = layer(
                    x,
                    positions,
                    pair,
                    memory=memory,
                    memory_positions=memory_positions,
                    backend=backend,
                )
        logits: Tensor = self.head(self.norm(x))
        return logits

    def new_caches(self) -> list[BlockCaches]:
        """Empty caches for a target and its source, a pair for each layer of the decoder."""
        return [cast("DecoderBlock", layer).new_caches() for layer in self.layers]


def transformer(
    vocabulary: int,
    dim: int,
    heads: int,
    layers: int,
    *,
    hidden: int | None = None,
    residual: type[Residual] = PostNorm,
    activation: nn.Module | None = None,
    dropout: float = 0.0,
) -> EncoderDecoder:
    """The first Transformer: post-norm blocks, sinusoids, and one matrix for both embeddings and
    the output.

    Args:
        vocabulary: V, shared by source and target.
        dim: the model dim M.
        heads: H, of M / H each.
        layers: of the encoder, and as many of the decoder.
        hidden: the width of the feed-forward layers; None is 4 M.
        residual: `PostNorm`, or `PreNorm`, which adds a norm behind each stack.
        activation: of the feed-forward layers; None is ReLU.
        dropout: on embeddings and sublayers, 0.1 in the paper.

    Raises:
        ArgumentError: a size is less than 1, or M is not a multiple of heads.

    >>> model = transformer(100, 16, 4, 2, residual=PreNorm)
    >>> model.head.weight is model.embed.embedding.weight is model.encoder.embed.embedding.weight
    True

    Source: Vaswani et al. 2017 (arXiv 1706.03762), sections 3.1 to 3.5; pre-norm: Xiong et al. 2020
    (arXiv 2002.04745).
    """
    wide = 4 * dim if hidden is None else hidden
    sizes = {"vocabulary": vocabulary, "dim": dim, "layers": layers, "hidden": wide}
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentError(f"{name} is {size}; it must be at least 1")
    D = resolve_head_dim(dim, heads, None)

    def paths(n: int) -> list[Residual]:
        return [residual(nn.LayerNorm(dim), dropout) for _ in range(n)]

    def last() -> nn.Module:
        return nn.LayerNorm(dim) if residual is PreNorm else nn.Identity()

    def own(mask: Causal | None) -> Attention:
        return Attention(
            separate_qkv(dim, heads, heads, D), output_projection(dim, heads, D), mask=mask
        )

    def feed() -> FeedForward:
        return FeedForward(dim, wide, activation)

    embedding = nn.Embedding(vocabulary, dim)
    nn.init.normal_(embedding.weight, std=dim**-0.5)  # of size 1 once it is scaled
    embed = InputEmbedding(
        embedding, SinusoidalPositions(dim), scale=math.sqrt(dim), dropout=dropout
    )
    head = Linear(dim, vocabulary, bias=False)
    head.weight = embedding.weight
    encoder = Encoder(embed, [Block(own(None), feed(), *paths(2)) for _ in range(layers)], last())
    blocks = [
        DecoderBlock(own(Causal()), cross_attention(dim, heads), feed(), *paths(3))
        for _ in range(layers)
    ]
    return EncoderDecoder(encoder, embed, blocks, last(), head)
