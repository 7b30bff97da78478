"""What claims measure: exact ones give their verdict, trained ones run at a tiny budget, parts
equal their definition.
"""

from __future__ import annotations

import functools
import json
import math
import signal
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import (
    CLAIMS,
    VERDICTS,
    Outcome,
    decode_mask,
    dropout,
    experiments,
    find_claim,
    heads,
    infini_attention,
    minus_infinity,
    parallelism,
    positions,
    run_claims,
    score_scale,
)
from experiments.small_training import (
    BYTES,
    answer_accuracy,
    byte_loss,
    small_decoder,
    train_on_task,
    validation_bytes,
)
from regard import attend, attention_weights
from regard.compare import ExperimentStore, Session
from regard.errors import ArgumentError
from regard.nn import SeparateQKV
from regard.span import Span
from regard.train.losses import AnswerLoss
from regard.train.tasks.task import Example, Task

TINY = 0.004
EXACT = {
    "scale": "holds",
    "scale-vanish": "holds with limits",
    "scale-explode": "holds with limits",
    "minus-infinity": "holds with limits",
    "minus-infinity-hides": "does not hold",
    "large-negative": "holds with limits",
    "dropout": "holds",
    "dropout-rows": "does not hold",
    "dropout-half": "does not hold",
    "order": "holds",
    "order-generation": "holds with limits",
    "order-information": "does not hold",
    "heads-wide": "does not hold",
    "heads-more": "holds with limits",
    "fused-work": "does not hold",
    "mask-work": "holds with limits",
    "mla-cache": "holds",
    "mla-work": "does not hold",
    "groups-cache": "holds",
    "mqa-linear": "does not hold",
    "positions": "holds with limits",
    "positions-distance": "does not hold",
    "image-text": "holds with limits",
    "decode-mask": "holds with limits",
    "decode-mask-always": "does not hold",
    "features": "does not hold",
}
"""Claims that neither train nor are timed, and their verdict whatever the seed. Pairs are counted
in one test below.
"""
COUNTED = {"full-work": "holds", "sparse-work": "does not hold", "linear-work": "holds"}
TRAINED = ("values", "groups-quality", "infini", "scale-training", "training-mask")


def measured(name: str, budget: float = TINY, seed: int = 0) -> Outcome:
    (found,) = run_claims(Session(ExperimentStore(None)), [CLAIMS[name]], budget, seed)
    return found


@functools.cache
def exact(seed: int) -> dict[str, Outcome]:
    """All exact claims of a seed; those that share an experiment measure it once."""
    found = run_claims(Session(ExperimentStore(None)), [CLAIMS[name] for name in EXACT], 0.1, seed)
    return {one.claim.id: one for one in found}


@pytest.mark.nightly(keep=4)
@pytest.mark.full(keep=1)
@pytest.mark.parametrize(("name", "wanted"), EXACT.items())
@pytest.mark.parametrize("seed", [0, 1])
def test_exact_claims_have_their_verdict_whatever_the_seed(
    name: str, wanted: str, seed: int
) -> None:
    found = exact(seed)[name]
    assert found.verdict == wanted, [check for check in found.checks if check.answer != "yes"]
    (axes,) = found.picture.draw().figure.axes
    drawn = [line for line in axes.lines if str(line.get_gid()).startswith("line")]
    assert [line.get_label() for line in drawn] == [line.name for line in found.picture.lines]
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", ["scale-vanish", "dropout", "decode-mask", "order-information"])
def test_the_seed_decides_the_numbers(name: str) -> None:
    assert measured(name, 0.1, 1).numbers == exact(1)[name].numbers
    assert exact(0)[name].numbers != exact(1)[name].numbers


@pytest.mark.full
def test_pairs_are_counted() -> None:
    found = run_claims(Session(ExperimentStore(None)), [CLAIMS[name] for name in COUNTED])
    assert {one.claim.id: one.verdict for one in found} == COUNTED


def test_every_claim_is_exact_counted_trained_or_timed() -> None:
    """So that none is left out of these tests because nobody thought of it."""
    learned = {
        "forgetting",
        "forgetting-beginning",
        "looking-back",
        "heads",
        "heads-text",
        "values-inverse",
        "infini-free",
        *TRAINED,
    }
    longer = {name for name in CLAIMS if CLAIMS[name].measured_with == "longer"}
    timed = {name for name, claim in CLAIMS.items() if claim.timed}
    groups = [set(EXACT), set(COUNTED), learned, longer, timed]
    assert sum(map(len, groups)) == len(CLAIMS)
    assert set().union(*groups) == set(CLAIMS)


