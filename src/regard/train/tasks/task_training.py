"""`regard train --task`: train a model on a task, evaluate it, and write a folder of results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from rich.text import Text
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor, nn

from regard.argument_checks import check_usable_device
from regard.did_you_mean import suggest
from regard.errors import ArgumentError, FileError
from regard.files.atomic_write import folder_locked, write_user_file
from regard.files.reading import checked_path, read_json
from regard.files.safetensors_files import load_tensors
from regard.models import recurrent, transformer
from regard.models.families import family, model_type_of
from regard.models.rnn import CELLS
from regard.nn.blocks.blocks import PreNorm
from regard.process_state import set_seed
from regard.train import checkpoints
from regard.train.loop import TrainResult, fit
from regard.train.losses import AnswerLoss, Seq2SeqLoss
from regard.train.pretraining import make_config, print_status, write_command
from regard.train.progress import make_progress
from regard.train.settings import Settings
from regard.train.tasks import find_task
from regard.train.tasks.report import (
    TaskReport,
    evaluate_task,
    read_accuracy,
    terminal_lines,
    write_report,
)
from regard.train.tasks.task import Task, TaskBatches, pad
from regard.units import plural
from regard.untrusted_text import error_text, short_repr
from regard.view.charts import Accuracy

VALIDATION_EXAMPLES = 128
"""The number of examples on which the validation loss is measured during training."""

RECIPE_FILE = "task.json"
"""The file with the task, the model and its recipe."""
WEIGHTS_FILE = "model.safetensors"


class TaskTrainingRun:
    """One run of `regard train --task`, from its options to the folder that it writes."""

    def __init__(self, options: dict[str, object]) -> None:
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
        self.recipe: Recipe = recipe(self.task, self.name).with_overrides(self.options)
        self.report: TaskReport | None = None
        if self.options["beams"] != 1 and self.task.kind == "causal":
            raise ArgumentError(
                f"beams is {self.options['beams']}; task {self.task.name!r} predicts single "
                "tokens, so beams must be 1"
            )

    def run(self) -> tuple[dict[str, object], int | None]:
        """Train and evaluate the model, and write the report."""
        check_usable_device(self.options["device"])
        settings, model, options = self.settings(), self.model(), self.options
        loss = (Seq2SeqLoss if self.task.kind == "seq2seq" else AnswerLoss)(self.recipe.smoothing)
        beside = [read_accuracy(Path(folder)) for folder in options["beside"]]
        batches = TaskBatches(self.task, batch=self.recipe.batch, seed=options["seed"])
        with ExitStack() as stack:
            self.start(stack)
            return self._run(settings, model, loss, batches, beside)

    def _run(
        self,
        settings: Settings,
        model: nn.Module,
        loss: Seq2SeqLoss | AnswerLoss,
        batches: TaskBatches,
        beside: Sequence[Accuracy],
    ) -> tuple[dict[str, object], int | None]:
        """Train and evaluate the model, and write the report, in a folder that is locked."""
        options = self.options
        parameters = sum(p.numel() for p in model.parameters())
        print_status(
            f"{self.task.name}: {self.task.description}\n"
            f"model: {self.name}, {plural(parameters, 'parameter')}"
        )
        result = fit(
            model,
            batches,
            settings,
            validation=pad(
                self.task, self.task.examples("validation", VALIDATION_EXAMPLES, "loss")
            ),
            loss=loss,
            folder=self.out / "checkpoints",
            log=self.out / "train.csv",
            progress=make_progress(settings.steps),
        )
        if result.stopped_by is None:
            try:
                with write_user_file(self.out / WEIGHTS_FILE) as path:
                    save_model(model.cpu(), str(path))
            except SafetensorError as error:
                raise FileError(
                    f"{self.out / WEIGHTS_FILE} cannot be written: {error_text(error)}"
                ) from error
            self.report = evaluate_task(
                model, self.task, self.name, examples=options["examples"], beams=options["beams"]
            )
            write_report(self.report, self.out, self.facts(result, parameters), beside)
        return self.figures(result, parameters), result.stopped_by

    def settings(self) -> Settings:
        """Return the settings of the training loop."""
        recipe = self.recipe
        names = ("accumulate", "bf16", "save_every", "clip", "weight_decay")
        overrides = {name: self.options[name] for name in names if name in self.options}
        return Settings(
            steps=recipe.steps,
            lr=recipe.lr,
            warmup=recipe.warmup,
            **{"weight_decay": 0.01} | overrides,
        )

    def model(self) -> nn.Module:
        """Return a model with random weights."""
        set_seed(self.options["seed"])  # a command may change the global random state
        return build(self.task, self.name, self.recipe).to(self.options["device"])

    def start(self, stack: ExitStack) -> None:
        """Create and lock the folder, and write the command and the recipe."""
        sizes = asdict(self.recipe) | {"set": list(self.recipe.set)}
        content = {"task": self.task.name, "model": self.name, "sizes": sizes}
        file = self.out / RECIPE_FILE
        checkpoints.check_free_space(self.out, checkpoints.EXTRA_BYTES)
        try:
            stack.enter_context(folder_locked(self.out))
            if not file.exists():
                flags = {"task": self.task.name, "model": self.name} | asdict(self.recipe)
                write_command(self.out, (), flags | self.options)
                with write_user_file(file) as path:
                    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            saved = read_json(file)
        except OSError as error:
            raise FileError(
                f"{self.out}: cannot write to this folder: {error_text(error)}; choose another"
            ) from error
        if saved != content:
            different = [name for name in content if saved.get(name) != content[name]]
            raise ArgumentError(
                f"{file} belongs to a run with another {' and '.join(different)}; "
                "repeat its options, or choose another folder"
            )

    def facts(self, result: TrainResult, parameters: int) -> dict[str, str]:
        """Return the texts that are shown under the title of the page, by label."""
        return {
            "model": self.name,
            "parameters": f"{parameters:,}",
            "steps": f"{result.step:,} of {self.recipe.batch} examples",
            "seed": str(self.options["seed"]),
            "trained on sources of up to": plural(self.task.lengths[1], "token"),
            "search": "greedy" if self.options["beams"] == 1 else f"{self.options['beams']} beams",
        }

    def figures(self, result: TrainResult, parameters: int) -> dict[str, object]:
        """Return the numbers that the command prints at the end."""
        figures: dict[str, object] = {
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
                figures[f"right_{split}"] = round(self.report.share(split), 4)
            figures["accuracy"] = [
                {
                    "split": b.split,
                    "low": b.low,
                    "high": b.high,
                    "examples": b.examples,
                    "right": b.correct,
                    "share": round(b.share, 4),
                }
                for b in self.report.bins
            ]
        return figures

    def lines(self) -> Iterator[Text]:
        """Yield the report for a terminal; nothing if the run was stopped."""
        if self.report is not None:
            yield from terminal_lines(self.report)


def load(folder: str | Path) -> tuple[nn.Module, Task]:
    """Load a model that `regard train --task` trained."""
    path = Path(folder)
    try:
        saved = read_json(checked_path(path, RECIPE_FILE))
        task = find_task(saved["task"])
        weights, _ = load_tensors(checked_path(path, WEIGHTS_FILE))
        with torch.device("meta"):  # compare the sizes with the weights before allocating memory
            _check_shapes(build(task, saved["model"], _recipe(saved["sizes"])), weights)
        model = build(task, saved["model"], _recipe(saved["sizes"]))
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
            f"{path}: cannot load a trained task: {error_text(error)}; give a folder that "
            "`regard train --task` wrote"
        ) from error
    return model.eval(), task


def _recipe(sizes: object) -> Recipe:
    """Return the recipe of a saved file."""
    if not isinstance(sizes, dict):
        raise ArgumentError(f"sizes is {short_repr(sizes)}; it must be an object", argument="sizes")
    for name in ("dim", "hidden", "heads", "layers"):
        most = 128 if name == "layers" else 1 << 14
        size = sizes.get(name, 1)
        if type(size) is not int or not 1 <= size <= most:
            raise ArgumentError(f"{name} is {short_repr(size)}; it must be from 1 to {most}")
    return Recipe().with_overrides(sizes)


def _check_shapes(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Check the names and shapes of stored tensors; those that share memory are stored once."""
    model_tensors = model.state_dict(keep_vars=True)
    stored = {id(model_tensors[name]) for name in weights if name in model_tensors}
    for name in sorted(model_tensors.keys() | weights.keys()):
        model_shape = tuple(model_tensors[name].shape) if name in model_tensors else None
        stored_shape = tuple(weights[name].shape) if name in weights else None
        if model_shape != stored_shape and not (
            stored_shape is None and id(model_tensors[name]) in stored
        ):
            raise ArgumentError(
                f"{short_repr(name)} is {stored_shape} in the file and {model_shape} in the model"
            )


