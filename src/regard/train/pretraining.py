"""`regard train` without `--task`: train a tokenizer and a language model on a text."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from regard.argument_checks import check_usable_device
from regard.configs.base import ModelConfig
from regard.configs.llama import LlamaConfig
from regard.configs.suggested_sizes import DecoderSizes
from regard.errors import ArgumentError, FileError
from regard.files.atomic_write import folder_locked, sync_to_disk, temporary_folder, write_user_file
from regard.models.assembly.catalogue_mixer import decoder_variants, find_decoder_variant
from regard.models.families import family, model_type_of, regard
from regard.models.load import load
from regard.models.model import Model
from regard.models.save import save
from regard.models.tokenizer import Tokenizer
from regard.nn.variants import VARIANTS
from regard.nn.variants.registry import (
    named_options,
    option_names,
    required_options,
    sized_options,
    written,
)
from regard.nn.weights import stored_modules
from regard.process_state import seeded, set_seed
from regard.train import checkpoints
from regard.train.batches import Batches, token_stream, validation_rows
from regard.train.context_parallel import ContextParallel
from regard.train.corpus import load_documents, split_documents
from regard.train.loop import TrainResult, fit
from regard.train.losses import next_token_loss
from regard.train.progress import make_progress
from regard.train.settings import Settings
from regard.units import plural
from regard.untrusted_text import MULTILINE, error_text, escape_controls

VOCAB = 4096
"""The default number of tokens of a new tokenizer."""
MODEL_OPTIONS = (
    "dim",
    "layers",
    "heads",
    "kv_heads",
    "hidden",
    "tie",
    "attention",
    "position",
    "window",
    "set",
)
"""The options of a new model; `--start-from` names a model that has them already."""
_FLAGS_WITH_ATTENTION = {"position": "--position", "window": "--window", "set": "--set"}
"""The options that are allowed only together with `--attention`."""


def make_config(options: Mapping[str, Any], vocab_size: int) -> Any:
    """Return the config of a model from the options of `regard train`.

    That is a Llama, or with `attention` a decoder with that mechanism, whose options `groups` and
    `window` are `kv_heads` and `window`, and the others those of `set`, as "name=value".
    """
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": options["dim"],
        "intermediate_size": options["hidden"] or -(-options["dim"] * 8 // 3 // 32) * 32,
        "num_hidden_layers": options["layers"],
        "num_attention_heads": options["heads"],
        "max_position_embeddings": options["context"],
        "tie_word_embeddings": options["tie"],
    }
    if options.get("attention") is None:
        for name, flag in _FLAGS_WITH_ATTENTION.items():
            if options.get(name):
                raise ArgumentError(
                    f"{flag} needs a mechanism of the catalogue; give one, such as --attention gqa"
                )
        D, groups = options["dim"] // options["heads"], _sizes(options).groups
        return LlamaConfig(**sizes, num_key_value_heads=groups, head_dim=D)
    name, attention_options, window = _attention_options(options)
    position = options.get("position") or "catalogue"
    return regard.Config(
        **sizes,
        attention=name,
        attention_options=attention_options,
        position=position,
        window=window,
    )


def make_model(config: Any, seed: int) -> nn.Module:
    """Return a model of a config with random weights; this seeds the global random state."""
    model_family = family(model_type_of(config))
    set_seed(seed)
    return model_family.build(config)


def parameters_without_gradient(model: nn.Module, vocab_size: int, length: int) -> tuple[str, ...]:
    """Return the parameters without a gradient of the loss, which keep their initial values.

    An example is the indexer of "dsa": it selects keys, and its paper trains it separately.
    """
    device = next(model.parameters()).device
    with seeded(None, [device] if device.type == "cuda" else ()):
        rows = torch.arange(length + 1, device=device)[None] % vocab_size
        torch.autograd.backward(next_token_loss(model, rows))
    untrained = tuple(name for name, p in model.named_parameters() if p.grad is None)
    model.zero_grad(set_to_none=True)
    return untrained


def _sizes(options: Mapping[str, Any]) -> DecoderSizes:
    """Return the sizes from which those of a mechanism follow that are not given."""
    return DecoderSizes.of(options["dim"], options["heads"], options.get("kv_heads"))


def _attention_options(options: Mapping[str, Any]) -> tuple[str, dict[str, object], int | None]:
    """Return the mechanism, its own options, and the window that the mask adds to it."""
    settings = options.get("set") or ()
    entry, chosen = named_options(options["attention"], settings, find_decoder_variant)
    name, known_options = entry.name, option_names(entry)
    for key, flag, value in (
        ("groups", "--kv-heads", options.get("kv_heads")),
        ("window", "--window", options.get("window")),
    ):
        if value is not None and key in chosen and chosen[key] != value:
            raise ArgumentError(
                f"{flag} is {value} and --set {key}={chosen[key]}; give one of the two"
            )
        if value is not None and key in known_options:
            chosen[key] = value
        elif value is not None and key == "groups":
            supporting = [n for n in decoder_variants() if key in option_names(VARIANTS[n])]
            raise ArgumentError(
                f"{flag} is not an option of {name}, whose number of key/value heads is fixed; "
                f"mechanisms that have it are {', '.join(supporting)}"
            )
    chosen = sized_options(entry, chosen, _sizes(options))
    if missing_options := [n for n in required_options(entry) if n not in chosen]:
        raise ArgumentError(
            f"{name} needs {', '.join(missing_options)}: give "
            f"{' '.join(f'--set {n}=...' for n in missing_options)}"
        )
    return name, chosen, None if "window" in known_options else options.get("window")


class PretrainingRun:
    """One run of `regard train`, from the options of the command to the folder that it writes."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = dict(options)
        self.start: Model | None = None  # the model that --start-from names
        if options.get("start_from"):
            for name in MODEL_OPTIONS:
                self.options[name] = None  # the model has them
        elif options["attention"] is None and options["kv_heads"] is None:
            self.options["kv_heads"] = _sizes(options).groups  # for command.txt
        self.out: Path = options["out"]
        # the ranks of the run; None is one process
        self.parallel = ContextParallel.from_environment() if options.get("parallel") else None

    def run(self) -> tuple[dict[str, object], int | None]:
        """Train the model and write its files."""
        settings, vocab = self.settings(), self.options["vocab"]
        if self.options.get("start_from"):
            self.start = load_starting_model(self.options["start_from"])
            self.options["vocab"] = vocab or self.start.config.vocab_size
        else:
            self.options["vocab"] = vocab or VOCAB
            make_config(self.options, self.options["vocab"])  # refuse wrong sizes before the text
        check_usable_device(self.options["device"])
        checkpoints.check_free_space(self.out, checkpoints.EXTRA_BYTES)  # before the text is read
        if self.parallel is not None and not self.parallel.is_first:
            return self._run(settings)
        with folder_locked(self.out):
            return self._run(settings)

    def _run(self, settings: Settings) -> tuple[dict[str, object], int | None]:
        """Train the model and write its files, in a folder that is locked."""
        tokenizer, tokens, validation = self.data_of_ranks()
        model, config = self.model(tokenizer.vocab_size)
        parameters = sum(p.numel() for p in model.parameters())
        self.print_status(f"model: {model_type_of(config)}, {plural(parameters, 'parameter')}")
        if self.options["attention"] is not None:
            self.print_status(f"attention: {written(config.attention, config.attention_options)}")
        if untrained := parameters_without_gradient(
            model, config.vocab_size, self.options["context"]
        ):
            self.print_status(
                f"note: the loss has no gradient for {', '.join(untrained)}; they keep their "
                "initial values"
            )
        result = fit(
            model,
            self.batches(tokens),
            settings,
            validation=validation,
            loss=torch.compile(next_token_loss) if self.options.get("compile") else None,
            folder=self.out / "checkpoints",
            log=self.out / "train.csv",
            progress=make_progress(settings.steps) if self.writes else None,
            metadata=config_metadata(config),
            parallel=self.parallel,
        )
        if result.stopped_by is None and self.writes:
            self.export(model, config)
        return self.figures(result, parameters, settings), result.stopped_by

    def settings(self) -> Settings:
        """Return the settings of the training loop."""
        options = self.options
        option_names = (
            "steps",
            "lr",
            "warmup",
            "accumulate",
            "clip",
            "weight_decay",
            "bf16",
            "save_every",
        )
        return Settings(**{name: options[name] for name in option_names})

    @property
    def writes(self) -> bool:
        """Whether this process writes the files."""
        return self.parallel is None or self.parallel.is_first

    def print_status(self, text: str) -> None:
        """Print a line on standard error, from the process that writes the files."""
        if self.writes:
            print_status(text)

    def data_of_ranks(self) -> tuple[Tokenizer, Tensor, Tensor]:
        """Return the data; the first rank makes the tokenizer, and the others read it."""
        if self.parallel is None:
            return self.data()
        if self.parallel.is_first:
            data = self.data()
            self.parallel.wait()
            return data
        self.parallel.wait()
        return self.data()

    def data(self) -> tuple[Tokenizer, Tensor, Tensor]:
        """Return the tokenizer, the training stream `[N]`, and the validation rows."""
        train, validation = split_documents(load_documents(self.options["source"]))
        file = self.out / "tokenizer.json"
        if file.exists():
            tokenizer = Tokenizer.load(file)
        else:
            texts, vocab = (d.text for d in train), self.options["vocab"]
            if self.start is None:
                tokenizer = Tokenizer.train(texts, vocab)
            else:
                assert self.start.tokenizer is not None  # `load_starting_model` checks it
                tokenizer = extended_tokenizer(self.start.tokenizer, texts, vocab)
            self.write_command()
            tokenizer.save(file)
        tokens, validation_tokens = (
            token_stream(train, tokenizer),
            token_stream(validation, tokenizer),
        )
        self.print_status(
            f"text: {plural(len(train), 'document')}, {plural(len(tokens), 'token')}; validation: "
            f"{plural(len(validation), 'document')}, {plural(len(validation_tokens), 'token')}"
        )
        return (
            tokenizer,
            tokens,
            validation_rows(validation_tokens, self.options["context"], limit=128),
        )

    def batches(self, tokens: Tensor) -> Batches:
        """Return the batches of the training stream."""
        options = self.options
        option_names = ("batch", "context", "seed", "repeat")
        repeat_first = options["repeat_first"] * options["accumulate"]
        return Batches(
            tokens, repeat_first=repeat_first, **{name: options[name] for name in option_names}
        )

    def model(self, vocab_size: int) -> tuple[nn.Module, Any]:
        """Return the model to train and its config: random weights, or those of `--start-from`."""
        if self.start is not None:
            network, its_config = extended_model(self.start, vocab_size, self.options["seed"])
            return network.to(self.options["device"]), its_config
        config = make_config(self.options, vocab_size)
        return make_model(config, self.options["seed"]).to(self.options["device"]), config

    def export(self, model: nn.Module, config: object) -> None:
        """Write the final weights and the config, each under its name only when complete."""
        try:
            with temporary_folder(self.out / "final") as temporary:
                save(model.cpu(), config, temporary, getattr(torch, self.options["dtype"]))
                # the weights are replaced before the config
                for file in sorted(temporary.iterdir(), reverse=True):
                    sync_to_disk(file)
                    file.replace(self.out / file.name)
                sync_to_disk(self.out)
        except (OSError, SafetensorError) as error:
            raise FileError(
                f"{self.out}: cannot write the weights: {error_text(error)}; the checkpoints "
                "are intact: free some space and continue with --resume"
            ) from error

    def write_command(self) -> None:
        """Write the command with every option and the versions to command.txt."""
        flags = {name: value for name, value in self.options.items() if name != "source"}
        write_command(self.out, [self.options["source"]], flags)

    def figures(
        self, result: TrainResult, parameters: int, settings: Settings
    ) -> dict[str, object]:
        """Return the numbers that the command prints at the end."""
        return {
            "step": result.step,
            "steps": settings.steps,
            "loss": round(result.loss, 4),
            "validation": None if result.validation is None else round(result.validation, 4),
            "parameters": parameters,
            "out": str(self.out),
        }


