"""`Explainable`, the interface through which `regard.inspect` explains a run of any mechanism.

`regard.inspect` records the attention calls of a run and the tensors at its taps
(`regard.tracing`), and gets everything else from the mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from regard.caches import Parts
from regard.positions import Rotary
from regard.span import Positions


class MechanismStep(NamedTuple):
    """One step of the computation of a mechanism: its name, its equation and its result.

    The `values` are [n,L,d] with all n heads, or scores [S]; no equation is the standard one.
    """

    name: str
    equation: str
    values: Tensor


MechanismSteps: TypeAlias = tuple[MechanismStep, ...]


class ProjectionQuery(NamedTuple):
    """A request for the steps that computed the inputs of one recorded attention call.

    Attributes:
        x: the hidden states [1,T,M] that the queries were computed from.
        memory: the hidden states [1,S,M3] of keys and values; in self-attention, x.
        branch: the name of the call's branch, such as "window"; "" without branches.
        call_index: the index of the call among all calls for this query.
        head_dim: that of the recorded keys, which shows the form in which MLA ran.
        first_values: the values of the first layer [1,S,G*E], if a decoder passed them.
    """

    x: Tensor
    positions: Positions
    memory: Tensor
    k_positions: Positions
    row: int
    branch: str
    call_index: int
    head_dim: int
    first_values: Tensor | None = None


class InputSteps(NamedTuple):
    """The steps that computed the queries, keys and values of an attention call.

    Attributes:
        q, k, v: the steps of queries [H,T,D], keys [G,S,D] and values [G,S,E]; () if unknown.
        rotary: the rotary embedding of queries and keys, or of their last dims.
        keys_are_blocks: whether a key is a block of tokens, at the position of its last.
    """

    q: MechanismSteps = ()
    k: MechanismSteps = ()
    v: MechanismSteps = ()
    rotary: Rotary | None = None
    keys_are_blocks: bool = False


class LayerRun(NamedTuple):
    """The input x [1,T,M] of a mechanism in a run, and the tensors at its taps without branches."""

    x: Tensor
    taps: Mapping[str, Tensor]

    @property
    def q(self) -> Tensor:
        """The queries [1,H,T,D] of the run."""
        return self.taps["q"]

    @property
    def k(self) -> Tensor:
        """The keys [1,G,S,D] of the run."""
        return self.taps["k"]

    @property
    def v(self) -> Tensor:
        """The values [1,G,S,E] of the run."""
        return self.taps["v"]

    @property
    def z(self) -> Tensor:
        """The heads [1,H,T,E] after the projection's `postprocess`."""
        return self.taps["z"]

    @property
    def heads(self) -> int:
        """The number of heads of the result: query heads, or a recurrence's value heads."""
        return max(self.q.shape[1], self.v.shape[1])

    def group(self, head: int) -> int:
        """Return the index of the key/value head that a query head reads."""
        return self.input_heads(head)[1]

    def input_heads(self, head: int) -> tuple[int, int, int]:
        """Return the indices of the query, key and value head that a head of the result uses."""
        query, key, value = (head // (self.heads // x.shape[1]) for x in (self.q, self.k, self.v))
        return query, key, value


class EffectiveRow(NamedTuple):
    """The row of weights of one head and query, by a mechanism that runs no softmax kernel.

    Attributes:
        kind: "linear" in the values, or "additive": the softmax of another score than q . k.
        scores: the scores [S], step by step; the last step is -inf where the key is unseen.
        weights: the weights [S]; None means the softmax of the last scores.
        output: the result of the head [E], which equals weights times values.
        products: the terms [S,D] whose sum over D is the first score of each key; None means q * k.
        state: the parts of a recurrent state after and before the query, or None.
        checks: quantities compared with the recorded run, with the largest differences.
    """

    kind: Literal["linear", "additive"]
    scores: MechanismSteps
    weights: Tensor | None
    output: Tensor
    scale: float = 1.0
    products: Tensor | None = None
    state: tuple[Parts, Parts] | None = None
    checks: Mapping[str, float] = {}


class CallWeights(NamedTuple):
    """The weights [H,n] of one recorded call for the explained query, and the keys' positions."""

    branch: str
    weights: Tensor
    positions: Tensor

    def by_position(self, length: int) -> Tensor:
        """Return the weights [H,length] by position; a position without a key has weight 0."""
        ordered = self.weights.new_zeros(len(self.weights), length)
        is_used = (self.positions >= 0) & (self.positions < length)

        ordered[:, self.positions[is_used]] = self.weights[:, is_used]
        return ordered


class MixTerm(NamedTuple):
    """One term of a weighted sum of rows; `explained` marks the row in question."""

    name: str
    factor: float
    row_sum: float
    explained: bool


class HeadMix(NamedTuple):
    """The combination of rows of weights into one head; `row` [S] is None if no row gives it."""

    text: str
    terms: tuple[MixTerm, ...]
    row: Tensor | None


class Explainable:
    """Base class of mechanisms and projections that can explain how their results were computed.

    By default, the projection explains queries, keys and values, the weights are those of a softmax
    kernel, and each row is the result of one head.

    Attributes:
        output: the module that joins the heads [*,H*E] -> [*,M].
        replaces_calls: whether the last of several calls for one query replaces the others.
        explain_refusal: why no row of weights exists, after the mechanism's name; or None.
    """

    output: nn.Module
    replaces_calls: bool = False
    explain_refusal: str | None = None

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of a call's queries, keys and values, by default of `self.project`."""
        inner = getattr(self, "project", None)
        return inner.explain_inputs(query) if isinstance(inner, Explainable) else InputSteps()

    def explain_row(self, run: LayerRun, head: int, row: int) -> EffectiveRow | None:
        """Compute the row of weights of one head and query, where no softmax kernel runs."""
        return None

    @property
    def has_own_row(self) -> bool:
        """Whether the mechanism computes its rows itself, because it runs no softmax kernel."""
        own = type(self).explain_row is not Explainable.explain_row
        return own or self.explain_refusal is not None

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], call_index: int, head: int, row: int
    ) -> HeadMix | None:
        """Describe how the row of weights of one call enters the result of the head."""
        inner = getattr(self, "project", None)
        if isinstance(inner, Explainable):
            return inner.explain_mix(run, calls, call_index, head, row)
        return None


