"""Attribution of whole answers, knockout of attention, features of autoencoders and probes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect import (
    ablate_features,
    attribute,
    attribute_answer,
    cut_attention,
    edit_features,
    knockout,
    probe,
)
from regard.inspect.model_run import prepare_run
from tests.inspect.interventions.test_interventions import encoder_decoder
from tests.inspect.planted import INDUCTION_HEAD, PREVIOUS_HEAD, planted_model
from tests.inspect.small_model import difference, model

IDS, ANSWER = [5, 9, 2, 31], [9, 7, 40]


@pytest.mark.parametrize("by_key", [False, True])
def test_an_answer_is_the_sum_of_its_tokens(by_key: bool) -> None:
    small = model()
    runs: list[int] = []
    small.decoder.layers[0].register_forward_pre_hook(lambda *_: runs.append(1))
    table = attribute_answer(small, torch.tensor([IDS]), ANSWER, by_key=by_key)
    assert len(runs) == 1, "one run for the whole answer"
    wanted: dict[tuple[str, str], float] = {}
    logits = 0.0
    for n, token in enumerate(ANSWER):
        before = torch.tensor([IDS + ANSWER[:n]])
        one = attribute(small, before, token, by_key=by_key)
        logits += float(one.baseline or 0)
        for i, j in np.ndindex(one.values.shape):
            column = one.columns[j] if by_key else table.columns[n]
            at = one.rows[i], column
            wanted[at] = wanted.get(at, 0.0) + one.values[i, j]
    found = {
        (row, column): table.values[i, j]
        for (i, row), (j, column) in itertools.product(
            enumerate(table.rows), enumerate(table.columns)
        )
    }
    assert {at for at, x in found.items() if x} <= {*wanted}
    assert max(abs(x - found[at]) for at, x in wanted.items() if "rounding" not in at[0]) < 1e-5
    assert table.baseline is not None
    assert abs(table.baseline - logits) < 1e-4
    assert abs(table.values.sum() - table.baseline) < 1e-9
    assert abs(table.values[1:].sum() - table.baseline) > 1e-3, "a missing term is seen"


def test_the_answer_of_an_encoder_decoder() -> None:
    small = encoder_decoder("t5, gated")
    source, answer = torch.tensor([[5, 9, 2, 31]]), [9, 7]
    for by_key in (False, True):
        table = attribute_answer(small, source, answer, by_key=by_key)
        targets = (torch.tensor([[0, *answer[:n]]]) for n in range(2))
        ones = [
            attribute(small, (source, target), token, by_key=by_key)
            for target, token in zip(targets, answer, strict=True)
        ]
        for i, name in enumerate(table.rows[:-1]):
            wanted = sum(one.values[one.rows.index(name)].sum() for one in ones)
            assert abs(table.values[i].sum() - wanted) < 1e-5
    with pytest.raises(ArgumentTypeError, match="an answer is attributed in a Model"):
        attribute_answer(nn.Linear(2, 2), source, answer)
    with pytest.raises(ArgumentError, match="the answer has no token"):
        attribute_answer(model(), source, [])


def attended(small: Any, layer: int, cut: set[tuple[int, int]], heads: set[int]) -> float:
    """The metric if a layer's attention is a loop over the pairs that are not cut."""
    attention = small.decoder.layers[layer].attention
    original = attention._attend

    def loop(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        H, T, D = q.shape[1:]
        out = torch.zeros_like(q)
        for h, i in itertools.product(range(H), range(T)):
            g = h * k.shape[1] // H
            keys = [j for j in range(i + 1) if h not in heads or (i, j) not in cut]
            if keys:
                p = (k[0, g, keys] @ q[0, h, i] / D**0.5).softmax(0)
                out[0, h, i] = p @ v[0, g, keys]
        return out

    attention._attend = loop
    with torch.no_grad():
        value = float(difference(small.forward(torch.tensor([IDS]))))
    attention._attend = original
    return value


def test_knockout_equals_a_loop_without_these_pairs() -> None:
    small = model()
    small.decoder.double()
    ids = torch.tensor([IDS])
    base = attended(small, 0, set(), set())
    together = knockout(small, ids, difference, queries=[-1], keys=[1, 2])
    each = knockout(small, ids, difference, queries=[3], keys=[1, 2], heads=[0, 3], layers=[1])
    for i in range(3):
        wanted = attended(small, i, {(3, 1), (3, 2)}, {0, 1, 2, 3}) - base
        assert abs(together.values[i, 0] - wanted) < 1e-12
        assert abs(wanted) > 1e-4
    for j, h in enumerate((0, 3)):
        wanted = attended(small, 1, {(3, 1), (3, 2)}, {h}) - base
        assert abs(each.values[0, j] - wanted) < 1e-12
    alone = knockout(small, ids, difference, queries=[0], keys=[0], layers=[0])
    assert abs(alone.values[0, 0] - attended(small, 0, {(0, 0)}, {0, 1, 2, 3}) + base) < 1e-12
    window = knockout(small, ids, difference, keys=[1], window=9, layers=[1])
    edit = {f"layers.{i}.scores": cut_attention([-1], [1]) for i in range(3)}
    whole = float(difference(prepare_run(small, ids).run(edit).output)) - base
    assert abs(window.values[0, 0] - whole) < 1e-12


def test_knockout_finds_the_edges_of_the_planted_circuit() -> None:
    planted, clean = planted_model(), torch.tensor([[0, 4, 5, 6, 7, 4]])
    to_next = knockout(planted, clean, (5, 6), queries=[-1], keys=[2], heads=range(4))
    to_before = knockout(planted, clean, (5, 6), queries=[2], keys=[1], heads=range(4))
    assert sorted(zip(*np.nonzero(to_next.values < -1), strict=True)) == [INDUCTION_HEAD]
    assert sorted(zip(*np.nonzero(to_before.values < -1), strict=True)) == [PREVIOUS_HEAD]
    with pytest.raises(ArgumentError, match="keys is 6; there are 6 positions"):
        knockout(planted, clean, (5, 6), keys=[6])
    with pytest.raises(ArgumentError, match="keys are empty"):
        knockout(planted, clean, (5, 6), keys=[])
    with pytest.raises(ArgumentError, match="window"):
        knockout(planted, clean, (5, 6), keys=[1], window=0)


class _Autoencoder(nn.Module):
    """A sparse autoencoder as libraries have it, with random weights."""

    def __init__(self, M: int, F: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(M, F, generator=draw) / M**0.5)

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self.weight).relu()

    def decode(self, features: Tensor) -> Tensor:
        return features @ self.weight.T


