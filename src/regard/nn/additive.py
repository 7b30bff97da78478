"""Additive attention as a module: the first attention, of a decoder's state to an encoder's
states.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache, Cross, kept
from regard.cost import Description
from regard.cost.softmax import AdditiveSpec
from regard.nn.cross import cross_weights, recollect
from regard.nn.project import Projection
from regard.ops.additive import additive_attention
from regard.process import is_compiling
from regard.span import Positions, Span
from regard.tap import tap


class AdditiveAttention(nn.Module):
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

    >>> from regard.nn.states import States
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
        with kept(cache):
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
        z = tap("z", self.project.finish(found, x))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

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
