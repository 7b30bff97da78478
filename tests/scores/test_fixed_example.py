"""Rules on one fixed example, against numbers from other implementations' formulas.

One head, four tokens: q[t, d] = sin(t + 2d + 1), k[t, d] = cos(2t + d),
v[t, e] = sin(3t + e + 1), scale 1/sqrt(3), causal. The numbers are the output of the last token,
from fp64 loops; those of softpick, CoPE and stick-breaking also come from their authors' public
code.
"""

from __future__ import annotations

import math

import pytest
import torch

import regard
from regard import scores
from regard.masks import Causal, Window
from regard.scores import ScoreRule
from tests.fixture_f import example, vectors

W = vectors()[0, 0]
"""Embeddings of CoPE: w[t, d] = cos(t - d)."""

EXPECTED: dict[str, tuple[ScoreRule | None, tuple[float, float]]] = {
    "softmax": (None, (0.1950359852, 0.2724150288)),
    "sigmoid": (scores.Sigmoid(-math.log(4)), (0.1092499979, 0.1410105162)),
    "softpick": (scores.Softpick(), (0.3536698505, 0.5325925733)),
    "scalable": (scores.ScalableSoftmax(0.43), (0.1198020476, 0.1357311543)),
    "cope": (scores.CoPE(W), (0.1871407731, 0.2477139337)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_output_of_the_last_token(name: str) -> None:
    q, k, v = example()
    rule, expected = EXPECTED[name]
    out = regard.attend(q, k, v, mask=Causal(), score=rule)[0, 0, -1]
    assert out.tolist() == pytest.approx(expected, abs=1e-9)


def test_another_rule_gives_another_output() -> None:
    outputs = [x for _, x in EXPECTED.values()]
    for i, a in enumerate(outputs):
        assert all(abs(a[0] - b[0]) > 1e-3 for b in outputs[i + 1 :])


def test_softmax_with_one_added() -> None:
    q, k, v = example()
    out = regard.attend(q, k, v, mask=Causal(), sink=torch.zeros(1, dtype=q.dtype))[0, 0, -1]
    assert out.tolist() == pytest.approx((0.1573172442, 0.2197316642), abs=1e-9)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_relu_weights(power: float) -> None:
    q, k, _ = example()
    s = (q @ k.mT)[0, 0, -1] / math.sqrt(3)
    p = regard.attention_weights(q, k, mask=Causal(), score=scores.ReLU(power))[0, 0, -1]
    assert p.tolist() == pytest.approx([max(x, 0) ** power / 4 for x in s.tolist()], abs=1e-12)
    assert (s < 0).any()
    assert (s > 0).any()


def test_signed_softmax_weights() -> None:
    q, k, _ = example()
    s = (q @ k.mT)[0, 0, -1] / math.sqrt(3)
    p = regard.attention_weights(q, k, mask=Causal(), score=scores.SignedSoftmax())[0, 0, -1]
    total = sum(math.exp(abs(x)) for x in s.tolist())
    signed = [math.copysign(math.exp(abs(x)), x) / total for x in s.tolist()]
    assert p.tolist() == pytest.approx(signed, abs=1e-12)
    assert (s < 0).any()


def test_stick_breaking_weights() -> None:
    q, k, _ = example()
    p = regard.attention_weights(q, k, mask=Causal() & ~Window(1), score=scores.StickBreaking())
    assert p[0, 0, -1].tolist() == pytest.approx(
        (0.0505240047, 0.1537805214, 0.6874657262, 0), abs=1e-9
    )
    assert 1 - p[0, 0, -1].sum().item() == pytest.approx(0.1082297477, abs=1e-9)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (2.0, (0.5666666667, 0.0666666667, 0, 0.3666666667)),
        (1.5, (0.4689538043, 0.1890527951, 0, 0.3419934006)),
    ],
)
def test_entmax_of_four_scores(alpha: float, expected: tuple[float, ...]) -> None:
    q, k = torch.ones(1, 1, 1, 1).double(), torch.tensor([1, 0.5, -1, 0.8], dtype=torch.float64)
    p = regard.attention_weights(q, k.view(1, 1, 4, 1), scale=1.0, score=scores.Entmax(alpha))
    assert p.flatten().tolist() == pytest.approx(expected, abs=1e-9)
