"""What `regard train --task` does: examples, model, training, questions, and the folder that comes
out.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor, nn

from regard.errors import ArgumentError, FileError
from regard.files.lock import locked
from regard.files.reading import load as read_tensors
from regard.files.regular import inside
from regard.files.strict import read_json
from regard.files.write import replacing
from regard.foreign import LINES, inert, shown, told
from regard.train import checkpoints
from regard.train.loop import Result, fit
from regard.train.losses import AnswerLoss, PairLoss
from regard.train.pretraining import check_device
from regard.train.progress import show
from regard.train.settings import Settings
from regard.train.tasks import find_task
from regard.train.tasks.report import Report, examine, lines, read_series, write_report
from regard.train.tasks.task import Made, Task, pad
from regard.train.tasks.task_models import Recipe, build, recipe
from regard.view.charts import Accuracy

VALIDATION = 128
"""Examples on which the loss is measured during training."""

RECIPE = "task.json"
WEIGHTS = "model.safetensors"


class TaskRun:
    """One run of `regard train --task`, from the command's options by name to the folder it writes.

    Args:
        options: out, task and model; what else is given and is not None takes the place of the
            recipe's: the fields of `Recipe`, accumulate, seed, save_every, bf16, device, examples,
            beams, beside.

    Raises:
        ArgumentError: there is no such task or model, the model cannot do the task, or a number is
            out of range.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options: dict[str, Any] = {
            "seed": 0,
            "device": "cpu",
            "examples": 400,
            "beams": 1,
            "beside": (),
        }
        self.options |= {name: value for name, value in options.items() if value is not None}
        self.out = Path(self.options["out"])
        self.task: Task = find_task(self.options["task"])
        self.name: str = self.options["model"]
        self.recipe: Recipe = recipe(self.task, self.name).with_(self.options)
        self.report: Report | None = None
        if self.options["beams"] != 1 and self.task.kind == "rows":
            raise ArgumentError(
                f"task {self.task.name!r} asks for single tokens and searches nothing; leave "
                "beams at 1"
            )

    def run(self) -> tuple[dict[str, Any], int | None]:
        """Train, examine and write; gives the final figures, and the signal that stopped it, if
        any.
        """
        check_device(self.options["device"])
        settings, model, o = self.settings(), self.model(), self.options
        loss = (PairLoss if self.task.kind == "pairs" else AnswerLoss)(self.recipe.smoothing)
        beside = [read_series(Path(folder)) for folder in o["beside"]]
        made = Made(self.task, batch=self.recipe.batch, seed=o["seed"])
        with ExitStack() as held:
            self.start(held)
            return self._run(settings, model, loss, made, beside)

    def _run(
        self,
        settings: Settings,
        model: nn.Module,
        loss: PairLoss | AnswerLoss,
        made: Made,
        beside: Sequence[Accuracy],
    ) -> tuple[dict[str, Any], int | None]:
        """What `run` does in a folder that is its own."""
        o = self.options
        parameters = sum(p.numel() for p in model.parameters())
        say(
            f"{self.task.name}: {self.task.sentence}\nmodel: {self.name}, {parameters:,} parameters"
        )
        result = fit(
            model,
            made,
            settings,
            validation=pad(self.task, self.task.examples("validation", VALIDATION, "loss")),
            loss=loss,
            folder=self.out / "checkpoints",
            log=self.out / "train.csv",
            progress=show(settings.steps),
        )
        if result.stopped_by is None:
            try:
                with replacing(self.out / WEIGHTS) as whole:
                    save_model(model.cpu(), str(whole))
            except SafetensorError as error:
                raise FileError(f"{self.out / WEIGHTS} cannot be written: {told(error)}") from error
            self.report = examine(
                model, self.task, self.name, examples=o["examples"], beams=o["beams"]
            )
            write_report(self.report, self.out, self.facts(result, parameters), beside)
        return self.figures(result, parameters), result.stopped_by

    def settings(self) -> Settings:
        """The settings of the loop."""
        r = self.recipe
        names = ("accumulate", "bf16", "save_every", "clip", "weight_decay")
        given = {name: self.options[name] for name in names if name in self.options}
        return Settings(steps=r.steps, lr=r.lr, warmup=r.warmup, **{"weight_decay": 0.01} | given)

    def model(self) -> nn.Module:
        """A fresh model."""
        torch.manual_seed(self.options["seed"])  # the weights; this process is ours
        return build(self.task, self.name, self.recipe).to(self.options["device"])

    def start(self, held: ExitStack) -> None:
        """Make the folder, with the command and the recipe, and lock it; refuses a folder of
        another run.
        """
        sizes = asdict(self.recipe) | {"set": list(self.recipe.set)}
        content = {"task": self.task.name, "model": self.name, "sizes": sizes}
        file = self.out / RECIPE
        checkpoints.prepare(self.out, checkpoints.MARGIN)
        try:
            held.enter_context(locked(self.out))
            if not file.exists():
                with replacing(self.out / "command.txt") as place:
                    place.write_text(self.command(), encoding="utf-8")
                with replacing(file) as place:
                    place.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            known = read_json(file)
        except OSError as error:
            raise FileError(f"{self.out}: cannot start a run there: {told(error)}") from error
        if known != content:
            differ = [name for name in content if known.get(name) != content[name]]
            raise ArgumentError(
                f"{file} is of a run with another {' and '.join(differ)}; "
                "repeat its options, or choose another folder"
            )

    def command(self) -> str:
        """The command with every option written out, and what it ran on."""
        given = {"task": self.task.name, "model": self.name} | asdict(self.recipe) | self.options
        parts = ["regard", "train"]
        for name, value in given.items():
            flag = "--" + name.replace("_", "-")
            values = value if isinstance(value, (list, tuple)) else [value]
            for one in values:
                if one is not False and one is not None:
                    parts += [flag] if one is True else [flag, str(one)]
        return (
            f"{shlex.join(parts)}\n# Python {platform.python_version()}, torch "
            f"{torch.__version__}\n"
        )

    def facts(self, result: Result, parameters: int) -> dict[str, str]:
        """What stands beside the title of the page."""
        return {
            "model": self.name,
            "parameters": f"{parameters:,}",
            "steps": f"{result.step:,} of {self.recipe.batch} examples",
            "seed": str(self.options["seed"]),
            "trained on sources of up to": f"{self.task.lengths[1]} tokens",
            "search": "greedy" if self.options["beams"] == 1 else f"{self.options['beams']} beams",
        }

    def figures(self, result: Result, parameters: int) -> dict[str, Any]:
        """What the command prints at the end."""
        found: dict[str, Any] = {
            "task": self.task.name,
            "model": self.name,
            "step": result.step,
            "steps": self.recipe.steps,
            "loss": round(result.loss, 4),
            "validation": None if result.validation is None else round(result.validation, 4),
            "parameters": parameters,
            "out": str(self.out),
        }
        if self.report is not None:
            for split in ("validation", "longer"):
                found[f"right_{split}"] = round(self.report.share(split), 4)
            found["accuracy"] = [asdict(b) | {"share": round(b.share, 4)} for b in self.report.bins]
        return found

    def lines(self) -> Iterator[Text]:
        """The report for a terminal; nothing where the run was stopped."""
        if self.report is not None:
            yield from lines(self.report)


