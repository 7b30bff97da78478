"""The loop: what a step computes, exact resume, non-finite losses, signals."""

from __future__ import annotations

import csv
import math
import os
import signal
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ArgumentError, FileError
from regard.train import Batches, NonFiniteLoss, checkpoints, evaluate, fit, next_token_loss
from regard.train.loop import catch_signals
from tests.train.parts import TOKENS, Small, batches, digest, run, settings


def rows_of(folder: Path) -> list[list[str]]:
    """The log without its last column, the speed."""
    with (folder / "train.csv").open(encoding="utf-8") as file:
        return [row[:-1] for row in csv.reader(file)]


def states_of(folder: Path) -> dict[str, Any]:
    """Everything of the newest checkpoint that another run must reproduce."""
    found = checkpoints.latest(folder / "checkpoints")
    assert found is not None
    hashes = {name: digest(tensors) for name, tensors in found.tensors.items()}
    return {"step": found.step, **hashes, "state": found.state}


def test_loss_is_the_mean_of_minus_log_probability() -> None:
    model = Small().eval()
    rows = TOKENS[:21].view(3, 7)
    logits = model(rows[:, :-1]).double()
    expected = 0.0
    for b in range(3):
        for t in range(6):
            chances = logits[b, t].exp()
            expected -= (chances[rows[b, t + 1]] / chances.sum()).log().item() / 18
    assert next_token_loss(model, rows).item() == pytest.approx(expected, rel=1e-6)
    shifted = F.cross_entropy(model(rows[:, 1:]).flatten(0, 1), rows[:, :-1].flatten()).item()
    assert shifted != pytest.approx(expected, rel=1e-3)  # the control: targets before inputs


def test_evaluate_weighs_rows_alike_and_leaves_the_mode() -> None:
    model = Small().train()
    rows = TOKENS[:70].view(10, 7)
    whole = evaluate(model, rows, batch=10)
    assert evaluate(model, rows, batch=3) == pytest.approx(whole, rel=1e-6)
    assert model.training
    assert evaluate(model.eval(), rows, batch=4) == pytest.approx(whole, rel=1e-6)
    assert not model.training


def test_a_step_is_adamw_on_the_clipped_gradient() -> None:
    trained, plain = Small(dropout=0.0), Small(dropout=0.0)
    run(trained, steps=3, warmup=2, clip=0.05, weight_decay=0.3, lr=0.01)
    matrices = [p for p in plain.parameters() if p.ndim == 2]
    others = [p for p in plain.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False)
    source = batches()
    for lr in (0.005, 0.01, 0.001):
        adam.zero_grad()
        next_token_loss(plain, next(source)).backward()
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in plain.parameters()))
        assert norm > 0.05
        for p in plain.parameters():
            p.grad *= 0.05 / (norm + 1e-6)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
    for ours, theirs in zip(trained.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    untrained = Small(dropout=0.0)
    assert (untrained.mix.weight - trained.mix.weight).abs().max() > 1e-3


def test_accumulation_equals_the_larger_batch() -> None:
    class Joined(Batches):
        """Two batches as one."""

        def __next__(self) -> Tensor:
            return torch.cat([super().__next__(), super().__next__()])

    split, joined = Small(dropout=0.0), Small(dropout=0.0)
    joined_batches = Joined(TOKENS, batch=4, context=6, seed=3, repeat=0.3)
    first = fit(split, batches(), settings(steps=5, accumulate=2))
    second = fit(joined, joined_batches, settings(steps=5))
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    for a, b in zip(split.parameters(), joined.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_training_learns_and_reports() -> None:
    model = Small(dropout=0.0)
    row = torch.arange(11).repeat(40)
    before = evaluate(model, row[:70].view(10, 7))
    result = fit(
        model,
        Batches(row, batch=16, context=6),
        settings(steps=150, lr=0.03),
        validation=row[:70].view(10, 7),
    )
    assert before > 2
    assert result.validation == evaluate(model, row[:70].view(10, 7))
    assert result.validation < 0.05
    assert (result.step, result.stopped_by) == (150, None)


@pytest.mark.parametrize("stop", [1, 9, 12, 19])
def test_stopped_and_resumed_is_bitwise_the_same(tmp_path: Path, stop: int) -> None:
    whole, first, second = Small(), Small(), Small()
    torch.manual_seed(42)
    expected = run(whole, tmp_path / "a", save_every=20)
    torch.manual_seed(42)
    stop_after(stop, first, tmp_path / "b", save_every=20)
    torch.manual_seed(0)  # whatever another process starts with
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    result = run(second, tmp_path / "b", save_every=20)
    assert result == expected
    assert digest(dict(second.named_parameters())) == digest(dict(whole.named_parameters()))
    assert states_of(tmp_path / "b") == states_of(tmp_path / "a")
    assert rows_of(tmp_path / "b") == rows_of(tmp_path / "a")
    assert [row[0] for row in rows_of(tmp_path / "a")] == [
        "step",
        *["4", "6", "8", "12", "16", "18", "20"],
    ]


def stop_after(step: int, model: nn.Module, folder: Path, **change: Any) -> None:
    """Train and ask to stop as Ctrl-C does, during the given step."""
    count = 0

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        nonlocal count
        if model.training:
            count += 1
            if count == step:
                signal.raise_signal(signal.SIGINT)
        return next_token_loss(model, rows)

    result = run(model, folder, loss=loss, **change)
    assert (result.step, result.stopped_by) == (step, signal.SIGINT)


def test_control_a_run_without_its_random_state_differs(tmp_path: Path, monkeypatch: Any) -> None:
    whole, part = Small(), Small()
    torch.manual_seed(42)
    run(whole, tmp_path / "a", save_every=20)
    torch.manual_seed(42)
    stop_after(9, part, tmp_path / "b")
    monkeypatch.setattr(torch, "set_rng_state", lambda _: torch.manual_seed(5))
    run(part, tmp_path / "b", save_every=20)
    assert digest(dict(part.named_parameters())) != digest(dict(whole.named_parameters()))


def test_a_finished_run_is_only_loaded(tmp_path: Path) -> None:
    first = run(Small(), tmp_path, save_every=7)
    again = Small()
    assert run(again, tmp_path, save_every=7) == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.5}, "lr is 0.5, and the run to resume has 0.001; repeat its settings"),
        ({"steps": 21}, "steps is 21, and the run to resume has 20"),
    ],
)
def test_resume_with_other_settings_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    stop_after(2, Small(), tmp_path)
    with pytest.raises(ArgumentError, match=message):
        run(Small(), tmp_path, **change)
    run(Small(), tmp_path, save_every=5)  # how often to save changes no number


