"""The block of a decoder that reads an encoder."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache, kept
from regard.nn.attention import Attention
from regard.nn.cross import CrossAttention
from regard.nn.residual import Residual
from regard.process import is_compiling
from regard.span import Positions
from regard.tap import place


class BlockCaches(NamedTuple):
    """What a decoder block remembers.

    own: of the target so far.
    cross: of the source, written once.
    """

    own: Cache
    cross: Cache


class DecoderBlock(nn.Module):
    """Self-attention, attention to an encoder's memory, then feed-forward, each with its residual path.

    Taps of the two attentions stand at the places `attention` and `cross`.

    Args:
        attention: an `Attention` with a causal mask.
        cross: a `CrossAttention`.
        feed_forward: a module [B,T,M] -> [B,T,M].
        around_attention, around_cross, around_feed_forward: `PostNorm` or `PreNorm`.

    Raises:
        ArgumentError: as `CrossAttention`: no memory, or two. The caches are left as they were.

    >>> import torch
    >>> from regard.nn.residual import PreNorm
    >>> from regard.nn.variants import cross_attention, mha
    >>> paths = [PreNorm(nn.LayerNorm(8)) for _ in range(3)]
    >>> block = DecoderBlock(mha(8, 2), cross_attention(8, 2), nn.Linear(8, 8), *paths)
    >>> block(torch.zeros(1, 3, 8), memory=torch.zeros(1, 5, 8)).shape
    torch.Size([1, 3, 8])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.1.
    """

    def __init__(
        self,
        attention: Attention,
        cross: CrossAttention,
        feed_forward: nn.Module,
        around_attention: Residual,
        around_cross: Residual,
        around_feed_forward: Residual,
    ) -> None:
        super().__init__()
        self.attention, self.around_attention = attention, around_attention
        self.cross, self.around_cross = cross, around_cross
        self.feed_forward, self.around_feed_forward = feed_forward, around_feed_forward

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        caches: BlockCaches | None = None,
        *,
        memory: Float[Tensor, "B S M3"] | None = None,
        memory_positions: Positions | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M"]:
        """x [B,T,M] -> [B,T,M]; memory [B,S,M3] is given once where there are caches, and else every time."""
        if caches is None or is_compiling():
            return self._forward(x, positions, caches, memory, memory_positions, backend)
        with kept(*caches):  # both: the second may refuse what the first has stored
            return self._forward(x, positions, caches, memory, memory_positions, backend)

    def _forward(
        self,
        x: Tensor,
        positions: Positions | None,
        caches: BlockCaches | None,
        memory: Tensor | None,
        memory_positions: Positions | None,
        backend: str,
    ) -> Tensor:
        own, other = caches if caches is not None else (None, None)
        if positions is None and own is not None:
            positions = own.next(x.shape[1])
        with place("attention"):
            x = self.around_attention(
                x, lambda x: self.attention(x, positions, own, backend=backend)
            )
        with place("cross"):
            x = self.around_cross(
                x,
                lambda x: self.cross(
                    x, positions, other,
                    memory=memory, memory_positions=memory_positions, backend=backend,
                ),
            )  # fmt: skip
        return self.around_feed_forward(x, self.feed_forward)

    def new_caches(self) -> BlockCaches:
        """Empty caches for a target and its source."""
        return BlockCaches(self.attention.new_cache(), self.cross.new_cache())