def config_metadata(config: Any) -> dict[str, object]:
    """Return a config as plain values; a run resumes only with equal values."""
    metadata: dict[str, object] = json.loads(
        json.dumps({"model_type": model_type_of(config), **asdict(config)})
    )
    return metadata


def print_status(text: str) -> None:
    """Print lines on standard error."""
    print(escape_controls(text, keep=MULTILINE), file=sys.stderr, flush=True)


def write_command(folder: Path, arguments: Sequence[str], options: Mapping[str, Any]) -> None:
    """Write the command with every option, and the versions of Python and torch."""
    parts = ["regard", "train", *arguments]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if item is not False and item is not None:
                parts += [flag] if item is True else [flag, str(item)]
    versions = f"# Python {platform.python_version()}, torch {torch.__version__}"
    with write_user_file(folder / "command.txt") as path:
        path.write_text(f"{shlex.join(parts)}\n{versions}\n", encoding="utf-8")


def load_starting_model(source: str | Path) -> Model:
    """Load a decoder in float32, to train it further."""
    model = load(source, dtype=torch.float32)
    if not isinstance(model, Model) or model.tokenizer is None:
        raise ArgumentError(
            f"{source} cannot be trained further: only a decoder with a tokenizer can; give the "
            "folder of another model"
        )
    return model


