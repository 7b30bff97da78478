"""`Recurrent`, which runs the rule of a recurrence, and `GatedConvolution`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.argument_checks import check_choice, check_positive_sizes
from regard.caches import Cache, Parts, State
from regard.cost import Spec
from regard.cost.fixed_state import ConvolutionSpec, LinearSpec, RecurrentSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Document
from regard.nn.explainable import EffectiveRow, LayerRun, MechanismStep, effective_row
from regard.nn.mixer import AcrossRanks, Mixer, count_weights
from regard.nn.projections.heads import HeadProjection, Projection, check_adds_no_bias
from regard.nn.recurrence.projections import (
    CausalConvolution,
    GroupedValueQKV,
    StatefulQKV,
    project_tokens,
)
from regard.nn.weights import Linear
from regard.span import Positions, Span, slice_positions
from regard.tracing import tap
from regard.units import plural

Tensors: TypeAlias = tuple[Tensor, ...]

GateActivation: TypeAlias = Literal["silu", "sigmoid"]
"""The function of an output gate."""
_GATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


class StateMixer(Mixer):
    """Base class of the mechanisms whose cache is a `State`."""

    across_ranks: ClassVar[AcrossRanks] = "state"
    static_step_refusal = None  # a step depends on tensors only

    def check_cache(self, cache: Cache) -> None:
        """Raise unless the cache is a `State`, not a cache of tokens."""
        if not isinstance(cache, State):
            raise ArgumentTypeError(
                f"the cache is {type(cache).__name__}; a recurrence needs a State: use new_cache()"
            )

    def new_cache(self) -> State:
        """Return an empty cache. Use a new one for each text, or call its `reset()`."""
        return State()


class RuleCall(TypedDict):
    """What a rule gets beside the tokens: the state, the positions and the form."""

    state: Parts | None
    k_positions: Positions | None
    form: str


RuleResult: TypeAlias = tuple[Tensor, Parts]
"""The results of the heads and the state after the last token."""

RuleCost: TypeAlias = Callable[[ParameterCounts, HeadShape], Spec]
"""A function from the parameters and heads of a layer to its cost."""


class RecurrenceRule(nn.Module):
    """Base class of the rules of recurrences, which compute gates and decays from x."""

    cost: RuleCost
    """The cost of a layer with this rule, for which `spec` asks."""
    shown: ClassVar[tuple[str, ...]] = ()
    """The names of the options that the rule prints."""

    explain_refusal: str | None = None
    """Why `Recurrent.explain_row` cannot give a row of weights; None if it can."""
    static_step_refusal: str | None = None
    """Why a step cannot be captured as a CUDA graph; None if it can."""
    scale: float | None = None
    """The factor on the queries; None is 1/sqrt(D)."""

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T K"],
        v: Float[Tensor, "B N T V"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B O T E"], Parts]:
        """Run the recurrence over a call; return the results of max(H,N) heads and the state."""
        return self.run(x, q, k, v, {"state": state, "k_positions": positions, "form": form})

    def run(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
        """Compute what `forward` returns, with its last arguments in `call`."""
        raise NotImplementedError

    def written_keys(self, k: Float[Tensor, "B G T D"]) -> Float[Tensor, "B G T D"]:
        """Return the keys that the state receives."""
        return k

    def unnormalized(self) -> RecurrenceRule | None:
        """Return the rule without a division by the sum of the weights; None if it has none."""
        return None

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> Spec:
        """Return the cost of a layer with this rule, from parameters and heads."""
        return self.cost(weights, shape)

    def extra_repr(self) -> str:
        """Return the options that are shown."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.shown)


def decayed_cost(mechanism: str) -> Any:
    """Return the `cost` of a rule whose state is a decayed sum, as the member of a class."""

    def cost(weights: ParameterCounts, shape: HeadShape) -> Spec:
        return LinearSpec(weights, (), shape, mechanism, decayed=True)

    return staticmethod(cost)


