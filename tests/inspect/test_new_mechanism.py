"""A mechanism that is defined here, outside of the package, is recorded and explained, though no
line of `regard.inspect` knows it; each has a negative control that says something false of itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard import attend, masks
from regard.caches import Cache, Growing, Parts
from regard.cost import Spec
from regard.errors import ArgumentError
from regard.inspect import Explanation, explain, record
from regard.models import Model
from regard.nn import Attention, HeadProjection, SeparateQKV
from regard.nn.explainable import (
    CallWeights,
    EffectiveRow,
    HeadMix,
    InputSteps,
    LayerRun,
    MechanismStep,
    MixTerm,
    ProjectionQuery,
)
from regard.nn.mixer import MaskVisibility, Mixer, count_weights
from regard.nn.projections.heads import Projection, ProjectionShape
from regard.span import Positions
from regard.tracing import named_scope, tap
from regard.view.explanation_text import page
from tests.inspect.small_model import TEXT, model

ROUNDING = 2e-5


def heads(n: int, d: int) -> HeadProjection:
    return HeadProjection(32, n, d)


class SigmoidAttention(Mixer):
    """z_i = sum over j <= i of sigmoid(q_i . k_j / sqrt(D)) v_j: no softmax, and no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.project = SeparateQKV(heads(4, 8), heads(2, 8), heads(2, 8))
        self.output = nn.Linear(32, 32)

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        q = tap("q", self.project.query(x, positions))
        k, v = self.project.remember(x, positions)
        k, v = tap("k", k), tap("v", v)
        scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(q.shape[-1])
        z = tap("z", scores.sigmoid().tril() @ v.repeat_interleave(2, 1))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def new_cache(self) -> Cache:
        return Growing()

    @property
    def spec(self) -> Spec:
        return self.project.spec(count_weights(self), MaskVisibility(masks.Causal()))


class ExplainedSigmoid(SigmoidAttention):
    """The same, and it says which row it applies."""

    def explain_row(self, run: LayerRun, head: int, row: int) -> EffectiveRow:
        k, q = run.k[0, run.group(head)].double(), run.q[0, head, row].double()
        scale = q.shape[-1] ** -0.5
        dots, seen = k @ q, torch.arange(len(k)) <= row
        weights = self.weights(scale * dots).masked_fill(~seen, 0.0)
        scores = (
            MechanismStep("dot", "", dots),
            MechanismStep("scaled", "", scale * dots),
            MechanismStep("sigmoid", "a_ij = σ(s_ij)", weights.masked_fill(~seen, -torch.inf)),
        )
        return EffectiveRow("linear", scores, weights, run.z[0, head, row], scale)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.sigmoid()


class LyingSigmoid(ExplainedSigmoid):
    """It says that it took a softmax."""

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


def with_layer(attention: nn.Module, layer: int = 1) -> Model:
    """A model with this attention in one of its layers, with the weights of a seed."""
    found = model()
    torch.manual_seed(3)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    found.decoder.layers[layer].attention = attention.eval().requires_grad_(requires_grad=False)
    return found


def explained(attention: nn.Module, **where: int | str) -> Explanation:
    return explain(with_layer(attention), TEXT, layer=1, **where)  # type: ignore[arg-type]


def test_a_new_equation_is_explained() -> None:
    found = explained(ExplainedSigmoid(), head=3, query=5)
    q, k = found.q[-1].values, found.k[-1].values
    row = [
        1 / (1 + math.exp(-float(q @ k[j]) / math.sqrt(8))) if j <= 5 else 0 for j in range(len(k))
    ]
    assert found.weights == pytest.approx(row, abs=ROUNDING)
    assert found.check < ROUNDING, found.checks
    assert found.kind == "linear"
    assert [step.name for step in found.scores] == ["dot", "scaled", "sigmoid"]
    assert [step.name for step in found.q] == ["projected"], "the steps of its projection"
    assert found.masked == ("",) * 6 + ("future",) * (len(k) - 6)
    assert found.mechanism == "ExplainedSigmoid"
    assert found.state is None
    data = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    text = [line.plain for line in page(data)]
    assert max(map(len, text)) <= 80
    assert any("━━ 5 no softmax ━" in line for line in text)


def test_a_new_equation_that_says_something_false_is_told_apart() -> None:
    """Negative control: the row that it says does not give what its heads read."""
    found = explained(LyingSigmoid(), head=3, query=5)
    assert found.checks["output of the mechanism"] > 0.01
    assert found.checks["q"] < ROUNDING


def test_a_new_equation_that_says_nothing_is_refused() -> None:
    words = r"layers\.1 is a SigmoidAttention, which ran no softmax"
    with pytest.raises(ArgumentError, match=words):
        explained(SigmoidAttention())


