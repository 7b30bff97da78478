"""The base class of all mechanisms: default positions, a cache that a refused call leaves
unchanged, and the cost.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache, rollback_on_error
from regard.cost import Description, Spec
from regard.cost.spec import ParameterCounts
from regard.errors import ArgumentError
from regard.masks import Full, Mask, reach
from regard.nn.explain import Explainable
from regard.process import is_compiling
from regard.span import Positions, Span


class Mixer(Explainable, nn.Module):
    """A module that lets the tokens of a sequence see one another, x [B,T,M] -> [B,T,M2].

    A mechanism writes `mix`, `new_cache` and `spec`, and `check_cache` if not every cache will do;
    and what of `Explainable` differs from the defaults.
    """

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M2"]:
        """Mix x [B,T,M] at its positions with itself and with what the cache holds, which
        afterwards holds x, too.

        Positions default to 0..T-1, or on from the last token of each row of the cache. A call that
        is refused leaves the cache as it was.

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
        with rollback_on_error(cache):
            return self.mix(x, positions, cache, backend)

    @abstractmethod
    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """The mechanism itself: x [B,T,M] at positions -> [B,T,M2]."""

    def check_cache(self, cache: Cache) -> None:
        """Refuse a cache that cannot serve."""

    @abstractmethod
    def new_cache(self) -> Cache:
        """An empty cache of the kind that suits it."""

    @property
    @abstractmethod
    def spec(self) -> Spec:
        """The cost of this layer, with the parameters that it really has."""

    def describe(self, context: int = 4096) -> Description:
        """The parameters, the cached values and the FLOPs of this layer when it decodes one token.

        Args:
            context: the number of tokens up to the decoded one, its own included.

        Raises:
            ArgumentError: the context is less than 1.
        """
        return self.spec.describe(context, type(self).__name__)


def count_weights(module: nn.Module, *apart: nn.Module | None) -> ParameterCounts:
    """The parameters of a module, by kind.

    Args:
        module: a module; weights of its linear maps count as matrices, one-dimensional weights of
            norms as norms.
        apart: modules inside it whose linear maps a decoded token does not apply exactly once
            (`ParameterCounts.counted_separately`).

    >>> count_weights(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))
    Weights(matrices=6, biases=2, norms=4, counted_separately=0)
    """
    total = sum(p.numel() for p in module.parameters())
    norms = sum(
        p.numel()
        for part in module.modules()
        if "Norm" in type(part).__name__
        for p in part.parameters(recurse=False)
    )
    matrices = _matrices(module)
    others = sum(_matrices(part) for part in apart if part is not None)
    return ParameterCounts(matrices, total - matrices - norms, norms, others)


def _matrices(module: nn.Module) -> int:
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


@dataclass(frozen=True)
class MaskVisibility:
    """How many keys a mask shows (`regard.cost.softmax.Visible`).

    Attributes:
        mask: the mask; None shows every key.
        keeps_all: whether a cache holds all tokens, whatever the mask shows.

    >>> from regard.masks import Causal, Window
    >>> visible = MaskVisibility(Causal() & Window(8))
    >>> visible.max_tokens, visible.visible_keys(100), visible.pairs(3)
    (8, 8, 6)
    """

    mask: Mask | None
    keeps_all: bool = False

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that the mask may still show; None if it has no bound, or if all are
        kept.
        """
        return None if self.keeps_all else reach(self.mask).tokens

    def visible_keys(self, context: int) -> int:
        """How many keys the token at position context - 1 sees, in the head that sees most."""
        return int(self._counts(Span(context - 1, 1), context).max())

    def pairs(self, context: int) -> int:
        """The query-key pairs of the head that has most."""
        return int(self._counts(Span(0, context), context).sum(-1).max())

    def _counts(self, queries: Span, context: int) -> Tensor:
        mask = self.mask if self.mask is not None else Full()
        return mask.visible(queries, Span(0, context))