class Recurrent(StateMixer):
    """A linear recurrence as a mechanism: projection, recurrence rule, norm, gate and output map.

    q, k, v = project(x);  z, state = rule(x, q, k, v, state);  z' = norm(z) * f(gate(x));
    out = output(heads of z' concatenated)

    Args:
        project: a `Projection`, with every step on a head. A `GroupedValueQKV` has N value heads
            and O = max(H, N) in the result; a `StatefulQKV` has a state of its own.
        rule: a `RecurrenceRule`.
        output: a module [B,T,H*E] -> [B,T,M].
        norm: a module on heads [B,H,T,E] that normalizes the last dim; None applies none.
        gate: the output gate, a `HeadProjection` of x to H heads of E; None applies none.
        gate_activation: f, "silu" or "sigmoid".
        gate_before_norm: whether z' = norm(z * f(gate(x))) instead, as in Mamba-2.
        documents: the documents of packed text, by position, each with an empty state first; None
            is one. It may be replaced between calls.

    Raises:
        ArgumentError: the gate or its activation does not fit, or documents in a call.

    >>> from regard.nn.recurrence.delta import DeltaRule
    >>> from regard.nn.variants.projections import separate_qkv
    >>> mixer = Recurrent(separate_qkv(8, 4, 2, 2), DeltaRule(8, 2), nn.Linear(8, 8))
    >>> cache = mixer.new_cache()
    >>> mixer(torch.zeros(1, 5, 8), cache=cache).shape, cache.bytes
    (torch.Size([1, 5, 8]), 32)

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4; norm and gate: Sun et al.
    2023 (arXiv 2307.08621), equation 8.
    """

    recording_refusal = "splits the sequence into chunks, whose number depends on its length"

    def __init__(
        self,
        project: Projection,
        rule: RecurrenceRule,
        output: nn.Module,
        *,
        norm: nn.Module | None = None,
        gate: HeadProjection | None = None,
        gate_activation: GateActivation = "silu",
        gate_before_norm: bool = False,
        documents: Document | None = None,
    ) -> None:
        check_adds_no_bias(project, "Recurrent")
        super().__init__()
        value_heads = project.value_heads if isinstance(project, GroupedValueQKV) else None
        self.heads = replace(project.shape.heads, value_heads=value_heads)
        outputs, E = self.heads.outputs, self.heads.value_dim
        if gate is not None and (gate.heads, gate.head_dim) != (outputs, E):
            raise ArgumentError(
                f"gate is {gate.extra_repr()}; it must be {plural(outputs, 'head')} of {E}, as the "
                "rule returns"
            )
        self.project, self.rule, self.output = project, rule, output
        check_choice("gate_activation", gate_activation, _GATE_ACTIVATIONS)
        self.norm, self.gate, self.documents = norm, gate, documents
        self.gate_activation, self.gate_before_norm = gate_activation, gate_before_norm
        self.explain_refusal = rule.explain_refusal

    @property
    def static_step_refusal(self) -> str | None:  # type: ignore[override]
        """The reason of the rule, if it has one."""
        return self.rule.static_step_refusal

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Run the recurrence over x [B,T,M] from the cached state, in the form `backend`."""
        assert cache is None or isinstance(cache, State)
        form = "recurrent" if backend == "reference" else backend
        before = None if cache is None else cache.state
        ruled, past = None, None
        if before is not None and isinstance(self.project, StatefulQKV):
            ruled, past = before[:-1], before[-1:]
        elif before is not None:
            ruled = before

        def project(
            part: Tensors, positions: Positions, state: Parts | None
        ) -> tuple[Tensors, Parts]:
            q, k, v, state = project_tokens(self.project, part[0], positions, state)
            return (q, k, v), state

        (q, k, v), past = over_documents(self.documents, project, (x,), positions, past)
        q, k, v = tap("q", q), tap("k", k), tap("v", v)
        z, after = self._recur((x, q, k, v), ruled, positions, form)
        if cache is not None:
            cache.store((*after, *past), positions)
        z = tap("z", self._norm_and_gate(z, x, positions))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def _recur(
        self,
        inputs: tuple[Tensor, ...],
        state: Parts | None,
        positions: Positions,
        form: str,
        rule: RecurrenceRule | None = None,
    ) -> tuple[Tensor, Parts]:
        """Run the rule over x, q, k and v, in every document from an empty state."""
        rule = self.rule if rule is None else rule

        def run(part: Tensors, positions: Positions, state: Parts | None) -> tuple[Tensors, Parts]:
            z, state = rule(*part, state, positions, form)
            return (z,), state

        (z,), state = over_documents(self.documents, run, inputs, positions, state)
        return z, state

    def _norm_and_gate(self, z: Tensor, x: Tensor, positions: Positions) -> Tensor:
        """Apply the norm and the output gate to heads z [B,H,T,E]."""
        z = self.project.postprocess(z, x)
        factor: Tensor | None = None
        if self.gate is not None:
            factor = _GATE_ACTIVATIONS[self.gate_activation](self.gate(x, positions))
        if factor is not None and self.gate_before_norm:
            z = z * factor
        z = z if self.norm is None else self.norm(z)
        return z if factor is None or self.gate_before_norm else z * factor

    def explain_row(self, run: LayerRun, head: int, row: int) -> EffectiveRow:
        """Return the coefficients that the rule gives to the values, with the states around the
        query.
        """
        T, outputs = run.q.shape[2], self.heads.outputs
        query, key = (head // (outputs // x.shape[1]) for x in (run.q, run.k))

        def read(v: Tensor, n: int = T, rule: RecurrenceRule = self.rule) -> tuple[Tensor, Parts]:
            inputs = tuple(tensor[..., :n, :] for tensor in (run.x, run.q, run.k, v))
            return self._recur(inputs, None, Span(0, n), "auto", rule)

        keys = self.rule.written_keys(run.k)
        dots = (keys[0, key].double() @ run.q[0, query, row].double()).cpu()
        scale = run.q.shape[-1] ** -0.5 if self.rule.scale is None else float(self.rule.scale)
        scores = [MechanismStep("dot", "", dots)]
        unnormalized = self.rule.unnormalized()
        if unnormalized is not None:
            raw = effective_row(lambda unit: read(unit, rule=unnormalized)[0], run.v, head, row)
            scores.append(MechanismStep("unnormalized", "a_ij = φ(q_i) · φ(k_j)", raw))
            scale = 1.0 if self.rule.normalize else scale
        else:
            scores.append(MechanismStep("scaled", "", scale * dots))
        result, _ = read(run.v)
        explained = row_of_state(run, head, row, read, result, scores, scale)
        z = self._norm_and_gate(result, run.x, Span(0, T))
        return explained._replace(checks={"z of the recurrence": float((z - run.z).abs().max())})

    @property
    def spec(self) -> Spec:
        """The cost of this layer, according to its rule."""
        spec = self.rule.spec(count_weights(self), self.heads)
        if isinstance(self.project, StatefulQKV) and isinstance(spec, RecurrentSpec):
            spec = replace(spec, convolution=self.project.cost)
        return spec


def row_of_state(
    run: LayerRun,
    head: int,
    row: int,
    read: Callable[..., tuple[Tensor, Parts]],
    result: Tensor,
    scores: list[MechanismStep],
    scale: float,
) -> EffectiveRow:
    """Return the coefficients of a state for one head and query; read(v, n) runs n tokens."""
    weights = effective_row(lambda unit: read(unit)[0], run.v, head, row)
    is_visible = torch.arange(run.q.shape[2], device="cpu") <= row
    last = MechanismStep("effective", "", weights.masked_fill(~is_visible, -torch.inf))
    _, after = read(run.v, row + 1)
    before = read(run.v, row)[1] if row else tuple(torch.zeros_like(x) for x in after)

    def of_head(state: Parts) -> Parts:
        # a normalizer has G heads, whereas S has one for each value head
        parts = (part[0, head // (run.heads // part.shape[1])] for part in state)
        # the matrices of several levels stand one below another
        return tuple(part.flatten(0, -2) if part.ndim > 2 else part for part in parts)

    return EffectiveRow(
        "linear",
        (*scores, last),
        weights.masked_fill(~is_visible, 0.0),
        result[0, head, row],
        scale,
        state=(of_head(after), of_head(before)),
    )


class GatedConvolution(StateMixer):
    """A short causal convolution between two gates: the layer of LFM2 that is not attention.

    [b; c; y] = W_in x;  out = W_out (c * convolution(b * y))

    Source: Liquid AI 2025, LFM2 (arXiv 2511.23404), section 2; the published code of LFM2.
    """

    explain_refusal = (
        "has no queries and keys: each channel has a filter of its own, and no row of weights "
        "belongs to a head; read convolution.weight, or explain a layer of attention"
    )

    recording_refusal = "skips empty slots, whose places depend on the positions"

    def __init__(
        self, dim: int, kernel: int = 3, *, bias: bool = False, documents: Document | None = None
    ) -> None:
        super().__init__()
        check_positive_sizes("GatedConvolution", dim=dim)
        self.input = Linear(dim, 3 * dim, bias=bias)
        self.convolution = CausalConvolution(dim, kernel, bias=bias, activation=None)
        self.output: nn.Module = Linear(dim, dim, bias=bias)
        self.documents = documents

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Convolve x [B,T,M] from the tokens in the cache; there is one form for all backends."""
        assert cache is None or isinstance(cache, State)
        if backend not in ("auto", "reference", "recurrent", "chunk", "parallel"):
            raise ArgumentError(
                f"backend is {backend!r}; a convolution has one form: use auto or reference"
            )
        b, c, y = self.input(x).chunk(3, -1)

        def convolve(
            part: Tensors, positions: Positions, state: Parts | None
        ) -> tuple[Tensors, Parts]:
            result, state = self.convolution(part[0], state, positions)
            return (result,), state

        before = None if cache is None else cache.state
        (z,), after = over_documents(self.documents, convolve, (b * y,), positions, before)
        if cache is not None:
            cache.store(after, positions)
        return tap("out", self.output(tap("z", (c * z)[:, None])[:, 0]))

    @property
    def spec(self) -> Spec:
        """The cost of this layer."""
        channels = self.convolution.weight.shape[0]
        shape = HeadShape(1, 1, channels, channels)
        return ConvolutionSpec(count_weights(self), (), shape, convolution=self.convolution.cost)


