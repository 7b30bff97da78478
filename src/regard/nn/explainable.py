"""What a mechanism says of one run of itself, so that the run can be explained.

`regard.inspect` knows no mechanism by name. It records the calls of attention and the taps of a
run, and asks the mechanism for the rest through `Explainable`: by which steps its queries, keys and
values were made, which row of weights it applies where no softmax kernel ran, and how several rows
make one head. A new mechanism overrides what differs from the defaults, beside its own definition.
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
    """One step of a chain: its name, its equation, and what came out.

    Steps of queries, keys and values have [n,L,d], all heads; steps of scores have [S], a number
    for each key. An empty equation is the usual one of that name.
    """

    name: str
    equation: str
    values: Tensor


ComputationSteps: TypeAlias = tuple[ComputationStep, ...]


class ProjectionQuery(NamedTuple):
    """What is asked about the inputs of one recorded call.

    Attributes:
        x, positions: what the queries were made of, [1,T,M], and where its tokens stand.
        memory, k_positions: what keys and values were made of, [1,S,M3], which is x itself in
            self-attention, and where its tokens stand.
        row: the row of x that is looked at.
        branch: the name of the call's branch, such as "window"; "" of a place without branches.
        call_index: which of the calls for this query it is, in the order of the run.
        head_dim: the size of the recorded keys, which tells the form of a latent.
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
    """How queries [H,T,D], keys [G,S,D] and values [G,S,E] were made, the last step of each being
    what attention was given; () where nothing is known.

    Attributes:
        q, k, v: the steps.
        rotary: the rotation of queries and keys, or None.
        rotary_start: the first dim that it turns.
        keys_are_blocks: whether a key stands for a block of tokens, at the position of its last.
    """

    q: ComputationSteps = ()
    k: ComputationSteps = ()
    v: ComputationSteps = ()
    rotary: Rotary | None = None
    rotary_start: int = 0
    keys_are_blocks: bool = False


class LayerRun(NamedTuple):
    """What a mechanism was given, and what went through its taps, in a run of one sequence.

    Attributes:
        x: its input [1,T,M].
        taps: the values at its own taps by name; those inside a branch are not among them.
    """

    x: Tensor
    taps: Mapping[str, Tensor]

    @property
    def q(self) -> Tensor:
        """The queries [1,H,T,D]."""
        return self.taps["q"]

    @property
    def k(self) -> Tensor:
        """The keys [1,G,S,D]."""
        return self.taps["k"]

    @property
    def v(self) -> Tensor:
        """The values [1,G,S,E]."""
        return self.taps["v"]

    @property
    def z(self) -> Tensor:
        """The heads behind what finishes them [1,H,T,E]."""
        return self.taps["z"]

    def group(self, head: int) -> int:
        """The key/value head that a query head reads."""
        return head // (self.q.shape[1] // self.k.shape[1])


class EffectiveRow(NamedTuple):
    """The row of weights that a mechanism applies to the values for one query, where no softmax
    kernel ran that could have been recorded.

    Attributes:
        kind: "linear": the weights are what is left of each value; "additive": they are the
            softmax of another score than q . k.
        scores: the scores [S], step by step; -inf in the last where the query does not see the key.
        weights: [S]; None is the softmax of the last scores.
        output: what the head read [E], by the mechanism itself: the weights times the values give it.
        scale: the factor on q . k.
        products: the terms [S,D] that make up the first score of each key; None is q * k.
        state: the parts of a state behind the query and in front of it, or None.
        checks: what the mechanism compared itself -> the largest difference.
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
    """The weights [H,n] of one recorded call for the query that is looked at.

    Attributes:
        branch: the name of its branch, or "".
        weights: as the kernel gave them.
        positions: where its keys stand [n]; -1 is a slot that holds nothing.
    """

    branch: str
    weights: Tensor
    positions: Tensor

    def by_position(self, length: int) -> Tensor:
        """Weights [H,length] by the positions of the keys.

        >>> call = CallWeights("", torch.tensor([[0.25, 0.75]]), torch.tensor([2, 0]))
        >>> call.by_position(3).tolist()
        [[0.75, 0.0, 0.25]]
        """
        found = self.weights.new_zeros(len(self.weights), length)
        real = (self.positions >= 0) & (self.positions < length)
        found[:, self.positions[real]] = self.weights[:, real]
        return found


class MixTerm(NamedTuple):
    """One row of a mix: its name, its factor, the sum of its weights, and whether it is the row
    that is explained.
    """

    name: str
    factor: float
    row_sum: float
    explained: bool


class HeadMix(NamedTuple):
    """Several rows that make one head: in words, in terms, and the row [S] that comes out, if
    there is one.
    """

    text: str
    terms: tuple[MixTerm, ...]
    row: Tensor | None


class Explainable:
    """A mechanism, or a projection, that can say how its numbers came about.

    Every method has a default, so that any mechanism can be recorded and explained: inputs are
    those of its projection, a row is what a softmax kernel recorded, and one row makes one head.

    Attributes:
        output: the module that joins the heads [*,H*E] -> [*,M].
        replaces_calls: whether of several calls for one query the last replaces the others.
    """

    output: nn.Module
    replaces_calls: bool = False

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """The steps by which the queries, keys and values of a call were made: by default those of
        the module's projection, if that is `Explainable`.
        """
        inner = getattr(self, "project", None)
        return inner.explain_inputs(query) if isinstance(inner, Explainable) else InputSteps()

    def explain_row(self, run: LayerRun, head: int, row: int) -> EffectiveRow | None:
        """The row of weights of one head and query, where no softmax kernel runs; None, the
        default, where one does.
        """
        return None

    @property
    def has_own_row(self) -> bool:
        """Whether the mechanism tells its rows itself, because it runs no softmax kernel."""
        return type(self).explain_row is not Explainable.explain_row

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], call_index: int, head: int, row: int
    ) -> HeadMix | None:
        """How the row of call `here` enters what the head gives; None where it is all of it, or
        where several calls are joined by their lse.
        """
        inner = getattr(self, "project", None)
        if isinstance(inner, Explainable):
            return inner.explain_mix(run, calls, call_index, head, row)
        return None


def explainable(module: nn.Module) -> Explainable:
    """What a module says of itself; the defaults for a module that says nothing.

    >>> explainable(nn.Linear(2, 2)).has_own_row
    False
    """
    return module if isinstance(module, Explainable) else _DefaultExplainable(module)


class _DefaultExplainable(Explainable):
    """The defaults for a module that is not `Explainable`, over its own projection and output map;
    heads that no output map joins are written as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.project = getattr(module, "project", None)
        self.output = getattr(module, "output", nn.Identity())


