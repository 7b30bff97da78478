"""`regard train` as a process of its own, killed by SIGKILL and resumed: the same bits, and one
interval lost at most.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import regard
from regard.cli.app import run
from regard.errors import ArgumentError
from regard.train import Batches, checkpoints, fit
from tests.train.parts import TOKENS, Small, batches, digest, settings

STEPS, EVERY = 54, 9
OPTIONS = "--batch 2 --context 16 --dim 16 --layers 1 --heads 2 --vocab 270 --warmup 5"
OPTIONS += f" --steps {STEPS} --save-every {EVERY} --repeat 0.3 --threads 1"
COMMON = OPTIONS.split()
OPTIONS += " --attention gated_delta_net --position learned --accumulate 2 --bf16 --clip 0.7"
MIXED = [*OPTIONS.split(), "--weight-decay", "0.3"]
SHORT = [*MIXED, "--steps", "3", "--save-every", "3"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"Line {i} of a text, written {i * i} times.\n" for i in range(200)))
    return file


def command(text: Path, out: Path, options: list[str], *more: str) -> list[str]:
    return ["train", str(text), "--out", str(out), *options, *more]


def digest_of(out: Path) -> str:
    return digest(load_file(out / "model.safetensors"))


def rows(out: Path) -> list[list[str]]:
    """The log without its last column, the speed."""
    with (out / "train.csv").open(encoding="utf-8") as file:
        return [row[:-1] for row in csv.reader(file)]


def steps_saved(out: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))


def start_and_kill(arguments: list[str], out: Path, after: int) -> None:
    """Start the command, and send SIGKILL a little after its checkpoint of a step is there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "regard", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not any(step >= after for step in steps_saved(out)):
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.full
def test_a_killed_process_goes_on_to_the_same_bits(text: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(command(text, whole, MIXED)) == 0
    start_and_kill(command(text, cut, MIXED), cut, after=2 * EVERY)
    assert not (cut / "model.safetensors").exists()
    kept = checkpoints.latest(cut / "checkpoints")
    assert kept is not None
    assert kept.step >= 2 * EVERY
    logged = [int(row[0]) for row in rows(cut)[1:] if row[0].isdigit()]
    assert max(logged, default=0) <= kept.step + EVERY  # one interval is lost at most
    # what a kill can leave behind: a row of a step that is done again, half of another, a folder
    # that was being written
    with (cut / "train.csv").open("a", encoding="utf-8") as file:
        file.write(f"{STEPS - 1},9.9,,0.1,0.2,3,4\n{STEPS},9.")
    (cut / "checkpoints" / ".writing-step-00000099-1").mkdir()
    assert run(command(text, cut, MIXED, "--resume")) == 0
    assert digest_of(cut) == digest_of(whole)
    assert rows(cut) == rows(whole)
    assert [row[0] for row in rows(whole)] == ["step", "50", str(STEPS)]
    assert len(steps_saved(cut)) == 2
    loaded = regard.load(cut)
    assert loaded.config.attention == "gated_delta_net"
    prompt = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded(prompt), regard.load(whole)(prompt))


def test_control_another_seed_gives_other_bits(text: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    short = [*COMMON, "--steps", "4"]
    assert run(command(text, one, short)) == 0
    assert run(command(text, two, short, "--seed", "1")) == 0
    assert digest_of(one) != digest_of(two)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "max_beta=2.0"], "'max_beta': 2.0}, and the model to resume has"),
        (["--position", "none"], "position is 'none', and the model to resume has 'learned'"),
        (["--clip", "0.9"], "clip is 0.9, and the run to resume has 0.7"),
        (["--heads", "4", "--set", "value_heads=4"], "num_attention_heads is 4, and the model to"),
        (["--attention", "delta_net"], "attention is 'delta_net', and the model to resume has"),
    ],
)
def test_another_model_is_not_resumed(
    text: Path, stopped: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    before = steps_saved(stopped)
    assert run(command(text, stopped, SHORT, *more, "--resume")) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert steps_saved(stopped) == before


@pytest.fixture(scope="module")
def stopped(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stopped") / "out"
    assert run(command(text, out, SHORT)) == 0
    return out


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("number", [3, 7, 14])
@pytest.mark.parametrize("accumulate, bf16", [(3, False), (2, True)])
def test_resumed_in_the_middle_with_accumulation_and_autocast(
    tmp_path: Path, number: int, accumulate: int, bf16: bool
) -> None:
    """The kill comes as an exception from the data, between two batches of one step."""

    class Deadly(Batches):
        left = number * accumulate - 1

        def __next__(self) -> Tensor:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return super().__next__()

    def go_on(model: Small, folder: str, kind: type[Batches] = Batches) -> None:
        source = kind(TOKENS, batch=4, context=6, seed=3, repeat=0.3, repeat_first=5 * accumulate)
        log = tmp_path / folder / "train.csv"
        fit(model, source, chosen, folder=tmp_path / folder, log=log, metadata={"kind": "small"})

    # steps are saved between two rows of the log, and while the data still warms up
    chosen = settings(accumulate=accumulate, bf16=bf16, log_every=3, save_every=4, steps=16)
    whole, first, second = Small(), Small(), Small()
    torch.manual_seed(7)
    go_on(whole, "a")
    torch.manual_seed(7)
    with pytest.raises(KeyboardInterrupt):
        go_on(first, "b", Deadly)
    kept = checkpoints.latest(tmp_path / "b")
    assert (0 if kept is None else kept.step) == (number - 1) // 4 * 4
    torch.manual_seed(7 if kept is None else 99)  # the first begins anew
    go_on(second, "b")
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert digest(dict(second.named_parameters())) == digest(dict(whole.named_parameters()))


def test_what_is_said_of_the_model_is_compared(tmp_path: Path) -> None:
    fit(Small(), batches(), settings(steps=2), folder=tmp_path, metadata={"kind": "a", "n": [1]})
    with pytest.raises(ArgumentError, match="kind is 'b', and the model to resume has 'a'; repeat"):
        fit(
            Small(), batches(), settings(steps=2), folder=tmp_path, metadata={"kind": "b", "n": [1]}
        )
    with pytest.raises(ArgumentError, match="kind is None, and the model to resume has 'a'"):
        fit(Small(), batches(), settings(steps=2), folder=tmp_path)
    fit(Small(), batches(), settings(steps=2), folder=tmp_path, metadata={"kind": "a", "n": [1]})
    other = tmp_path / "other"
    fit(Small(), batches(), settings(steps=2), folder=other)  # a checkpoint that says nothing
    fit(Small(), batches(), settings(steps=2), folder=other, metadata={"kind": "a"})
