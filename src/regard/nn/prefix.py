"""A model that runs its prefix again when its rotary frequencies change."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.caches import Cache
from regard.nn.row_rotary import changes, lengths
from regard.span import Positions, Span, after, follow


class Prefix:
    """A model and its caches under the policy "recompute" (`regard.nn.policy`): the whole prefix is run again whenever the frequencies change.

    For every call, the logits of its tokens equal those of one pass over the prefix. A call whose length changes the
    frequencies costs a pass over all n tokens: with `LongRoPE` once, at L -> L + 1; with `DynamicNTK` at every token behind
    L, so that N tokens cost about N^2 / 2 tokens of work. A call that raises changes nothing.

    Args:
        model: a `Decoder`, or what has its `forward` and `new_caches`.

    Attributes:
        caches: those of the prefix so far.
        reruns: how often the prefix was run again.

    >>> from regard.models.decoder import Decoder
    >>> from regard.nn.embed import Embed
    >>> prefix = Prefix(Decoder(Embed(nn.Embedding(7, 4)), [], nn.Identity(), nn.Linear(4, 7)))
    >>> prefix(torch.tensor([[1, 2]]), Span(0, 2)).shape, prefix.reruns
    (torch.Size([1, 2, 7]), 0)

    Source: the code released with Phi-3 (arXiv 2404.14219) drops its cache when LongRoPE changes lists.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.reruns = model, 0
        self.caches: list[Cache] = model.new_caches()  # type: ignore[operator]
        self._ids: Tensor | None = None
        self._positions: Positions = Span(0, 0)

    def __call__(
        self, ids: Int[Tensor, "B T"], positions: Positions | None = None, **options: Any
    ) -> Tensor:
        """Logits [B,T,V] for the token after each of ids [B,T], which continue the prefix; options are the model's."""
        T = ids.shape[1]
        positions = after(self._positions, T) if positions is None else positions
        if self._ids is None:
            logits, whole, where = (
                self.model(ids, positions, self.caches, **options),
                ids,
                positions,
            )
        else:
            whole, where = torch.cat([self._ids, ids], 1), follow(self._positions, positions)
            if changes(self.model, lengths(self._positions), lengths(where)):
                caches = self.model.new_caches()  # type: ignore[operator]
                logits = self.model(whole, where, caches, **options)[:, -T:]
                self.caches, self.reruns = caches, self.reruns + 1
            else:
                logits = self.model(ids, positions, self.caches, **options)
        self._ids, self._positions = whole, where
        return logits

    def fork(self) -> Prefix:
        """Another prefix of the same model; what is done to one does not change the other."""
        other = type(self)(self.model)
        other.caches = [cache.fork() for cache in self.caches]
        other._ids, other._positions = self._ids, self._positions
        return other

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these rows of the batch, in this order, as `Cache.select` does."""
        for cache in self.caches:
            cache.select(rows)
        if self._ids is None:
            return
        batch = self._ids.shape[0]
        self._ids = self._ids[rows.to(self._ids.device)]
        if isinstance(self._positions, Tensor) and self._positions.shape[0] == batch:
            self._positions = self._positions[rows.to(self._positions.device)]
