"""Blocks of one sublayer, parallel mechanisms in a layer, and a residual stream in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache, State
from regard.caches.joined import Joined
from regard.cost import Spec
from regard.cost.summed import SummedSpec, TokenwiseSpec
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.blocks.blocks import Block, PreNorm, Sublayer
from regard.nn.blocks.experts import MoE
from regard.nn.blocks.norms import RMSNorm
from regard.nn.mixer import Mixer, count_weights
from regard.nn.recurrence.recurrent import StateMixer
from regard.span import Positions
from regard.tracing import named_scope, tap
from regard.units import plural


class MixerBlock(Block):
    """A block of one sublayer, a mechanism with its residual connection: x + mixer(norm(x)).

    Source: Gu and Dao 2023 (arXiv 2312.00752), section 3.4 and figure 3.
    """

    def __init__(self, attention: Mixer, residual: PreNorm) -> None:
        super().__init__(attention, nn.Identity(), residual, PreNorm(nn.Identity()))

    def _traced_forward(
        self, x: Tensor, positions: Positions | None, cache: Cache | None, backend: str
    ) -> Tensor:
        with named_scope("attention"):
            x = self.attention_residual(x, self._tapped_attention(positions, cache, backend))
        return tap("residual", x)

    def _plain_forward(
        self, x: Tensor, positions: Positions | None, cache: Cache | None, backend: str
    ) -> Tensor:
        """Apply the mechanism to hidden states [B,T,M] and add its output."""
        result: Tensor = self.attention_residual(
            x, lambda normed: self.attention(normed, positions, cache, backend=backend)
        )
        return result


class Tokenwise(StateMixer):
    """A module that acts on each token alone, in the place of a mechanism: nothing is mixed.

    Source: NVIDIA 2025, Nemotron-H (arXiv 2504.03624), section 2.
    """

    explain_refusal = (
        "mixes no tokens, so that there is no row of weights; explain a layer of attention"
    )

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Apply the network to x [B,T,M]; it is the same for every backend."""
        if isinstance(cache, State):
            cache.store((), positions)
        return tap("mlp", self.network(x))

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

    A stack of such blocks needs a `NarrowingRMSNorm` before its head.

    Source: Gu and Dao 2023 (arXiv 2312.00752), `residual_in_fp32` of its released code.
    """

    def forward(self, x: Float[Tensor, "B T M"], sublayer: Sublayer) -> Float[Tensor, "B T M"]:
        """Compute x + sublayer(norm(x)) for hidden states [B,T,M], in fp32 or better."""
        narrow = x.to(_dtype_of(self.norm, x))
        y = self.apply_dropout(sublayer(tap("norm", self.norm(narrow))))
        return x.to(torch.promote_types(x.dtype, torch.float32)) + y


class NarrowingRMSNorm(RMSNorm):
    """An `RMSNorm` whose result has the dtype of its weight, whatever the dtype of its input.

    Source: Gu and Dao 2023 (arXiv 2312.00752), `residual_in_fp32` of its released code.
    """

    def forward(self, x: Float[Tensor, "*L D"], positions: object = None) -> Float[Tensor, "*L D"]:
        """Normalize x [..., dim]; positions are ignored."""
        return super().forward(x).to(self.weight.dtype)


def _dtype_of(norm: nn.Module, x: Tensor) -> torch.dtype:
    """Return the dtype of the weight of a norm, or of x if the norm has none."""
    weight = getattr(norm, "weight", None)
    return weight.dtype if isinstance(weight, Tensor) else x.dtype


class ParallelMixers(Mixer):
    """Several mechanisms that read the same input beside each other: the sum of their results.

    y = sum_i out_scales_i mixer_i(in_scales_i x)

    The cache is a `Joined` of theirs; their taps are named `mixers.0`, `mixers.1` and so on.

    Source: Dong et al. 2024 (arXiv 2411.13676), section 2.1; Falcon-LLM Team 2025 (arXiv
    2507.22448), section 3.1, where results are added.
    """

    explain_refusal = (
        "adds the results of several mechanisms, so that no row of weights belongs to the layer; "
        "read the taps of mixers.0, mixers.1 and so on"
    )
    static_step_refusal = None  # each mechanism has its own reasons

    def __init__(
        self,
        mixers: Sequence[Mixer],
        *,
        in_scales: Sequence[float] | None = None,
        out_scales: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if not mixers:
            raise ArgumentError("ParallelMixers needs at least one mechanism")
        self.mixers = nn.ModuleList(mixers)
        self.in_scales, self.out_scales = (
            (1.0,) * len(mixers) if scales is None else tuple(scales)
            for scales in (in_scales, out_scales)
        )
        for name, scales in (("in_scales", self.in_scales), ("out_scales", self.out_scales)):
            if len(scales) != len(mixers):
                raise ArgumentError(
                    f"{name} has {plural(len(scales), 'number')} for "
                    f"{plural(len(mixers), 'mechanism')}; give one for each"
                )
        reasons = (mixer.recording_refusal for mixer in mixers)
        self.recording_refusal = next((x for x in reasons if x is not None), None)

    def check_cache(self, cache: Cache) -> None:
        """Check that the cache has a part for each mechanism, which that mechanism accepts."""
        if not isinstance(cache, Joined):
            raise ArgumentTypeError(
                f"the cache is {type(cache).__name__}; {plural(len(self.mixers), 'mechanism')} in "
                "one layer need a Joined: use new_cache()"
            )
        if len(cache.parts) != len(self.mixers):
            raise ArgumentError(
                f"the cache has {plural(len(cache.parts), 'part')} for "
                f"{plural(len(self.mixers), 'mechanism')}; use new_cache()"
            )
        for mixer, part in zip(self._every(), cache.parts, strict=True):
            mixer.check_cache(part)

    def mix(
        self, x: Float[Tensor, "B T M"], positions: Positions, cache: Cache | None, backend: str
    ) -> Float[Tensor, "B T M2"]:
        """Add the results of all mechanisms for x [B,T,M], each with its part of the cache."""
        if backend not in ("auto", "reference"):
            raise ArgumentError(
                f"backend is {backend!r}, and {plural(len(self.mixers), 'mechanism')} in one layer "
                "have different kernels; use auto or reference"
            )
        assert cache is None or isinstance(cache, Joined)
        parts = (None,) * len(self.mixers) if cache is None else cache.parts
        total: Tensor | None = None
        for i, (mixer, part) in enumerate(zip(self._every(), parts, strict=True)):
            with named_scope(f"mixers.{i}"):
                y = mixer(_scaled(x, self.in_scales[i]), positions, part, backend=backend)
            y = _scaled(y, self.out_scales[i])
            total = y if total is None else total + y
        assert total is not None, "there is at least one mechanism"
        return total

    def new_cache(self) -> Joined:
        """Return an empty cache with a part for each mechanism."""
        return Joined([mixer.new_cache() for mixer in self._every()])

    @property
    def spec(self) -> Spec:
        """The cost of all mechanisms together."""
        return SummedSpec.of([mixer.spec for mixer in self._every()])

    def extra_repr(self) -> str:
        """Return the factors that are not 1."""
        named = {"in_scales": self.in_scales, "out_scales": self.out_scales}
        return ", ".join(f"{k}={list(v)}" for k, v in named.items() if any(x != 1 for x in v))

    def _every(self) -> list[Mixer]:
        """Return all mechanisms, in their order."""
        return [cast("Mixer", mixer) for mixer in self.mixers]


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale
