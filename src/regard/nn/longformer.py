"""Longformer attention: a window for most tokens, and a few global tokens with projections of their
own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.caches import Cache, Growing, Parts
from regard.cost.softmax import SoftmaxSpec
from regard.errors import ArgumentError
from regard.masks import Causal, Dilated, Global, Mask, Window
from regard.nn.explainable import Explainable, InputSteps, ProjectionQuery
from regard.nn.mixer import MaskVisibility, Mixer, count_weights
from regard.nn.projections import Projection
from regard.ops.softmax import attend
from regard.span import Positions, Span, as_tensor
from regard.tracing import tap


class Longformer(Mixer):
    """Longformer attention: every token sees its window and the global tokens; a global token sees
    all tokens, through separate projections.

    z_t = softmax(q'_t K'^T / sqrt(D) over all) V', for a global token t;
    z_t = softmax(q_t K^T / sqrt(D) over window(t) and globals) V, for every other token t

    Args:
        local_project: the projection for the queries of tokens that are not global, and for all
            keys and values that these queries see.
        global_project: the projection for the queries of global tokens, and for all keys and values
            that these queries see.
        output: a module [B,T,H*E] -> [B,T,M].
        positions: the positions of the global tokens.
        window: how many keys a token sees up to and including itself.
        ahead: how many later keys a token sees; None makes the layer causal, as generation needs.
        step: the dilation of the window: a token sees every step-th key, as many keys as without
            dilation.

    Raises:
        ArgumentError: the two projections differ in shape, or a size is out of range for its mask.

    >>> from regard.nn.variants.projections import separate_qkv
    >>> local, other = separate_qkv(8, 2, 2, 4), separate_qkv(8, 2, 2, 4)
    >>> layer = Longformer(local, other, nn.Linear(8, 8), positions=(0,), window=3, ahead=2)
    >>> layer(torch.zeros(1, 7, 8)).shape
    torch.Size([1, 7, 8])

    Source: Beltagy et al. 2020 (arXiv 2004.05150), section 3.1.
    """

    recording_refusal = "computes the global queries separately, whose number depends on the length"

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
                f"local_project is {local_project.shape}, global_project is "
                f"{global_project.shape}; both need the same shape"
            )
        self.local_project, self.global_project, self.output = local_project, global_project, output
        self.globals = Global(positions)
        self.causal = ahead is None
        dilated, reach = Dilated(window, step), (window - 1) * step + 1
        window_mask: Mask = Window(reach) if ahead is None else Window(reach, ahead=ahead * step)
        if step != 1:
            window_mask = window_mask & dilated
        # Every query sees the global keys; the second mask is for global queries, which see all.
        self.mask: Mask = window_mask | self.globals
        self.global_mask: Mask | None = None
        if self.causal:
            self.mask, self.global_mask = Causal() & self.mask, Causal()

    # A global query is computed by both projections, and the second result replaces the first.
    replaces_calls = True

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of the local projection, or of the global one for the second call of a
        query.
        """
        project = self.global_project if query.call_index else self.local_project
        return project.explain_inputs(query) if isinstance(project, Explainable) else InputSteps()

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] to its own tokens and, in a causal layer, to the tokens in the
        cache.
        """
        local_memory = self.local_project.remember(x, positions)
        global_memory = self.global_project.remember(x, positions)
        memory, k_positions, n = (*local_memory, *global_memory), positions, len(local_memory)
        if cache is not None:
            memory, k_positions = cache.update(memory, positions)
        q = tap("q", self.local_project.query(x, positions))
        k, v = self.local_project.recall(memory[:n], k_positions)
        z = attend(
            q,
            tap("k", k),
            tap("v", v),
            mask=self.mask,
            q_positions=positions,
            k_positions=k_positions,
            backend=backend,
        )
        z = tap("z", self._replace_global_rows(z, x, positions, memory[n:], k_positions, backend))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def _replace_global_rows(
        self,
        z: Tensor,
        x: Tensor,
        positions: Positions,
        memory: Parts,
        k_positions: Positions,
        backend: str,
    ) -> Tensor:
        """Return heads z [B,H,T,E] with the rows of global tokens computed by the global
        projection.
        """
        rows = self._global_rows(positions)
        if rows is not None:  # the rows are known without a copy from the device: compute only them
            if not len(rows):
                return z

            index = torch.tensor(rows, device=x.device)
            x, positions = x[:, index], as_tensor(positions, x.device)[:, index]
        q = self.global_project.query(x, positions)
        k, v = self.global_project.recall(memory, k_positions)

        global_z = attend(
            q,
            k,
            v,
            mask=self.global_mask,
            q_positions=positions,
            k_positions=k_positions,
            backend=backend,
        )
        if rows is not None:
            return z.index_copy(2, index, global_z)
        return torch.where(self.globals.has(as_tensor(positions))[:, None, :, None], global_z, z)

    def _global_rows(self, positions: Positions) -> list[int] | None:
        """Return the indices of the global tokens among those of the call; None if the positions
        are a tensor.
        """
        if not isinstance(positions, Span):
            return None
        first = positions.start
        return [p - first for p in self.globals.positions if first <= p < positions.stop]

    def new_cache(self) -> Cache:
        """Return an empty cache that stores all tokens, since global queries and keys reach any
        distance.
        """
        return Growing()

    @property
    def spec(self) -> SoftmaxSpec:
        """The cost of this layer: both projections are cached, and a decoded token that is not
        global reads one of them.
        """
        shape, visible = self.local_project.shape, MaskVisibility(self.mask, keeps_all=True)
        return SoftmaxSpec(count_weights(self), 2 * shape.parts, shape.heads, visible)