def extended_tokenizer(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a model's tokenizer, with Chinese characters of texts up to `vocab_size`."""
    if vocab_size < tokenizer.vocab_size:
        raise ArgumentError(
            f"vocab is {vocab_size} and the model has {plural(tokenizer.vocab_size, 'token')}, "
            f"which it keeps; give {tokenizer.vocab_size} or more"
        )
    if vocab_size == tokenizer.vocab_size:
        return tokenizer
    return tokenizer.with_chinese(texts, vocab_size)


def extended_model(model: Model, vocab_size: int, seed: int) -> tuple[nn.Module, ModelConfig]:
    """Return a copy of a model with more tokens, and its config.

    Old weights are copied, dequantized; rows of new tokens are normally distributed, with the mean
    and deviation of the old rows. The global random state is set to the seed.
    """
    config = replace(model.config, vocab_size=vocab_size)
    model_family = family(model_type_of(config))
    assert model_family is not None  # it was loaded
    set_seed(seed)
    network = model_family.build(config)
    old = model.decoder.state_dict()
    old |= {name: record.dequantize() for name, record in stored_modules(model.decoder)}
    new = network.state_dict()
    network.load_state_dict({name: _extended(old[name], new[name]) for name in new})
    return network, config


def _extended(old: Tensor, new: Tensor) -> Tensor:
    """Return the old tensor with rows added until it has the shape of the new one."""
    if old.shape == new.shape:
        return old
    rows = torch.randn(new.shape[0] - old.shape[0], *old.shape[1:], dtype=old.dtype)
    return torch.cat([old, rows * old.std(0) + old.mean(0)])
