"""Longformer: a window for most tokens, and a few global tokens with projections of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.caches import Cache, Growing, Parts
from regard.cost.softmax import SoftmaxSpec
from regard.deprecation import renamed_attribute, renamed_parameters
from regard.errors import ArgumentError
from regard.masks import Causal, Dilated, Global, Mask, Window
from regard.nn.explainable import Explainable, InputSteps, ProjectionQuery
from regard.nn.mixer import MaskVisibility, Mixer, count_weights
from regard.nn.projections import Projection
from regard.nn.renamed_weights import LoadsRenamedWeights
from regard.ops.softmax import attend
from regard.span import Positions, Span, as_tensor
from regard.tap import tap


class Longformer(LoadsRenamedWeights, Mixer):
    """Every token sees its window and the global tokens; a global token sees everything, by other
    projections.

    z_t = softmax(q_t K^T / sqrt(D) over window(t) and globals) V, for other tokens;
    z_t = softmax(q'_t K'^T / sqrt(D) over all) V', for a global token t

    Args:
        local_project: the projection of most tokens; the keys of global tokens that others see are its
            keys, too.
        global_project: the projection of the global queries, with keys and values of its own for all
            tokens.
        output: a module [B,T,H*E] -> [B,T,M].
        positions: the positions of the global tokens.
        window: how many keys a token sees looking back, its own included, and `ahead` of it.
        ahead: keys behind the token that it sees; None makes the layer causal, for generation.
        step: of a dilated window, which has gaps: every step-th key, as many as without gaps.

    Raises:
        ArgumentError: the two projections differ in shape, or a mask refuses its numbers.

    >>> from regard.nn import HeadProjection, SeparateQKV
    >>> make = lambda: SeparateQKV(HeadProjection(8, 2, 4), HeadProjection(8, 2, 4), HeadProjection(8, 2, 4))
    >>> layer = Longformer(make(), make(), nn.Linear(8, 8), positions=(0,), window=3, ahead=2)
    >>> layer(torch.zeros(1, 7, 8)).shape
    torch.Size([1, 7, 8])

    Source: Beltagy et al. 2020 (arXiv 2004.05150), section 3.1.
    """

    renamed_weights = {"local": "local_project", "globally": "global_project"}
    local = renamed_attribute("local_project")
    globally = renamed_attribute("global_project")

    @renamed_parameters(local="local_project", globally="global_project")
    def __init__(
        self,
        local_project: Projection,
        global_project: Projection,
        output: nn.Module,
        *,
        positions: tuple[int, ...] = (0,),
        window: int,
        ahead: int | None = None,
        step: int = 1,
    ) -> None:
        super().__init__()
        if local_project.shape != global_project.shape:
            raise ArgumentError(
                f"local_project is {local_project.shape}, global_project is {global_project.shape}; both need the same shape"
            )
        self.local_project, self.global_project, self.output = local_project, global_project, output
        self.globals = Global(positions)
        self.causal = ahead is None
        gaps, reach = Dilated(window, step), (window - 1) * step + 1
        near: Mask = Window(reach) if ahead is None else Window(reach, ahead=ahead * step)
        if step != 1:
            near = near & gaps
        # others see global keys; that a global query sees everything is the second mask's matter
        self.mask: Mask = near | self.globals
        self.global_mask: Mask | None = None
        if self.causal:
            self.mask, self.global_mask = Causal() & self.mask, Causal()

    replaces_calls = True  # a global query's second call is its answer

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """The steps of the local projection, or of the global one in the second call of a query."""
        project = self.global_project if query.call_index else self.local_project
        return project.explain_inputs(query) if isinstance(project, Explainable) else InputSteps()

    def check_cache(self, cache: Cache) -> None:
        """Refuse a cache where the layer looks ahead.

        Raises:
            ArgumentError: it does.
        """
        if not self.causal:
            raise ArgumentError(
                "this Longformer looks ahead, so that no token is final before the last; "
                "give no cache, or make it causal with ahead=None"
            )

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] at its positions to itself and to what the cache holds (causal
        layers only).
        """
        near, far = (
            self.local_project.remember(x, positions),
            self.global_project.remember(x, positions),
        )
        memory, seen, n = (*near, *far), positions, len(near)
        if cache is not None:
            memory, seen = cache.update(memory, positions)
        q = tap("q", self.local_project.query(x, positions))
        k, v = self.local_project.recall(memory[:n], seen)
        z = attend(
            q,
            tap("k", k),
            tap("v", v),
            mask=self.mask,
            q_positions=positions,
            k_positions=seen,
            backend=backend,
        )
        z = tap("z", self._replace(z, x, positions, memory[n:], seen, backend))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def _replace(
        self, z: Tensor, x: Tensor, positions: Positions, far: Parts, seen: Positions, backend: str
    ) -> Tensor:
        """z with the rows of global tokens as the global projection has them."""
        rows = self._rows(positions)
        if rows is not None:  # known without reading a tensor: the few rows alone are computed
            if not len(rows):
                return z
            at = torch.tensor(rows, device=x.device)
            x, positions = x[:, at], as_tensor(positions, x.device)[:, at]
        q = self.global_project.query(x, positions)
        k, v = self.global_project.recall(far, seen)
        wide = attend(
            q, k, v, mask=self.global_mask, q_positions=positions, k_positions=seen, backend=backend
        )
        if rows is not None:
            return z.index_copy(2, at, wide)
        return torch.where(self.globals.has(as_tensor(positions))[:, None, :, None], wide, z)

    def _rows(self, positions: Positions) -> list[int] | None:
        """Which rows are global tokens; None where positions are in a tensor."""
        if not isinstance(positions, Span):
            return None
        first = positions.start
        return [p - first for p in self.globals.positions if first <= p < positions.stop]

    def new_cache(self) -> Cache:
        """An empty cache that keeps everything: global keys may stand anywhere, and global queries
        see all.
        """
        return Growing()

    @property
    def spec(self) -> SoftmaxSpec:
        """The cost of this layer: both projections are cached, and a decoded token that is not
        global reads one.
        """
        shape, visible = self.local_project.shape, MaskVisibility(self.mask, keeps_all=True)
        return SoftmaxSpec(count_weights(self), 2 * shape.parts, shape.heads, visible)