def test_the_gradients_of_the_scale_are_those_of_the_formula() -> None:
    """dL/dq_i = scale sum_j (dL/ds_ij) k_j, ds = (diag(p) - p p^T) dL/dp: written out in loops."""
    dim, n = 3, 4
    make = torch.Generator().manual_seed(5)
    x, target = torch.randn(2, n, dim, generator=make, dtype=torch.float64)
    maps = torch.randn(3, dim, dim, generator=make, dtype=torch.float64) * dim**-0.5
    q, k, v = (x @ m for m in maps)
    both = score_scale._gradients(dim, torch.Generator().manual_seed(5), tokens=n)
    for way, factor in (("unscaled", 1.0), ("scaled", dim**-0.5)):
        grads = torch.zeros(n, dim, dtype=torch.float64)
        for i in range(n):
            p = [math.exp(factor * float(q[i] @ k[j])) for j in range(n)]
            p = [one / sum(p) for one in p]
            given = [float(target[i] @ v[j]) for j in range(n)]
            mean = sum(a * b for a, b in zip(p, given, strict=True))
            for j in range(n):
                grads[i] += factor * p[j] * (given[j] - mean) * k[j]
        norms = sorted(float(row.norm()) for row in grads)
        assert both[way]["per_query_largest"] == pytest.approx(norms[-1], rel=1e-12)
        assert both[way]["per_query_median"] == pytest.approx(
            norms[1], rel=1e-12
        )  # torch's lower median
        assert both[way]["weights"] == pytest.approx(float((x.T @ grads).norm()), rel=1e-12)


def test_dependent_steps_are_counted() -> None:
    with parallelism.DependencyChain() as chain:
        x = torch.zeros(8) + 1
        for _ in range(5):
            x = x * 2
        beside = torch.zeros(8) - 1  # zeros are made in one step, and this is the second
        both = torch.stack([x, beside])
        view = both[0]
        filled = torch.zeros(3)
        filled[0] = x[0]  # in place: known behind x, through the views on both sides
    assert chain.depth(x) == 7
    assert chain.depth(beside) == 2
    assert (chain.depth(both), chain.depth(view)) == (8, 8)
    assert chain.depth(filled) == 8
    assert chain.depth(torch.zeros(3)) == 0


def test_no_positions_are_needed_under_a_causal_mask_of_two_layers() -> None:
    """The figures of docs/claims.md: seed 0, width 16, 6 tokens."""
    rows = exact(0)["order-information"].numbers["by_layers"]
    assert [row["all"] < 1e-15 for row in rows] == [True] * 3
    assert rows[0]["causal"] < 1e-15
    assert rows[1]["causal"] == pytest.approx(0.0834, abs=5e-5)


def test_adding_a_memory_changes_no_weight_that_was_trained() -> None:
    _, window = small_decoder(
        len(infini_attention.TASK.vocabulary),
        layers=1,
        attention="sliding_window",
        options={"groups": 4, "window": 8},
    )
    added = infini_attention._added_to(window, 3)
    own, old = added.state_dict(), window.state_dict()
    assert [name for name in own if name not in old] == ["layers.0.attention.gate"]
    assert all(torch.equal(own[name], old[name]) for name in old)


@pytest.mark.full
@pytest.mark.parametrize("name", TRAINED)
def test_trained_claims_run_at_a_tiny_budget(name: str) -> None:
    found = measured(name)
    assert found.verdict in VERDICTS
    assert all(math.isfinite(check.value) for check in found.checks)
    assert found.picture.drawable
    json.dumps(found.as_dict(), allow_nan=False)