def test_resume_with_another_model_is_refused(tmp_path: Path) -> None:
    stop_after(2, Small(), tmp_path)
    wide = Small()
    wide.mix = nn.Linear(8, 9)
    before = digest(dict(wide.named_parameters()))
    with pytest.raises(ArgumentError, match=r"weight 'mix.bias' is \(9,\) in the model and \(8,\)"):
        run(wide, tmp_path)
    less = Small()
    less.mix = nn.Identity()
    with pytest.raises(ArgumentError, match=r"weight 'mix.bias' is None in the model and \(8,\)"):
        run(less, tmp_path)
    assert digest(dict(wide.named_parameters())) == before


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_loss_stops_before_the_step(tmp_path: Path, bad: float) -> None:
    model = Small(dropout=0.0)
    seen: list[str] = []

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        if model.training:
            seen.append(digest(dict(model.named_parameters())))
        return next_token_loss(model, rows) * (bad if len(seen) == 7 else 1.0)

    with pytest.raises(
        NonFiniteLoss, match=f"loss is {bad} at step 7; .* the checkpoint of step 6"
    ):
        run(model, tmp_path, loss=loss, save_every=3)
    assert issubclass(NonFiniteLoss, FloatingPointError)
    assert digest(dict(model.named_parameters())) == seen[-1]
    kept = checkpoints.latest(tmp_path / "checkpoints")
    assert kept is not None
    assert kept.step == 6
    assert rows_of(tmp_path)[-1][:2] == ["7", str(bad)]
    assert run(model, tmp_path, save_every=3).step == 20  # and the run can go on from there


def test_a_non_finite_gradient_stops_before_the_step() -> None:
    class Sharp(torch.autograd.Function):
        """The identity with a gradient of infinity."""

        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, g: Tensor) -> Tensor:
            return g * math.inf

    model = Small()
    before = digest(dict(model.named_parameters()))
    with pytest.raises(NonFiniteLoss, match=r"gradient norm is (nan|inf) at step 1; .* no"):
        run(model, loss=lambda m, rows: Sharp.apply(next_token_loss(m, rows)))
    assert digest(dict(model.named_parameters())) == before


def test_bf16_runs_close_to_fp32() -> None:
    full = run(Small(dropout=0.0))
    half = run(Small(dropout=0.0), bf16=True)
    assert half.loss == pytest.approx(full.loss, rel=0.05)
    assert half.loss != full.loss


def test_sigterm_finishes_the_step_and_saves(tmp_path: Path) -> None:
    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return next_token_loss(model, rows)

    before = signal.getsignal(signal.SIGTERM)
    result = run(Small(), tmp_path, loss=loss)
    assert (result.step, result.stopped_by) == (1, signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    kept = checkpoints.latest(tmp_path / "checkpoints")
    assert kept is not None
    assert kept.step == 1


def test_the_second_signal_leaves_at_once(tmp_path: Path) -> None:
    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("unreached")

    with pytest.raises(SystemExit) as caught:
        run(Small(), tmp_path, loss=loss)
    assert caught.value.code == 130
    assert checkpoints.latest(tmp_path / "checkpoints") is None


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    seen: list[list[int]] = []

    def work() -> None:
        with catch_signals() as caught:
            seen.append(caught)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[]]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_log_of_an_impossible_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a file", "utf-8")
    with pytest.raises(FileError, match=r"train.csv: cannot write the log: File exists"):
        fit(Small(), batches(), settings(), log=tmp_path / "x" / "train.csv")


def test_nothing_to_train_and_bad_settings() -> None:
    with pytest.raises(ArgumentError, match="no parameter with requires_grad"):
        fit(nn.Identity(), batches(), settings())
    for name in ("steps", "accumulate", "log_every", "validate_every", "save_every"):
        with pytest.raises(ArgumentError, match=f"{name} is 0; it must be 1 or more"):
            settings(**{name: 0})
    for name, value in (("lr", 0.0), ("lr", math.nan), ("clip", math.inf), ("clip", -1.0)):
        with pytest.raises(ArgumentError, match=f"{name} is {value}; it must be positive and fin"):
            settings(**{name: value})
    for name, value in (("warmup", -1), ("weight_decay", math.nan)):
        with pytest.raises(ArgumentError, match=f"{name} is {value}; it must be 0 or more"):
            settings(**{name: value})


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    chosen = settings(steps=100, warmup=10, lr=2.0)
    rates = [chosen.lr_at(step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.2 * i for i in range(1, 11)])
    assert rates[54] == pytest.approx(2.0 * 0.55)
    assert rates[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(rates[9:]))
    assert settings(warmup=0, lr=1.0).lr_at(20) == pytest.approx(0.1)
