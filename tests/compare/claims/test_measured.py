"""What claims measure: exact ones give their verdict, trained ones run at a tiny budget, parts equal their definition."""

from __future__ import annotations

import json
import math
import signal
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import attend, attention_weights
from regard.compare import Session, Store
from regard.compare.claims import (  # fmt: skip
    CLAIMS,
    Outcome,
    decode_mask,
    dropout,
    experiments,
    find_claim,
    heads,
    infini,
    minus_infinity,
    run,
    values,
)
from regard.compare.claims.training import BYTES, byte_loss, decoder, held_bytes, learn, right
from regard.errors import ArgumentError
from regard.nn import Separate
from regard.span import Span
from regard.train.seq2seq import AnswerLoss
from regard.train.tasks.base import Example, Task
from regard.view.curves import svg

TINY = 0.004
EXACT = {"scale": "holds", "minus-infinity": "holds with limits", "dropout": "holds with limits",
         "positions": "holds with limits", "decode-mask": "holds with limits", "features": "does not hold"}  # fmt: skip
TRAINED = ("values", "groups", "infini")


def measured(name: str, budget: float = TINY, seed: int = 0) -> Outcome:
    (found,) = run(Session(Store(None)), [CLAIMS[name]], budget, seed)
    return found


@pytest.mark.parametrize(("name", "wanted"), EXACT.items())
@pytest.mark.parametrize("seed", [0, 1])
def test_exact_claims_have_their_verdict_whatever_the_seed(name: str, wanted: str, seed: int) -> None:  # fmt: skip
    found = measured(name, 0.1, seed)
    assert found.verdict == wanted, [check for check in found.checks if not check.passed]
    again = measured(name, 0.1, seed)
    assert again.numbers == found.numbers, "the same seed, the same numbers"
    assert measured(name, 0.1, seed + 2).numbers != found.numbers or name == "positions"
    assert svg(found.picture).count("<polyline") == len(found.picture.lines)
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize("name", TRAINED)
def test_trained_claims_run_at_a_tiny_budget(name: str) -> None:
    found = measured(name)
    assert found.verdict in ("holds", "holds with limits", "does not hold")
    assert all(math.isfinite(check.value) for check in found.checks)
    assert found.picture.drawable
    if name == "groups":  # what is exact needs no training
        passed = [check.says for check in found.checks if check.passed]
        assert "MQA's cache is smaller by the number of heads" in passed
        assert "the score work of MQA stays MHA's: FLOPs by FLOPs" in passed
    json.dumps(found.as_dict(), allow_nan=False)


def broken(monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """The verdict when a part does the wrong thing."""
    if name == "minus-infinity":  # a mask that leaks a little
        real = attention_weights
        monkeypatch.setattr(minus_infinity, "attention_weights", lambda *a, **k: real(*a, **k) + 1e-9)  # fmt: skip
    elif name == "dropout":  # survivors are not scaled
        plain = attend

        def unscaled(*a: Any, dropout: float = 0.0, **k: Any) -> Tensor:
            return plain(*a, dropout=dropout, **k) * (1 - dropout)

        monkeypatch.setattr(dropout, "attend", unscaled)
    else:  # the cache forgets a token
        monkeypatch.setitem(decode_mask.STEPS, "one token, all keys kept", (decode_mask.Growing, (6, 1), decode_mask.WINDOW, False))  # fmt: skip
    return measured(name, 0.1).verdict


@pytest.mark.parametrize("name", ["minus-infinity", "dropout", "decode-mask"])
def test_a_broken_part_makes_a_claim_fall(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert broken(monkeypatch, name) == "does not hold"


def test_what_is_kept_is_not_measured_again(tmp_path: Any) -> None:
    claim = find_claim("minus-infinity")
    (first,) = run(Session(Store(tmp_path)), [claim])
    session = Session(Store(tmp_path))
    (second,) = run(session, [claim])
    assert (first.reused, second.reused) == (False, True)
    assert (session.measured, second.numbers) == (0, first.numbers)
    (third,) = run(Session(Store(tmp_path)), [claim], seed=1)
    assert not third.reused


def test_a_budget_must_be_a_positive_number() -> None:
    for budget in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ArgumentError, match=r"budget is .*; it must be above 0, and 1 is the default"):  # fmt: skip
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
    example = infini._across(Random(0), 0)
    told = dict(zip(example.source[0:6:2], example.source[1:6:2], strict=True))
    assert [t for t in example.target if t] == [told[k] for k in example.source if k in told][3:]
    asked = [i for i, word in enumerate(example.target) if word]
    reach = infini.LAYERS * (infini.SEGMENT - 1)
    last_told = 2 * infini.PAIRS - 1
    assert min(asked) - reach > last_told
    assert set(example.source[2 * infini.PAIRS : min(asked)]) == {"."}


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
    model = values._model(values.WAYS[1 if back else 2], 0).double().requires_grad_(False)
    attention = model.layers[0].attention
    project = attention.project
    assert isinstance(project, Separate)
    x, at = torch.randn(1, 6, values.DIM, dtype=torch.float64), Span(0, 6)
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
    held = held_bytes(100)
    assert held.dtype == torch.long
    assert 0 <= int(held.min()) <= int(held.max()) < BYTES
    _, model = decoder(BYTES, dim=16, heads=2)
    fresh = byte_loss(model, 16, rows=2)
    rows = held_bytes(34).view(2, 17)
    by_hand = (
        -model(rows[:, :-1]).double().log_softmax(-1).gather(-1, rows[:, 1:, None]).detach().mean()
    )
    assert fresh == pytest.approx(float(by_hand), rel=1e-5)


def test_learning_is_what_makes_it_right() -> None:
    task = Task(
        name="repeat", sentence="Say it again.", origin="here", kind="rows",
        vocabulary=heads.PLACES.vocabulary, lengths=(4, 6, 8),
        draw=lambda random, n: (lambda words: Example(words, words))(tuple(random.choices(heads.SYMBOLS, k=n))),
    )  # fmt: skip
    _, model = decoder(len(task.vocabulary), dim=16, heads=2, layers=1)
    before = right(model, task, "validation", 32)
    learn(model, task, 40, lr=1e-2, batch=8)
    assert before < 0.5
    assert right(model, task, "validation", 32) > 0.95


def test_an_interrupt_in_training_leaves_nothing_behind() -> None:
    _, model = decoder(len(heads.PLACES.vocabulary), dim=16, heads=2, layers=1)
    begun = []

    def stop(module: torch.nn.Module, rows: Any) -> Tensor:
        begun.append(torch.get_num_threads())
        signal.raise_signal(signal.SIGINT)
        return AnswerLoss()(module, rows)

    with pytest.raises(KeyboardInterrupt):
        learn(model, heads.PLACES, 50, batch=2, loss=stop)
    assert begun == [1], "one step, on one thread"
