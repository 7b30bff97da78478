"""A decoder: embed, blocks, norm, head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.caches import Cache, rollback_on_error
from regard.errors import ArgumentError
from regard.nn import Block, InputEmbedding
from regard.process_state import is_compiling
from regard.span import Positions, Span
from regard.tracing import is_tracing, named_scope


class Decoder(nn.Module):
    """ids -> embedding -> blocks -> norm -> logits.

    Args:
        embed: an `InputEmbedding`: called as embed(ids, positions).
        layers: blocks, called as block(x, positions, cache).
        norm: behind the last block: a norm, or an `nn.Identity` for post-norm blocks.
        head: a module [B,T,M] -> [B,T,V]; give its weight to the embedding to tie them. None, as in
            a base model that was saved alone: there are states, and no logits.

    Raises:
        ArgumentError: ids are not [B,T], or one lies outside the vocabulary; a cache is missing;
            logits are asked for, and there is no head.

    >>> import torch
    >>> decoder = Decoder(InputEmbedding(nn.Embedding(7, 4)), [], nn.Identity(), nn.Linear(4, 7))
    >>> decoder(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 7])
    """

    def __init__(
        self,
        embed: InputEmbedding,
        layers: Sequence[Block],
        norm: nn.Module,
        head: nn.Module | None,
    ) -> None:
        super().__init__()
        self.embed, self.layers = embed, nn.ModuleList(layers)
        self.norm, self.head = norm, head

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Positions | None = None,
        caches: Sequence[Cache] | None = None,
        *,
        backend: str = "auto",
        last: int | None = None,
    ) -> Float[Tensor, "B n V"]:
        """Logits [B,T,V] for the token after each of ids [B,T]; with caches, one per layer, ids
        continue them.

        With `last`, only the last so many: a prompt that is only read needs no logits of its own
        tokens.
        """
        return self._run(ids, positions, caches, backend, last, self.require_head())

    def hidden(
        self,
        ids: Int[Tensor, "B T"],
        positions: Positions | None = None,
        caches: Sequence[Cache] | None = None,
        *,
        backend: str = "auto",
        last: int | None = None,
    ) -> Float[Tensor, "B n M"]:
        """States [B,T,M] of ids [B,T] behind the last norm, from which the head makes logits;
        arguments as `forward`.

        >>> import torch
        >>> decoder = Decoder(InputEmbedding(nn.Embedding(7, 4)), [], nn.Identity(), head=None)
        >>> decoder.hidden(torch.tensor([[1, 2]])).shape
        torch.Size([1, 2, 4])
        """
        return self._run(ids, positions, caches, backend, last, None)

    def require_head(self) -> nn.Module:
        """The head, for whoever cannot do without logits.

        Raises:
            ArgumentError: there is none.

        >>> embed = InputEmbedding(nn.Embedding(7, 4))
        >>> Decoder(embed, [], nn.Identity(), nn.Linear(4, 7)).require_head()
        Linear(in_features=4, out_features=7, bias=True)
        """
        if self.head is None:
            raise ArgumentError(
                "this model has no head: a base model was saved alone, and config.json ties no "
                "head to its embedding; "
                "hidden(ids) gives its states; for logits and text load the checkpoint of the "
                "language model"
            )
        return self.head

    def _run(
        self,
        ids: Tensor,
        positions: Positions | None,
        caches: Sequence[Cache] | None,
        backend: str,
        last: int | None,
        head: nn.Module | None,
    ) -> Tensor:
        if caches is not None and len(caches) != len(self.layers):
            raise ArgumentError(
                f"{len(caches)} caches for {len(self.layers)} layers; give one per layer"
            )
        if positions is None:
            positions = caches[0].next(ids.shape[-1]) if caches else Span(0, ids.shape[-1])
        if not caches or is_compiling():
            return self._forward(ids, positions, caches, backend, last, head)
        with rollback_on_error(*caches, layers=True):  # the last layer may be the one that refuses
            return self._forward(ids, positions, caches, backend, last, head)

    def _forward(
        self,
        ids: Tensor,
        positions: Positions,
        caches: Sequence[Cache] | None,
        backend: str,
        last: int | None,
        head: nn.Module | None,
    ) -> Tensor:
        x, heard = self.embed(ids, positions), is_tracing()
        for i, layer in enumerate(self.layers):
            cache = caches[i] if caches is not None else None
            if not heard:
                x = layer(x, positions, cache, backend=backend)
                continue
            with named_scope(f"layers.{i}"):
                x = layer(x, positions, cache, backend=backend)
        x = x if last is None or last >= x.shape[1] else x[:, -last:]
        x = self.norm(x)
        out: Tensor = x if head is None else head(x)
        return out

    def new_caches(self) -> list[Cache]:
        """An empty cache for each layer, of the kind that suits it."""
        return [cast("Block", layer).new_cache() for layer in self.layers]


def check_ids(ids: Tensor, vocabulary: int) -> None:
    """Raise ArgumentError for the first id outside [0, vocabulary), which torch would answer with a
    bare index error.
    """
    outside = (ids < 0) | (ids >= vocabulary)
    if bool(outside.any()):
        where = outside.nonzero()[0].tolist()
        raise ArgumentError(
            f"token id {int(ids[tuple(where)])} at {where} lies outside [0, {vocabulary}); "
            "was it made by another tokenizer?"
        )
