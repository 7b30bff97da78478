"""An encoder: embed, blocks that see the whole sequence, norm; and what may be trained on top of
it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.nn.blocks import Block
from regard.nn.embedding import InputEmbedding
from regard.span import Positions, Span
from regard.tracing import named_scope


class Encoder(nn.Module):
    """ids -> embedding with positions -> blocks -> norm -> states.

    Args:
        embed: an `InputEmbedding`.
        layers: blocks, called as block(x, positions).
        norm: behind the last block: an `nn.Identity` for post-norm blocks, a norm for pre-norm
            ones.

    Raises:
        ArgumentError: ids are not [B,S].

    >>> import torch
    >>> from regard.nn.embedding import Sinusoidal
    >>> encoder = Encoder(InputEmbedding(nn.Embedding(7, 4), Sinusoidal(4)), [], nn.Identity())
    >>> encoder(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 4])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), figure 1, left half.
    """

    def __init__(self, embed: InputEmbedding, layers: Sequence[Block], norm: nn.Module) -> None:
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
        """States [B,S,M] of ids [B,S]; a slot at position -1 is padding: no other sees it, and its
        own state means nothing.

        Segments tell which text of the input a token belongs to, 0 by default; only an embedding
        that has them takes them.
        """
        positions = Span(0, ids.shape[-1]) if positions is None else positions
        x = self.embed(ids, positions, segments)
        for i, layer in enumerate(self.layers):
            with named_scope(f"layers.{i}"):
                x = layer(x, positions, backend=backend)
        states: Tensor = self.norm(x)
        return states


class HeadedEncoder(nn.Module):
    """An encoder with what was trained on top of it: a pooler for the whole text, a head for words
    that were hidden.

    states = encoder(ids);  pooled = pooler(states of the first token);  logits = head(states)

    Args:
        encoder: an `Encoder`.
        pooler: a module [B,M] -> [B,M], or None.
        head: a module [B,S,M] -> [B,S,V], or None; give it the weight of the embedding to tie them.

    Raises:
        ArgumentError: when called: what is asked for was not trained.

    >>> from regard.nn.embedding import Sinusoidal
    >>> encoder = Encoder(InputEmbedding(nn.Embedding(7, 4), Sinusoidal(4)), [], nn.Identity())
    >>> model = HeadedEncoder(encoder, head=nn.Linear(4, 7))
    >>> model.logits(model(torch.tensor([[1, 2]]))).shape
    torch.Size([1, 2, 7])

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
        """States [B,S,M] of ids [B,S], as `Encoder`."""
        states: Tensor = self.encoder(ids, positions, segments, backend=backend)
        return states

    def pooled(
        self, states: Float[Tensor, "B S M"], positions: Positions | None = None
    ) -> Float[Tensor, "B M"]:
        """What the pooler makes of the state of each text's first token."""
        if self.pooler is None:
            raise ArgumentError("this model has no pooler: none was stored; pool its states")
        pooled: Tensor = self.pooler(first(states, positions))
        return pooled

    def logits(self, states: Float[Tensor, "B S M"]) -> Float[Tensor, "B S V"]:
        """Logits for the word that stands, or stood, at each slot."""
        if self.head is None:
            raise ArgumentError(
                "this model has no head: none was stored; load a checkpoint for masked words"
            )
        logits: Tensor = self.head(states)
        return logits


def first(
    states: Float[Tensor, "B S M"], positions: Positions | None = None
) -> Float[Tensor, "B M"]:
    """The state of the first slot of each row that is no padding.

    >>> first(torch.tensor([[[5.0], [6.0], [7.0]]]), torch.tensor([[-1, 0, 1]])).tolist()
    [[6.0]]
    """
    if positions is None or isinstance(positions, Span):
        return states[:, 0]
    at = (positions >= 0).int().argmax(1)  # of several largest ones, the first
    rows = torch.arange(states.shape[0], device=states.device)
    return states[rows, at.to(states.device)]