ATTENTIONS = ("bahdanau", "luong")
SEQ2SEQ_MODELS = (
    *CELLS,
    *(f"{cell}+{attention}" for cell in CELLS for attention in ATTENTIONS),
    "transformer",
)
"""Models for "seq2seq" tasks, which map a source to a target."""

CAUSAL_MODELS = ("decoder", *CELLS)
"""Models for "causal" tasks, which predict the next token."""

ATTENTION_OPTIONS = ("attention", "kv_heads", "position", "window", "set")
"""Attributes of a recipe that choose the attention of model "decoder"."""


@dataclass(frozen=True)
class Recipe:
    """The sizes of a model, and how it is trained."""

    dim: int = 128
    hidden: int = 256
    layers: int = 2
    heads: int = 4
    dropout: float = 0.0
    steps: int = 1000
    batch: int = 64
    lr: float = 2e-3
    warmup: int = 100
    smoothing: float = 0.0
    attention: str | None = None
    kv_heads: int | None = None
    position: str | None = None
    window: int | None = None
    set: tuple[str, ...] = ()

    def with_overrides(self, overrides: Mapping[str, Any]) -> Recipe:
        """Return the recipe with other values, for those that are not None."""
        known = {f.name for f in fields(self)}
        values = {k: v for k, v in overrides.items() if k in known and v is not None}
        return replace(self, **values | ({"set": tuple(values["set"])} if "set" in values else {}))


