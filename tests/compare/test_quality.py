"""Training: as many steps as there is time for, the best rate by validation, seeds, divergence, and
interrupts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regard.compare import quality
from regard.compare.comparison import Comparison, summarize_quality
from regard.compare.experiment import ExperimentStore, Session
from regard.compare.quality import TrainingSettings, pilot_experiments, run_name, steps_that_fit
from regard.errors import ArgumentError
from tests.compare.small import MACHINE, taught


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """Who runs the tests in the background may have them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def jobs(plan: Any, steps: int, **more: Any) -> list[Any]:
    lesson = plan.tasks[0].name
    seconds = {lesson: dict.fromkeys(plan.configs, 1.0)}
    return quality.training_experiments(
        plan.train_configs, plan.tasks, plan.training, {lesson: steps}, seconds, **more
    )


@pytest.mark.parametrize(
    "room,expected",
    [(1e9, (100, 50)), (50.0, (50, 25)), (25.5, (25, 20)), (0.0, (20, 20)), (-5.0, (20, 20))],
)
def test_steps_that_fit(room: float, expected: tuple[int, int]) -> None:
    # 100 x (0.1 x 1 + 0.2 x 3) + 50 x (0.2 x 1 + 0.133 x 3) are 70 + 30 seconds
    seconds = {"text": {"mha": 0.1, "linear": 0.2}, "mqar": {"mha": 0.2, "linear": 0.4 / 3}}
    steps, whole = steps_that_fit({"text": 100, "mqar": 50}, seconds, {"mha": 1, "linear": 3}, room)
    assert whole == pytest.approx(100.0)
    assert (steps["text"], steps["mqar"]) == expected


def test_few_steps_that_are_wanted_stay_few() -> None:
    assert steps_that_fit({"text": 5}, {"text": {"mha": 1.0}}, {"mha": 1}, 1.0)[0] == {"text": 5}


def test_rates() -> None:
    assert len(TrainingSettings().learning_rates_for(recurrent=True)) >= 3
    assert set(TrainingSettings().learning_rates_for(recurrent=False)) <= set(
        TrainingSettings().learning_rates_for(recurrent=True)
    )
    assert TrainingSettings(rates=(0.1,)).learning_rates_for(recurrent=True) == (0.1,)
    for wrong in ({"seeds": ()}, {"rates": ()}, {"seeds": (0, 0)}, {"rates": (0.1, 0.1)}):
        with pytest.raises(ArgumentError, match="give at least one, and each only once"):
            TrainingSettings(**wrong)


def test_the_pilot_times_each_mechanism() -> None:
    plan = taught("mha", "linear")
    (one,) = pilot_experiments(plan.train_configs, plan.tasks)
    found = one.measure()["seconds"]
    assert one.name == "pilot/mqar"
    assert set(found) == {"mha", "linear"}
    assert min(found.values()) > 0


