"""What `regard train` does: text, tokenizer, model, training, and the folder that comes out."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from regard.errors import ArgumentError, FileError
from regard.files.lock import locked
from regard.files.write import replacing, sync, workplace
from regard.foreign import LINES, inert, told
from regard.models.families import type_of
from regard.models.save import save
from regard.models.tokenizer import Tokenizer
from regard.train import checkpoints
from regard.train.batches import Batches, validation_rows
from regard.train.corpus import read, split
from regard.train.loop import Result, fit
from regard.train.progress import show
from regard.train.settings import Settings
from regard.train.tokens import stream
from regard.train.variants import KV_HEADS, config_of, model_of, unreached


class Run:
    """One run of `regard train`, from the command's options by name to the folder it writes."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = dict(options)
        if options["attention"] is None and options["kv_heads"] is None:
            self.options["kv_heads"] = KV_HEADS  # for command.txt
        self.out: Path = options["out"]

    def run(self) -> tuple[dict[str, Any], int | None]:
        """Train and write; gives the final figures, and the signal that stopped it, if any."""
        settings, vocab = self.settings(), self.options["vocab"]
        config_of(self.options, vocab)  # refuses bad sizes before the long part
        check_device(self.options["device"])
        checkpoints.prepare(self.out, checkpoints.MARGIN)  # before the text is read
        with locked(self.out):
            return self._run(settings)

    def _run(self, settings: Settings) -> tuple[dict[str, Any], int | None]:
        """What `run` does in a folder that is its own."""
        tokenizer, tokens, validation = self.data()
        model, config = self.model(tokenizer.vocab_size)
        parameters = sum(p.numel() for p in model.parameters())
        say(f"model: {type_of(config)}, {parameters:,} parameters")
        if missed := unreached(model, config.vocab_size, self.options["context"]):
            say(
                f"note: the loss has no gradient for {', '.join(missed)}: they stay as they were drawn"
            )
        result = fit(
            model,
            self.batches(tokens),
            settings,
            validation=validation,
            folder=self.out / "checkpoints",
            log=self.out / "train.csv",
            progress=show(settings.steps),
            about=about(config),
        )
        if result.stopped_by is None:
            self.export(model, config)
        return self.figures(result, parameters, settings), result.stopped_by

    def settings(self) -> Settings:
        """The settings of the loop."""
        o = self.options
        names = (
            "steps", "lr", "warmup", "accumulate", "clip", "weight_decay", "bf16", "save_every",
        )  # fmt: skip
        return Settings(**{name: o[name] for name in names})

    def data(self) -> tuple[Tokenizer, Tensor, Tensor]:
        """The tokenizer, the training stream, and the validation rows."""
        train, held = split(read(self.options["source"]))
        file = self.out / "tokenizer.json"
        if file.exists():
            tokenizer = Tokenizer.load(file)
        else:
            tokenizer = Tokenizer.train((d.text for d in train), self.options["vocab"])
            self.write_command()
            tokenizer.save(file)
        tokens, other = stream(train, tokenizer), stream(held, tokenizer)
        say(
            f"text: {len(train)} documents, {len(tokens):,} tokens; "
            f"validation: {len(held)} documents, {len(other):,} tokens"
        )
        return tokenizer, tokens, validation_rows(other, self.options["context"], limit=128)

    def batches(self, tokens: Tensor) -> Batches:
        """The training batches."""
        o = self.options
        names = ("batch", "context", "seed", "repeat")
        first = o["repeat_first"] * o["accumulate"]
        return Batches(tokens, repeat_first=first, **{name: o[name] for name in names})

    def model(self, vocab_size: int) -> tuple[nn.Module, Any]:
        """A fresh model of that shape, and its config."""
        config = config_of(self.options, vocab_size)
        return model_of(config, self.options["seed"]).to(self.options["device"]), config

    def export(self, model: nn.Module, config: Any) -> None:
        """The final weights and config, each put in place whole."""
        try:
            with workplace(self.out / "final") as temporary:
                save(model.cpu(), config, temporary, getattr(torch, self.options["dtype"]))
                for file in sorted(
                    temporary.iterdir(), reverse=True
                ):  # the weights before the config
                    sync(file)
                    file.replace(self.out / file.name)
                sync(self.out)
        except (OSError, SafetensorError) as error:
            raise FileError(
                f"{self.out}: cannot write the weights: {told(error)}; the checkpoints are intact: free some space, "
                "and go on with --resume"
            ) from error

    def write_command(self) -> None:
        """command.txt: the command with every option written out, and what it ran on."""
        parts = ["regard", "train", self.options["source"]]
        for name, value in self.options.items():
            flag = "--" + name.replace("_", "-")
            if name == "source" or value is None or value is False:
                continue
            for one in value if isinstance(value, list) else [value]:
                parts += [flag] if one is True else [flag, str(one)]
        versions = f"# Python {platform.python_version()}, torch {torch.__version__}"
        with replacing(self.out / "command.txt") as place:
            place.write_text(f"{shlex.join(parts)}\n{versions}\n", encoding="utf-8")

    def figures(self, result: Result, parameters: int, settings: Settings) -> dict[str, Any]:
        """What the command prints at the end."""
        return {
            "step": result.step,
            "steps": settings.steps,
            "loss": round(result.loss, 4),
            "validation": None if result.validation is None else round(result.validation, 4),
            "parameters": parameters,
            "out": str(self.out),
        }


def check_device(device: str) -> None:
    """Refuse a device that is not there.

    Raises:
        ArgumentError: with torch's reason.

    >>> check_device("cpu")
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ArgumentError(f"device {device!r} cannot be used: {reason}; use cpu") from error


def about(config: Any) -> dict[str, Any]:
    """What a model is, as plain values: a run goes on with the same only."""
    found: dict[str, Any] = json.loads(
        json.dumps({"model_type": type_of(config), **asdict(config)})
    )
    return found


def say(text: str) -> None:
    """A line for the person who waits, on standard error."""
    print(inert(text, keep=LINES), file=sys.stderr, flush=True)
