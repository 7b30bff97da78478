"""Attention to the keys and values of an earlier layer, as in cross-layer attention, in YOCO and in
the last layers of Gemma 3n: a layer without key and value projections of its own.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from regard.caches import Cache, CrossLayer, Parts
from regard.cost.softmax import SharedKeysSpec, VisibleKeys
from regard.cost.spec import ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.nn.attention import Attention
from regard.nn.explainable import InputSteps, ProjectionQuery, first_rotary
from regard.nn.mixer import AcrossRanks, MaskVisibility, count_weights
from regard.nn.projections import (
    HeadProjection,
    Projection,
    ProjectionShape,
    SeparateQKV,
)
from regard.span import Positions


class QueryProjection(Projection, nn.Module):
    """A projection to queries only. Keys and values come as an earlier layer stored them.

    >>> import torch
    >>> QueryProjection(HeadProjection(8, 4, 2), 2).remember(torch.zeros(1, 3, 8), None)
    ()

    Source: Brandon et al. 2024 (arXiv 2405.12981), section 3.
    """

    def __init__(self, q: HeadProjection, groups: int, value_dim: int | None = None) -> None:
        super().__init__()
        if groups < 1 or q.heads % groups:
            raise ArgumentError(
                f"groups is {groups}, and q is {q.extra_repr()}; groups must divide the query heads"
            )
        self.q, self.groups = q, groups
        self.value_dim = q.head_dim if value_dim is None else value_dim

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Return the queries [B,H,T,D] of hidden states x."""
        q: Tensor = self.q(x, positions)
        return q

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return no parts, because the earlier layer stores the tokens."""
        return ()

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of the earlier layer."""
        k, v = memory
        return k, v

    @property
    def shape(self) -> ProjectionShape:
        """H, G, D and E; a cache stores nothing."""
        return ProjectionShape(self.q.heads, self.groups, self.q.head_dim, self.value_dim, ())

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of the queries; those of keys and values belong to the earlier layer."""
        q = self.q.explain_steps(query.x, query.positions, "q")
        return InputSteps(q, rotary=first_rotary(self.q.steps))

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """Return the cost of attention through this projection."""
        return SharedKeysSpec(weights, self.shape.heads.parts, self.shape.heads, visible)


class SharedMemoryAttention(Attention):
    """Softmax attention to the keys and values that an earlier layer computed and stored.

    q = query(x);  k, v = those of the earlier layer, in this call and in its cache

    It runs inside a `Decoder` whose `memory_from` names the earlier layer. The keys are rotated
    already, so that queries need the same rotary embedding.

    Args:
        output: a module [B,T,H*E] -> [B,T,M].

    >>> import torch
    >>> from regard.span import Span
    >>> layer = SharedMemoryAttention(
    ...     QueryProjection(HeadProjection(8, 4, 2), 2), torch.nn.Linear(8, 8, bias=False))
    >>> cache = layer.new_cache()
    >>> cache.lend((torch.zeros(1, 2, 5, 2), torch.zeros(1, 2, 5, 2)), Span(0, 5))
    >>> layer(torch.zeros(1, 1, 8), Span(4, 1), cache).shape
    torch.Size([1, 1, 8])

    Source: Brandon et al. 2024 (arXiv 2405.12981), section 3; Sun et al. 2024 (arXiv 2405.05254).
    """

    across_ranks: ClassVar[AcrossRanks] = None

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] to the tokens that were lent to the cache."""
        if cache is None:
            raise ArgumentError(
                "this layer reads the memory of an earlier layer, and was called without a "
                "CrossLayer cache; call the Decoder, which passes the memory from layer to layer"
            )
        memory, k_positions = cache.update((), positions)
        return self._attend_and_project(x, positions, memory, k_positions, backend)

    def check_cache(self, cache: Cache) -> None:
        """Raise unless the cache is a `CrossLayer` one."""
        if not isinstance(cache, CrossLayer):
            raise ArgumentError(
                f"the cache is a {type(cache).__name__}; a layer that reads the memory of an "
                "earlier layer needs a CrossLayer cache: use new_cache()"
            )

    def new_cache(self) -> CrossLayer:
        """Return a cache that stores nothing."""
        return CrossLayer()

    @property
    def spec(self) -> Spec:
        """The cost of this layer: no cached values, and the FLOPs of all visible keys."""
        assert isinstance(self.project, QueryProjection), "the class accepts no other projection"
        return self.project.spec(count_weights(self), MaskVisibility(self.mask))


def without_own_memory(attention: Attention) -> SharedMemoryAttention:
    """Return attention with the queries and the output of a layer, which reads the memory of an
    earlier layer instead of its own keys and values.

    >>> from regard.nn.variants import gqa
    >>> without_own_memory(gqa(32, 4, groups=2)).describe(100).cached_values
    0
    """
    project = attention.project
    if type(attention) is not Attention or type(project) is not SeparateQKV:
        raise ArgumentError(
            f"{type(attention).__name__} with {type(project).__name__} cannot read the memory of "
            "another layer; use Attention with SeparateQKV, as gqa has it"
        )
    if project.key_transform is not None:
        raise ArgumentError("key_transform is applied when keys are read; sharing needs None")
    return SharedMemoryAttention(
        QueryProjection(project.q, project.k.heads, project.v.head_dim),
        attention.output,
        mask=attention.mask,
        scale=attention.scale,
        softcap=attention.softcap,
        bias=attention.bias,
        sink=attention.sink,
        dropout=attention.dropout,
    )
