"""What a layer takes from earlier layers: the keys and values of one, or the first values."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.argument_checks import check_number
from regard.caches import Cache, CrossLayer, Parts
from regard.caches.cross_layer import FirstValues
from regard.cost.softmax import SharedKeysSpec, VisibleKeys
from regard.cost.spec import ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.nn.attention.attention import Attention
from regard.nn.explainable import InputSteps, MechanismStep, ProjectionQuery, first_rotary
from regard.nn.mixer import AcrossRanks, MaskVisibility, count_weights
from regard.nn.projections.heads import HeadProjection, Projection, ProjectionShape, SeparateQKV
from regard.span import Positions


class QueryProjection(Projection, nn.Module):
    """A projection to queries only. Keys and values come as an earlier layer stored them.

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
    """Return attention with a layer's queries and output, to the memory of an earlier layer."""
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


def require_first(first: FirstValues | None) -> FirstValues:
    """Return the values of the first layer that came with a call."""
    if first is None:
        raise ArgumentError(
            "a layer mixes its values with those of the first layer, and was called without them; "
            "call a Decoder, which passes them from layer to layer, or give the layer a "
            "regard.caches.cross_layer.WithFirstValues"
        )
    return first


class ValueResidualQKV(SeparateQKV):
    """A projection whose values are mixed with those of the first layer.

    v = s W_v x + (1 - s) v_1, with a learned s, and v_1 the values of the first layer

    The first layer has v = W_v x. A cache stores the mixed values.

    Source: Zhou et al. 2024 (arXiv 2410.17897), section 3.
    """

    def __init__(
        self,
        q: HeadProjection,
        k: HeadProjection,
        v: HeadProjection,
        *,
        is_first: bool,
        share: float = 0.5,
    ) -> None:
        super().__init__(q, k, v)
        check_number("share", share, float("-inf"), float("inf"), "finite")
        self.share = None if is_first else nn.Parameter(torch.tensor([float(share)]))

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the keys and the values of the first layer; a later layer needs its values."""
        if self.share is not None:
            require_first(None)
        return super().remember(x, positions)

    @property
    def carries_values(self) -> bool:
        """True: the first layer gives its values, and the others read them."""
        return True

    def remember_carried(self, x: Tensor, positions: Positions | None, first: FirstValues) -> Parts:
        """Return keys [B,G,S,D] and mixed values [B,G,S,E]; the first layer gives its values."""
        k, v = super().remember(x, positions)
        if self.share is None:
            first.give(v)
            return k, v
        return k, self._mix(v, first)

    def _mix(self, v: Tensor, first: FirstValues) -> Tensor:
        """Return s v + (1 - s) v_1 for values v [B,G,S,E]."""
        assert self.share is not None, "a later layer has a share"
        share = self.share.to(v.dtype)
        return share * v + (1 - share) * first.take(self.v.heads, self.v.head_dim)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of queries, keys and values, with the mix as the last one of values."""
        steps = super().explain_inputs(query)
        if self.share is None:
            return steps
        v = self._mix(steps.v[-1].values[None], FirstValues(query.first_values))[0]
        equation = f"v_j ← {self.share.item():.3g} v_j + {1 - self.share.item():.3g} v1_j"
        return steps._replace(
            v=(*steps.v, MechanismStep("mixed with the first layer", equation, v))
        )

    def extra_repr(self) -> str:
        """Return whether this is the first layer."""
        return f"is_first={self.share is None}"
