"""What passes between the layers of a decoder beside the hidden states: a reader has a
`CrossLayer`, the earlier layer a `LendingCache`; `WithFirstValues` brings the values of the first
layer.

A reader gets what the earlier layer saw in the same call: its cache may have forgotten tokens that
queries see, and numbers them wrongly after it advanced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from regard.caches.base import Cache, Contents, ForwardingCache, Parts, StaticSize, check_crop
from regard.caches.contiguous import Growing
from regard.errors import ArgumentError
from regard.masks import Mask
from regard.span import Positions, Span


class LendingCache(ForwardingCache):
    """Another cache, or none, for the length of one call, with a record of what was returned."""

    crop_is_exact: ClassVar[bool] = False
    savable: ClassVar[bool] = False

    def __init__(self, inner: Cache | None) -> None:
        self.inner = inner
        self._store = Growing() if inner is None else inner
        self.returned: tuple[Parts, Positions] | None = None

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Store the memory in the inner cache, and keep and return what it returns."""
        visible = memory, positions
        self.returned = visible if self.inner is None else super().update(memory, positions)
        return self.returned

    @property
    def settings(self) -> Mapping[str, object]:
        """A copy of the inner cache, so that a fork is independent."""
        return {"inner": None if self.inner is None else self.inner.fork()}


class FirstValues:
    """What layers of one call pass on: the values [B,T,G*E] of the first layer, and the keys that
    the last layer with a selector chose; None before such a layer has run.
    """

    def __init__(self, values: Tensor | None = None) -> None:
        self.values = values
        self.choice: Mask | None = None

    def give(self, v: Tensor) -> None:
        """Keep the values of the first layer."""
        if self.values is not None:
            raise ArgumentError(
                "two layers of this call give the values of the first layer; number the layers by "
                "their option `layer`, from 0"
            )
        self.values = v.transpose(1, 2).flatten(2)

    def take(self, heads: int, dim: int) -> Tensor:
        """Return the values of the first layer."""
        if self.values is None:
            raise ArgumentError(
                "a layer reads the values of the first layer, and no earlier layer of this call "
                "has given any; the first layer of a Decoder must be built with layer=0"
            )
        if self.values.shape[-1] != heads * dim:
            raise ArgumentError(
                f"the values of the first layer have {self.values.shape[-1]} channels, and this "
                f"layer has {heads * dim}; give both the same value heads"
            )
        return torch.unflatten(self.values, -1, (heads, dim)).transpose(1, 2)


class WithFirstValues(LendingCache):
    """The cache of a layer for the length of one call, with the values of the first layer.

    `Decoder` makes one for each layer that carries values (`Mixer.carries_values`). A cache of
    tokens stores the values after the mix, so that decoding needs no earlier ones.

    Source: Zhou et al. 2024 (arXiv 2410.17897), section 3.
    """

    def __init__(self, inner: Cache | None, first: FirstValues) -> None:
        super().__init__(inner)
        self.first = first

    @property
    def settings(self) -> Mapping[str, object]:
        """A copy of the inner cache, with the values of the present call."""
        return {**super().settings, "first": self.first}

    def next(self, length: int) -> Positions:
        """Return the default positions of the next tokens, as the inner cache numbers them."""
        return self._store.next(length)


def split_first_values(cache: Cache | None) -> tuple[Cache | None, FirstValues | None]:
    """Return the cache of a layer itself, and the values of the first layer that came with it."""
    return (cache.inner, cache.first) if isinstance(cache, WithFirstValues) else (cache, None)


class CrossLayer(Cache):
    """The cache of a layer that reads the keys and values of an earlier layer. It stores nothing.

    `Decoder` lends it the memory of the earlier layer before each call of the reader.

    Raises:
        ArgumentError: an update stores memory of its own, or no memory is lent.

    >>> cache = CrossLayer()
    >>> cache.lend((torch.zeros(1, 1, 3, 2),), Span(0, 3))
    >>> _, positions = cache.update((), Span(2, 1))
    >>> positions, cache.bytes
    (Span(start=0, length=3), 0)

    Source: Brandon et al. 2024 (arXiv 2405.12981); Sun et al. 2024 (arXiv 2405.05254).
    """

    static_step_refusal: ClassVar[str | None] = None

    def __init__(self) -> None:
        self._lent: tuple[Parts, Positions] | None = None

    def lend(self, memory: Parts, positions: Positions) -> None:
        """Give the next update its result.

        Args:
            memory: the memory of the earlier layer that is visible in this call.
            positions: its positions.
        """
        self._lent = memory, positions

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Return the memory that was lent, once."""
        lent, self._lent = self._lent, None
        if memory:
            raise ArgumentError(
                "a CrossLayer cache stores no memory, because its layer reads that of an earlier "
                "layer; give a layer with keys and values of its own a Growing cache"
            )
        if lent is None:
            raise ArgumentError(
                "a layer reads the memory of an earlier layer, and none was lent in this call; "
                "call the Decoder, which passes it from layer to layer"
            )
        return lent

    def crop(self, length: int) -> None:
        """Check the length; there is nothing to remove."""
        check_crop(length)

    def contents(self) -> Contents:
        """Return no contents, because nothing is stored."""
        return {}

    def to_static(self, size: StaticSize) -> Cache:
        """Return another one: a step gets the memory of the earlier layer."""
        return CrossLayer()

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Remove the memory that was lent."""
        self._lent = None

    def __len__(self) -> int:
        return 0
