"""What `regard train` does: text, tokenizer, model and training."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Mapping
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
from regard.models.assembly.mechanism import decoders, entry_of
from regard.models.families import family, llama, regard, type_of
from regard.models.save import save
from regard.models.tokenizer import Tokenizer
from regard.nn.variants import VARIANTS
from regard.nn.variants.registry import names, parse, required
from regard.process import seeded
from regard.train import checkpoints
from regard.train.batches import Batches, stream, validation_rows
from regard.train.corpus import read, split
from regard.train.loop import Result, fit
from regard.train.losses import next_token_loss
from regard.train.progress import show
from regard.train.settings import Settings

KV_HEADS = 2
"""Key/value heads where they are not given."""
_ONLY = {"position": "--position", "window": "--window", "set": "--set"}


def config_of(options: Mapping[str, Any], vocab_size: int) -> Any:
    """The config of a family, from the command's options by name.

    Without `attention`, a Llama. With it, a decoder of our own: `kv_heads` is the mechanism's
    option `groups`, `window` is its own option where it has one, and `set` has the others as
    name=value.

    Raises:
        ArgumentError: a flag that the mechanism cannot take, by its name; or what the family's
            config refuses.

    >>> options = dict(dim=32, layers=2, heads=4, hidden=None, context=16, tie=False)
    >>> options |= {"attention": "gqa", "kv_heads": 1, "window": 8}
    >>> config_of(options, 257).attention_options
    {'groups': 1}
    """
    o = options
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": o["dim"],
        "intermediate_size": o["hidden"] or -(-o["dim"] * 8 // 3 // 32) * 32,
        "num_hidden_layers": o["layers"],
        "num_attention_heads": o["heads"],
        "max_position_embeddings": o["context"],
        "tie_word_embeddings": o["tie"],
    }
    if o.get("attention") is None:
        for name, flag in _ONLY.items():
            if o.get(name):
                raise ArgumentError(
                    f"{flag} is for a mechanism of the catalogue; name one, such as --attention gqa"
                )
        groups = o.get("kv_heads") or KV_HEADS
        return llama.Config(**sizes, num_key_value_heads=groups, head_dim=o["dim"] // o["heads"])
    chosen, window = _options(o)
    position = o.get("position") or "catalogue"
    return regard.Config(
        **sizes,
        attention=o["attention"],
        attention_options=chosen,
        position=position,
        window=window,
    )


def model_of(config: Any, seed: int) -> nn.Module:
    """A fresh model of a config; the global random state is set to the seed.

    >>> config = config_of(dict(dim=32, layers=1, heads=4, hidden=None, context=16, tie=False), 257)
    >>> sum(p.numel() for p in model_of(config, 0).parameters())
    28832
    """
    found = family(type_of(config))
    assert found is not None
    torch.manual_seed(seed)
    return found.build(config)


def unreached(model: nn.Module, vocab_size: int, length: int) -> tuple[str, ...]:
    """The parameters that the loss on the next token has no gradient for: they stay as they were
    drawn.

    They choose what others read, such as the indexer of "dsa", which its paper trains by another
    loss.

    >>> config = config_of(dict(dim=32, layers=1, heads=4, hidden=None, context=16, tie=False), 257)
    >>> unreached(model_of(config, 0), 257, 8)
    ()
    """
    device = next(model.parameters()).device
    with seeded(None, [device] if device.type == "cuda" else ()):
        rows = torch.arange(length + 1, device=device)[None] % vocab_size
        torch.autograd.backward(next_token_loss(model, rows))
    missed = tuple(name for name, p in model.named_parameters() if p.grad is None)
    model.zero_grad(set_to_none=True)
    return missed


def _options(o: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """The mechanism's own options, and the window that is put over it."""
    name = o["attention"]
    entry = entry_of(name)
    own, chosen = names(entry), parse(o.get("set") or (), entry)
    for key, flag, value in (
        ("groups", "--kv-heads", o.get("kv_heads")),
        ("window", "--window", o.get("window")),
    ):
        if value is not None and key in chosen and chosen[key] != value:
            raise ArgumentError(f"{flag} is {value} and --set {key}={chosen[key]}; keep one")
        if value is not None and key in own:
            chosen[key] = value
        elif value is not None and key == "groups":
            able = [n for n in decoders() if key in names(VARIANTS[n])]
            raise ArgumentError(
                f"{flag} does not go with {name}, whose key/value heads are fixed; it goes with "
                f"{', '.join(able)}"
            )
    if "groups" in required(entry):
        chosen.setdefault("groups", KV_HEADS)
    if missing := [n for n in required(entry) if n not in chosen]:
        raise ArgumentError(
            f"{name} needs {', '.join(missing)}: give {' '.join(f'--set {n}=...' for n in missing)}"
        )
    return chosen, None if "window" in own else o.get("window")


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
                f"note: the loss has no gradient for {', '.join(missed)}: they stay as they were "
                "drawn"
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
            "steps",
            "lr",
            "warmup",
            "accumulate",
            "clip",
            "weight_decay",
            "bf16",
            "save_every",
        )
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
                f"{self.out}: cannot write the weights: {told(error)}; the checkpoints are "
                "intact: free some space, "
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
