"""`regard train`, from a text to a folder that loads, interrupted in every way."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from regard.cli.app import run
from regard.models.tokenizer import Tokenizer
from regard.ops import tokenwise
from tests.cli.command import Said

SMALL = shlex.split(
    "--steps 12 --batch 4 --context 16 --dim 16 --layers 2 --heads 4 --kv-heads 2 --vocab 280 "
    "--warmup 2 --save-every 5 --repeat 0.2"
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "a text.txt"
    file.write_text("".join(f"Line {i} of a text, written {i * i} times.\n" for i in range(200)))
    return file


def words(text: Path, out: Path, *more: str) -> list[str]:
    return ["train", str(text), "--out", str(out), *SMALL, *more]


def train(text: Path, out: Path, *more: str) -> int:
    return run(words(text, out, *more))


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error as one line."""
    return " ".join(capsys.readouterr().err.split())


def equal(a: Path, b: Path) -> bool:
    one, two = weights(a), weights(b)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_it_writes_a_model_and_nothing_else(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert train(text, out, "--json") == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert (figures["step"], figures["steps"], figures["out"]) == (12, 12, str(out))
    assert 4 < figures["validation"] < 6
    assert "step 12/12" in captured.err
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints",
        "command.txt",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "train.csv",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a text.txt", "out"]
    assert Tokenizer.load(out).vocab_size == 280
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 280
    assert sum(t.numel() for t in weights(out).values()) == figures["parameters"]
    assert (out / "train.csv").read_text().splitlines()[-1].startswith("12,")


@pytest.mark.full
def test_the_command_is_written_out_and_can_be_run_again(text: Path, tmp_path: Path) -> None:
    assert train(text, tmp_path / "a") == 0
    line, versions = (tmp_path / "a" / "command.txt").read_text().splitlines()
    written = shlex.split(line)
    assert written[:3] == ["regard", "train", str(text)]
    assert versions.startswith("# Python 3.")
    written[written.index("--out") + 1] = str(tmp_path / "b")
    assert run(written[1:]) == 0
    assert equal(tmp_path / "a", tmp_path / "b")
    assert train(text, tmp_path / "c", "--seed", "1") == 0
    assert not equal(tmp_path / "a", tmp_path / "c")


def test_half_precision_weights(text: Path, tmp_path: Path) -> None:
    assert train(text, tmp_path / "a", "--dtype", "float16") == 0
    assert {t.dtype for t in weights(tmp_path / "a").values()} == {torch.float16}


KILLED = """
import os, sys
from regard.cli.app import run
from regard.train import Batches

batch, number = map(int, sys.argv[1:3])
draw, drawn = Batches.__next__, []

def deadly(self):
    drawn.append(1)
    if len(drawn) == batch:
        os.kill(os.getpid(), number)
    return draw(self)

Batches.__next__ = deadly
sys.exit(run(sys.argv[3:]))
"""
"""A process that gets a signal as it draws its n-th batch. It is not forked: torch refuses to
differentiate behind a fork where it has a thread for another device.
"""


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("is_slow", [False, True])
def test_bf16_is_said_to_be_slow_where_it_is(
    is_slow: bool,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenwise, "is_slow_in_torch", lambda dtype: is_slow)
    assert train(text, tmp_path / "out", "--steps", "1", "--bf16") == 0
    assert ("without --bf16" in capsys.readouterr().err) == is_slow


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_and_resumed_gives_the_same_weights(
    text: Path, tmp_path: Path, number: signal.Signals
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(text, whole) == 0
    killed = [sys.executable, "-c", KILLED, "9", str(int(number)), *words(text, cut)]
    status = subprocess.run(killed, capture_output=True, check=False).returncode
    assert status == (-9 if number == signal.SIGKILL else 128 + number)
    newest = max(path.name for path in (cut / "checkpoints").iterdir())
    assert newest == f"step-{5 if number == signal.SIGKILL else 9:08d}"
    assert not (cut / "model.safetensors").exists()
    assert train(text, cut, "--resume") == 0
    assert equal(whole, cut)
    logs = [
        [line.rsplit(",", 1)[0] for line in (out / "train.csv").read_text().splitlines()]
        for out in (whole, cut)
    ]
    assert logs[0] == logs[1]


def test_resume_without_a_checkpoint_begins(text: Path, tmp_path: Path) -> None:
    assert train(text, tmp_path / "a", "--resume") == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--heads", "16", "--kv-heads", "4"], "dim 16 / heads 16 is the width of a head and must"),
        (["--heads", "8", "--kv-heads", "3"], "3"),
        (["--repeat", "2"], "less than or equal to 1"),
        (["--lr", "0"], "lr is 0.0; it must be positive and finite"),
        (["--vocab", "100"], "greater than or equal to 257"),
        (["--context", "100000"], "a row needs context"),
        (["--clip", "0"], "clip is 0.0; it must be positive and finite"),
        (["--weight-decay", "-1"], "'--weight-decay': weight_decay is -1.0; it must be 0 or more"),
        (["--window", "4"], "--window needs a mechanism of the catalogue; give one"),
        (["--attention", "luong"], "luong attends to a second sequence"),
        (["--attention", "moba", "--set", "topk=1", "--position", "none"], "moba does not support"),
        (["--attention", "gqa", "--set", "bass=3"], "gqa has no option bass; did you mean 'base'?"),
        (["--nonsense"], "No such option"),
    ],
)
def test_wrong_usage_is_2_and_writes_no_model(
    text: Path, tmp_path: Path, refused: Said, more: list[str], message: str
) -> None:
    assert message in refused("train", text, "--out", tmp_path / "out", *SMALL, *more)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def configured(out: Path) -> dict[str, Any]:
    """What the config.json of a run says of the model."""
    found: dict[str, Any] = json.loads((out / "config.json").read_text())
    return found


