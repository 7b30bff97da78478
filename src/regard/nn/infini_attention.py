"""Infini-attention: softmax attention inside a segment, and a compressive memory of all earlier
segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.caches import Cache, Memory
from regard.cost.infini import InfiniSpec
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.explainable import (
    CallWeights,
    HeadMix,
    InputSteps,
    LayerRun,
    MixTerm,
    ProjectionQuery,
    effective_row,
    find_rotary,
    run_steps,
)
from regard.nn.mixer import Mixer, count_weights
from regard.nn.projections import Projection
from regard.ops.memory import Compressed, infini_attention
from regard.ops.memory.compressive import Update
from regard.ops.memory.infini import Empty, check_options
from regard.positions import Rotary
from regard.span import Positions, Span
from regard.tap import tap


def check_unrotated(project: Projection, why: str) -> None:
    """The projection holds no rotary: the module that says why has its own.

    Raises:
        ArgumentError: it does.
    """
    if not isinstance(project, nn.Module):
        return
    for name, part in project.named_modules():
        if isinstance(part, Rotary):
            raise ArgumentError(
                f"project.{name} is {part}, but {why}; make the heads without it and give rotary= "
                "to the module"
            )


def check_rotary(rotary: nn.Module | None, D: int) -> None:
    """A rotary is for heads of this size, and its frequencies do not follow the length of each
    call.

    Raises:
        ArgumentError: it is for others, or they do.
    """
    if not isinstance(rotary, Rotary):
        return
    if rotary.dim != D:
        raise ArgumentError(f"rotary is for heads of {rotary.dim}, and queries have {D}")
    if rotary.follows_length:
        raise ArgumentError(
            f"{rotary} follows the length of each call, and queries and keys are rotated apart; "
            "freeze its length: "
            "length=<number>"
        )


class InfiniAttention(Mixer):
    """project -> remember -> rotate -> infini_attention -> output.

    q = query(x);  k, v = recall(remember(x)), without positions: the memory gets these
    z = infini_attention(q, k, v, rotary(q), rotary(k), gate), segments of N positions;
    out = output(z, heads joined)

    What a cache keeps does not grow: M and z, and the tokens of one segment. It is no free addition
    to a trained model: gate and projections have to be trained with it, and it loses detail (a
    memory answers with a mean of what was written). The gate has one number per head and needs a
    higher learning rate than matrices, and no weight decay.

    Args:
        project: a `Projection` without positions: H query heads, G key/value heads.
        output: a module [B,T,H*E] -> [B,T,M].
        segment: N, how many positions a segment has.
        rotary: a step on queries and keys of the local attention, called with positions; None is
            none.
        update: "linear" or "delta", the rule by which a segment is written.
        empty: "zero" or "skip": what the gate does in the first segment
            (`regard.memory.infini_attention`).

    Raises:
        ArgumentError, ArgumentTypeError: segment is not an int of at least 1, update or empty is
            another word, the projection rotates, or the rotary does not fit.

    >>> from regard.nn import HeadProjection, SeparateQKV
    >>> from regard.positions import Rotary
    >>> project = SeparateQKV(HeadProjection(8, 4, 2), HeadProjection(8, 2, 2), HeadProjection(8, 2, 2))
    >>> attention = InfiniAttention(project, nn.Linear(8, 8), segment=4, rotary=Rotary(2))
    >>> cache = attention.new_cache()
    >>> attention(torch.zeros(1, 10, 8), cache=cache).shape, len(cache)
    (torch.Size([1, 10, 8]), 2)

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), section 2.
    """

    def __init__(
        self,
        project: Projection,
        output: nn.Module,
        *,
        segment: int,
        rotary: nn.Module | None = None,
        update: Update = "linear",
        empty: Empty = "zero",
    ) -> None:
        super().__init__()
        check_options(segment, update, empty)
        check_unrotated(project, "the memory is written without positions")
        check_rotary(rotary, project.shape.D)
        self.project, self.output, self.rotary = project, output, rotary
        self.gate = nn.Parameter(torch.zeros(project.shape.H))
        self.segment, self.update, self.empty = segment, update, empty

    def check_cache(self, cache: Cache) -> None:
        """Refuse a cache of another kind, or of other segments.

        Raises:
            ArgumentTypeError: the cache is not a `regard.caches.Memory`.
            ArgumentError: its segments have another length.
        """
        if not isinstance(cache, Memory):
            raise ArgumentTypeError(
                f"the cache is {type(cache).__name__}; Infini-attention needs a Memory: use "
                "new_cache()"
            )
        if cache.segment != self.segment:
            raise ArgumentError(
                f"the cache has segments of {cache.segment}, and the module of {self.segment}; "
                "use new_cache()"
            )

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] to its own segment, and to what the cache has of all before."""
        assert cache is None or isinstance(cache, Memory)
        q = tap("q", self.project.query(x, positions))
        memory, seen, state = self.project.remember(x, positions), positions, None
        if cache is not None:
            memory, seen = cache.update(memory, positions)
            state = None if cache.state is None else Compressed(*cache.state)
        k, v = self.project.recall(memory, seen)
        k, v = tap("k", k), tap("v", v)
        z, state = infini_attention(
            q,
            k,
            v,
            gate=self.gate,
            segment=self.segment,
            q_rotated=None if self.rotary is None else self.rotary(q, positions),
            k_rotated=None if self.rotary is None else self.rotary(k, seen),
            update=self.update,
            empty=self.empty,
            state=state,
            positions=seen,
            backend=backend,
        )
        if cache is not None:
            cache.store(state, positions)
        z = tap("z", self.project.postprocess(z, x))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def new_cache(self) -> Memory:
        """An empty cache: a new text begins with a new one, or with `reset()`."""
        return Memory(self.segment)

    @property
    def spec(self) -> InfiniSpec:
        """The cost of this layer."""
        shape = self.project.shape
        return InfiniSpec(
            count_weights(self), shape.parts, shape.heads, self.segment, self.update == "delta"
        )

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """The steps of the projection, then the rotary of the local attention."""
        made = super().explain_inputs(query)
        if self.rotary is None or not made.q:
            return made
        return made._replace(
            q=run_steps([self.rotary], made.q, query.positions, "q"),
            k=run_steps([self.rotary], made.k, query.k_positions, "k"),
            rotary=find_rotary(self.rotary),
        )

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], call_index: int, head: int, row: int
    ) -> HeadMix:
        """A softmax inside the segment, and a memory of all segments before, mixed by the gate."""
        S = run.k.shape[2]
        whole = effective_row(lambda unit: self._mixed(run, unit, self.gate), run.v, head, row)
        memory_only = torch.full_like(self.gate, 1e4)
        memory = effective_row(lambda unit: self._mixed(run, unit, memory_only), run.v, head, row)
        share, local = float(self.gate[head].sigmoid()), calls[call_index].by_position(S)[head]
        return HeadMix(
            f"σ(gate) = {share:.4f} of a memory that all segments before wrote, the rest of the "
            "softmax in this segment",
            (
                MixTerm("memory", share, float(memory.sum()), explained=False),
                MixTerm("softmax", 1 - share, float(local.sum()), explained=True),
            ),
            whole,
        )

    def _mixed(self, run: LayerRun, values: Tensor, gate: Tensor) -> Tensor:
        """What the queries of a run read of other values, under another gate."""
        at = Span(0, run.k.shape[2])
        return infini_attention(
            run.q,
            run.k,
            values,
            gate=gate,
            segment=self.segment,
            update=self.update,
            empty=self.empty,
            q_rotated=None if self.rotary is None else self.rotary(run.q, at),
            k_rotated=None if self.rotary is None else self.rotary(run.k, at),
            positions=at,
        )[0]

    def extra_repr(self) -> str:
        """The segment, the rule of writing, and what the gate does without a memory."""
        return f"segment={self.segment}, update={self.update!r}, empty={self.empty!r}"
