"""`Encoder`, whose blocks see the whole sequence, and `HeadedEncoder`, with pooler and head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.nn.blocks.blocks import Block
from regard.nn.blocks.embedding import InputEmbedding, LogMelEmbedding
from regard.span import Positions, Span
from regard.tracing import named_scope, tap


class Encoder(nn.Module):
    """An encoder network: ids -> embedding -> blocks -> norm -> hidden states.

    Args:
        embed: the input embedding, with positions.
        layers: the blocks, called as block(x, positions).
        norm: the norm after the last block; an `nn.Identity` for post-norm blocks.

    Raises:
        ArgumentError: when called: ids are not [B, S].

    >>> import torch
    >>> from regard.nn.blocks.embedding import SinusoidalPositions
    >>> embed = InputEmbedding(nn.Embedding(7, 4), SinusoidalPositions(4))
    >>> encoder = Encoder(embed, [], nn.Identity())
    >>> encoder(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 4])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), figure 1, left half.
    """

    def __init__(
        self, embed: InputEmbedding | LogMelEmbedding, layers: Sequence[Block], norm: nn.Module
    ) -> None:
        super().__init__()
        self.embed, self.layers, self.norm = embed, nn.ModuleList(layers), norm

    def forward(
        self,
        ids: Int[Tensor, "B S"],
        positions: Positions | None = None,
        segments: Int[Tensor, "B S"] | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B S M"]:
        """Compute the hidden states of ids.

        Args:
            ids: token ids [B, S].
            positions: positions [B, S]; -1 is padding, which no token sees. None is 0 to S - 1.
            segments: segment ids [B, S], for an embedding that has them; None is 0.
            backend: the attention kernel, or "auto".

        Returns:
            Hidden states [B, S, M].
        """
        positions = Span(0, ids.shape[-1]) if positions is None else positions
        return self.run_blocks(self.embed(ids, positions, segments), positions, backend=backend)

    def run_blocks(
        self, x: Float[Tensor, "B S M"], positions: Positions, *, backend: str = "auto"
    ) -> Float[Tensor, "B S M"]:
        """Apply the blocks and the last norm to embeddings.

        Args:
            x: embeddings [B, S, M].
            positions: their positions [B, S].
            backend: the attention kernel, or "auto".

        Returns:
            Hidden states [B, S, M].
        """
        x = tap("embed", x)
        for i, layer in enumerate(self.layers):
            with named_scope(f"layers.{i}"):
                x = layer(x, positions, backend=backend)
        states: Tensor = self.norm(x)
        return states if isinstance(self.norm, nn.Identity) else tap("norm", states)


class HeadedEncoder(nn.Module):
    """An encoder with a pooler for the whole text and a head for masked language modelling.

    states = encoder(ids);  pooled = pooler(state of the first token);  logits = head(states)

    Args:
        encoder: the encoder.
        pooler: a module [B, M] -> [B, M], or None.
        head: a module [B, S, M] -> [B, S, V], which may share the embedding's weight, or None.

    Raises:
        ArgumentError: when called: the pooler or the head is None.

    Source: Devlin et al. 2018 (arXiv 1810.04805), sections 3 and 3.1.
    """

    def __init__(
        self, encoder: Encoder, pooler: nn.Module | None = None, head: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.encoder, self.pooler, self.head = encoder, pooler, head

    def forward(
        self,
        ids: Int[Tensor, "B S"],
        positions: Positions | None = None,
        segments: Int[Tensor, "B S"] | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B S M"]:
        """Compute the hidden states of ids, as `Encoder` does.

        Args:
            ids, positions, segments, backend: as in `Encoder.forward`.

        Returns:
            Hidden states [B, S, M].
        """
        states: Tensor = self.encoder(ids, positions, segments, backend=backend)
        return states

    def pooled(
        self, states: Float[Tensor, "B S M"], positions: Positions | None = None
    ) -> Float[Tensor, "B M"]:
        """Apply the pooler to the state of each text's first token.

        Args:
            states: hidden states [B, S, M].
            positions: positions [B, S], -1 for padding; None means that there is no padding.

        Returns:
            Vectors [B, M].

        Raises:
            ArgumentError: there is no pooler.
        """
        if self.pooler is None:
            raise ArgumentError(
                "this model has no pooler, because the checkpoint has none; pool its states"
            )
        pooled: Tensor = self.pooler(first_token_state(states, positions))
        return pooled

    def logits(self, states: Float[Tensor, "B S M"]) -> Float[Tensor, "B S V"]:
        """Compute logits for the token at each slot, as masked language models do.

        Args:
            states: hidden states [B, S, M].

        Returns:
            Logits [B, S, V].

        Raises:
            ArgumentError: there is no head.
        """
        if self.head is None:
            raise ArgumentError(
                "this model has no head, because the checkpoint has none; load a checkpoint of a "
                "masked language model"
            )
        return tap("logits", self.head(states))


def first_token_state(
    states: Float[Tensor, "B S M"], positions: Positions | None = None
) -> Float[Tensor, "B M"]:
    """Return the state [B, M] of the first slot of each row that is not padding."""
    if positions is None or isinstance(positions, Span):
        return states[:, 0]
    slots = (positions >= 0).int().argmax(1)  # argmax returns the first of several maxima
    rows = torch.arange(states.shape[0], device=states.device)
    return states[rows, slots.to(states.device)]
