"""Blocks of one sublayer: a mechanism without a feed-forward layer behind it, or a feed-forward
layer in its place, and a residual stream that stays in fp32 between such blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache, State
from regard.cost import Spec
from regard.cost.summed import TokenwiseSpec
from regard.errors import ArgumentTypeError
from regard.nn.blocks import Block, PreNorm
from regard.nn.feed_forward import MoE
from regard.nn.mixer import AcrossRanks, Mixer, count_weights
from regard.nn.norms import RMSNorm
from regard.span import Positions
from regard.tracing import is_tracing, named_scope, tap


class MixerBlock(Block):
    """A block of one sublayer, a mechanism with its residual connection: x + mixer(norm(x)).

    A stack of Mamba layers consists of such blocks: the mechanism has the gate and the wide middle
    that a Transformer has in its feed-forward layer.

    Args:
        attention: any `Mixer` [B,T,M] -> [B,T,M].

    >>> import torch
    >>> from regard.nn.variants import mamba2
    >>> block = MixerBlock(mamba2(8, 2), PreNorm(RMSNorm(8)))
    >>> block(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Source: Gu and Dao 2023 (arXiv 2312.00752), section 3.4 and figure 3.
    """

    def __init__(self, attention: Mixer, residual: PreNorm) -> None:
        super().__init__(attention, nn.Identity(), residual, PreNorm(nn.Identity()))

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M"]:
        """Apply the mechanism to hidden states [B,T,M] and add its output."""
        if is_tracing():
            with named_scope("attention"):
                x = self.attention_residual(x, self._tapped_attention(positions, cache, backend))
            return tap("residual", x)
        result: Tensor = self.attention_residual(
            x, lambda normed: self.attention(normed, positions, cache, backend=backend)
        )
        return result


class Tokenwise(Mixer):
    """A module that acts on each token alone, in the place of a mechanism: nothing is mixed.

    Its cache stores nothing but the last position.

    Args:
        network: a feed-forward layer [B,T,M] -> [B,T,M].

    >>> import torch
    >>> layer = Tokenwise(nn.Linear(4, 4))
    >>> cache = layer.new_cache()
    >>> layer(torch.zeros(1, 3, 4), cache=cache).shape, cache.bytes, cache.next(1)
    (torch.Size([1, 3, 4]), 0, Span(start=3, length=1))

    Source: NVIDIA 2025, Nemotron-H (arXiv 2504.03624), section 2, where feed-forward layers are
    layers of their own.
    """

    across_ranks: ClassVar[AcrossRanks] = "state"

    explain_refusal = (
        "mixes no tokens, so that there is no row of weights; explain a layer of attention"
    )

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def check_cache(self, cache: Cache) -> None:
        """Check that the cache is a `State`."""
        if not isinstance(cache, State):
            raise ArgumentTypeError(
                f"the cache is {type(cache).__name__}; a layer that mixes no tokens needs a State: "
                "use new_cache()"
            )

    @property
    def static_step_refusal(self) -> str | None:
        """None: a step depends on tensors only."""
        return None

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Apply the network to x [B,T,M]; it is the same for every backend."""
        if isinstance(cache, State):
            cache.store((), positions)
        return tap("mlp", self.network(x))

    def new_cache(self) -> State:
        """Return an empty cache, which counts positions."""
        return State()

    @property
    def spec(self) -> Spec:
        """The cost of this layer; of the experts of a mixture, those that one token uses."""
        if not isinstance(self.network, MoE):
            return TokenwiseSpec(count_weights(self), ())
        experts = self.network.experts
        weights = count_weights(self, *experts)
        used = weights.counted_separately * self.network.router.k // len(experts)
        return TokenwiseSpec(weights, (), used)


class WidePreNorm(PreNorm):
    """A `PreNorm` whose sum stays in fp32 or better, whatever the dtype of the weights.

    y = x + sublayer(norm(x)), where norm(x) has the dtype of the norm's weight and y has fp32

    The arguments are those of `PreNorm`. A stack of such blocks needs a `NarrowingRMSNorm` before
    its head.

    >>> path = WidePreNorm(RMSNorm(2).bfloat16())
    >>> path(torch.ones(1, 1, 2).bfloat16(), lambda normed: normed).dtype
    torch.float32

    Source: Gu and Dao 2023 (arXiv 2312.00752), `residual_in_fp32` of its released code.
    """

    def forward(
        self, x: Float[Tensor, "B T M"], sublayer: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "B T M"]:
        """Compute x + sublayer(norm(x)) for hidden states [B,T,M], in fp32 or better."""
        narrow = x.to(_dtype_of(self.norm, x))
        y = self.apply_dropout(sublayer(tap("norm", self.norm(narrow))))
        return x.to(torch.promote_types(x.dtype, torch.float32)) + y


class NarrowingRMSNorm(RMSNorm):
    """An `RMSNorm` whose result has the dtype of its weight, whatever the dtype of its input.

    The arguments are those of `RMSNorm`.

    >>> NarrowingRMSNorm(2).bfloat16()(torch.ones(2)).dtype
    torch.bfloat16

    Source: Gu and Dao 2023 (arXiv 2312.00752), `residual_in_fp32` of its released code.
    """

    def forward(self, x: Float[Tensor, "*L D"], positions: object = None) -> Float[Tensor, "*L D"]:
        """Normalise x [..., dim]; positions are ignored."""
        return super().forward(x).to(self.weight.dtype)


def _dtype_of(norm: nn.Module, x: Tensor) -> torch.dtype:
    """Return the dtype of the weight of a norm, or of x if the norm has none."""
    weight = getattr(norm, "weight", None)
    return weight.dtype if isinstance(weight, Tensor) else x.dtype
