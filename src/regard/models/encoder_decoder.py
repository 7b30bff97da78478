"""`EncoderDecoder`, the network of the original Transformer, and a function that builds it."""

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
from regard.nn.attention.attention import Attention
from regard.nn.blocks.blocks import Block, BlockCaches, DecoderBlock, PostNorm, PreNorm, Residual
from regard.nn.blocks.embedding import InputEmbedding, SinusoidalPositions
from regard.nn.blocks.feed_forward import FeedForward
from regard.nn.variants.cross import cross_attention
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.nn.weights import Linear
from regard.process_state import is_compiling
from regard.span import Positions, Span
from regard.tracing import named_scope, tap
from regard.units import plural


class EncoderDecoder(nn.Module):
    """An encoder-decoder network.

    source ids -> encoder -> memory;  target ids, memory -> decoder -> logits for the next token

    Args:
        encoder: the encoder.
        embed: the input embedding of the target, which may be the encoder's.
        layers: the blocks of the decoder.
        norm: the norm after the last of them, as in `Encoder`.
        head: a module [B, T, M] -> [B, T, V], which may share the embedding's weight.

    Raises:
        ArgumentError: when called: ids are not [B, T]; caches are not one pair per layer; memory is
            missing, or given again with caches that contain it.

    >>> import torch
    >>> model = transformer(11, 8, 2, 1)
    >>> source, target = torch.tensor([[3, 4, 5]]), torch.tensor([[1, 2]])
    >>> model(source, target).shape
    torch.Size([1, 2, 11])
    >>> caches = model.new_caches()
    >>> memory = model.run_encoder(source)
    >>> first = model.run_decoder(target[:, :1], caches, memory=memory)
    >>> second = model.run_decoder(target[:, 1:], caches)

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
        source_ids: Int[Tensor, "B S"] | Float[Tensor, "B F L"],
        target_ids: Int[Tensor, "B T"],
        source_positions: Positions | None = None,
        target_positions: Positions | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B T V"]:
        """Compute logits for the token after each target token, given the source.

        Args:
            source_ids: ids [B, S] of the source, or log-mel features [B, F, L] of speech.
            target_ids: ids [B, T] of the target.
            source_positions, target_positions: their positions, -1 for padding; None counts from 0.
            backend: the attention kernel, or "auto".

        Returns:
            Logits [B, T, V].
        """
        memory = self.run_encoder(source_ids, source_positions, backend=backend)
        return self.run_decoder(
            target_ids,
            positions=target_positions,
            memory=memory,
            memory_positions=source_positions,
            backend=backend,
        )

    def run_encoder(
        self,
        ids: Int[Tensor, "B S"] | Float[Tensor, "B F L"],
        positions: Positions | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B S M"]:
        """Run the encoder on a source.

        Args:
            ids: ids [B, S] of the source, or log-mel features [B, F, L] of speech.
            positions: positions [B, S], -1 for padding; None is 0 to S - 1.
            backend: the attention kernel, or "auto".

        Returns:
            Hidden states [B, S, M], the memory to which the decoder attends.
        """
        with named_scope("encoder"):
            states: Tensor = self.encoder(ids, positions, backend=backend)
            return states

    def run_decoder(
        self,
        ids: Int[Tensor, "B T"],
        caches: Sequence[BlockCaches] | None = None,
        *,
        positions: Positions | None = None,
        memory: Float[Tensor, "B S M"] | None = None,
        memory_positions: Positions | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T V"]:
        """Run the decoder on target ids, with or without caches.

        Args:
            ids: ids [B, T] of the target; with caches, those that follow the ids in the caches.
            caches: from `new_caches`, one pair per layer; a call that raises leaves them unchanged.
            positions: positions [B, T], -1 for padding; None continues from the caches, or from 0.
            memory: hidden states [B, S, M] of the source; with caches, only in the first call.
            memory_positions: their positions [B, S], -1 for padding.
            backend: the attention kernel, or "auto".

        Returns:
            Logits [B, T, V] for the token after each id.
        """
        if caches is not None and len(caches) != len(self.layers):
            raise ArgumentError(
                f"{plural(len(caches), 'pair')} of caches for {plural(len(self.layers), 'layer')}; "
                "new_caches() returns one pair per layer"
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
        with named_scope("decoder"):
            x = tap("embed", self.embed(ids, positions))
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
        x = self.norm(x)
        if not isinstance(self.norm, nn.Identity):
            with named_scope("decoder"):
                x = tap("norm", x)
        return tap("logits", self.head(x))

    def new_caches(self) -> list[BlockCaches]:
        """Create empty caches for the target and for the source.

        Returns:
            One pair for each layer of the decoder.
        """
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
    """Build the original Transformer: post-norm, sinusoidal positions, one shared embedding matrix.

    Args:
        vocabulary: the vocabulary size V, shared by source and target.
        dim: the model dim M.
        heads: the number of heads H, of dim M / H each.
        layers: the number of layers of the encoder, and of the decoder.
        hidden: the width of the feed-forward layers; None is 4 M.
        residual: `PostNorm`, or `PreNorm`, which adds a norm after each stack.
        activation: the nonlinearity of the feed-forward layers; None is ReLU.
        dropout: the probability of dropout on embeddings and sublayers, 0.1 in the paper.

    Returns:
        The network with initial weights.

    Raises:
        ArgumentError: a size is less than 1, or M is not a multiple of heads.

    >>> model = transformer(100, 16, 4, 2, residual=PreNorm)
    >>> model.head.weight is model.embed.embedding.weight is model.encoder.embed.embedding.weight
    True

    Source: Vaswani et al. 2017 (arXiv 1706.03762), sections 3.1 to 3.5; pre-norm: Xiong et al. 2020
    (arXiv 2002.04745).
    """
    width = 4 * dim if hidden is None else hidden
    sizes = {"vocabulary": vocabulary, "dim": dim, "layers": layers, "hidden": width}
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentError(f"{name} is {size}; it must be at least 1")
    D = resolve_head_dim(dim, heads, None)

    def residuals(n: int) -> list[Residual]:
        return [residual(nn.LayerNorm(dim), dropout) for _ in range(n)]

    def last() -> nn.Module:
        return nn.LayerNorm(dim) if residual is PreNorm else nn.Identity()

    def own(mask: Causal | None) -> Attention:
        return Attention(
            separate_qkv(dim, heads, heads, D), output_projection(dim, heads, D), mask=mask
        )

    def feed() -> FeedForward:
        return FeedForward(dim, width, activation)

    embedding = nn.Embedding(vocabulary, dim)
    nn.init.normal_(
        embedding.weight, std=dim**-0.5
    )  # after the scaling by sqrt(M), its standard deviation is 1
    embed = InputEmbedding(
        embedding, SinusoidalPositions(dim), scale=math.sqrt(dim), dropout=dropout
    )
    head = Linear(dim, vocabulary, bias=False)
    head.weight = embedding.weight
    encoder = Encoder(
        embed, [Block(own(None), feed(), *residuals(2)) for _ in range(layers)], last()
    )
    blocks = [
        DecoderBlock(own(Causal()), cross_attention(dim, heads), feed(), *residuals(3))
        for _ in range(layers)
    ]
    return EncoderDecoder(encoder, embed, blocks, last(), head)
