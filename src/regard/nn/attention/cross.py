"""Attention to another sequence, to what earlier layers stored, and that of recurrent decoders."""

from __future__ import annotations

from contextlib import nullcontext
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_number
from regard.caches import Cache, Cross, CrossLayer, Parts, rollback_on_error
from regard.caches.cross_layer import FirstValues
from regard.cost import Description
from regard.cost.softmax import AdditiveSpec, CrossSpec, SharedKeysSpec, VisibleKeys
from regard.cost.spec import ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.nn.attention.attention import Attention
from regard.nn.explainable import (
    EffectiveRow,
    Explainable,
    InputSteps,
    LayerRun,
    MechanismStep,
    ProjectionQuery,
    first_rotary,
)
from regard.nn.mixer import AcrossRanks, MaskVisibility, check_recorded_graph, count_weights
from regard.nn.module_calls import call_as_leaf, is_proxy
from regard.nn.projections.heads import (
    HeadProjection,
    Projection,
    ProjectionShape,
    SeparateQKV,
    unwrapped,
)
from regard.ops.additive_attention import additive_attention
from regard.process_state import is_compiling
from regard.sequence_scope import current_scope
from regard.span import Positions, Span
from regard.tracing import tap


class CrossAttention(Attention):
    """Attention from one sequence to another, such as from a decoder to an encoder's states.

    q = query(x);  k, v = recall(remember(memory));  out = output(attend(q, k, v))

    The arguments are those of `Attention`. Positions of x and of memory are counted separately. The
    call that passes memory writes it to the cache; later calls read it there.

    Raises:
        ArgumentError: memory is neither passed nor in the cache, or both.

    >>> from regard.nn import HeadProjection, SeparateQKV
    >>> q, k, v = HeadProjection(8, 4, 2), HeadProjection(6, 2, 2), HeadProjection(6, 2, 2)
    >>> cross = CrossAttention(SeparateQKV(q, k, v), torch.nn.Linear(8, 8))
    >>> cross(torch.zeros(1, 5, 8), memory=torch.zeros(1, 7, 6)).shape
    torch.Size([1, 5, 8])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3.
    """

    across_ranks = None

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        backend: str = "auto",
        *,
        memory: Float[Tensor, "B S M3"] | None = None,
        memory_positions: Positions | None = None,
    ) -> Float[Tensor, "B T M2"]:
        """Attend from x to memory, or to the memory that the cache holds."""
        if (scope := current_scope()) is not None:
            refused: Tensor = scope.run_mixer(self, x, positions, cache, backend)
            return refused
        if type(x) is not Tensor and is_proxy(x):
            return call_as_leaf(
                self,
                CrossAttention.forward,
                x,
                positions,
                cache=cache,
                memory=memory,
                memory_positions=memory_positions,
                backend=backend,
            )
        positions = Span(0, x.shape[1]) if positions is None else positions
        with nullcontext() if is_compiling() else rollback_on_error(cache):
            stored, k_positions = project_memory(self.project, memory, memory_positions, cache)
            return self._attend_and_project(x, positions, stored, k_positions, backend)

    def new_cache(self) -> Cross:
        """Return an empty cache for the states of one encoder."""
        return Cross()

    @property
    def spec(self) -> CrossSpec:
        """The cost of this layer for one query token, without keys and values of memory."""
        return CrossSpec(
            count_cross_weights(self, self.project),
            self.project.shape.parts,
            self.project.shape.heads,
        )


def project_memory(
    project: Projection, memory: Tensor | None, positions: Positions | None, cache: Cache | None
) -> tuple[Parts, Positions]:
    """Compute what a cache stores for the memory, or read it from the cache."""
    if cache is not None and not isinstance(cache, Cross):
        raise ArgumentError(
            f"the cache of a cross-attention is {type(cache).__name__}, which stores the tokens of "
            "a self-attention; use new_cache(), which returns a Cross cache"
        )
    if memory is None:
        if positions is not None:
            raise ArgumentError(
                "memory_positions is given without memory; leave it out, because the cache stores "
                "the positions of its memory"
            )
        if cache is None or not cache.written:
            raise ArgumentError(
                "there is no memory to attend to; pass memory [batch, length, dim], or a cache "
                "that holds one"
            )
        return cache.read()
    positions = Span(0, memory.shape[1]) if positions is None else positions
    parts = project.remember(memory, positions)
    return (parts, positions) if cache is None else cache.store(parts, positions)