def models_for(task: Task) -> tuple[str, ...]:
    """Return the names of the models that can learn a task."""
    return SEQ2SEQ_MODELS if task.kind == "seq2seq" else CAUSAL_MODELS


def check_model(task: Task, name: str) -> None:
    """Check that a model can learn a task."""
    allowed = models_for(task)
    if name in allowed:
        return
    if name in (*SEQ2SEQ_MODELS, *CAUSAL_MODELS):
        reason = (
            "predicts the next token of one sequence and has no source for an encoder"
            if task.kind == "causal"
            else "maps a source to a target, and a model of one sequence does not separate them"
        )
        raise ArgumentError(
            f"task {task.name!r} {reason}: model {name!r} cannot learn it; choose "
            f"{', '.join(allowed)}"
        )
    hint = suggest(name, allowed, most=2, otherwise=f"; choose {', '.join(allowed)}")
    raise ArgumentError(f"there is no model {name!r}{hint}")


def recipe(task: Task, name: str) -> Recipe:
    """Return sizes and steps with which a model learns a task in minutes on two cores."""
    check_model(task, name)
    if name == "transformer":
        return Recipe(hidden=256, lr=1.5e-3, warmup=200, steps=2000)
    if name == "decoder":
        return Recipe(hidden=352, lr=3e-3, steps=1000)
    steps = 1000 if name.endswith("bahdanau") else 2000 if name.endswith("luong") else 4000
    return Recipe(dim=64, hidden=128, layers=1, lr=3e-3, steps=steps)


def build(task: Task, name: str, sizes: Recipe) -> nn.Module:
    """Return a model for a task with random weights, from torch's global random state."""
    check_model(task, name)
    for option in ATTENTION_OPTIONS:
        if name != "decoder" and getattr(sizes, option):
            raise ArgumentError(
                f"--{option.replace('_', '-')} is an option of model 'decoder', and the model is "
                f"{name!r}; leave it out"
            )
    V = len(task.vocabulary)
    if name == "transformer":
        return transformer(
            V,
            sizes.dim,
            sizes.heads,
            sizes.layers,
            hidden=sizes.hidden,
            residual=PreNorm,
            dropout=sizes.dropout,
        )
    if name == "decoder":
        return _decoder(task, V, sizes)
    cell, _, attention = name.partition("+")
    if task.kind == "causal":
        return RecurrentLanguageModel(cell, V, sizes.dim, sizes.hidden, sizes.layers)
    return recurrent(
        V, sizes.dim, sizes.hidden, cell=cell, layers=sizes.layers, attention=attention or None
    )


def _decoder(task: Task, vocabulary: int, sizes: Recipe) -> nn.Module:
    """Return a Llama with as many key/value heads as heads, or a decoder with `sizes.attention`."""
    options = asdict(sizes) | {"context": task.lengths[1], "tie": False}
    if sizes.attention is None:
        if sizes.dim % (2 * sizes.heads):
            raise ArgumentError(
                f"dim {sizes.dim} / heads {sizes.heads} is the dim of a head and must be even"
            )
        options["kv_heads"] = sizes.kv_heads or sizes.heads
    config = make_config(options, vocabulary)
    model_family = family(model_type_of(config))
    assert model_family is not None
    return model_family.build(config)


class RecurrentLanguageModel(nn.Module):
    """A recurrent language model without attention: ids -> embedding -> recurrent network ->
    logits.

    >>> import torch
    >>> RecurrentLanguageModel("gru", 11, 8, 16, 1)(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 11])
    """

    def __init__(self, cell: str, vocabulary: int, dim: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.network = CELLS[cell](dim, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Return the logits `[B, T, V]` of the token after each of `ids`, `[B, T]`."""
        logits: Tensor = self.head(self.network(self.embedding(ids))[0])
        return logits
