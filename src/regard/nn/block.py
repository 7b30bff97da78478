"""A block of a decoder: attention and feed-forward, each behind a norm and beside a residual path."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache
from regard.nn.attention import Attention
from regard.span import Positions


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + feed_forward(norm(x)).

    Args:
        attention: an `Attention`.
        feed_forward: a module [B,T,M] -> [B,T,M].
        attention_norm, feed_forward_norm: the norms in front of them.

    Source: Xiong et al. 2020 (arXiv 2002.04745), figure 1b.
    """

    def __init__(
        self,
        attention: Attention,
        feed_forward: nn.Module,
        attention_norm: nn.Module,
        feed_forward_norm: nn.Module,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.feed_forward_norm, self.feed_forward = feed_forward_norm, feed_forward

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M"]:
        """x [B,T,M] -> [B,T,M]."""
        x = x + self.attention(self.attention_norm(x), positions, cache, backend=backend)
        return x + self.feed_forward(self.feed_forward_norm(x))

    def new_cache(self) -> Cache:
        """An empty cache of the kind that suits the attention."""
        return self.attention.new_cache()