def explainable(module: nn.Module) -> Explainable:
    """Return the module if it is `Explainable`, otherwise a wrapper with the defaults."""
    return module if isinstance(module, Explainable) else _DefaultExplainable(module)


class _DefaultExplainable(Explainable):
    """The default explanations of a module that is not `Explainable`."""

    def __init__(self, module: nn.Module) -> None:
        self.project = getattr(module, "project", None)
        self.output = getattr(module, "output", nn.Identity())


def find_rotary(step: nn.Module) -> Rotary | None:
    """Return the rotary embedding that a step of a `HeadProjection` is or contains, or None."""
    inner = getattr(step, "rotary", step)
    return inner if isinstance(inner, Rotary) else None


def first_rotary(steps: Iterable[nn.Module]) -> Rotary | None:
    """Return the first rotary embedding among some steps, or None."""
    return next((r for step in steps if (r := find_rotary(step)) is not None), None)


def run_steps(
    steps: Iterable[nn.Module],
    previous: MechanismSteps,
    positions: Positions,
    letter: Literal["q", "k", "v"],
) -> MechanismSteps:
    """Run the steps of a `HeadProjection` one after the other and record the result of each."""
    results, index = list(previous), "i" if letter == "q" else "j"
    for step in steps:
        y = step(results[-1].values[None], positions)[0]
        kind, rotary = type(step).__name__.lower(), find_rotary(step)
        name, operator = (kind, kind) if rotary is None else ("rotated", "R(p)")
        if rotary is not None and rotary.rotary_factor != 1:
            operator = f"{rotary.rotary_factor:.7g} R(p)"
        results.append(MechanismStep(name, f"{letter}_{index} ← {operator} {letter}_{index}", y))

    return tuple(results)


def projection_step(
    letter: Literal["q", "k", "v"], values: Tensor, linear: nn.Module, function: str = ""
) -> MechanismStep:
    """Return the step "projected", the first of queries, keys or values."""
    index, upper = "i" if letter == "q" else "j", letter.upper()
    product = f"W_{upper} x_{index}"
    if getattr(linear, "bias", None) is not None:
        product += f" + b_{upper}"
    product = f"{function}({product})" if function else product
    return MechanismStep("projected", f"{letter}_{index} = {product}", values)


KEYS_PER_BLOCK = 64
"""The number of keys whose coefficients one call of the mechanism computes in `effective_row`."""


def effective_row(
    mix: Callable[[Tensor], Tensor], v: Tensor, head: int, row: int, columns: int = KEYS_PER_BLOCK
) -> Tensor:
    """Compute the coefficients a_i [S], in float64, that one head of query i gives to the values.

    If z_i = sum_j a_ij v_j, the mechanism applied to unit vectors gives the row a_i.
    """
    _, G, S, _ = v.shape

    coefficients = torch.zeros(S, dtype=torch.float64, device="cpu")
    for start in range(0, min(S, row + 1), columns):
        stop = min(start + columns, S)
        unit = v.new_zeros(1, G, S, stop - start)
        unit[
            :, :, torch.arange(start, stop, device="cpu"), torch.arange(stop - start, device="cpu")
        ] = 1
        coefficients[start:stop] = mix(unit)[0, head, row]

    return coefficients
