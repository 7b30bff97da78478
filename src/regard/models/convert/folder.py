"""Converting a checkpoint folder into another, and a report of what changed.

The new folder is written whole or not at all, with everything of the source that is not a weight.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, cast, get_args

import torch
from jaxtyping import Int
from safetensors import SafetensorError
from torch import Tensor

from regard.configs.base import Raw
from regard.configs.reader import IGNORED_KEYS
from regard.errors import ArgumentError, FileError
from regard.files.regular import present
from regard.files.strict import read_json
from regard.files.write import sync, workplace
from regard.foreign import told
from regard.models.convert.attention_maps import Checkpoint, ConversionStep, rebuild
from regard.models.convert.context_length import Extension, extend_context
from regard.models.convert.dtype import DTYPES, to_dtype
from regard.models.convert.grouped_heads import HeadPooling, to_groups
from regard.models.convert.latent_attention import to_latent
from regard.models.convert.report import (
    ConversionReport,
    FinetuneResult,
    ModelSummary,
    compare_models,
    evaluation_windows,
)
from regard.models.convert.rotary_layout import to_layout
from regard.models.load import load, resolve_source
from regard.models.model import Model
from regard.models.save import save
from regard.nn.projections import Projection
from regard.positions.rotary import Layout

COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "LICENSE",
    "LICENSE.txt",
)
"""Files that go along as they are."""
SOURCE_ONLY_KEYS = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "model_type",
        "name_or_path",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
    }
)
"""Keys of config.json that speak of the source alone."""
ARCHITECTURES = {"deepseek_v2": "DeepseekV2ForCausalLM", "llama": "LlamaForCausalLM"}
"""What transformers calls the families that a conversion may end in."""


TARGETS = ("mha", "gqa", "mqa", "mla")
"""What attention can become."""
ALLOWED_VALUES: dict[str, tuple[str, ...]] = {
    "to": TARGETS,
    "pooling": get_args(HeadPooling),
    "rotary_layout": get_args(Layout),
    "stored_layout": get_args(Layout),
    "scaling": get_args(Extension),
    "dtype": tuple(DTYPES),
}
"""What the options that are words may be."""
Finetune: TypeAlias = Callable[[torch.nn.Module, Int[Tensor, "N T"]], FinetuneResult]
"""Trains a network in place on rows of ids: the loop is not this package's matter."""


@dataclass(frozen=True)
class ConversionOptions:
    """What a checkpoint is to become; what is None stays.

    Attributes:
        to: "mha", "gqa" (with kv_heads), "mqa" or "mla" (with rank).
        kv_heads: key/value heads; alone it means gqa.
        pooling: how fewer of them are made.
        rank: of the latent; None with "mla" is the full one.
        rotary_layout: "half" or "interleaved".
        stored_layout: the layout that the weights really have, where it is not what config.json
            says.
        context, scaling: tokens, and how rotary positions reach so far.
        dtype: of the weights.

    Raises:
        ArgumentError: nothing is asked for, a word is unknown, or what is asked for does not go
            together.

    >>> ConversionOptions(to="mqa", dtype="bfloat16").kv_heads
    1
    """

    to: str | None = None
    kv_heads: int | None = None
    pooling: HeadPooling = "mean"
    rank: int | None = None
    rotary_layout: Layout | None = None
    stored_layout: Layout | None = None
    context: int | None = None
    scaling: Extension = "yarn"
    dtype: str | None = None

    def __post_init__(self) -> None:
        asked = (self.to, self.kv_heads, self.rotary_layout, self.context, self.dtype)
        if all(value is None for value in asked):
            raise ArgumentError(
                "nothing is asked for: give to, kv_heads, rotary_layout, context or dtype"
            )
        for name, known in ALLOWED_VALUES.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ArgumentError(f"{name} is {value!r}; it is one of {', '.join(known)}")
        if reason := self._contradiction():
            raise ArgumentError(reason)
        if self.to == "mqa":
            object.__setattr__(self, "kv_heads", 1)

    def _contradiction(self) -> str | None:
        """What does not go together, or None."""
        heads = self.kv_heads is not None
        fewer = heads or self.to == "mqa"
        rotary, stored = self.rotary_layout is not None, self.stored_layout is not None
        checks = (
            (
                self.rank is not None and self.to != "mla",
                "rank is given, and belongs to mla: give to mla",
            ),
            (heads and self.to == "mla", "kv_heads is given, and mla has none: leave it out"),
            (
                heads and self.to == "mha",
                "kv_heads is given, and mha has as many as queries: leave it out",
            ),
            (
                self.to == "mqa" and self.kv_heads not in (None, 1),
                f"kv_heads is {self.kv_heads}, and mqa has 1: leave it out",
            ),
            (self.to == "gqa" and not heads, "gqa is asked for, and kv_heads is missing"),
            (
                self.pooling != "mean" and not fewer,
                f"groups by {self.pooling} are for fewer key/value heads: give kv_heads",
            ),
            (
                self.scaling != "yarn" and self.context is None,
                f"scaling {self.scaling} is given without a context",
            ),
            (
                stored and not rotary,
                "stored_layout is given without rotary_layout, the one that comes out",
            ),
            (
                self.to == "mla" and rotary and not stored,
                (
                    "rotary_layout is given, and the rotary key of mla is always interleaved: "
                    "leave it out"
                ),
            ),
        )
        return next((reason for wrong, reason in checks if wrong), None)


