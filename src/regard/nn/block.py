"""Blocks: self-attention and feed-forward, each with its residual path."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache
from regard.nn.mixer import Mixer
from regard.nn.residual import Residual
from regard.span import Positions


class Block(nn.Module):
    """A mixer and a feed-forward layer, one behind the other: of a decoder with a causal mask, of an encoder without a mask.

    x = around_attention(x, attention);  x = around_feed_forward(x, feed_forward)

    Args:
        attention: an `Attention`, or any other `Mixer` [B,T,M] -> [B,T,M].
        feed_forward: a module [B,T,M] -> [B,T,M].
        around_attention, around_feed_forward: residual paths: `PreNorm`, `PostNorm`, `OutputNorm`, `Sandwich`.

    >>> import torch
    >>> from regard.nn.residual import PreNorm
    >>> from regard.nn.variants import mha
    >>> block = Block(mha(8, 2), nn.Linear(8, 8), PreNorm(nn.LayerNorm(8)), PreNorm(nn.LayerNorm(8)))
    >>> block(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.1; pre-norm: Xiong et al. 2020 (arXiv 2002.04745), figure 1b.
    """

    def __init__(
        self,
        attention: Mixer,
        feed_forward: nn.Module,
        around_attention: Residual,
        around_feed_forward: Residual,
    ) -> None:
        super().__init__()
        self.around_attention, self.attention = around_attention, attention
        self.around_feed_forward, self.feed_forward = around_feed_forward, feed_forward

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M"]:
        """x [B,T,M] -> [B,T,M]."""
        x = self.around_attention(
            x, lambda normed: self.attention(normed, positions, cache, backend=backend)
        )
        return self.around_feed_forward(x, self.feed_forward)

    def new_cache(self) -> Cache:
        """An empty cache of the kind that suits the attention."""
        return self.attention.new_cache()


class ParallelBlock(Block):
    """Both sublayers read the same x, and what they give is added to it at once.

    x + attention(norm_1(x)) + feed_forward(norm_2(x)): of each `PreNorm` path only the norm and the dropout are used.

    >>> import torch
    >>> from regard.nn.residual import PreNorm
    >>> from regard.nn.variants import mha
    >>> paths = (PreNorm(nn.LayerNorm(8)) for _ in range(2))
    >>> ParallelBlock(mha(8, 2), nn.Linear(8, 8), *paths)(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Source: Wang and Komatsuzaki 2021 (GPT-J); Black et al. 2022 (arXiv 2204.06745), section 2.1, equation 2.
    """

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M"]:
        """x [B,T,M] -> [B,T,M]."""
        mixed = self.around_attention(
            x, lambda normed: self.attention(normed, positions, cache, backend=backend)
        )
        path = self.around_feed_forward
        return mixed + path.dropout(self.feed_forward(path.norm(x)))