def test_the_first_step_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 9000, 1, 2, 3, 4 and 5 seconds: the median of the last five is 3."""
    plan = taught("mha")
    seconds = iter([0.0, 9000.0, *(x for n in (1.0, 2.0, 3.0, 4.0, 5.0) for x in (0.0, n))])
    monkeypatch.setattr(quality, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    (one,) = pilot_experiments(plan.train_configs, plan.tasks)
    assert one.measure()["seconds"] == {"mha": 3.0}


def test_the_same_seed_gives_the_same_numbers_and_others_do_not() -> None:
    plan = taught("linear", seeds=(0, 1), rates=(3e-3, 1e-2))
    first, seed, rate, _ = jobs(plan, 3)
    assert [first.name, seed.name, rate.name] == [
        run_name("mqar", "linear", r, s) for r, s in ((3e-3, 0), (3e-3, 1), (1e-2, 0))
    ]
    one, again = ({**first.measure(), "seconds": 0} for _ in range(2))
    assert one == again
    assert one["steps"] == 3
    assert len({one["validation"], seed.measure()["validation"], rate.measure()["validation"]}) == 3


def test_training_lowers_the_loss() -> None:
    plan = taught("mha", rates=(1e-2,))
    told: list[str] = []
    short, long = (jobs(plan, n, report=told.append)[0].measure() for n in (1, 40))
    assert long["validation"] < 0.95 * short["validation"]
    assert any("step 40/40" in line for line in told)


def numbers(validation: float, accuracy: float) -> dict[str, Any]:
    return {"validation": validation, "accuracy": accuracy, "steps": 7, "tokens": 70}


def test_the_best_rate_is_chosen_by_validation_over_seeds_not_by_what_is_judged() -> None:
    plan = taught("linear", seeds=(0, 1), rates=(0.1, 0.2, 0.3))
    lesson, pupil = plan.tasks[0], plan.train_configs["linear"]
    made = {
        (0.1, 0): numbers(2.0, 0.9),
        (0.1, 1): numbers(2.0, 0.9),
        (0.2, 0): numbers(1.0, 0.2),
        (0.2, 1): numbers(2.5, 0.4),  # the best mean
        (0.3, 0): numbers(0.1, 0.8),
        (0.3, 1): {"diverged": True, "seconds": 1.0},
    }
    done = {run_name("mqar", "linear", rate, seed): n for (rate, seed), n in made.items()}
    found = summarize_quality(lesson, "linear", pupil, (0, 1), done)
    assert found == {
        "validation": {"0.1": 2.0, "0.2": 1.75, "0.3": None},
        "seeds": [0, 1],
        "rate": 0.2,
        "mean": pytest.approx(0.3),
        "low": 0.2,
        "high": 0.4,
        "steps": 7,
        "tokens": 70,
    }
    del done[run_name("mqar", "linear", 0.1, 1)]
    assert summarize_quality(lesson, "linear", pupil, (0, 1), done) is None


def test_a_run_that_diverges_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = taught("linear", rates=(1e-2,))
    real = quality.build_decoder

    def broken(config: Any, seed: int = 0) -> Any:
        model = real(config, seed)
        model.register_forward_hook(lambda *args: args[-1] * float("inf"))
        return model

    monkeypatch.setattr(quality, "build_decoder", broken)
    (job,) = jobs(plan, 3)
    found = job.measure()
    assert found["diverged"] is True
    told = summarize_quality(
        plan.tasks[0], "linear", plan.train_configs["linear"], (0,), {job.name: found}
    )
    assert told == {"validation": {"0.01": None}, "seeds": [0], "diverged": True}


def test_a_signal_ends_the_comparison_and_leaves_what_is_done(tmp_path: Path) -> None:
    plan = taught("mha", "mqa", rates=(1e-2,))
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if "mqar/mqa" in line:
            signal.raise_signal(signal.SIGINT)

    session = Session(ExperimentStore(tmp_path), tell)
    with pytest.raises(KeyboardInterrupt):
        Comparison(plan, session, MACHINE, steps=2, with_memory=False).run()
    assert "mqar/mha/lr 0.01/seed 0" in session.results
    assert "mqar/mqa/lr 0.01/seed 0" not in session.results
    again = Session(ExperimentStore(tmp_path))
    Comparison(plan, again, MACHINE, steps=2, with_memory=False).run()
    assert (again.measured, again.reused) == (1, session.measured)


def test_a_signal_inside_training_ends_it_too() -> None:
    plan = taught("mqa", rates=(1e-2,))
    (job,) = jobs(plan, 50, report=lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        job.measure()


def test_steps_are_shrunk_for_all_alike_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = taught("mha", "linear", rates=(1e-2,))
    monkeypatch.setattr(quality, "_seconds_per_step", lambda *_: 1e6)
    session = Session(ExperimentStore(tmp_path))
    one = Comparison(plan, session, MACHINE, minutes=1.0, with_memory=False)
    one.run()
    assert session.results["steps"]["steps"] == {"mqar": 20}
    assert {n["steps"] for name, n in session.results.items() if name.startswith("mqar/")} == {20}
    assert "all of mqar 400 would take about" in one.notes[0]
    assert "--minutes is 1, so every mechanism is trained for fewer steps" in one.notes[0]
    # what was chosen is kept: a run that goes on, later and faster, trains no other number of steps
    monkeypatch.setattr(quality, "_seconds_per_step", lambda *_: 1e-9)
    again = Session(ExperimentStore(tmp_path))
    Comparison(plan, again, MACHINE, minutes=1.0, with_memory=False).run()
    assert again.measured == 0


def test_steps_that_are_asked_for_are_not_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = taught("mha", rates=(1e-2,))
    monkeypatch.setattr(quality, "_seconds_per_step", lambda *_: 1e6)
    one = Comparison(
        plan, Session(ExperimentStore(None)), MACHINE, minutes=1.0, steps=3, with_memory=False
    )
    one.run()
    assert one.session.results["mqar/mha/lr 0.01/seed 0"]["steps"] == 3
    assert one.notes == ["steps: mqar 3; the estimated training time is 833:20:00"]
