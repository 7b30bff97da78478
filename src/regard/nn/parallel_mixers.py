"""`ParallelMixers`, several mechanisms in one layer, whose results are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache
from regard.caches.joined import Joined
from regard.cost import Spec
from regard.cost.summed import SummedSpec
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.mixer import Mixer
from regard.span import Positions
from regard.tracing import named_scope
from regard.units import plural


class ParallelMixers(Mixer):
    """Several mechanisms that read the same input beside each other: the sum of their results.

    y = sum_i out_scales_i mixer_i(in_scales_i x)

    The cache is a `Joined` of the caches of the mechanisms. Their taps are named `mixers.0`,
    `mixers.1` and so on.

    >>> import torch
    >>> from regard.nn.variants import gqa, mamba2
    >>> layer = ParallelMixers([gqa(8, 2, groups=1), mamba2(8, 2)])
    >>> cache = layer.new_cache()
    >>> layer(torch.zeros(1, 3, 8), cache=cache).shape, cache.next(1)
    (torch.Size([1, 3, 8]), Span(start=3, length=1))

    Source: Dong et al. 2024 (arXiv 2411.13676), section 2.1; Falcon-LLM Team 2025 (arXiv
    2507.22448), section 3.1, where results are added.
    """

    explain_refusal = (
        "adds the results of several mechanisms, so that no row of weights belongs to the layer; "
        "read the taps of mixers.0, mixers.1 and so on"
    )

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

    @property
    def static_step_refusal(self) -> str | None:
        """None: each mechanism has its own reasons."""
        return None

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
        """Apply all mechanisms to x [B,T,M], each with its part of the cache, and add the results.

        A mechanism gets the kernel `backend` if it is "auto" or "reference", which all have.
        """
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