def load(folder: str | Path) -> tuple[nn.Module, Task]:
    """A model that `TaskRun` trained, in evaluation mode, and its task.

    Raises:
        FileError: the folder lacks a file of such a run, or one of them is damaged.
    """
    path = Path(folder)
    try:
        held = read_json(inside(path, RECIPE))
        task = find_task(held["task"])
        weights, _ = read_tensors(inside(path, WEIGHTS))
        with torch.device("meta"):  # sizes are believed when the weights have them
            _check_shapes(build(task, held["model"], _recipe(held["sizes"])), weights)
        model = build(task, held["model"], _recipe(held["sizes"]))
        model.load_state_dict(dict(weights), strict=False)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        AttributeError,
        OverflowError,
        MemoryError,
        ZeroDivisionError,
    ) as error:
        raise FileError(
            f"{path}: cannot load a trained task: {told(error)}; give a folder that `regard train "
            "--task` wrote"
        ) from error
    return model.eval(), task


def _recipe(sizes: Any) -> Recipe:
    """The recipe of a file.

    Raises:
        ArgumentError: it is no object, or a size is none.
    """
    if not isinstance(sizes, dict):
        raise ArgumentError(f"sizes is {shown(sizes)}; it must be an object")
    for name in ("dim", "hidden", "heads", "layers"):
        most = 128 if name == "layers" else 1 << 14
        found = sizes.get(name, 1)
        if type(found) is not int or not 1 <= found <= most:
            raise ArgumentError(f"{name} is {shown(found)}; it must be from 1 to {most}")
    return Recipe().with_(sizes)


def _check_shapes(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """What is stored is what a model has; of weights that share memory one is stored.

    Raises:
        ArgumentError: one is missing, unexpected, or of another shape.
    """
    own = model.state_dict(keep_vars=True)
    stored = {id(own[name]) for name in weights if name in own}
    for name in sorted(own.keys() | weights.keys()):
        here = tuple(own[name].shape) if name in own else None
        there = tuple(weights[name].shape) if name in weights else None
        if here != there and not (there is None and id(own[name]) in stored):
            raise ArgumentError(f"{shown(name)} is {there} in the file and {here} in the model")


def say(text: str) -> None:
    """A line for the person who waits, on standard error."""
    print(inert(text, keep=LINES), file=sys.stderr, flush=True)
