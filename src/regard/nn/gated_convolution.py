"""`GatedConvolution`, a layer that mixes only the last few tokens: a short convolution between two
gates.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from regard.caches import Cache, Parts, State
from regard.cost import Spec
from regard.cost.fixed_state import ConvolutionSpec
from regard.cost.spec import HeadShape
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Document
from regard.nn.causal_convolution import CausalConvolution
from regard.nn.linear import Linear
from regard.nn.mixer import AcrossRanks, Mixer, count_weights
from regard.nn.packed_documents import over_documents
from regard.span import Positions
from regard.tracing import tap


class GatedConvolution(Mixer):
    """A short causal convolution between two gates: the layer of LFM2 that is not attention.

    [b; c; y] = W_in x;  out = W_out (c * convolution(b * y))

    >>> import torch
    >>> mixer = GatedConvolution(8, 3)
    >>> cache = mixer.new_cache()
    >>> mixer(torch.zeros(1, 5, 8), cache=cache).shape, cache.bytes  # two tokens of 8 channels
    (torch.Size([1, 5, 8]), 64)

    Source: Liquid AI 2025, LFM2 (arXiv 2511.23404), section 2; the published code of LFM2.
    """

    across_ranks: ClassVar[AcrossRanks] = "state"

    explain_refusal = (
        "has no queries and keys: each channel has a filter of its own, and no row of weights "
        "belongs to a head; read convolution.weight, or explain a layer of attention"
    )

    recording_refusal = "skips empty slots, whose places depend on the positions"

    def __init__(
        self, dim: int, kernel: int = 3, *, bias: bool = False, documents: Document | None = None
    ) -> None:
        super().__init__()
        if dim < 1:
            raise ArgumentError(f"GatedConvolution(dim={dim}): it must be at least 1")
        self.input = Linear(dim, 3 * dim, bias=bias)
        self.convolution = CausalConvolution(dim, kernel, bias=bias, activation=None)
        self.output: nn.Module = Linear(dim, dim, bias=bias)
        self.documents = documents

    def check_cache(self, cache: Cache) -> None:
        """Check that the cache is a `State`."""
        if not isinstance(cache, State):
            raise ArgumentTypeError(
                f"the cache is {type(cache).__name__}; a convolution needs a State: use new_cache()"
            )

    @property
    def static_step_refusal(self) -> str | None:
        """None: a step depends on tensors only."""
        return None

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Convolve x [B,T,M] from the tokens in the cache; there is one form for all backends."""
        assert cache is None or isinstance(cache, State)
        if backend not in ("auto", "reference", "recurrent", "chunk", "parallel"):
            raise ArgumentError(
                f"backend is {backend!r}; a convolution has one form: use auto or reference"
            )
        b, c, y = self.input(x).chunk(3, -1)

        def convolve(
            part: tuple[Tensor, ...], positions: Positions, state: Parts | None
        ) -> tuple[tuple[Tensor, ...], Parts]:
            result, state = self.convolution(part[0], state, positions)
            return (result,), state

        before = None if cache is None else cache.state
        (z,), after = over_documents(self.documents, convolve, (b * y,), positions, before)
        if cache is not None:
            cache.store(after, positions)
        return tap("out", self.output(tap("z", (c * z)[:, None])[:, 0]))

    def new_cache(self) -> State:
        """Return an empty cache. Use a new one for each text, or call its `reset()`."""
        return State()

    @property
    def spec(self) -> Spec:
        """The cost of this layer."""
        channels = self.convolution.weight.shape[0]
        shape = HeadShape(1, 1, channels, channels)
        return ConvolutionSpec(count_weights(self), (), shape, convolution=self.convolution.cost)
