"""What every mechanism does around its own equation: positions by default, and a cache that a refused call leaves alone."""

from __future__ import annotations

from abc import abstractmethod

from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache, kept
from regard.cost import Description
from regard.errors import ArgumentError
from regard.process import is_compiling
from regard.span import Positions, Span


class Mixer(nn.Module):
    """A module that lets the tokens of a sequence see one another, x [B,T,M] -> [B,T,M2].

    A mechanism writes `mix`, `new_cache` and `describe`, and `check_cache` if not every cache will do.
    """

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M2"]:
        """Mix x [B,T,M] at its positions with itself and with what the cache holds, which afterwards holds x, too.

        Positions default to 0..T-1, or on from the last token of each row of the cache. A call that is refused leaves
        the cache as it was.

        Args:
            x: hidden states; slots at position -1 are no tokens.
            positions: a Span, or integers [B or 1, T].
            cache: from `new_cache`, or another that holds what is needed.
            backend: the kernel, or the form of a recurrence, or "auto".
        """
        if x.ndim != 3:
            raise ArgumentError(
                f"x is {tuple(x.shape)}; it must be [batch, length, dim]"
                + (": use x[None]" if x.ndim == 2 else "")
            )
        if cache is not None:
            self.check_cache(cache)
        if positions is None:
            positions = Span(0, x.shape[1]) if cache is None else cache.next(x.shape[1])
        if cache is None or is_compiling():
            return self.mix(x, positions, cache, backend)
        with kept(cache):
            return self.mix(x, positions, cache, backend)

    @abstractmethod
    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """The mechanism itself: x [B,T,M] at positions -> [B,T,M2]."""

    def check_cache(self, cache: Cache) -> None:
        """Refuse a cache that cannot serve."""

    @abstractmethod
    def new_cache(self) -> Cache:
        """An empty cache of the kind that suits it."""

    @abstractmethod
    def describe(self, context: int = 4096) -> Description:
        """What one layer keeps and computes when it decodes the token at position context - 1."""
