"""How a mechanism explains one run of itself.

`regard.inspect` treats all mechanisms alike. It records the attention calls and the taps of a run,
and asks the mechanism for the rest through `Explainable`: the steps that computed its queries, keys
and values, the row of weights that it applies where no softmax kernel ran, and how several rows are
combined into one head. A new mechanism overrides the methods whose defaults do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from regard.caches import Parts
from regard.positions import Rotary
from regard.span import Positions


class ComputationStep(NamedTuple):
    """One step of a computation, such as "rotated": its name, its equation and its result.

    The values of queries, keys and values are [n,L,d] for all heads; those of scores are [S], one
    for each key. An empty equation stands for the usual one of that name.
    """

    name: str
    equation: str
    values: Tensor


ComputationSteps: TypeAlias = tuple[ComputationStep, ...]


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
        head_dim: the head dim of the recorded keys, which shows the form of a latent projection.
    """

    x: Tensor
    positions: Positions
    memory: Tensor
    k_positions: Positions
    row: int
    branch: str
    call_index: int
    head_dim: int


class InputSteps(NamedTuple):
    """The steps that computed queries [H,T,D], keys [G,S,D] and values [G,S,E]. The last step of
    each is the input of attention; () if nothing is known.

    Attributes:
        q, k, v: the steps.
        rotary: the rotary embedding of queries and keys, or None.
        rotary_start: the first dim that it rotates.
        keys_are_blocks: whether a key stands for a block of tokens, at the position of its last
            token.
    """

    q: ComputationSteps = ()
    k: ComputationSteps = ()
    v: ComputationSteps = ()
    rotary: Rotary | None = None
    rotary_start: int = 0
    keys_are_blocks: bool = False


class LayerRun(NamedTuple):
    """The input of a mechanism and the values at its taps, in a run of one sequence.

    Attributes:
        x: its input [1,T,M].
        taps: the values at its own taps by name, without those inside a branch.
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
        """The heads [1,H,T,E] after postprocessing."""
        return self.taps["z"]

    def group(self, head: int) -> int:
        """Return the index of the key/value head that a query head reads."""
        return head // (self.q.shape[1] // self.k.shape[1])


class EffectiveRow(NamedTuple):
    """The row of weights that a mechanism applies to the values for one query, where no softmax
    kernel ran that could have been recorded.

    Attributes:
        kind: "linear" if each weight is the coefficient of one value; "additive" if the weights are
            the softmax of a score other than q . k.
        scores: the scores [S], step by step; the last step is -inf where the query does not see the
            key.
        weights: the weights [S]; None is the softmax of the last scores.
        output: the result of the head [E], computed by the mechanism; it equals weights times
            values.
        scale: the factor on q . k.
        products: the terms [S,D] whose sum is the first score of each key; None is q * k.
        state: the parts of a recurrent state after and before the query, or None.
        checks: what the mechanism compared with the recorded run, and the largest difference.
    """

    kind: Literal["linear", "additive"]
    scores: ComputationSteps
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
        """Return the weights [H,length], ordered by the positions of the keys.

        >>> call = CallWeights("", torch.tensor([[0.25, 0.75]]), torch.tensor([2, 0]))
        >>> call.by_position(3).tolist()
        [[0.75, 0.0, 0.25]]
        """
        row = self.weights.new_zeros(len(self.weights), length)
        real = (self.positions >= 0) & (self.positions < length)

        row[:, self.positions[real]] = self.weights[:, real]
        return row


class MixTerm(NamedTuple):
    """One term of a weighted sum of rows.

    Attributes:
        name: the name of the row.
        factor: its factor in the sum.
        row_sum: the sum of its weights.
        explained: whether it is the row that is being explained.
    """

    name: str
    factor: float
    row_sum: float
    explained: bool


class HeadMix(NamedTuple):
    """A head that is a combination of several rows.

    Attributes:
        text: the combination in words.
        terms: its terms.
        row: the resulting row [S], or None if there is no single one.
    """

    text: str
    terms: tuple[MixTerm, ...]
    row: Tensor | None


class Explainable:
    """A mechanism, or a projection, that can explain how its numbers were computed.

    Every method has a default, so that any mechanism can be recorded and explained: the inputs are
    those of its projection, the row is the one that a softmax kernel recorded, and one row is one
    head.

    Attributes:
        output: the module that joins the heads [*,H*E] -> [*,M].
        replaces_calls: whether the last of several calls for one query replaces the others.
    """

    output: nn.Module
    replaces_calls: bool = False

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps that computed the queries, keys and values of a call: by default those
        of the module's projection, if that is `Explainable`.
        """
        inner = getattr(self, "project", None)
        return inner.explain_inputs(query) if isinstance(inner, Explainable) else InputSteps()

    def explain_row(self, run: LayerRun, head: int, row: int) -> EffectiveRow | None:
        """Return the row of weights of one head and query if no softmax kernel runs; by default
        None.
        """
        return None

    @property
    def has_own_row(self) -> bool:
        """Whether the mechanism computes its rows itself, because it runs no softmax kernel."""
        return type(self).explain_row is not Explainable.explain_row

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], call_index: int, head: int, row: int
    ) -> HeadMix | None:
        """Return how the row of call `call_index` enters the result of the head. None means that
        the row is the whole result, or that several calls are merged by their lse.
        """
        inner = getattr(self, "project", None)
        if isinstance(inner, Explainable):
            return inner.explain_mix(run, calls, call_index, head, row)
        return None


