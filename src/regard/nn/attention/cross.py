"""Cross-attention, and the additive attention of recurrent decoders."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache, Cross, Parts, rollback_on_error
from regard.cost import Description
from regard.cost.softmax import AdditiveSpec, CrossSpec
from regard.cost.spec import ParameterCounts
from regard.errors import ArgumentError
from regard.nn.attention.attention import Attention
from regard.nn.explainable import EffectiveRow, Explainable, LayerRun, MechanismStep
from regard.nn.mixer import check_recorded_graph, count_weights
from regard.nn.module_calls import call_as_leaf, is_proxy
from regard.nn.projections.heads import Projection, unwrapped
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
        if cache is None or is_compiling():
            stored, k_positions = project_memory(self.project, memory, memory_positions, cache)
            return self._attend_and_project(x, positions, stored, k_positions, backend)
        with rollback_on_error(cache):
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
    project: Projection,
    memory: Tensor | None,
    positions: Positions | None,
    cache: Cache | None,
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
        if cache is None or is_compiling():
            return self._forward(x, positions, cache, memory, memory_positions)
        with rollback_on_error(cache):
            return self._forward(x, positions, cache, memory, memory_positions)

    def _forward(
        self,
        x: Tensor,
        positions: Positions,
        cache: Cache | None,
        memory: Tensor | None,
        memory_positions: Positions | None,
    ) -> Tensor:
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
