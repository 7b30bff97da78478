"""Training over ranks equals training in one process, and goes on after a rank has died."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from regard.cli.app import run
from regard.errors import ArgumentError, ParallelError
from regard.parallel import spawn
from regard.train import ContextParallel, checkpoints, fit
from tests.parallel import training_ranks
from tests.parallel.training_ranks import batches, decoder, settings, train


def in_one_process() -> tuple[list[Tensor], float]:
    """The weights and the last loss of one process."""
    model = decoder()
    result = fit(model, batches(), settings())
    return [p.detach() for p in model.parameters()], result.loss


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("W", [2, 3])
def test_training_over_ranks_equals_one_process(W: int) -> None:
    expected, loss = in_one_process()
    results = spawn(train, W, None)
    for weights, last in results:
        for x, first, reference in zip(weights, results[0][0], expected, strict=True):
            assert torch.equal(x, first)  # every rank made the same steps
            torch.testing.assert_close(x, reference)  # in fp64
        assert last == pytest.approx(loss, rel=1e-12)
    start = next(decoder().parameters())
    assert not torch.allclose(start, expected[0])  # the control: training changes the weights


@pytest.mark.full
def test_a_run_goes_on_bit_for_bit_after_any_rank_was_killed(tmp_path: Path) -> None:
    whole, _ = spawn(train, 3, None)[0]
    on_two_ranks = []
    for dying in range(3):
        folder = tmp_path / str(dying)
        with pytest.raises(ParallelError, match=f"rank {dying} of 3 failed"):
            spawn(train, 3, folder, (dying, 3), timeout=20.0)
        checkpoint = checkpoints.latest(folder)
        assert checkpoint is not None
        assert checkpoint.step == 2
        shutil.copytree(folder, tmp_path / f"{dying} on two ranks")
        on_two_ranks.append(tmp_path / f"{dying} on two ranks")
        resumed, _ = spawn(train, 3, folder)[0]
        for x, reference in zip(resumed, whole, strict=True):
            assert torch.equal(x, reference)
    # on another number of ranks the state is the same bit for bit, and sums have another order
    first, second = (spawn(train, 2, folder)[0][0] for folder in on_two_ranks[:2])
    for x, y, reference in zip(first, second, whole, strict=True):
        assert torch.equal(x, y)
        torch.testing.assert_close(x, reference)


@pytest.mark.full
def test_a_checkpoint_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """A run of one process goes on over ranks and the other way round: it is the same state."""
    whole, _ = in_one_process()
    with pytest.raises(ParallelError, match="rank 1 of 2 failed"):
        spawn(train, 2, tmp_path / "ranks", (1, 3), timeout=20.0)
    shutil.copytree(tmp_path / "ranks", tmp_path / "alone")
    model = decoder()
    result = fit(model, batches(), settings(), folder=tmp_path / "alone")
    assert result.step == training_ranks.STEPS
    for p, reference in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(p.detach(), reference)
    saved = checkpoints.latest(tmp_path / "alone")
    assert saved is not None
    finished, _ = spawn(train, 3, tmp_path / "alone")[0]  # all steps are done: the state is read
    for p, x in zip(model.parameters(), finished, strict=True):
        assert torch.equal(p.detach(), x)


def test_a_process_group_must_be_there() -> None:
    with pytest.raises(ArgumentError, match=r"torch\.distributed is not initialized"):
        ContextParallel()


def test_ranks_with_other_settings_are_told() -> None:
    for text in spawn(training_ranks.other_settings, 2):
        assert "the ranks differ in the settings" in text


OPTIONS = (
    "--steps 3 --dim 32 --layers 1 --heads 4 --context 24 --batch 2 --vocab 300 --save-every 2"
)


def arguments(folder: Path, out: str) -> list[str]:
    """The arguments of `regard train`."""
    return ["train", str(folder / "text.txt"), "--out", str(folder / out), *OPTIONS.split()]


def rows_of(path: Path) -> list[list[float]]:
    """The rows of a log without its last column, the speed."""
    with path.open(encoding="utf-8") as file:
        return [[float(x) for x in row[:-1]] for row in list(csv.reader(file))[1:]]


@pytest.mark.full
def test_the_command_trains_on_the_ranks_of_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the cat sees a dog and a blue tree\n" * 400)
    assert run(arguments(tmp_path, "one")) == 0
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    more = ["--parallel", "context"]
    ranked = subprocess.run(
        [sys.executable, *start, "-m", "regard", *arguments(tmp_path, "two"), *more],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ranked.returncode == 0, ranked.stderr
    assert ranked.stdout.count("step 3  steps 3") == 1  # the first rank prints alone
    first, second = rows_of(tmp_path / "one/train.csv"), rows_of(tmp_path / "two/train.csv")
    assert first == [pytest.approx(row, rel=1e-4) for row in second]
    assert sorted(x.name for x in (tmp_path / "two/checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000003",
    ]
    capsys.readouterr()
    assert run([*arguments(tmp_path, "three"), *more]) == 2
    assert "torchrun" in capsys.readouterr().err
