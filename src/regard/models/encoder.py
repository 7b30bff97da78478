"""An encoder: embed, blocks that see the whole sequence, norm."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.embed import Embed
from regard.nn.block import Block
from regard.span import Positions, Span
from regard.tap import place


class Encoder(nn.Module):
    """ids -> embedding with positions -> blocks -> norm -> states.

    Args:
        embed: an `Embed`.
        layers: blocks, called as block(x, positions).
        norm: behind the last block: an `nn.Identity` for post-norm blocks, a norm for pre-norm ones.

    Raises:
        ArgumentError: ids are not [B,S].

    >>> import torch
    >>> from regard.nn.embed import Sinusoidal
    >>> encoder = Encoder(Embed(nn.Embedding(7, 4), Sinusoidal(4)), [], nn.Identity())
    >>> encoder(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 4])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), figure 1, left half.
    """

    def __init__(self, embed: Embed, layers: Sequence[Block], norm: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers, self.norm = embed, nn.ModuleList(layers), norm

    def forward(
        self,
        ids: Int[Tensor, "B S"],
        positions: Positions | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B S M"]:
        """States [B,S,M] of ids [B,S]; a slot at position -1 is padding: no other sees it, and its own state means nothing."""
        positions = Span(0, ids.shape[-1]) if positions is None else positions
        x = self.embed(ids, positions)
        for i, layer in enumerate(self.layers):
            with place(f"layers.{i}"):
                x = layer(x, positions, backend=backend)
        return self.norm(x)
