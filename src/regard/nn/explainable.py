"""`Explainable`, the interface through which `regard.inspect` explains a run of any mechanism.

`regard.inspect` records the attention calls of a run and the tensors at its taps (named points, see
`regard.tracing`). It gets everything else from the mechanism: the steps that computed the queries,
keys and values; the row of attention weights, if no softmax kernel computed one; and the way in
which several rows are combined into one head. A new mechanism overrides the methods whose defaults
do not fit.
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

    Attributes:
        name: the name of the step, such as "rotated".
        equation: the equation as text; "" stands for the standard equation of a step of this name.
        values: the result. For queries, keys and values it is [n,L,d], with all n heads; for scores
            it is [S], with one score per key.
    """

    name: str
    equation: str
    values: Tensor


MechanismSteps: TypeAlias = tuple[MechanismStep, ...]


class ProjectionQuery(NamedTuple):
    """A request for the steps that computed the inputs of one recorded attention call.

    Attributes:
        x: the hidden states [1,T,M] that the queries were computed from.
        positions: positions of the tokens of x.
        memory: the hidden states [1,S,M3] that keys and values were computed from; in
            self-attention this is x.
        k_positions: positions of the tokens of memory.
        row: the index of the explained query in x.
        branch: the name of the call's branch, such as "window"; "" for a mechanism without
            branches.
        call_index: the index of the call among all calls for this query, in the order of the run.
        head_dim: the head dim of the recorded keys. It shows whether a latent projection (MLA) ran
            in its expanded or in its absorbed form.
        first_values: the values of the first layer [1,S,G*E], where a decoder passed them to this
            one; None where it passed none.
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
        q: the steps of the queries; the last one holds the input of attention [H,T,D]. () if the
            steps are not known.
        k: the steps of the keys, likewise; the last one holds [G,S,D].
        v: the steps of the values, likewise; the last one holds [G,S,E].
        rotary: the rotary embedding of queries and keys, or None.
        rotary_start: the index of the first dim that the rotary embedding rotates.
        keys_are_blocks: whether a key stands for a block of tokens, at the position of its last
            token.
    """

    q: MechanismSteps = ()
    k: MechanismSteps = ()
    v: MechanismSteps = ()
    rotary: Rotary | None = None
    rotary_start: int = 0
    keys_are_blocks: bool = False


class LayerRun(NamedTuple):
    """The input of a mechanism in a run of one sequence, and the tensors at its taps.

    Attributes:
        x: the input [1,T,M].
        taps: tap name, such as "q", to tensor. Taps inside a branch are not included.
    """

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
        """The number of heads of the result: the query heads, or the value heads of a recurrence
        that has more of these.
        """
        return max(self.q.shape[1], self.v.shape[1])

    def group(self, head: int) -> int:
        """Return the index of the key/value head that a query head reads."""
        return self.input_heads(head)[1]

    def input_heads(self, head: int) -> tuple[int, int, int]:
        """Return the indices of the query, key and value head that a head of the result uses."""
        query, key, value = (head // (self.heads // x.shape[1]) for x in (self.q, self.k, self.v))
        return query, key, value


class EffectiveRow(NamedTuple):
    """The row of weights that one head of a mechanism applies to the values for one query. A
    mechanism computes it itself if it runs no softmax kernel, whose weights could be recorded.

    Attributes:
        kind: "linear" if each weight is the coefficient of one value; "additive" if the weights are
            the softmax of a score other than q . k.
        scores: the scores [S], step by step; the last step is -inf where the query does not see the
            key.
        weights: the weights [S]; None means the softmax of the last scores.
        output: the result of the head [E], computed by the mechanism; it equals weights times
            values.
        scale: the factor on q . k.
        products: the terms [S,D] whose sum over D is the first score of each key; None means q * k.
        state: the parts of a recurrent state after and before the query, or None.
        checks: name of a quantity that was compared with the recorded run, to the largest absolute
            difference.
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
    """The weights [H,n] of one recorded attention call for the explained query.

    Attributes:
        branch: the name of the call's branch, or "".
        weights: the weights, as the kernel returned them.
        positions: positions of the keys [n]; -1 is an empty slot.
    """

    branch: str
    weights: Tensor
    positions: Tensor

    def by_position(self, length: int) -> Tensor:
        """Return the weights [H,length] in the order of positions; a position without a key has
        weight 0.
        """
        ordered = self.weights.new_zeros(len(self.weights), length)
        is_used = (self.positions >= 0) & (self.positions < length)

        ordered[:, self.positions[is_used]] = self.weights[:, is_used]
        return ordered


class MixTerm(NamedTuple):
    """One term of a weighted sum of rows.

    Attributes:
        name: the name of the row.
        factor: its factor in the sum.
        row_sum: the sum of the weights of the row.
        explained: whether this row is the one that is being explained.
    """

    name: str
    factor: float
    row_sum: float
    explained: bool


class HeadMix(NamedTuple):
    """The combination of several rows of weights into one head.

    Attributes:
        text: the combination in words.
        terms: the terms of the combination.
        row: the combined row [S], or None if no single row gives the result of the head.
    """

    text: str
    terms: tuple[MixTerm, ...]
    row: Tensor | None


class Explainable:
    """Base class of mechanisms and projections that can explain how their results were computed.

    Every method has a default, so that any mechanism can be explained. By default, the projection
    of the mechanism explains the queries, keys and values; the weights are those that were recorded
    from a softmax kernel; and each recorded row is the result of one head.

    Attributes:
        output: the module that joins the heads [*,H*E] -> [*,M].
        replaces_calls: whether the last of several calls for one query replaces the others.
        explain_refusal: why no row of weights exists, as words that follow the name of the
            mechanism; None if one does.
    """

    output: nn.Module
    replaces_calls: bool = False
    explain_refusal: str | None = None

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps that computed the queries, keys and values of a call. By default, they
        are those of `self.project`, if that is `Explainable`.
        """
        inner = getattr(self, "project", None)
        return inner.explain_inputs(query) if isinstance(inner, Explainable) else InputSteps()

    def explain_row(self, run: LayerRun, head: int, row: int) -> EffectiveRow | None:
        """Compute the row of weights of one head and query, if the mechanism runs no softmax
        kernel.
        """
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
    """Return the module itself if it is `Explainable`, otherwise a wrapper that gives the default
    explanations.
    """
    return module if isinstance(module, Explainable) else _DefaultExplainable(module)


class _DefaultExplainable(Explainable):
    """The default explanations of a module that is not `Explainable`, with its projection and
    output map if it has them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.project = getattr(module, "project", None)
        self.output = getattr(module, "output", nn.Identity())


def find_rotary(step: nn.Module) -> Rotary | None:
    """Return the rotary embedding that a step of a `HeadProjection` is or contains (as its
    attribute `rotary`), or None.
    """
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
    """Return the step "projected", the first of queries, keys or values: a linear map of the hidden
    states.
    """
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

    If a mechanism is linear in the values, z_i = sum_j a_ij v_j, it can be applied to unit vectors
    instead of the values. The result for query i is then the row a_i. This is done for one block of
    keys at a time.
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
