"""Selected attention: softmax attention whose mask is chosen from what is there, by a selector."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache, Growing
from regard.cost import Description
from regard.cost.selected import SelectedSpec
from regard.errors import ArgumentError
from regard.masks import Causal
from regard.nn.mixer import Mixer, count_weights
from regard.nn.project import Projection, aimed, facing
from regard.nn.selectors import Indexer, Selector
from regard.ops.selection.indexer import index_scores, indexer_loss
from regard.ops.softmax import attend, attention_weights
from regard.span import Positions, Span, count
from regard.tap import tap


class SelectedAttention(Mixer):
    """project -> remember -> recall -> choose -> attend -> output: `Attention` with a mask made
    from each call.

    mask = choose(q, k, x);  z = finish(attend(q, k, v, mask), x);  out = output(z, heads joined)

    Args:
        project: a `Projection`, also one that keeps a latent.
        select: a `Selector`: `MoBA` or `Indexer`.
        output: a module [B,T,H*E] -> [B,T,M].
        scale: None is 1/sqrt(D).

    >>> from regard.nn import Heads, Separate
    >>> from regard.nn.selectors import MoBA
    >>> project = Separate(Heads(8, 4, 2), Heads(8, 2, 2), Heads(8, 2, 2))
    >>> layer = SelectedAttention(project, MoBA(4, 2), nn.Linear(8, 8))
    >>> layer(torch.zeros(1, 9, 8)).shape
    torch.Size([1, 9, 8])
    """

    def __init__(
        self,
        project: Projection,
        select: Selector,
        output: nn.Module,
        *,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.project, self.select, self.output, self.scale = project, select, output, scale

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] at its positions to the chosen tokens of x and of what the cache
        holds.
        """
        memory, seen = self.project.remember(x, positions), positions
        n = len(memory)
        memory = (*memory, *self.select.remember(x, positions))
        if cache is not None:
            if self.project.stale:
                raise ArgumentError(f"a cache was given, but {self.project.stale}")
            memory, seen = cache.update(memory, positions)
        project = facing(self.project, x.shape[1], count(seen))
        q = tap("q", aimed(project, project.query(x, positions), positions, seen))
        k, v = project.recall(memory[:n], seen)
        k, v = tap("k", k), tap("v", v)
        mask = self.select.choose(q, k, x, memory[n:], positions, seen)
        z = attend(
            q,
            k,
            v,
            mask=mask,
            scale=self._scale,
            q_positions=positions,
            k_positions=seen,
            backend=backend,
        )
        z = tap("z", project.finish(z, x))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    @property
    def _scale(self) -> float:
        # by the dims of a head as defined: a form of the projection may have longer ones
        return self.project.shape.D**-0.5 if self.scale is None else self.scale

    def new_cache(self) -> Cache:
        """An empty cache that keeps everything: any token may be chosen later."""
        return Growing()

    @property
    def spec(self) -> SelectedSpec:
        """The cost of this layer: a cache holds all keys, and what the selector remembers."""
        shape, selection = self.project.shape, self.select.spec
        own = ((1, selection.values_per_token),) if selection.values_per_token else ()
        return SelectedSpec(count_weights(self), (*shape.parts, *own), shape.heads, selection)

    def describe(self, context: int = 4096) -> Description:
        """Describe the layer as every mechanism does, under the name of its selector."""
        return self.spec.describe(context, type(self.select).__name__)


def indexer_losses(
    layer: SelectedAttention,
    x: Float[Tensor, "B T M"],
    positions: Positions | None = None,
    *,
    chosen: bool = True,
) -> Float[Tensor, "B T"]:
    """The loss of each query that the indexer of a layer learns from, without a cache; its gradient
    reaches the indexer alone.

    Args:
        x, positions: as the layer takes them.
        chosen: compare over the keys that the indexer chose (the sparse stage), or over all past
            ones (the warm-up).

    Raises:
        ArgumentError: the layer's selector is no `Indexer`.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), equations 3 and 4.
    """
    select = layer.select
    if not isinstance(select, Indexer):
        raise ArgumentError(
            f"the layer selects by {type(select).__name__}; only an Indexer has a loss of its own"
        )
    positions = Span(0, x.shape[1]) if positions is None else positions
    x = x.detach()
    (key,) = select.remember(x, positions)
    with torch.no_grad():
        q = layer.project.query(x, positions)
        k, _ = layer.project.recall(layer.project.remember(x, positions), positions)
        mask = select.choose(q, k, x, (key,), positions, positions) if chosen else Causal()
        pattern = attention_weights(
            q, k, mask=mask, scale=layer._scale, q_positions=positions, k_positions=positions
        )
        visible = mask.block(positions, positions, device=x.device)[:, 0].expand(len(x), -1, -1)
    index_q, weight = select.parts(x, positions)
    return indexer_loss(index_scores(index_q, key, weight), pattern, visible)
