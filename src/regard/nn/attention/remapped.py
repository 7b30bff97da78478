"""Attention with other positions than the usual ones: beyond the training length, or of several
axes.

Where distances differ from the real ones, a result is two or three calls over disjoint keys at
other positions, joined by `merge`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.argument_checks import check_int
from regard.biases import Bias
from regard.caches import Cache, Parts
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Causal, Chunk, EarlierChunks, Mask, Sinks, Window
from regard.nn.attention.attention import Attention, Places
from regard.nn.explainable import InputSteps, MechanismStep, ProjectionQuery
from regard.nn.projections.heads import (
    HeadProjection,
    ProjectionShape,
    SeparateQKV,
    check_shared_rotary,
    shared_rotary,
)
from regard.ops.softmax import attend_partial, merge
from regard.positions import rotate
from regard.positions.multi_axis import MultiAxisRotary, order_of, text_axes
from regard.process_state import is_exporting
from regard.span import EMPTY, Positions, Span, as_tensor
from regard.tracing import named_scope, requested_taps


@dataclass(frozen=True)
class PositionMap:
    """The position to which a query or a key at position p is rotated.

    min((p mod modulus) // divisor + offset, at_most)
    """

    modulus: int | None = None
    divisor: int = 1
    offset: int = 0
    at_most: int | None = None

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the other positions of these positions."""
        p = positions if self.modulus is None else positions % self.modulus
        p = p // self.divisor + self.offset
        return p if self.at_most is None else p.clamp(max=self.at_most)


@dataclass(frozen=True)
class RemappedPart:
    """Some pairs of a causal mask, and the positions to which they are rotated, or None."""

    name: str
    mask: Mask
    query: PositionMap | None = None
    key: PositionMap | None = None


def _constant(value: int) -> PositionMap:
    """Return the map of every position to one."""
    return PositionMap(modulus=1, offset=value)


def _near_and_far(window: int, name: str, mask: Mask) -> tuple[RemappedPart, ...]:
    """Return the window, and the other keys that are seen, all at the distance of the window."""
    far = RemappedPart(name, mask & ~Window(window), _constant(window), _constant(0))
    return RemappedPart("near", Causal() & Window(window)), far


class DistanceMap(ABC):
    """Base class of the maps of distances: `parts` divides the pairs and says their positions."""

    @abstractmethod
    def parts(self) -> tuple[RemappedPart, ...]:
        """Divide the pairs of queries and keys.

        Returns:
            The parts, each with its mask and the positions of its queries and keys.
        """

    @property
    def mask(self) -> Mask:
        """The union of the parts: by default the causal mask, because no key is hidden."""
        return Causal()

    @property
    @abstractmethod
    def unchanged(self) -> int:
        """The length of a text up to which no distance is changed."""

    def distance(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the distances of queries and keys.

        Args:
            q: positions of queries [T].
            k: positions of keys [S].

        Returns:
            The distances [T,S]; 0 where the query does not see the key.
        """
        result = torch.zeros(len(q), len(k), dtype=torch.int64, device=q.device)
        for part in self.parts():
            own_q = q if part.query is None else part.query(q)
            own_k = k if part.key is None else part.key(k)
            allowed = part.mask.block(q[None], k[None])[0, 0]
            result = result + allowed * (own_q[:, None] - own_k[None])
        return result


@dataclass(frozen=True)
class DualChunk(DistanceMap):
    """Dual chunk attention (DCA): near distances are nearly real, far ones stay below n.

    keys are at j mod c; a query is at i mod c for its own chunk, at min(i mod c + c, n) for the
    chunk before it, and at min(2c - 1, n) for earlier chunks

    Args:
        chunk: the size c of a chunk.
        length: n, the largest position of a query; below the training length, and at least c.

    Raises:
        ArgumentError, ArgumentTypeError: a number is no positive int, or n is below c.

    >>> DualChunk(4, 6).distance(torch.tensor([9]), torch.arange(10)).tolist()
    [[6, 5, 4, 3, 5, 4, 3, 2, 1, 0]]

    Source: An et al. 2024 (arXiv 2402.17463), section 3.
    """

    chunk: int
    length: int

    def __post_init__(self) -> None:
        check_int("chunk", self.chunk, 1)
        check_int("length", self.length, 1)
        if self.length < self.chunk:
            raise ArgumentError(
                f"length is {self.length} and chunk is {self.chunk}; length must be at least "
                "chunk, because keys stand at positions below chunk"
            )

    def parts(self) -> tuple[RemappedPart, ...]:
        """Return the own chunk, the chunk before it, and all earlier ones."""
        c, n = self.chunk, self.length
        within = PositionMap(modulus=c)
        following = PositionMap(modulus=c, offset=c, at_most=n)
        return (
            RemappedPart("own chunk", Causal() & Chunk(c), within, within),
            RemappedPart("chunk before", EarlierChunks(c, 1, 1), following, within),
            RemappedPart("earlier", EarlierChunks(c, 2), _constant(min(2 * c - 1, n)), within),
        )

    @property
    def unchanged(self) -> int:
        """Two chunks, or as far as n does not limit the second."""
        return min(self.length + 1, 2 * self.chunk)


class WindowedMap(DistanceMap):
    """Base class of the maps that leave the distances within a window as they are."""

    window: int

    @property
    def unchanged(self) -> int:
        """The window and one more, because a distance of the window stays."""
        return self.window + 1


@dataclass(frozen=True)
class SelfExtend(WindowedMap):
    """Self-Extend: the nearest keys keep their distances, and the others are grouped.

    i - j for i - j < W, else floor(i / G) + W - floor(W / G) - floor(j / G)

    Args:
        group: the number G of positions that become one.
        window: the number W of nearest keys, a multiple of G.

    Raises:
        ArgumentError, ArgumentTypeError: a number is no positive int, or G does not divide W.

    >>> SelfExtend(2, 4).distance(torch.tensor([11]), torch.arange(12)).tolist()
    [[7, 7, 6, 6, 5, 5, 4, 4, 3, 2, 1, 0]]

    Source: Jin et al. 2024 (arXiv 2401.01325), section 3.2.
    """

    group: int
    window: int

    def __post_init__(self) -> None:
        check_int("group", self.group, 1)
        check_int("window", self.window, 1)
        if self.window % self.group:
            lower = max(1, self.window // self.group) * self.group
            raise ArgumentError(
                f"window is {self.window} and group is {self.group}; group must divide window, "
                f"such as window={lower}: otherwise the released code computes other distances in "
                "a prompt than while decoding"
            )

    def parts(self) -> tuple[RemappedPart, ...]:
        """Return the window, and the grouped keys beyond it."""
        G, W = self.group, self.window
        return (
            RemappedPart("near", Causal() & Window(W)),
            RemappedPart(
                "grouped",
                Causal() & ~Window(W),
                PositionMap(divisor=G, offset=W - W // G),
                PositionMap(divisor=G),
            ),
        )


@dataclass(frozen=True)
class ReRoPE(WindowedMap):
    """Rectified rotary positions: no distance is larger than the window.

    min(i - j, w)

    Args:
        window: the largest distance w.

    Raises:
        ArgumentError, ArgumentTypeError: window is not an int of at least 1.

    >>> ReRoPE(2).distance(torch.tensor([4]), torch.arange(5)).tolist()
    [[2, 2, 2, 1, 0]]

    Source: Su 2023, "Rectified Rotary Position Embeddings" (code: bojone/rerope).
    """

    window: int

    def __post_init__(self) -> None:
        check_int("window", self.window, 1)

    def parts(self) -> tuple[RemappedPart, ...]:
        """Return the window, and the keys beyond it at one distance."""
        return _near_and_far(self.window, "far", Causal())


@dataclass(frozen=True)
class LMInfinite(WindowedMap):
    """LM-Infinite: a query sees the last keys and the first ones, at most a window away.

    min(i - j, w) for i - j < w or j < s; other keys are hidden

    Args:
        sinks: the number s of first tokens.
        window: the number w of last keys, and the largest distance.

    Raises:
        ArgumentError, ArgumentTypeError: a number is not an int of at least 1.

    >>> LMInfinite(1, 2).distance(torch.tensor([4]), torch.arange(5)).tolist()
    [[2, 0, 0, 1, 0]]

    Source: Han et al. 2023 (arXiv 2308.16137), section 3.2.
    """

    sinks: int
    window: int

    def __post_init__(self) -> None:
        check_int("sinks", self.sinks, 1, "0 is the mask Window")
        check_int("window", self.window, 1)

    def parts(self) -> tuple[RemappedPart, ...]:
        """Return the window, and the first tokens beyond it."""
        return _near_and_far(self.window, "first tokens", Causal() & Sinks(self.sinks))

    @property
    def mask(self) -> Mask:
        """The window and the first tokens."""
        return Causal() & (Window(self.window) | Sinks(self.sinks))


class RemappedAttention(Attention):
    """Softmax attention whose rotary distances are those of a `DistanceMap`.

    s_ij = q_i^T R(-d(i, j)) k_j / sqrt(D), d(i, j) the distance of the map

    The cache stores keys that are rotated by their own positions, so that a trained model can be
    used. For each part of the map, queries and keys are rotated further; parts are joined by their
    lse. Up to `distances.unchanged` tokens it is one plain call.

    Args:
        project: a `SeparateQKV` whose query and key heads end with the same `Rotary` object.
        output: a module [B,T,H*E] -> [B,T,M].
        distances: a `DualChunk`, `SelfExtend`, `ReRoPE` or `LMInfinite`, or another `DistanceMap`.
        scale, softcap, sink: as in `Attention`.

    Raises:
        ArgumentError, ArgumentTypeError: queries and keys do not end with the same rotary of fixed
            frequencies, or distances is not a `DistanceMap`.

    >>> from regard.nn.variants.projections import separate_qkv
    >>> from regard.positions import Rotary
    >>> project = separate_qkv(8, 4, 2, 2, Rotary(2))
    >>> attention = RemappedAttention(project, nn.Linear(8, 8), ReRoPE(4))
    >>> attention(torch.zeros(1, 50, 8)).shape
    torch.Size([1, 50, 8])
    """

    across_ranks = None

    def __init__(
        self,
        project: SeparateQKV,
        output: nn.Module,
        distances: DistanceMap,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink: nn.Parameter | None = None,
    ) -> None:
        check_shared_rotary(project)
        if not isinstance(distances, DistanceMap):
            raise ArgumentTypeError(
                f"distances is {type(distances).__name__}; it must be a DistanceMap, such as "
                "DualChunk(chunk, length)"
            )
        super().__init__(
            project, output, mask=distances.mask, scale=scale, softcap=softcap, sink=sink
        )
        self.distances = distances
        # built once, because a compiled graph cannot make masks
        self._parts = distances.parts()

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, places: Places, backend: str
    ) -> Tensor:
        """Attend in one call while no distance is changed; otherwise in one call for each part."""
        if bias is not None:
            raise ArgumentError(
                f"{type(self).__name__} got the bias {bias} of its projection; its positions move, "
                "and a bias would not follow them: use a projection without data_bias"
            )
        positions, k_positions = places
        if (
            isinstance(positions, Span)
            and not is_exporting()  # an exported program serves every length
            and positions.stop <= self.distances.unchanged
        ):
            return super()._attend(q, k, v, None, places, backend)
        if not requested_taps().isdisjoint(("scores", "pattern")):
            raise ArgumentError(
                f"a trace asks for scores or patterns of a {type(self).__name__}, which has no "
                "single call: its parts rotate queries and keys to other positions; record the "
                "run, or trace q, k, v and z"
            )
        partials = []
        for part in self._parts:
            with named_scope(part.name.replace(" ", "_")):
                moved_q = self._moved(q, positions, part.query)
                moved_k = self._moved(k, k_positions, part.key)
                numbers = {"scale": self.scale, "softcap": self.softcap, "backend": backend}
                rules: Any = {"mask": part.mask, **numbers, **places._asdict()}
                partials.append(attend_partial(moved_q, moved_k, v, **rules))
        return merge(partials, sink=self.sink).out

    def _moved(self, x: Tensor, positions: Positions, to: PositionMap | None) -> Tensor:
        """Rotate x [B,n,L,D] from its positions to other ones."""
        if to is None:
            return x
        own = as_tensor(positions, x.device).to(x.device)
        rotary = shared_rotary(self.project)
        return rotate(x, to(own) - own, rotary.inv_freq, layout=rotary.layout)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of the projection, and the rotation to the positions of the part."""
        steps = super().explain_inputs(query)
        names = {part.name.replace(" ", "_"): part for part in self._parts}
        part = names.get(query.branch)
        if part is None:
            return steps
        return steps._replace(
            q=self._explain_move(steps.q, query.positions, part.query, f"q_i, part {part.name}"),
            k=self._explain_move(steps.k, query.k_positions, part.key, f"k_j, part {part.name}"),
        )

    def _explain_move(
        self,
        steps: tuple[MechanismStep, ...],
        positions: Positions,
        to: PositionMap | None,
        what: str,
    ) -> tuple[MechanismStep, ...]:
        if to is None or not steps:
            return steps
        moved = self._moved(steps[-1].values[None], positions, to)[0]
        equation = f"R(other position - own position) {what}"
        return (*steps, MechanismStep("rotated further", equation, moved))

    def extra_repr(self) -> str:
        """Return the map of distances, and what differs from the defaults."""
        return f"{self.distances}, {super().extra_repr()}"


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
    static_step_refusal = (
        "asks its cache for the coordinates of the last token by an update of no tokens"
    )

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
