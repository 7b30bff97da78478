"""`regard train --task`: what it writes, refuses, resumes, and what the pages show."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import shlex
import signal
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from safetensors.torch import load_file

from regard import masks
from regard.cli import train as train_module
from regard.cli.app import run
from regard.errors import ArgumentError, FileError
from regard.train import Settings, fit
from regard.train.losses import Seq2SeqLoss
from regard.train.tasks import TASKS
from regard.train.tasks.evaluate import answer_examples
from regard.train.tasks.report import read_accuracy
from regard.train.tasks.task import TaskBatches
from regard.train.tasks.task_training import TaskTrainingRun, build, load

SMALL = [
    "--task",
    "copy",
    "--model",
    "gru+luong",
    "--steps",
    "8",
    "--batch",
    "4",
    "--dim",
    "8",
    "--hidden",
    "8",
    "--warmup",
    "2",
    "--save-every",
    "3",
    "--examples",
    "6",
    "--smoothing",
    "0.1",
]


def train(out: Path, *more: str) -> int:
    return run(["train", "--out", str(out), *SMALL, *more])


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error, out of the box that it may be drawn in."""
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "copy"
    with redirect_stdout(StringIO()) as said:
        assert train(out) == 0
    (out.parent / "said.txt").write_text(said.getvalue(), "utf-8")
    return out


@pytest.mark.full
def test_it_writes_what_it_says(made: Path) -> None:
    assert sorted(path.name for path in made.iterdir()) == [
        "accuracy.csv",
        "accuracy.svg",
        "alignment.svg",
        "checkpoints",
        "command.txt",
        "model.safetensors",
        "report.html",
        "task.json",
        "train.csv",
    ]
    assert (made / "train.csv").read_text().splitlines()[-1].startswith("8,")


@pytest.mark.full
def test_the_figures_are_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "a", "--json", "--beams", "2") == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["task"], figures["model"], figures["step"]) == ("copy", "gru+luong", 8)
    with (tmp_path / "a" / "accuracy.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["shortest"]) for row in rows] == [b["low"] for b in figures["accuracy"]]
    for split in ("validation", "longer"):
        inside = [row for row in rows if row["split"] == split]
        right, examples = (sum(int(row[name]) for row in inside) for name in ("right", "examples"))
        assert examples == 6
        assert figures[f"right_{split}"] == round(right / examples, 4)
        assert all(float(r["low"]) <= float(r["share"]) <= float(r["high"]) for r in inside)
    assert figures["parameters"] == sum(t.numel() for t in weights(tmp_path / "a").values())


def test_the_trained_model_loads_and_says_the_same(made: Path) -> None:
    model, task = load(made)
    assert task is TASKS["copy"]
    assert not model.training
    held = model.state_dict()
    assert all(torch.equal(held[name], x) for name, x in weights(made).items())
    series = read_accuracy(made)
    found = answer_examples(model, task, task.examples("validation", 6, 0))
    assert sum(p.examples for p in series.bins) == 12
    right = sum(round(p.share * p.examples) for p in series.bins if p.high <= 20)
    assert sum(o.correct for o in found) == right


@pytest.mark.full
def test_the_command_can_be_run_again(made: Path, tmp_path: Path) -> None:
    words = shlex.split((made / "command.txt").read_text().splitlines()[0])
    assert words[:2] == ["regard", "train"]
    words[words.index("--out") + 1] = str(tmp_path / "b")
    assert run(words[1:]) == 0
    one, two = weights(made), weights(tmp_path / "b")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.full
def test_stopped_and_resumed_gives_the_same_weights(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, left = TaskBatches.__next__, [5]

    def deadly(self: TaskBatches):
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGTERM)
        return draw(self)

    monkeypatch.setattr(TaskBatches, "__next__", deadly)
    out = tmp_path / "cut"
    assert train(out) == 128 + signal.SIGTERM
    assert "continue with the same command and --resume" in shown(capsys)
    assert not (out / "report.html").exists()
    assert train(out, "--resume") == 0
    assert all(torch.equal(x, weights(out)[name]) for name, x in weights(made).items())
    logs = [
        [line.rsplit(",", 1)[0] for line in (f / "train.csv").read_text().splitlines()]
        for f in (made, out)
    ]
    assert logs[0] == logs[1]


def test_resume_with_other_settings_is_refused(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = weights(made)
    for change in (
        ["--dim", "10"],
        ["--model", "gru+bahdanau"],
        ["--task", "dates"],
        ["--smoothing", "0.2"],
    ):
        assert train(made, "--resume", *change) == 2
        assert "belongs to a run with another" in shown(capsys)
    assert train(made, "--resume", "--seed", "3") == 2
    assert "belongs to another task, batch size or seed" in shown(capsys)
    assert all(torch.equal(x, weights(made)[name]) for name, x in before.items())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--task", "coppy"], "there is no task 'coppy'; did you mean 'copy'"),
        (["--model", "lstm+bahdano"], "there is no model 'lstm+bahdano'; did you mean"),
        (["--model", "decoder"], "model 'decoder' cannot learn it; choose rnn"),
        (["--task", "mqar"], "has no source for an encoder: model 'gru+luong' cannot learn it"),
        (["--vocab", "300"], "'--vocab': applies to training on text"),
        (["--repeat", "0.5"], "'--repeat': applies to training on text"),
        (["python-docs"], "'SOURCE': applies to training on text"),
        (["--beams", "0"], "greater than or equal to 1"),
        (["--task", "mqar", "--model", "lstm", "--beams", "2"], "so beams must be 1"),
        (["--attention", "gqa"], "--attention is an option of model 'decoder'"),
        (["--device", "nowhere"], "device 'nowhere' cannot be used"),
        (["--lr", "0"], "lr is 0.0; it must be positive"),
        (["--hidden", "0"], "greater than or equal to 1"),
    ],
)
def test_wrong_usage_is_2_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert train(tmp_path / "out", *more) == 2
    assert message in shown(capsys)
    assert not (tmp_path / "out").exists()