def broken(monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """The verdict when a part does the wrong thing."""
    if name == "minus-infinity":  # a mask that leaks a little
        real = attention_weights
        monkeypatch.setattr(
            minus_infinity, "attention_weights", lambda *a, **k: real(*a, **k) + 1e-9
        )
    elif name == "dropout":  # survivors are not scaled
        plain = attend

        def unscaled(*a: Any, dropout: float = 0.0, **k: Any) -> Tensor:
            return plain(*a, dropout=dropout, **k) * (1 - dropout)

        monkeypatch.setattr(dropout, "attend", unscaled)
    else:  # the cache forgets a token
        monkeypatch.setitem(
            decode_mask.STEPS,
            "one token, all keys cached",
            (decode_mask.Growing, (6, 1), decode_mask.WINDOW, False),
        )
    return measured(name, 0.1).verdict


@pytest.mark.parametrize("name", ["minus-infinity", "dropout", "decode-mask"])
def test_a_broken_part_makes_a_claim_fall(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert broken(monkeypatch, name) == "does not hold"


def test_what_is_kept_is_not_measured_again(tmp_path: Any) -> None:
    claim = find_claim("minus-infinity")
    (first,) = run_claims(Session(ExperimentStore(tmp_path)), [claim])
    session = Session(ExperimentStore(tmp_path))
    (second,) = run_claims(session, [claim])
    assert (first.reused, second.reused) == (False, True)
    assert (session.measured, second.numbers) == (0, first.numbers)
    (third,) = run_claims(Session(ExperimentStore(tmp_path)), [claim], seed=1)
    assert not third.reused


def test_a_budget_must_be_a_positive_number() -> None:
    for budget in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ArgumentError, match=r"budget is .*; it must be above 0, and 1"):
            experiments([find_claim("scale")], budget)


def test_claims_leave_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    measured("dropout", 0.1)
    assert torch.equal(torch.get_rng_state(), before)


def test_two_places_asks_for_the_difference() -> None:
    example = next(heads.PLACES.stream("train", 0))
    drawn = [int(word[1:]) for word in example.source]
    for t, asked in enumerate(example.target):
        assert asked == ("" if t < 4 else f"d{(drawn[t - 1] - drawn[t - 4]) % 8}")


def test_a_window_does_not_reach_over_the_silence() -> None:
    example = infini_attention._draw_across_segments(Random(0), 0)
    told = dict(zip(example.source[0:6:2], example.source[1:6:2], strict=True))
    assert [t for t in example.target if t] == [told[k] for k in example.source if k in told][3:]
    asked = [i for i, word in enumerate(example.target) if word]
    reach = infini_attention.LAYERS * (infini_attention.SEGMENT - 1)
    last_told = 2 * infini_attention.PAIRS - 1
    assert min(asked) - reach > last_told
    assert set(example.source[2 * infini_attention.PAIRS : min(asked)]) == {"."}


def turned_by_loops(v: Tensor, p: Tensor, *, back: bool) -> Tensor:
    """z_i = R(-i) sum_j p_ij R(j) v_j, a pair of dims as one complex number."""
    H, T, D = v.shape
    pairs = torch.complex(v[..., : D // 2], v[..., D // 2 :])
    theta = torch.tensor([10000.0 ** (-2 * i / D) for i in range(D // 2)], dtype=torch.float64)
    out = torch.zeros_like(pairs)
    for h in range(H):
        for i in range(T):
            for j in range(i + 1):
                angle = theta * (j - i if back else j)
                out[h, i] += p[h, i, j] * torch.polar(torch.ones_like(angle), angle) * pairs[h, j]
    return torch.cat((out.real, out.imag), -1)


@pytest.mark.parametrize("back", [True, False])
def test_turned_values_are_the_formula(back: bool) -> None:
    model = positions._model(positions.WAYS[1 if back else 2], 0).double().requires_grad_(False)
    attention = model.layers[0].attention
    project = attention.project
    assert isinstance(project, SeparateQKV)
    x, at = torch.randn(1, 6, positions.VALUES_DIM, dtype=torch.float64), Span(0, 6)
    q, k = project.query(x, at), project.remember(x, at)[0]
    p = attention_weights(q, k, mask=attention.mask)[0]
    wanted = turned_by_loops(project.v(x, at)[0], p, back=back)
    joined = wanted.transpose(0, 1).flatten(1)
    attention.output.weight.data.normal_()  # a fresh one is 0, and would hide everything
    got, plain = attention(x, at)[0], joined @ attention.output.weight.T
    assert float((got - plain).abs().max()) < 1e-12 * float(plain.abs().max()) * 100
    other = turned_by_loops(project.v(x, at)[0], p, back=not back).transpose(0, 1).flatten(1)
    assert float((got - other @ attention.output.weight.T).abs().max()) > 1e-2


def test_text_is_held_out_and_losses_are_counted() -> None:
    held = validation_bytes(100)
    assert held.dtype == torch.long
    assert 0 <= int(held.min()) <= int(held.max()) < BYTES
    _, model = small_decoder(BYTES, dim=16, heads=2)
    fresh = byte_loss(model, 16, rows=2)
    rows = validation_bytes(34).view(2, 17)
    by_hand = (
        -model(rows[:, :-1]).double().log_softmax(-1).gather(-1, rows[:, 1:, None]).detach().mean()
    )
    assert fresh == pytest.approx(float(by_hand), rel=1e-5)


def test_learning_is_what_makes_it_right() -> None:
    task = Task(
        name="repeat",
        description="Say it again.",
        reference="here",
        kind="causal",
        vocabulary=heads.PLACES.vocabulary,
        lengths=(4, 6, 8),
        draw=lambda random, n: (lambda words: Example(words, words))(
            tuple(random.choices(heads.SYMBOLS, k=n))
        ),
    )
    _, model = small_decoder(len(task.vocabulary), dim=16, heads=2, layers=1)
    before = answer_accuracy(model, task, "validation", 32)
    train_on_task(model, task, 40, lr=1e-2, batch=8)
    assert before < 0.5
    assert answer_accuracy(model, task, "validation", 32) > 0.95


def test_an_interrupt_in_training_leaves_nothing_behind() -> None:
    _, model = small_decoder(len(heads.PLACES.vocabulary), dim=16, heads=2, layers=1)
    begun = []

    def stop(module: torch.nn.Module, rows: Any) -> Tensor:
        begun.append(torch.get_num_threads())
        signal.raise_signal(signal.SIGINT)
        return AnswerLoss()(module, rows)

    with pytest.raises(KeyboardInterrupt):
        train_on_task(model, heads.PLACES, 50, batch=2, loss=stop)
    assert begun == [1], "one step, on one thread"