def convert(
    source: str | Path,
    out: str | Path,
    wanted: ConversionOptions,
    *,
    text: str | None = None,
    tokens: int = 4096,
    length: int | None = None,
    revision: str | None = None,
    ignore: Sequence[str] = (),
    heal: Finetune | None = None,
    tell: Callable[[str], None] | None = None,
) -> ConversionReport:
    """Convert a checkpoint folder, measure what that did, and write another folder.

    The result is written beside `out` under another name, loaded again, measured as it was loaded,
    and only then renamed: `out` is whole or not there. The order is: layout of stored weights,
    heads or latents, context, layout, dtype.

    Args:
        source: a folder, "tiny", or a repository of the hub: see `regard.load`.
        out: a folder that does not exist, or is empty; never the source.
        wanted: what it is to become.
        text: to measure on; None is a built-in one, the topics of `pydoc`.
        tokens: at most so many of it.
        length: tokens of a window; None is the trained length, at most 512.
        revision: of a repository of the hub.
        ignore: what of the source may be passed over, as `regard.load` takes it; the result is
            without it.
        heal: trains the converted network in place on the windows, before it is written.
        tell: is called with a line at the beginning of each part of the work.

    Raises:
        ArgumentError: what is wanted cannot be made of this model.
        FileError: a folder cannot be read or written.

    >>> report = convert("tiny", "one-head", ConversionOptions(to="mqa"), tokens=256)
    >>> report.before.kept, report.after.kept
    (1024, 256)
    >>> import regard
    >>> regard.load("one-head").config.num_key_value_heads
    1
    """
    folder, target = resolve_source(source, revision), Path(out)
    tell = tell or _ignore_line
    with staging_folder(folder, target) as place:
        return _convert(
            source, folder, target, place, wanted, text, (tokens, length), heal, ignore, tell
        )


def _convert(
    source: str | Path,
    folder: Path,
    target: Path,
    place: Path,
    wanted: ConversionOptions,
    text: str | None,
    size: tuple[int, int | None],
    heal: Finetune | None,
    ignore: Sequence[str],
    tell: Callable[[str], None],
) -> ConversionReport:
    """What `convert` does in a place of its own."""
    tokens, length = size
    tell(f"reading {source}")
    before = load(folder, kind=Model, ignore=ignore)
    if not before.has_head:
        raise ArgumentError(
            f"{source} is a base model without a head, whose logits a conversion would be "
            "measured by; convert the checkpoint of "
            "the language model"
        )
    first = Checkpoint(before.decoder, before.config)
    limit = min(512, before.config.max_position_embeddings) if length is None else length
    ids, source_text = evaluation_windows(before, text, limit, tokens)
    tell(f"converting {len(before.decoder.layers)} layers")
    after, steps = apply_conversions(first, wanted)
    healing = None
    if heal is not None:
        if not source_text:
            raise ArgumentError("healing needs a text, and the model has no tokenizer to read one")
        tell(f"healing on {ids.numel():,} tokens")
        after, healing = _finetuned(after, heal, ids)
    tell(f"writing {target}")
    write_checkpoint(after, folder, read_json(folder / "config.json"), place)
    again = load(place, kind=Model)
    tell(f"measuring on {ids.numel():,} tokens")
    measured = compare_models(before.decoder, again.decoder, ids, text=source_text)
    rename_to(place, target)
    return ConversionReport(
        str(source),
        str(target),
        steps,
        summarize(first),
        summarize(Checkpoint(again.decoder, again.config)),
        measured,
        healing,
        before.ignored,
    )


def apply_conversions(
    held: Checkpoint, wanted: ConversionOptions
) -> tuple[Checkpoint, tuple[ConversionStep, ...]]:
    """All conversions that are wanted, one after the other; the given model is as before.

    Raises:
        ArgumentError: one of them cannot be made.
    """
    todo: list[Callable[[Checkpoint], tuple[Checkpoint, ConversionStep]]] = []
    relayout = None
    if wanted.rotary_layout is not None:
        relayout = partial(to_layout, layout=wanted.rotary_layout, stored=wanted.stored_layout)
    if relayout is not None and wanted.stored_layout is not None:
        todo.append(relayout)
    if wanted.to == "mla":
        todo.append(partial(to_latent, rank=wanted.rank))
    elif wanted.to == "mha":
        todo.append(_to_mha)
    elif wanted.kv_heads is not None:
        todo.append(partial(to_groups, groups=wanted.kv_heads, pooling=wanted.pooling))
    if wanted.context is not None:
        todo.append(partial(extend_context, length=wanted.context, extension=wanted.scaling))
    if relayout is not None and wanted.stored_layout is None:
        todo.append(relayout)
    if wanted.dtype is not None:
        todo.append(partial(to_dtype, dtype=wanted.dtype))
    steps = []
    for step in todo:
        held, done = step(held)
        steps.append(done)
    return held, tuple(steps)