def test_what_belongs_to_tasks_needs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in (
        ["--model", "lstm"],
        ["--beams", "2"],
        ["--smoothing", "0.1"],
        ["--beside", "x"],
    ):
        assert run(["train", "--out", str(tmp_path / "out"), *option]) == 2
        assert f"'{option[0]}': applies only to tasks; give --task NAME too" in shown(capsys)
    assert run(["train", "--out", str(tmp_path / "out"), "--task", "copy"]) == 2
    assert "'--model': a task needs a model: lstm" in shown(capsys)
    assert not (tmp_path / "out").exists()


def test_the_list_of_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--task", "list"]) == 0
    said = capsys.readouterr().out
    for task in TASKS.values():
        assert f"{task.name:<15} {task.description}" in said
    assert "--model decoder, rnn, gru, lstm" in said
    assert set(TASKS) == set(train_module.TASKS)


@pytest.mark.full
def test_the_terminal_shows_bars_and_where_it_looks(made: Path) -> None:
    said = (made.parent / "said.txt").read_text("utf-8")
    assert "longer than in training" in said
    assert "alignment (decoder; the answer is wrong)" in said
    assert re.search(r" \d+ - \d+ .*% \( *\d+ to +\d+\)", said)
    assert "right_validation" in said
    assert "accuracy" not in said
    assert max(map(len, said.splitlines()[:-1])) <= 100


@pytest.mark.full
def test_another_run_stands_beside(made: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "b", "--beside", str(made), "--seed", "1") == 0
    other = weights(tmp_path / "b")
    assert any(not torch.equal(x, other[name]) for name, x in weights(made).items())
    drawn = (tmp_path / "b" / "accuracy.svg").read_text("utf-8")
    assert drawn.count("<title>copy, ") == drawn.count("<title>gru+luong, ") > 0
    assert ">copy</text>" in drawn
    assert ">gru+luong</text>" in drawn


