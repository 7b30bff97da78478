"""Attention with rotary positions of several axes (M-RoPE)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from regard.biases import Bias
from regard.caches import Cache, Parts
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Mask
from regard.nn.attention.attention import Attention, Places
from regard.nn.projections.heads import HeadProjection, ProjectionShape, SeparateQKV
from regard.positions.multi_axis import MultiAxisRotary, order_of, text_axes
from regard.span import EMPTY, Positions, Span, as_tensor


class MultiAxisProjection(SeparateQKV):
    """A projection with a `MultiAxisRotary`, of which a cache also stores shifts of tokens.

    shift = (largest coordinate so far) - order, of a text token that follows, on all axes

    Args:
        q, k, v: as for `SeparateQKV`; the last step on q and on k is the same `MultiAxisRotary`.

    Raises:
        ArgumentError: the last steps are not the same `MultiAxisRotary`, or as for `SeparateQKV`.

    >>> rotary = MultiAxisRotary(4, sections=(1, 1))
    >>> q, k, v = (HeadProjection(8, 2, 4, *steps) for steps in ((rotary,), (rotary,), ()))
    >>> MultiAxisProjection(q, k, v).shape.memory
    (8, 8, 1)
    """

    def __init__(self, q: HeadProjection, k: HeadProjection, v: HeadProjection) -> None:
        super().__init__(q, k, v)
        last = [part.steps[-1] if len(part.steps) else None for part in (q, k)]
        if not isinstance(last[0], MultiAxisRotary) or last[0] is not last[1]:
            raise ArgumentError(
                f"the last step on queries is {last[0]}, and on keys {last[1]}; both must be the "
                "same MultiAxisRotary object"
            )

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the keys [B,G,S,D], the values [B,G,S,E], and the shifts [B,1,S,1]."""
        k, v = super().remember(x, positions)
        wide = torch.promote_types(x.dtype, torch.float32)
        if not isinstance(positions, Tensor) or positions.ndim == 2:
            return k, v, x.new_zeros(x.shape[0], 1, x.shape[1], 1, dtype=wide)
        order = positions[0]
        largest = positions[1:].amax(0).masked_fill(order <= EMPTY, EMPTY)
        shift = (largest.cummax(-1).values - order) if x.shape[1] else largest
        shift = shift.to(x.device, wide)[:, None, :, None]
        return k, v, shift.expand(x.shape[0], -1, -1, -1)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values."""
        return memory[0], memory[1]

    @property
    def rotary(self) -> MultiAxisRotary:
        """The rotary embedding of queries and keys."""
        return cast("MultiAxisRotary", self.q.steps[-1])

    @property
    def shape(self) -> ProjectionShape:
        """H, G, D and E; a cache stores G D + G E + 1 values per token."""
        shape = super().shape
        return shape._replace(memory=(*shape.memory, 1))


class MultiAxisAttention(Attention):
    """Softmax attention with rotary positions of several axes.

    Positions are [1 + A,B,T] (`regard.positions.multi_axis_positions`): an order, which decides
    what a query sees, and coordinates, which rotate. Tokens without coordinates are text that
    follows the largest one, which the cache carries: decoding needs no positions.

    Args:
        project: a `MultiAxisProjection`.
        output: a module [B,T,H*E] -> [B,T,M].
        mask: a mask on the order of the tokens; None lets every query see every key.
        scale: the factor on the scores; None is 1/sqrt(D).

    Raises:
        ArgumentTypeError: project is not a `MultiAxisProjection`.

    >>> from regard.nn.variants import mrope
    >>> from regard.positions import multi_axis_positions
    >>> layer, x = mrope(32, 4, groups=2), torch.randn(1, 7, 32)
    >>> cache = layer.new_cache()
    >>> out = layer(x[:, :6], multi_axis_positions([[2, (1, 2, 2)]]), cache)
    >>> layer(x[:, 6:], cache=cache).shape  # at the coordinate 4, behind 6 tokens
    torch.Size([1, 1, 32])

    Source: Wang et al. 2024 (arXiv 2409.12191), section 2.1.
    """

    across_ranks = None

    def __init__(
        self,
        project: MultiAxisProjection,
        output: nn.Module,
        *,
        mask: Mask | None = None,
        scale: float | None = None,
    ) -> None:
        if not isinstance(project, MultiAxisProjection):
            raise ArgumentTypeError(
                f"project is {type(project).__name__}; it must be a MultiAxisProjection"
            )
        super().__init__(project, output, mask=mask, scale=scale)

    @property
    def static_step_refusal(self) -> str | None:
        """Why a step cannot be captured as a CUDA graph, as words that follow the name."""
        return "asks its cache for the coordinates of the last token by an update of no tokens"

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M]; tokens without coordinates continue the row as text."""
        project = cast("MultiAxisProjection", self.project)
        order = order_of(positions)
        if order is positions and cache is not None and len(cache):
            shift = self._carried_shift(x, cache)
            positions = text_axes(order, shift, len(project.rotary.sections))
        memory, k_positions = project.remember(x, positions), order
        if cache is not None:
            memory, k_positions = cache.update(memory, order)
        return self._attend_and_project(x, positions, memory, k_positions, backend)

    def _carried_shift(self, x: Tensor, cache: Cache) -> Tensor:
        """Return the shift [B,1] behind the last token of each row of a cache."""
        none = cache.next(0)
        # an update with no token changes nothing, and returns what any kind of cache holds
        memory, k_positions = cache.update(self.project.remember(x[:, :0], none), none)
        shifts = memory[2][:, 0, :, 0]
        if isinstance(k_positions, Span):
            return shifts[:, -1:].round().to(torch.int64)
        k_positions = as_tensor(k_positions, shifts.device).expand(shifts.shape[0], -1)
        last = k_positions.argmax(1, keepdim=True)
        shift = shifts.gather(1, last).round().to(torch.int64)
        return shift.masked_fill(k_positions.amax(1, keepdim=True) <= EMPTY, 0)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, places: Places, backend: str
    ) -> Tensor:
        """Attend by the order of the tokens."""
        order = places._replace(q_positions=order_of(places.q_positions))
        return super()._attend(q, k, v, bias, order, backend)