def test_a_row_without_taps_is_refused() -> None:
    class Untapped(ExplainedSigmoid):
        def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
            return tap("out", self.output(x))

    words = "is a Untapped, which implements explain_row but has no tap q, k, v, z"
    with pytest.raises(ArgumentError, match=words):
        explained(Untapped())


class Mirrored(Projection, nn.Module):
    """A projection with steps of its own: keys are queries read backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.v = heads(4, 8), heads(4, 8)

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        return self.heads(x, positions)

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        return self.heads(x, positions).flip(-1), self.v(x, positions)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        return memory[0], memory[1]

    @property
    def shape(self) -> ProjectionShape:
        return ProjectionShape(4, 4, 8, 8, (32, 32))


class ExplainedMirrored(Mirrored):
    """The same, and it says how its keys came about."""

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        q = self.heads.explain_steps(query.x, query.positions, "q")
        k = self.heads.explain_steps(query.memory, query.k_positions, "k")
        v = self.v.explain_steps(query.memory, query.k_positions, "v")
        return InputSteps(
            q, (*k, MechanismStep("mirrored", "k_j ← k_j backwards", self.last(k[-1].values))), v
        )

    def last(self, k: Tensor) -> Tensor:
        return k.flip(-1)


class LyingMirrored(ExplainedMirrored):
    """It forgets to say that its keys are backwards."""

    def last(self, k: Tensor) -> Tensor:
        return k


def attention_of(project: Mirrored) -> Attention:
    return Attention(project, nn.Linear(32, 32), mask=masks.Causal())


def test_a_new_projection_is_recorded_and_explained() -> None:
    found = explained(attention_of(ExplainedMirrored()), head=2, query=6)
    assert [step.name for step in found.k] == ["projected", "mirrored"]
    assert found.check < ROUNDING, found.checks
    assert {"q", "k", "v"} <= set(found.checks)
    assert found.kind == "softmax"
    recording = record(with_layer(attention_of(ExplainedMirrored())), TEXT)
    row = recording.weights("layers.1", 2, rows=6)[0]
    assert found.weights == pytest.approx(row.numpy(), abs=ROUNDING)


def test_a_new_projection_that_says_something_false_is_told_apart() -> None:
    """Negative control: only the keys are not what attention was given."""
    found = explained(attention_of(LyingMirrored()), head=2, query=6)
    assert found.checks["k"] > 0.01
    assert max(found.checks["q"], found.checks["v"]) < ROUNDING


def test_a_new_projection_that_says_nothing_is_shown_as_attention_got_it() -> None:
    found = explained(attention_of(Mirrored()), head=2, query=6)
    assert [step.name for step in (*found.q, *found.k, *found.values)] == ["input"] * 3
    assert found.check < ROUNDING


class NearAndFar(SigmoidAttention):
    """Two softmaxes in branches of their own, 0.75 of the near one and 0.25 of the other."""

    shares = (0.75, 0.25)

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        q = tap("q", self.project.query(x, positions))
        k, v = self.project.remember(x, positions)
        k, v = tap("k", k), tap("v", v)
        z = torch.zeros_like(q)
        for name, share, mask in (("near", 0.75, masks.Window(3)), ("far", 0.25, masks.Full())):
            with named_scope(name):
                z = z + share * attend(q, k, v, mask=masks.Causal() & mask)
        return tap("out", self.output(tap("z", z).transpose(1, 2).flatten(2)))

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], here: int, head: int, row: int
    ) -> HeadMix:
        rows = [call.by_position(run.k.shape[2])[head] for call in calls]
        terms = tuple(
            MixTerm(call.branch, share, float(one.sum()), n == here)
            for n, (call, share, one) in enumerate(zip(calls, self.shares, rows, strict=True))
        )
        mixed = self.shares[0] * rows[0] + self.shares[1] * rows[1]
        return HeadMix("a near row and a far one", terms, mixed)


class LyingNearAndFar(NearAndFar):
    shares = (0.25, 0.75)


@pytest.mark.parametrize(("kind", "right"), [(NearAndFar, True), (LyingNearAndFar, False)])
def test_a_new_mix_of_rows_is_explained(kind: type[NearAndFar], right: bool) -> None:
    """The mixed row over the values is what the head gave; with the shares exchanged it is not."""
    found = explained(kind(), head=1, query=7, call="far")
    assert found.calls == ("near", "far")
    assert found.mixture is not None
    assert found.mixture.row is not None
    assert [term.is_explained for term in found.mixture.terms] == [False, True]
    assert [term.name for term in found.mixture.terms] == ["near", "far"]
    off = float(np.abs(found.mixture.row @ found.v - found.z).max())
    assert (off < ROUNDING) == right
    assert right or off > 0.01
