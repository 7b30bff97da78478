"""Infini-attention: softmax inside a segment, and a memory of all earlier segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.caches import Cache, Memory
from regard.cost.fixed_state import InfiniSpec
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
from regard.nn.mixer import AcrossRanks, Mixer, count_weights
from regard.nn.projections.heads import Projection, check_adds_no_bias
from regard.ops.infini_attention import (
    CompressiveState,
    EmptyMemoryRule,
    UpdateRule,
    check_options,
    infini_attention,
)
from regard.positions import Rotary
from regard.span import Positions, Span
from regard.tracing import tap


def check_unrotated(project: Projection, reason: str) -> None:
    """Check that a projection contains no rotary embedding."""
    if not isinstance(project, nn.Module):
        return
    for name, part in project.named_modules():
        if isinstance(part, Rotary):
            raise ArgumentError(
                f"project.{name} is {part}, but {reason}; build the projection without it, and "
                "pass rotary= to the module"
            )


def check_rotary(rotary: nn.Module | None, D: int) -> None:
    """Check that a rotary embedding is for heads of dim D and has fixed frequencies."""
    if not isinstance(rotary, Rotary):
        return
    if rotary.dim != D:
        raise ArgumentError(
            f"rotary has dim {rotary.dim}; it must be the head dim {D} of the queries"
        )
    if rotary.follows_length:
        raise ArgumentError(
            f"the frequencies of {rotary} follow the length of each call, but queries and keys are "
            "rotated separately here; give it a fixed length=<number>"
        )


class InfiniAttention(Mixer):
    """Softmax attention inside a segment, mixed by a gate with a memory of earlier segments.

    q = query(x);  k, v = recall(remember(x));
    z = infini_attention(q, k, v, rotary(q), rotary(k), gate), in segments of N positions;
    out = output(heads of z concatenated)

    The memory uses q, k and v without positions. The cache has a fixed size: the memory, its
    normalizer, and one segment. A trained model needs training with it, and a memory loses detail.
    The gate, one parameter per head, needs a higher learning rate and no weight decay.

    Args:
        project: a `Projection` without positions, with H query heads and G key/value heads.
        output: a module [B,T,H*E] -> [B,T,M].
        segment: the number of positions N in a segment.
        rotary: a step on queries and keys of the softmax attention, or None.
        update: "linear" or "delta", the rule that writes a segment into the memory.
        empty: how the gate treats the empty memory: "zero" or "skip" (`infini_attention`).

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid, or the project has a rotary.

    >>> from regard.nn import HeadProjection, SeparateQKV
    >>> q, k, v = (HeadProjection(8, heads, 2) for heads in (4, 2, 2))
    >>> project = SeparateQKV(q, k, v)
    >>> attention = InfiniAttention(project, nn.Linear(8, 8), segment=4, rotary=Rotary(2))
    >>> cache = attention.new_cache()
    >>> attention(torch.zeros(1, 10, 8), cache=cache).shape, len(cache)
    (torch.Size([1, 10, 8]), 2)

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), section 2.
    """

    across_ranks: ClassVar[AcrossRanks] = "state"

    recording_refusal = "splits the sequence into segments, whose number depends on its length"

    def __init__(
        self,
        project: Projection,
        output: nn.Module,
        *,
        segment: int,
        rotary: nn.Module | None = None,
        update: UpdateRule = "linear",
        empty: EmptyMemoryRule = "zero",
    ) -> None:
        check_adds_no_bias(project, "InfiniAttention")
        super().__init__()
        check_options(segment, update, empty)
        check_unrotated(project, "the memory is written without positions")
        check_rotary(rotary, project.shape.D)
        self.project, self.output, self.rotary = project, output, rotary
        self.gate = nn.Parameter(torch.zeros(project.shape.H))
        self.segment, self.update, self.empty = segment, update, empty

    def check_cache(self, cache: Cache) -> None:
        """Check that the cache is a `Memory` for segments of this length."""
        if not isinstance(cache, Memory):
            raise ArgumentTypeError(
                f"the cache is {type(cache).__name__}; Infini-attention needs a Memory: use "
                "new_cache()"
            )
        if cache.segment != self.segment:
            raise ArgumentError(
                f"the cache has segment={cache.segment}, but the module has "
                f"segment={self.segment}; use new_cache()"
            )

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] to its own segment and to the memory of all earlier segments."""
        assert cache is None or isinstance(cache, Memory)
        q = tap("q", self.project.query(x, positions))
        memory, k_positions, state = self.project.remember(x, positions), positions, None
        if cache is not None:
            memory, k_positions = cache.update(memory, positions)
            state = None if cache.state is None else CompressiveState(*cache.state)
        k, v = self.project.recall(memory, k_positions)
        k, v = tap("k", k), tap("v", v)
        z, state = infini_attention(
            q,
            k,
            v,
            gate=self.gate,
            segment=self.segment,
            q_rotated=None if self.rotary is None else self.rotary(q, positions),
            k_rotated=None if self.rotary is None else self.rotary(k, k_positions),
            update=self.update,
            empty=self.empty,
            state=state,
            positions=k_positions,
            backend=backend,
        )
        if cache is not None:
            cache.store(state, positions)
        z = tap("z", self.project.postprocess(z, x))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def new_cache(self) -> Memory:
        """Return an empty cache. Use a new one for each text, or call its `reset()`."""
        return Memory(self.segment)

    @property
    def spec(self) -> InfiniSpec:
        """The cost of this layer: its parameters, the fixed size of its cache, and its FLOPs."""
        shape = self.project.shape
        return InfiniSpec(
            count_weights(self), shape.parts, shape.heads, self.segment, self.update == "delta"
        )

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of the projection, followed by the rotary of the softmax attention."""
        steps = super().explain_inputs(query)
        if self.rotary is None or not steps.q:
            return steps
        return steps._replace(
            q=run_steps([self.rotary], steps.q, query.positions, "q"),
            k=run_steps([self.rotary], steps.k, query.k_positions, "k"),
            rotary=find_rotary(self.rotary),
        )

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], call_index: int, head: int, row: int
    ) -> HeadMix:
        """Return the mix of the softmax inside the segment and the memory of earlier ones."""
        S = run.k.shape[2]
        combined = effective_row(
            lambda unit: self._run_again(run, unit, self.gate), run.v, head, row
        )
        memory_only = torch.full_like(self.gate, 1e4)  # its sigmoid is 1
        memory = effective_row(
            lambda unit: self._run_again(run, unit, memory_only), run.v, head, row
        )
        share, local = float(self.gate[head].sigmoid()), calls[call_index].by_position(S)[head]
        return HeadMix(
            "σ(gate) times the memory of all earlier segments, plus 1 - σ(gate) times the softmax "
            f"in this segment, with σ(gate) = {share:.4f}",
            (
                MixTerm("memory", share, float(memory.sum()), explained=False),
                MixTerm("softmax", 1 - share, float(local.sum()), explained=True),
            ),
            combined,
        )

    def _run_again(self, run: LayerRun, values: Tensor, gate: Tensor) -> Tensor:
        """Compute the heads of a recorded run with other values [1,G,S,E'] and another gate [H]."""
        positions = Span(0, run.k.shape[2])
        return infini_attention(
            run.q,
            run.k,
            values,
            gate=gate,
            segment=self.segment,
            update=self.update,
            empty=self.empty,
            q_rotated=None if self.rotary is None else self.rotary(run.q, positions),
            k_rotated=None if self.rotary is None else self.rotary(run.k, positions),
            positions=positions,
        )[0]

    def extra_repr(self) -> str:
        """Return the segment length, the update rule, and how the empty memory is treated."""
        return f"segment={self.segment}, update={self.update!r}, empty={self.empty!r}"
