"""The feed-forward layer of RWKV, which reads the token before, and a block with such a layer."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache, Parts, State
from regard.caches.joined import Joined
from regard.cost import Spec
from regard.cost.decayed_state import channel_mix_spec
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.blocks import Block, PreNorm
from regard.nn.linear import Linear
from regard.nn.mixer import AcrossRanks, Mixer, count_weights
from regard.nn.recurrent_projections import token_before
from regard.span import Positions
from regard.tracing import is_tracing, named_scope, parent_scope, tap


class ChannelMix(Mixer):
    """The feed-forward layer of RWKV-4: a squared ReLU and a gate, both of a mix of each token with
    the one before it. Its state is the last token.

    y_t = sigmoid(W_r (c_r x_t + (1 - c_r) x_{t-1})) * W_v max(W_k (c_k x_t + (1 - c_k) x_{t-1}),
    0)^2, with c per channel

    >>> layer = ChannelMix(4, 8)
    >>> cache = layer.new_cache()
    >>> layer(torch.zeros(1, 3, 4), cache=cache).shape, cache.bytes
    (torch.Size([1, 3, 4]), 16)

    Source: Peng et al. 2023 (arXiv 2305.13048), equations 17 and 18.
    """

    across_ranks: ClassVar[AcrossRanks] = "state"

    explain_refusal = (
        "mixes a token with the one before it only, so that there is no row of weights; explain a "
        "layer of attention"
    )

    recording_refusal = "skips empty slots, whose places depend on the positions"

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        if min(dim, hidden) < 1:
            raise ArgumentError(f"ChannelMix(dim={dim}, hidden={hidden}): each must be at least 1")
        share = torch.linspace(0, 1, dim)
        self.mix_k, self.mix_r = (nn.Parameter(share.clone()) for _ in "kr")
        self.up = Linear(dim, hidden, bias=False)
        self.receptance = Linear(dim, dim, bias=False)
        self.down = Linear(hidden, dim, bias=False)

    def check_cache(self, cache: Cache) -> None:
        """Check that the cache is a `State`."""
        if not isinstance(cache, State):
            raise ArgumentTypeError(
                f"the cache is {type(cache).__name__}; a token shift needs a State: use new_cache()"
            )

    @property
    def static_step_refusal(self) -> str | None:
        """None: a step depends on tensors only."""
        return None

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Apply the layer to x [B,T,M] behind the token in the cache; it is the same for every
        backend.
        """
        assert cache is None or isinstance(cache, State)
        past: Parts | None = None if cache is None else cache.state
        before, past = token_before(x, self.mix_k, past, positions)
        if cache is not None:
            cache.store(past, positions)
        k, r = (x * c + before * (1 - c) for c in (self.mix_k, self.mix_r))
        y: Tensor = self.receptance(r).sigmoid() * self.down(self.up(k).relu().square())
        return y

    def new_cache(self) -> State:
        """Return an empty cache. Use a new one for each text, or call its `reset()`."""
        return State()

    @property
    def spec(self) -> Spec:
        """The cost of this layer."""
        return channel_mix_spec(count_weights(self), self.mix_k.shape[0], self.up.out_features)


class TwoMixerBlock(Block):
    """A block of two mechanisms, one after the other, each with a residual connection: the second
    is in the place of the feed-forward layer. Its cache is a `Joined` of both.

    >>> from regard.nn.variants import rwkv4
    >>> residuals = (PreNorm(nn.LayerNorm(8)) for _ in range(2))
    >>> block = TwoMixerBlock(rwkv4(8, 2), ChannelMix(8, 32), *residuals)
    >>> block(torch.zeros(1, 3, 8), cache=block.new_cache()).shape
    torch.Size([1, 3, 8])

    Source: Peng et al. 2023 (arXiv 2305.13048), figure 2.
    """

    def __init__(
        self,
        attention: Mixer,
        feed_forward: Mixer,
        attention_residual: PreNorm,
        feed_forward_residual: PreNorm,
    ) -> None:
        super().__init__(attention, feed_forward, attention_residual, feed_forward_residual)

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M"]:
        """Apply both mechanisms to hidden states [B,T,M], each with its part of the cache."""
        if cache is not None and (not isinstance(cache, Joined) or len(cache.parts) != 2):
            raise ArgumentTypeError(
                f"the cache is {type(cache).__name__}; a block of two mechanisms needs a Joined of "
                "two: use new_cache()"
            )
        first, second = (None, None) if cache is None else cache.parts
        if positions is None and cache is not None:
            positions = cache.next(x.shape[1])

        def feed_forward(normed: Tensor) -> Tensor:
            y: Tensor = self.feed_forward(normed, positions, second, backend=backend)
            if not is_tracing():
                return y
            with parent_scope():
                return tap("mlp", y)

        if not is_tracing():
            x = self.attention_residual(
                x, lambda normed: self.attention(normed, positions, first, backend=backend)
            )
            result: Tensor = self.feed_forward_residual(x, feed_forward)
            return result
        with named_scope("attention"):
            x = self.attention_residual(x, self._tapped_attention(positions, first, backend))
        with named_scope("mlp"):
            x = self.feed_forward_residual(x, feed_forward)
        return tap("residual", x)

    def new_cache(self) -> Joined:
        """Return an empty cache with a part for each mechanism."""
        parts = (self.attention, self.feed_forward)
        return Joined([mixer.new_cache() for mixer in parts if isinstance(mixer, Mixer)])