class Piece(NamedTuple):
    """Neighbouring tokens of a call, in which no row begins a document after the first token."""

    start: int
    stop: int
    begins: Bool[Tensor, "#B"] | None


def split_at_documents(documents: Document, positions: Positions, length: int) -> list[Piece]:
    """Split the tokens of a call where a row begins a document.

    A token begins a document if its position is one of the bounds.
    """
    everywhere = torch.ones(1, dtype=torch.bool, device="cpu")
    if isinstance(positions, Span) and isinstance(documents.bounds[0], int):
        # integers of Python, which a compiled graph can compare
        starts = {b - positions.start: everywhere for b in documents.bounds if isinstance(b, int)}
        begins = {i: starts[i] for i in sorted(starts) if 0 <= i < length}
    else:
        first = documents.begins(positions)
        begins = {i: first[:, i] for i in first.any(0).nonzero().flatten().tolist()}
    edges = [0, *(i for i in begins if i), length]
    pieces = [Piece(i, stop, begins.get(i)) for i, stop in pairwise(edges)]
    return pieces


def over_documents(
    documents: Document | None,
    run: Callable[[Tensors, Positions, Parts | None], tuple[Tensors, Parts]],
    inputs: Tensors,
    positions: Positions,
    state: Parts | None,
) -> tuple[Tensors, Parts]:
    """Run a computation with a state over the documents of a call, each from an empty state."""
    if documents is None:
        return run(inputs, positions, state)
    B, T = inputs[0].shape[0], inputs[0].shape[-2]
    documents.require(B, 1, T, T)
    results: list[Tensors] = []
    for start, stop, begins in split_at_documents(documents, positions, T):
        if begins is not None and state is not None:
            empty = run(
                tuple(x[..., :0, :] for x in inputs), slice_positions(positions, slice(0, 0)), None
            )[1]
            rows = begins.to(inputs[0].device)
            state = tuple(
                torch.where(rows.view(-1, *[1] * (new.ndim - 1)), new, old)
                for new, old in zip(empty, state, strict=True)
            )
        part = tuple(x[..., start:stop, :] for x in inputs)
        outputs, state = run(part, slice_positions(positions, slice(start, stop)), state)
        results.append(outputs)
    assert state is not None, "there is at least one piece"
    return tuple(torch.cat(parts, -2) for parts in zip(*results, strict=True)), state


def wide(x: Tensor) -> Tensor:
    """Convert a tensor to float32, unless it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def initial_step_bias(*shape: int) -> Tensor:
    """Return random biases b for which softplus(b) is log-uniform between 0.001 and 0.1."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()  # of a new parameter
    step = torch.empty(shape, dtype=dtype, device=device)
    step.uniform_(math.log(0.001), math.log(0.1)).exp_()
    return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