def explainable(module: nn.Module) -> Explainable:
    """Return the module itself if it is `Explainable`, otherwise a wrapper with the default
    explanations.

    >>> explainable(nn.Linear(2, 2)).has_own_row
    False
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
    """Return the rotary embedding of a step on heads, or None if the step does not rotate.

    >>> find_rotary(nn.Identity()) is None, find_rotary(Rotary(4)).dim
    (True, 4)
    """
    inner = getattr(step, "rotary", step)
    return inner if isinstance(inner, Rotary) else None


def first_rotary(steps: Iterable[nn.Module]) -> Rotary | None:
    """Return the first rotary embedding among some steps, or None."""
    return next((r for step in steps if (r := find_rotary(step)) is not None), None)


def run_steps(
    steps: Iterable[nn.Module],
    previous: ComputationSteps,
    positions: Positions,
    letter: Literal["q", "k", "v"],
) -> ComputationSteps:
    """Run steps on heads one after the other.

    Args:
        steps: modules called as step(x [B,n,L,d], positions).
        previous: the steps so far; the last one holds the input.
        positions: positions of the tokens.
        letter: whether the heads are queries, keys or values.

    Returns:
        The steps so far, followed by the new ones.

    >>> from regard.span import Span
    >>> before = (ComputationStep("projected", "", torch.zeros(1, 3, 4)),)
    >>> [step.name for step in run_steps([Rotary(4)], before, Span(0, 3), "q")]
    ['projected', 'rotated']
    """
    results, index = list(previous), "i" if letter == "q" else "j"
    for step in steps:
        y = step(results[-1].values[None], positions)[0]
        kind = type(step).__name__.lower()
        name, how = (kind, kind) if find_rotary(step) is None else ("rotated", "R(p)")
        results.append(ComputationStep(name, f"{letter}_{index} ← {how} {letter}_{index}", y))

    return tuple(results)


def projection_step(
    letter: Literal["q", "k", "v"], values: Tensor, prefix: str = ""
) -> ComputationStep:
    """Return the first step of queries, keys or values: a linear map of the hidden states.

    >>> projection_step("k", torch.zeros(1, 3, 4)).equation
    'k_j = W_K x_j'
    """
    index = "i" if letter == "q" else "j"
    return ComputationStep(
        "projected", f"{letter}_{index} = {prefix}W_{letter.upper()} x_{index}", values
    )


KEYS_PER_BLOCK = 64
"""How many columns of an effective row are computed by one call of the mechanism."""


def effective_row(
    mix: Callable[[Tensor], Tensor], v: Tensor, head: int, row: int, columns: int = KEYS_PER_BLOCK
) -> Tensor:
    """Compute the coefficients a_i [S], in float64, that one head of query i gives to the values.

    Any mechanism that is linear in the values, z_i = sum_j a_ij v_j, can be applied to values that
    are unit vectors. The result for query i is then the row a_i, one block of keys at a time.

    Args:
        mix: a function from values [1,G,S,E'] to heads [1,H,T,E'], linear in the values.
        v: the values [1,G,S,E] of the call, for their shape and dtype.
        head: the head of the row.
        row: the query of the row; keys behind it have no weight.
        columns: the number of keys in a block.

    Returns:
        The row of coefficients [S].

    >>> pattern = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    >>> effective_row(lambda v: pattern @ v, torch.zeros(1, 1, 2, 3), 0, 1).tolist()
    [0.25, 0.75]
    """
    _, G, S, _ = v.shape

    coefficients = torch.zeros(S, dtype=torch.float64)
    for start in range(0, min(S, row + 1), columns):
        stop = min(start + columns, S)
        unit = v.new_zeros(1, G, S, stop - start)
        unit[:, :, torch.arange(start, stop), torch.arange(stop - start)] = 1
        coefficients[start:stop] = mix(unit)[0, head, row]

    return coefficients
