"""What `regard train` does: text, tokenizer, model, training, and the folder that comes out."""

from __future__ import annotations

import platform
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import FileError
from regard.models.save import save
from regard.models.families.llama import Config, build
from regard.models.tokenizer import Tokenizer
from regard.train.batches import Batches, validation_rows
from regard.train.corpus import read, split
from regard.train.loop import Result, fit
from regard.train.progress import show
from regard.train.settings import Settings
from regard.train.tokens import stream


class Run:
    """One run of `regard train`, from the command's options by name to the folder it writes."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.out: Path = options["out"]

    def run(self) -> tuple[dict[str, Any], int | None]:
        """Train and write; gives the final figures, and the signal that stopped it, if any."""
        settings, vocab = self.settings(), self.options["vocab"]
        self.config(vocab)  # refuses bad sizes before the long part
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(
                f"{self.out}: cannot make the folder: {error.strerror or error}"
            ) from error
        tokenizer, tokens, validation = self.data()
        model, config = self.model(tokenizer.vocab_size)
        parameters = sum(p.numel() for p in model.parameters())
        say(f"model: {parameters:,} parameters")
        result = fit(
            model,
            self.batches(tokens),
            settings,
            validation=validation,
            folder=self.out / "checkpoints",
            log=self.out / "train.csv",
            progress=show(settings.steps),
        )
        if result.stopped_by is None:
            self.export(model, config)
        return self.figures(result, parameters, settings), result.stopped_by

    def settings(self) -> Settings:
        """The settings of the loop."""
        o = self.options
        return Settings(
            steps=o["steps"],
            lr=o["lr"],
            warmup=o["warmup"],
            accumulate=o["accumulate"],
            bf16=o["bf16"],
            save_every=o["save_every"],
        )

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

    def config(self, vocab_size: int) -> Config:
        """The shape of the model."""
        o = self.options
        return Config(
            vocab_size=vocab_size,
            hidden_size=o["dim"],
            intermediate_size=o["hidden"] or -(-o["dim"] * 8 // 3 // 32) * 32,
            num_hidden_layers=o["layers"],
            num_attention_heads=o["heads"],
            num_key_value_heads=o["kv_heads"],
            head_dim=o["dim"] // o["heads"],
            max_position_embeddings=o["context"],
            tie_word_embeddings=o["tie"],
        )

    def model(self, vocab_size: int) -> tuple[nn.Module, Config]:
        """A fresh model of that shape."""
        torch.manual_seed(self.options["seed"])  # the weights; this process is ours
        config = self.config(vocab_size)
        return build(config).to(self.options["device"]), config

    def export(self, model: nn.Module, config: Config) -> None:
        """The final weights and config, each put in place whole."""
        temporary = self.out / ".writing-final"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save(model.cpu(), config, temporary, getattr(torch, self.options["dtype"]))
        for file in sorted(temporary.iterdir(), reverse=True):  # the weights before the config
            file.replace(self.out / file.name)
        temporary.rmdir()

    def write_command(self) -> None:
        """command.txt: the command with every option written out, and what it ran on."""
        parts = ["regard", "train", self.options["source"]]
        for name, value in self.options.items():
            flag = "--" + name.replace("_", "-")
            if name == "source" or value is None or value is False:
                continue
            parts += [flag] if value is True else [flag, str(value)]
        versions = f"# Python {platform.python_version()}, torch {torch.__version__}"
        (self.out / "command.txt").write_text(
            f"{shlex.join(parts)}\n{versions}\n", encoding="utf-8"
        )

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


def say(text: str) -> None:
    """A line for the person who waits, on standard error."""
    print(text, file=sys.stderr, flush=True)