def find_rotary(step: nn.Module) -> Rotary | None:
    """The rotation that a step on heads does, or None if it turns nothing.

    >>> find_rotary(nn.Identity()) is None, find_rotary(Rotary(4)).dim
    (True, 4)
    """
    inner = getattr(step, "rotary", step)
    return inner if isinstance(inner, Rotary) else None


def first_rotary(steps: Iterable[nn.Module]) -> Rotary | None:
    """The first rotation among some steps, or None."""
    return next((found for step in steps if (found := find_rotary(step)) is not None), None)


def run_steps(
    steps: Iterable[nn.Module],
    links: ComputationSteps,
    positions: Positions,
    letter: Literal["q", "k", "v"],
) -> ComputationSteps:
    """Steps on heads, one behind the other, appended to the links that they go on from.

    >>> from regard.span import Span
    >>> given = (ComputationStep("projection_step", "", torch.zeros(1, 3, 4)),)
    >>> [link.name for link in run_steps([Rotary(4)], given, Span(0, 3), "q")]
    ['projected', 'rotated']
    """
    found, index = list(links), "i" if letter == "q" else "j"
    for step in steps:
        y = step(found[-1].values[None], positions)[0]
        kind = type(step).__name__.lower()
        name, how = (kind, kind) if find_rotary(step) is None else ("rotated", "R(p)")
        found.append(ComputationStep(name, f"{letter}_{index} ← {how} {letter}_{index}", y))
    return tuple(found)


def projection_step(
    letter: Literal["q", "k", "v"], values: Tensor, how: str = ""
) -> ComputationStep:
    """The first step of queries, keys or values: what a linear map made of the tokens.

    >>> projection_step("k", torch.zeros(1, 3, 4)).equation
    'k_j = W_K x_j'
    """
    index = "i" if letter == "q" else "j"
    return ComputationStep(
        "projection_step", f"{letter}_{index} = {how}W_{letter.upper()} x_{index}", values
    )


KEYS_PER_BLOCK = 64
"""Keys whose columns of an effective row are computed together: the rule runs once for each block.
"""


def effective_row(
    mix: Callable[[Tensor], Tensor], v: Tensor, head: int, row: int, columns: int = KEYS_PER_BLOCK
) -> Tensor:
    """a_i [S], float64: what a head of query i has of each value.

    Whatever a mechanism does with queries, keys, gates and decays, if it is linear in the values,
    z_i = sum_j a_ij v_j, then the row a_i is what the mechanism itself gives for values that are
    unit vectors, a block of keys at a time.

    Args:
        mix: values [1,G,S,E'] -> what the queries read [1,H,T,E'], linear in the values.
        v: the values [1,G,S,E] of the call; their shape and dtype.
        head, row: whose row; keys behind `row` have no weight.
        columns: keys in a block.

    >>> pattern = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    >>> effective_row(lambda v: pattern @ v, torch.zeros(1, 1, 2, 3), 0, 1).tolist()
    [0.25, 0.75]
    """
    _, G, S, _ = v.shape
    found = torch.zeros(S, dtype=torch.float64)
    for start in range(0, min(S, row + 1), columns):
        stop = min(start + columns, S)
        unit = v.new_zeros(1, G, S, stop - start)
        unit[:, :, torch.arange(start, stop), torch.arange(stop - start)] = 1
        found[start:stop] = mix(unit)[0, head, row]
    return found