def summarize(held: Checkpoint) -> ModelSummary:
    """What a model has and keeps."""
    unique = {id(p): p for p in held.network.parameters()}.values()
    dtypes = [str(p.dtype).removeprefix("torch.") for p in unique]
    projections = [m for m in held.network.modules() if isinstance(m, Projection)]
    kept = sum(sum(project.shape.memory) for project in projections)
    return ModelSummary(
        held.model_type, max(set(dtypes), key=dtypes.count), sum(p.numel() for p in unique), kept
    )


def _ignore_line(line: str) -> None:
    """Nobody waits."""


def _to_mha(held: Checkpoint) -> tuple[Checkpoint, ConversionStep]:
    return to_groups(held, held.config.num_attention_heads)


def _finetuned(held: Checkpoint, heal: Finetune, ids: Tensor) -> tuple[Checkpoint, FinetuneResult]:
    """A trained copy: conversions share weights with the model that they were made of."""
    copy = rebuild(held.config, {name: x.clone() for name, x in held.weights().items()})
    done = heal(copy.network.requires_grad_(True), ids)
    return Checkpoint(copy.network.eval().requires_grad_(False), held.config), done


def check_out(source: Path, out: Path) -> None:
    """Refuse to write over anything.

    Raises:
        ArgumentError: out is the source, or lies in it.
        FileError: out is a file, or a folder that holds something.

    >>> check_out(Path("a"), Path("a"))
    Traceback (most recent call last):
    regard.errors.ArgumentError: out is a, which is the source or lies in it; a
    conversion never writes there: give another folder
    """
    if out.resolve() == source.resolve() or source.resolve() in out.resolve().parents:
        raise ArgumentError(
            f"out is {out}, which is the source or lies in it; a conversion never writes there: "
            "give another folder"
        )
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise FileError(f"{out} is there and is no folder; give another name")
    if out.is_dir() and any(out.iterdir()):
        raise FileError(f"{out} is not empty; nothing is written over: give a new folder")


@contextmanager
def staging_folder(source: Path, out: Path) -> Iterator[Path]:
    """A folder beside `out` for what is to become it, and for nobody else, from the beginning of
    the work to its end.

    Whatever fails leaves nothing behind, and what a killed conversion left is swept.

    Raises:
        ArgumentError, FileError: as `check_out`; another run is writing `out`; or the disk refuses.
    """
    check_out(source, out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with workplace(out, alone=True) as folder:
            check_out(source, out)  # another run may have finished it meanwhile
            yield folder
    except (OSError, SafetensorError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"{out}: cannot write the folder: {told(error)}; free some space, or choose another"
        ) from error


def rename_to(folder: Path, out: Path) -> None:
    """Rename a folder that is whole to `out`.

    Raises:
        OSError: the disk refuses, or something came to be in `out` meanwhile.
    """
    if out.is_dir():
        out.rmdir()
    folder.rename(out)
    sync(out.parent)


def write_checkpoint(held: Checkpoint, source: Path, raw: Raw, folder: Path) -> None:
    """Write a converted model into a folder, with everything of the source that is not a weight.

    Raises:
        FileError: a file of the source cannot be read.
        OSError, SafetensorError: the disk refuses; `staging_folder` tells it of the folder that the user
            named.
    """
    assert held.network.head is not None  # `convert` refuses a model without one
    dtype = cast("Tensor", held.network.head.weight).dtype
    save(held.network, held.config, folder, dtype)
    path = folder / "config.json"
    config = read_json(path)
    kept = {
        key: raw[key] for key in raw if key in IGNORED_KEYS - SOURCE_ONLY_KEYS and key not in config
    }
    name = config["model_type"]
    if name == raw.get("model_type") and "architectures" in raw:
        kept["architectures"] = raw["architectures"]
    elif name in ARCHITECTURES:
        kept["architectures"] = [ARCHITECTURES[name]]
    path.write_text(json.dumps({**config, **kept}, indent=2) + "\n", "utf-8")
    for file in COPIED_FILES:
        if (there := present(source, file)) is not None:
            shutil.copyfile(there, folder / file)
    for written_file in folder.iterdir():
        sync(written_file)
    sync(folder)