def count_cross_weights(module: nn.Module, project: Projection) -> ParameterCounts:
    """Count the parameters of a cross-attention layer, and of the key and value maps."""
    inner = unwrapped(project)
    parts = [getattr(inner, name, None) for name in ("k", "v")]
    return count_weights(module, *(part for part in parts if isinstance(part, nn.Module)))


class AdditiveAttention(Explainable, nn.Module):
    """Cross-attention whose score is a small network: v . tanh(q + k).

    q = query(x);  k, h = recall(remember(memory));  e_ij = v . tanh(q_i + k_j);
    out_i = sum_j softmax(e_i)_j h_j

    Args:
        project: a `Projection` whose queries and keys have the same dim D.
        output: a module [B,T,H*E] -> [B,T,M2] on the concatenated heads; None applies none.

    Raises:
        ArgumentError: a call passes no memory, and the cache holds none, or both do.

    >>> from regard.nn.projections.fused import EncoderStateProjection
    >>> project = EncoderStateProjection(nn.Linear(6, 10), 8, key=nn.Linear(8, 10, bias=False))
    >>> AdditiveAttention(project)(torch.zeros(1, 1, 6), memory=torch.zeros(1, 7, 8)).shape
    torch.Size([1, 1, 8])

    Source: Bahdanau et al. 2015 (arXiv 1409.0473), equations 5 and 6, appendix A.1.2.
    """

    def __init__(self, project: Projection, output: nn.Module | None = None) -> None:
        super().__init__()
        H, D = project.shape.H, project.shape.D
        self.project, self.output = project, output if output is not None else nn.Identity()
        self.weight = nn.Parameter(torch.empty(H, D))
        nn.init.normal_(self.weight, std=D**-0.5)

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        *,
        memory: Float[Tensor, "B S M3"] | None = None,
        memory_positions: Positions | None = None,
    ) -> Float[Tensor, "B T M2"]:
        """Attend from x [B,T,M] to memory [B,S,M3], or to the memory that the cache holds.

        Args:
            x: hidden states [B,T,M] of the sequence that gives the queries.
            positions: positions of x; 0..T-1 by default.
            cache: a `regard.caches.Cross` cache, or None.
            memory: states [B,S,M3] of the other sequence, unless the cache holds them.
            memory_positions: positions of memory; -1 marks padding.

        Returns:
            The contexts [B,T,M2].
        """
        if type(x) is not Tensor and is_proxy(x):
            return call_as_leaf(
                self,
                AdditiveAttention.forward,
                x,
                positions,
                cache=cache,
                memory=memory,
                memory_positions=memory_positions,
            )
        check_recorded_graph(self, "computes scores in blocks, whose number depends on the length")
        positions = Span(0, x.shape[1]) if positions is None else positions
        with nullcontext() if is_compiling() else rollback_on_error(cache):
            stored, k_positions = project_memory(self.project, memory, memory_positions, cache)
            q = tap("q", self.project.query(x, positions))
            k, v = self.project.recall(stored, k_positions)
            k, v = tap("k", k), tap("v", v)
            context = additive_attention(
                q, k, v, self.weight, q_positions=positions, k_positions=k_positions
            ).context
            z = tap("z", self.project.postprocess(context, x))
            return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def explain_row(self, run: LayerRun, head: int, row: int) -> EffectiveRow:
        """Return the scores of the small network and their terms, whose softmax is the row."""
        k = run.k[0, run.group(head)].double()
        terms = self.weight[head].double() * (run.q[0, head, row].double() + k).tanh()  # [S,D]
        scores = terms.sum(1)
        return EffectiveRow(
            "additive",
            (MechanismStep("additive", "", scores), MechanismStep("masked", "", scores)),
            None,
            run.z[0, head, row],
            products=terms,
        )

    def new_cache(self) -> Cross:
        """Return an empty cache for the states of one encoder.

        Returns:
            A `regard.caches.Cross`.
        """
        return Cross()

    @property
    def spec(self) -> AdditiveSpec:
        """The cost of one decoding step, without the keys of the encoder's states."""
        return AdditiveSpec(
            count_cross_weights(self, self.project),
            self.project.shape.parts,
            self.project.shape.heads,
        )

    def describe(self, context: int = 4096) -> Description:
        """Compute the parameters, cached values and FLOPs of this layer for one step.

        Args:
            context: the number of encoder states that the step attends to.

        Returns:
            The figures, each with its formula.
        """
        return self.spec.describe(context, type(self).__name__)


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

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return no parts, because the earlier layer stores the tokens."""
        return ()

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of the earlier layer."""
        k, v = memory  # a layer that stores other parts cannot be shared
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

    carries_values = True

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