def test_a_mechanism_of_the_catalogue_by_flags(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--attention", "gqa", "--position", "alibi", "--window", "6", "--set", "head_dim=8"]
    assert train(text, out, *flags) == 0
    said = configured(out)
    wanted = {"model_type": "regard", "attention": "gqa", "position": "alibi", "window": 6}
    assert said.items() >= wanted.items()
    assert said["attention_options"] == {"groups": 2, "head_dim": 8}
    assert "model: regard" in capsys.readouterr().err
    assert run(["generate", "Line 3", "--model", str(out), "--max-tokens", "2"]) == 0
    line = (out / "command.txt").read_text().splitlines()[0]
    assert "--attention gqa --position alibi --window 6 --set head_dim=8" in line
    plain = tmp_path / "plain"
    assert train(text, plain) == 0
    assert configured(plain)["model_type"] == "llama"
    assert "--attention" not in (plain / "command.txt").read_text()


def test_what_the_loss_does_not_train_is_said(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = shlex.split("--set topk=4 --set index_heads=2 --set index_dim=4 --set rotary_dim=4")
    assert train(text, tmp_path / "out", "--attention", "dsa", *sizes) == 0
    assert "note: the loss has no gradient for layers.0.attention" in capsys.readouterr().err


TOML = """
[model]
attention = "sliding_window"
kv-heads = 1
options = {window = 5, base = 500.0}
tie = true
[train]
steps = 99
weight_decay = 0.25
[data]
source = "%s"
"""


def test_a_file_of_options_under_the_flags(text: Path, tmp_path: Path) -> None:
    file, out, again = tmp_path / "run.toml", tmp_path / "out", tmp_path / "again"
    file.write_text(TOML % text)
    at = SMALL.index("--kv-heads")
    flags = [*SMALL[:at], *SMALL[at + 2 :], "--config", str(file), "--set", "window=7", "--no-tie"]
    assert run(["train", "--out", str(out), *flags]) == 0
    said = configured(out)
    assert said["attention_options"] == {"base": 500.0, "window": 7, "groups": 1}
    assert (said["num_hidden_layers"], said["tie_word_embeddings"]) == (2, False)
    line = (out / "command.txt").read_text().splitlines()[0]
    assert "--steps 12" in line
    assert "--weight-decay 0.25" in line
    assert "--config" not in line
    written = shlex.split(line.replace(str(out), str(again)))
    assert run(written[1:]) == 0
    assert equal(out, again)


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ("[model]\nheds = 3", [], "[model] has no heds; did you mean 'heads'?"),
        ("[model]\nlayers = 0", [], "layers is '0': "),
        ("[train]\nsteps = 1.5", [], "steps is '1.5': "),
        ("[train]\nbf16 = 3", [], "bf16 is '3'"),
        ("[model]\nattention = 'mqa'", ["--kv-heads", "2"], "--kv-heads is not an option of mqa"),
        ("[model]\nattention = 'mqa'\noptions.bass = 3", [], "did you mean 'base'?"),
        ("[model", [], "is not TOML"),
    ],
)
def test_a_file_that_is_refused(
    text: Path, tmp_path: Path, refused: Said, content: str, more: list[str], message: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(content)
    given = ("train", text, "--out", tmp_path / "out", "--config", file, *more)
    assert message in refused(*given, code=1 if "TOML" in message else 2)
    assert not (tmp_path / "out").exists()


def test_options_of_another_mechanism_stay_in_the_file(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\nattention = 'chunked'\noptions.chunk = 4")
    assert train(text, tmp_path / "out", "--config", str(file), "--attention", "retention") == 0
    assert configured(tmp_path / "out")["attention_options"] == {"groups": 2}


def test_a_folder_in_use_and_a_file_are_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert train(text, out) == 2
    assert "is not empty; choose another folder, or continue" in shown(capsys)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    assert train(text, text) == 2
    assert "is a file; give a folder" in shown(capsys)


def test_failures_are_1(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "none.txt", tmp_path / "out") == 1
    assert "none.txt is missing" in shown(capsys)
    assert train(text, text / "under a file") == 1
    assert "cannot create the folder" in shown(capsys)
    assert train(text, tmp_path / "nan", "--lr", "1e38") == 1
    assert "the weights were not updated" in shown(capsys)


def test_resume_with_another_text_is_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(text, tmp_path / "a") == 0
    text.write_text(text.read_text() + "And more.\n" * 40)
    assert train(text, tmp_path / "a", "--resume") == 2
    assert "other tokens" in shown(capsys)