def test_a_table_that_is_none_is_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"accuracy.csv is missing; give a folder that `regard"):
        read_accuracy(tmp_path)
    (tmp_path / "accuracy.csv").write_text("split,shortest\nvalidation,x\n")
    with pytest.raises(FileError, match=r"accuracy.csv: not a table with columns split, shortest"):
        read_accuracy(tmp_path)
    assert train(tmp_path / "out", "--beside", str(tmp_path)) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_run_is_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"cannot load a trained task: .*task.json is missing"):
        load(tmp_path)
    content = json.loads((made / "task.json").read_text())
    (tmp_path / "task.json").write_text(json.dumps(content | {"model": "lstm"}))
    (tmp_path / "model.safetensors").write_bytes((made / "model.safetensors").read_bytes())
    with pytest.raises(FileError, match=r"cannot load a trained task: .* in the file and None in"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(FileError, match="cannot load a trained task"):
        load(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="file: cannot create the folder: File exists; choose"):
        TaskTrainingRun(
            {"out": tmp_path / "file", "task": "copy", "model": "lstm", "dim": 4, "hidden": 4}
        ).run()


@pytest.mark.full
def test_a_mechanism_of_the_catalogue_does_a_task(tmp_path: Path) -> None:
    small = [
        "--steps",
        "2",
        "--batch",
        "2",
        "--dim",
        "8",
        "--heads",
        "2",
        "--hidden",
        "8",
        "--examples",
        "2",
    ]
    chosen = [
        "--attention",
        "sliding_window",
        "--kv-heads",
        "1",
        "--set",
        "window=9",
        "--set",
        "base=500.0",
    ]
    out = tmp_path / "mqar"
    assert (
        run(["train", "--task", "mqar", "--model", "decoder", "--out", str(out), *small, *chosen])
        == 0
    )
    model, _ = load(out)
    assert model.layers[0].attention.mask == masks.Causal() & masks.Window(9)  # type: ignore[union-attr,index]
    assert shlex.join(chosen) in (out / "command.txt").read_text()
    assert (out / "alignment.svg").exists()


def test_options_from_python() -> None:
    run = TaskTrainingRun(
        {"out": "x", "task": "copy", "model": "lstm", "steps": 3, "dim": None, "clip": 0.5}
    )
    assert (run.recipe.steps, run.recipe.dim, run.settings().clip) == (3, 64, 0.5)
    assert list(run.lines()) == []
    with pytest.raises(ArgumentError, match="predicts single tokens, so beams must be 1"):
        TaskTrainingRun({"out": "x", "task": "mqar", "model": "lstm", "beams": 3})


def test_the_log_of_the_run_is_that_of_fit(made: Path) -> None:
    """The command does what these three lines do."""
    model = TaskTrainingRun(
        {"out": "x", "task": "copy", "model": "gru+luong", "dim": 8, "hidden": 8}
    ).model()
    settings = Settings(steps=8, lr=3e-3, warmup=2, weight_decay=0.01)
    result = fit(model, TaskBatches(TASKS["copy"], batch=4), settings, loss=Seq2SeqLoss(0.1))
    last = list(csv.DictReader((made / "train.csv").read_text().splitlines()))[-1]
    assert result.step == int(last["step"])
    assert all(torch.equal(model.state_dict()[name], x) for name, x in weights(made).items())
    assert build is not None


def test_the_page_runs_no_script_and_its_style_is_known(made: Path) -> None:
    page = (made / "report.html").read_text("utf-8")
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    sha = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{sha}'" in page
    assert "<script" not in page
    assert not re.search(r"\sstyle=|http(?!://www.w3.org/2000/svg)s?://", page)
    assert page.count("<svg") == 1 + page.count("<figcaption>")
    assert "copy: gru+luong" in page


@pytest.mark.parametrize("name", ["accuracy.svg", "alignment.svg"])
def test_drawings_are_xml(made: Path, name: str) -> None:
    root = ET.fromstring((made / name).read_text("utf-8"))
    assert root.tag.endswith("svg")
    wide, high = (float(x) for x in root.attrib["viewBox"].split()[2:])
    for node in root.iter():
        for key, most in (("x", wide), ("cx", wide), ("y", high), ("cy", high)):
            assert 0 <= float(node.attrib.get(key, 0)) <= most, (node.tag, node.attrib)