def test_features_are_edits() -> None:
    small, sae = model(), _Autoencoder(32, 64)
    run = prepare_run(small, torch.tensor([IDS]))
    tap = "layers.1.residual"
    unchanged = run.run(capture=[tap])
    x = unchanged.trace[tap]
    same = run.run({tap: edit_features(sae, lambda f: f)}).output
    assert torch.equal(same, unchanged.output), "no change of a feature changes nothing"
    table = ablate_features(small, torch.tensor([IDS]), difference, sae=sae, tap=tap)
    assert len(table.rows) == 32
    largest = sae.encode(x)[0].amax(0)
    assert {int(i) for i in table.rows} == {*largest.topk(32).indices.tolist()}
    for i in map(int, table.rows[:4]):
        new = x - sae.encode(x)[..., i : i + 1] * sae.weight[:, i]
        wanted = float(difference(run.run({tap: lambda _, new=new: new.detach()}).output))
        wanted -= float(difference(unchanged.output))
        assert abs(table.values[table.rows.index(str(i)), 0] - wanted) < 1e-5
    assert np.abs(table.values).max() > 1e-4
    replaced = edit_features(sae, {}, keep_error=False)(x)
    assert torch.equal(replaced, sae.decode(sae.encode(x)))
    with pytest.raises(ArgumentError, match="no tap"):
        ablate_features(small, torch.tensor([IDS]), 3, sae=sae, tap="layers.9.residual")


def test_probes_find_what_is_there_and_nothing_else() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(400, 12, generator=draw)
    labels = (x[:, 3] - 2 * x[:, 7] > 0.1).long()
    for kind in ("ridge", "logistic"):
        found = probe(x, labels, kind=kind)  # type: ignore[arg-type]
        assert found.held_out > 0.95
        assert 0.3 < found.control < 0.7
        assert int((found.weight[:, 1] - found.weight[:, 0]).abs().argmax()) == 7
        noise = torch.randint(2, (400,), generator=torch.Generator().manual_seed(1))
        assert probe(x, noise, kind=kind).held_out < 0.62, "negative control"  # type: ignore[arg-type]
    # ridge by the normal equations
    one = probe(x, labels, penalty=3.0)
    held = {*torch.randperm(400, generator=torch.Generator().manual_seed(0))[:100].tolist()}
    fitted = torch.tensor([i not in held for i in range(400)])
    z = x[fitted].double()
    size = z.std(0, correction=0)
    z = (z - z.mean(0)) / size
    y = nn.functional.one_hot(labels[fitted], 2).double()
    wanted = torch.linalg.solve(z.T @ z + 3 * torch.eye(12), z.T @ (y - y.mean(0)))
    assert (one.weight * size[:, None] - wanted).abs().max() < 1e-9
    right = (one(x[~fitted]) == labels[~fitted]).double().mean()
    assert one.held_out == float(right)


def test_a_group_is_on_one_side_of_the_split() -> None:
    """Copies of an example in train and test would make a probe of noise look good."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 80, generator=draw).repeat_interleave(4, 0)
    labels = torch.randint(2, (60,), generator=draw).repeat_interleave(4)
    groups = [i // 4 for i in range(240)]
    assert probe(x, labels).held_out > 0.9, "negative control: copies are on both sides"
    assert probe(x, labels, groups=groups).held_out < 0.75
    with pytest.raises(ArgumentError, match="as many of each"):
        probe(x, labels[1:])
    with pytest.raises(ArgumentError, match="one group"):
        probe(x, labels, groups=[0] * 240)
    with pytest.raises(ArgumentError, match="kind"):
        probe(x, labels, kind="svm")  # type: ignore[arg-type]


def test_the_answer_of_a_text() -> None:
    table = attribute_answer(regard.load("tiny"), "to be or", " not to be")
    assert table.columns == ("3 ·not", "4 ·to", "5 ·be")
