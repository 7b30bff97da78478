"""Attention between two sequences: cross-attention, and the additive attention of recurrent
decoders.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache, Cross, Parts, rollback_on_error
from regard.cost import Description
from regard.cost.softmax import AdditiveSpec, CrossSpec
from regard.cost.spec import ParameterCounts
from regard.errors import ArgumentError
from regard.nn.attention import Attention
from regard.nn.explain import EffectiveRow, Explainable, LayerRun, Link
from regard.nn.mixer import count_weights
from regard.nn.projections import Projection
from regard.ops.additive import additive_attention
from regard.process import is_compiling
from regard.span import Positions, Span
from regard.tap import tap


class CrossAttention(Attention):
    """Attention of one sequence to another: a decoder's words to an encoder's, a text to an image.

    q = query(x);  k, v = recall(remember(memory));  out = output(attend(q, k, v))

    The arguments are those of `Attention`; positions of x and of memory are two different counts,
    so a mask is rarely wanted. A cache is written once, by the call that gives memory, and read by
    every later one.

    Raises:
        ArgumentError: there is no memory, neither given nor in the cache; or there are two.

    >>> import torch
    >>> from regard.nn import Heads, Separate
    >>> project = Separate(Heads(8, 4, 2), Heads(6, 2, 2), Heads(6, 2, 2))
    >>> cross = CrossAttention(project, torch.nn.Linear(8, 8))
    >>> cross(torch.zeros(1, 5, 8), memory=torch.zeros(1, 7, 6)).shape
    torch.Size([1, 5, 8])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3.
    """

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        *,
        memory: Float[Tensor, "B S M3"] | None = None,
        memory_positions: Positions | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M2"]:
        """Attend from x [B,T,M] to memory [B,S,M3], or to the memory that the cache holds.

        Positions of x default to 0..T-1, those of memory to 0..S-1; a slot of memory at -1 is
        padding.
        """
        positions = Span(0, x.shape[1]) if positions is None else positions
        if cache is None or is_compiling():
            held, seen = recollect(self.project, memory, memory_positions, cache)
            return self._answer(x, positions, held, seen, backend)
        with rollback_on_error(cache):
            held, seen = recollect(self.project, memory, memory_positions, cache)
            return self._answer(x, positions, held, seen, backend)

    def new_cache(self) -> Cross:
        """An empty cache for one encoder's memory."""
        return Cross()

    @property
    def spec(self) -> CrossSpec:
        """The cost of this layer for one token that asks; the memory's keys and values are made
        once.
        """
        return CrossSpec(
            cross_weights(self, self.project), self.project.shape.parts, self.project.shape.heads
        )


def recollect(
    project: Projection,
    memory: Tensor | None,
    positions: Positions | None,
    cache: Cache | None,
) -> tuple[Parts, Positions]:
    """What a projection remembers of memory [B,S,M], and where: made now, and written to the cache,
    or read from it.
    """
    if cache is not None and not isinstance(cache, Cross):
        raise ArgumentError(
            f"cross-attention was given a {type(cache).__name__} cache, which belongs to "
            "self-attention; "
            "give a Cross cache, which new_cache() makes"
        )
    if memory is None:
        if positions is not None:
            raise ArgumentError("memory_positions were given without memory; a cache has its own")
        if cache is None or not cache.written:
            raise ArgumentError(
                "there is no memory to attend to: give memory [batch, length, dim], or a cache "
                "that holds one"
            )
        return cache.read()
    positions = Span(0, memory.shape[1]) if positions is None else positions
    made = project.remember(memory, positions)
    return (made, positions) if cache is None else cache.store(made, positions)


def cross_weights(module: nn.Module, project: Projection) -> ParameterCounts:
    """The parameters of a layer that reads another text, with the maps that the query does not use
    set apart.
    """
    inner: object = project
    while isinstance(wrapped := getattr(inner, "project", None), Projection):
        inner = wrapped
    parts = [getattr(inner, name, None) for name in ("k", "v")]
    return count_weights(module, *(part for part in parts if isinstance(part, nn.Module)))


class AdditiveAttention(Explainable, nn.Module):
    """Cross-attention whose score is a small network: v . tanh(q + k).

    q = query(x);  k, h = recall(remember(memory));  e_ij = v . tanh(q_i + k_j);
    out_i = sum_j softmax(e_i)_j h_j

    Memory is projected once, and kept by a cache if there is one: each step of a decoder computes
    its query only.

    Args:
        project: a `Projection`, usually `States`.
        output: a module [B,T,H*E] -> [B,T,M2]; the papers have none.

    Raises:
        ArgumentError: there is no memory, neither given nor in the cache; or there are two.

    >>> from regard.nn.projections import States
    >>> project = States(nn.Linear(6, 10), 8, key=nn.Linear(8, 10, bias=False))
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
        """Attend from x [B,T,M] to memory [B,S,M3], or to the memory that the cache holds; a slot
        at -1 is padding.
        """
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
        held, seen = recollect(self.project, memory, memory_positions, cache)
        q = tap("q", self.project.query(x, positions))
        k, v = self.project.recall(held, seen)
        k, v = tap("k", k), tap("v", v)
        found = additive_attention(
            q, k, v, self.weight, q_positions=positions, k_positions=seen
        ).context
        z = tap("z", self.project.postprocess(found, x))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def explain_row(self, run: LayerRun, head: int, row: int) -> EffectiveRow:
        """The scores of the small network, term by term; their softmax is the row."""
        k = run.k[0, run.group(head)].double()
        terms = self.weight[head].double() * (run.q[0, head, row].double() + k).tanh()  # [S,D]
        scores = terms.sum(1)
        return EffectiveRow(
            "additive",
            (Link("additive", "", scores), Link("masked", "", scores)),
            None,
            run.z[0, head, row],
            products=terms,
        )

    def new_cache(self) -> Cross:
        """An empty cache for one encoder's memory."""
        return Cross()

    @property
    def spec(self) -> AdditiveSpec:
        """The cost of this layer for one step of the decoder; the states' keys are made once."""
        return AdditiveSpec(
            cross_weights(self, self.project), self.project.shape.parts, self.project.shape.heads
        )

    def describe(self, context: int = 4096) -> Description:
        """The parameters, the cached values and the FLOPs of this layer for `context` states of
        memory and one step.
        """
        return self.spec.describe(context, type(self).__name__)
