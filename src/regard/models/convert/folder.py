"""`convert`: write a checkpoint folder completely or not at all as another one, with other heads,
positions or another dtype, and report what changed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from regard.configs.base import Raw
from regard.configs.reader import IGNORED_KEYS
from regard.errors import ArgumentError
from regard.files.named_packages import packaged_source
from regard.files.reading import checked_path_or_none, read_json
from regard.language import Phrase, counted
from regard.models.convert.attention_maps import (
    AttentionMaps,
    Checkpoint,
    ConversionStep,
    LayerErrors,
    layers_of,
    rebuild,
)
from regard.models.convert.grouped_heads import HeadPooling, best_pooling, to_groups
from regard.models.convert.latent_attention import to_latent
from regard.models.convert.report import (
    ConversionReport,
    FinetuneResult,
    ModelSummary,
    calibration_windows,
    compare_models,
    evaluation_windows,
)
from regard.models.convert.rotary_positions import Extension, extend_context, to_layout
from regard.models.convert.weight_forms import hidden_errors, is_stored, to_dense, to_stored_weights
from regard.models.families import family
from regard.models.load import gguf_file, load, resolve_source
from regard.models.model import Model
from regard.models.save import check_free, new_folder, rename_to, save
from regard.nn.projections.heads import Projection
from regard.nn.weights import count_parameters, stored_modules
from regard.ops.stored_weights import StoredWeight
from regard.positions.rotary import Layout

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
"""Name -> dtype."""


def to_dtype(checkpoint: Checkpoint, dtype: str) -> tuple[Checkpoint, ConversionStep]:
    """Convert the weights to another dtype, each rounded once; some families keep a few in float32.

    Args:
        checkpoint: a decoder.
        dtype: "float32", "float16", "bfloat16" or "float64".

    Returns:
        The converted checkpoint, and its errors.

    Raises:
        ArgumentError: the name is unknown, this is the dtype already, or a weight is too large.

    >>> import regard
    >>> tiny = regard.load("tiny")
    >>> after, step = to_dtype(Checkpoint(tiny.decoder, tiny.config), "bfloat16")
    >>> after.network.head.weight.dtype, step.layers[0].keys < 2**-8
    (torch.bfloat16, True)
    """
    if dtype not in DTYPES:
        raise ArgumentError(
            f"dtype is {dtype!r}; it is one of {', '.join(DTYPES)}", argument="dtype"
        )
    wanted, its_family = DTYPES[dtype], family(checkpoint.model_type)
    before = checkpoint.weights()
    if all(x.dtype == its_family.dtype_of(name, wanted) for name, x in before.items()):
        raise ArgumentError(f"the weights are {dtype} already; choose another dtype")
    weights = {name: x.to(its_family.dtype_of(name, wanted)) for name, x in before.items()}
    for name, x in weights.items():
        if not bool(x.isfinite().all()) and bool(before[name].isfinite().all()):
            raise ArgumentError(
                f"{name} has the value {float(before[name].abs().max()):.3g}, which is too large "
                f"for {dtype}; use bfloat16"
            )
    after = rebuild(checkpoint.config, weights)
    return after, ConversionStep(
        Phrase("weights to {dtype}", dtype=dtype), tuple(_errors(checkpoint, after))
    )


def _errors(before: Checkpoint, after: Checkpoint) -> list[LayerErrors]:
    """Return the rounding errors of keys and values per layer; [] without separate maps."""
    pairs = zip(layers_of(before.network), layers_of(after.network), strict=True)
    try:
        layers = [(AttentionMaps.of(a), AttentionMaps.of(b)) for (_, a), (_, b) in pairs]
    except ArgumentError:
        return []
    return [a.errors(a.k - b.k, a.v - b.v) for a, b in layers]


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
"""Files that are copied unchanged."""
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
"""Keys of config.json that describe only the source."""
ARCHITECTURES = {"deepseek_v2": "DeepseekV2ForCausalLM", "llama": "LlamaForCausalLM"}
"""`model_type` -> the class name in transformers, for families that a conversion may produce."""


TARGETS = ("mha", "gqa", "mqa", "mla")
"""The kinds of attention that a conversion can produce."""
ALLOWED_VALUES: dict[str, tuple[str, ...]] = {
    "to": TARGETS,
    "pooling": get_args(HeadPooling),
    "rotary_layout": get_args(Layout),
    "stored_layout": get_args(Layout),
    "scaling": get_args(Extension),
    "dtype": tuple(DTYPES),
    "weights": ("int8", "int4"),
}
"""Option -> the values that it may have."""
Finetune: TypeAlias = Callable[[torch.nn.Module, Int[Tensor, "N T"]], FinetuneResult]
"""A function that trains a network in place on rows of ids, and returns the losses."""


@dataclass(frozen=True)
class ConversionOptions:
    """What to change in a checkpoint; options that are None leave it as it is.

    Args:
        to: "mha", "gqa" (with kv_heads), "mqa" or "mla" (with rank).
        kv_heads: the number of key/value heads; given alone, it means gqa.
        pooling: how fewer key/value heads are computed; None is "svd", or "mean" where a norm
            follows the maps of the heads.
        rank: the rank of the latent; None with "mla" is the full rank.
        rotary_layout: "half" or "interleaved".
        stored_layout: the true layout of the weights, if it is not the one that config.json says.
        context, scaling: the new context in tokens, and the rotary scaling that reaches it.
        dtype: the dtype of the weights.
        weights: "int8" or "int4", in which linear maps, head and embedding are stored at last.

    Raises:
        ArgumentError: nothing changes, a name is unknown, or options contradict each other.

    >>> ConversionOptions(to="mqa", dtype="bfloat16").kv_heads
    1
    """

    to: str | None = None
    kv_heads: int | None = None
    pooling: HeadPooling | None = None
    rank: int | None = None
    rotary_layout: Layout | None = None
    stored_layout: Layout | None = None
    context: int | None = None
    scaling: Extension = "yarn"
    dtype: str | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        asked = (
            self.to,
            self.kv_heads,
            self.rotary_layout,
            self.context,
            self.dtype,
            self.weights,
        )
        if all(value is None for value in asked):
            raise ArgumentError(
                "there is nothing to change; give to, kv_heads, rotary_layout, context, dtype or "
                "weights"
            )
        for name, known in ALLOWED_VALUES.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ArgumentError(
                    f"{name} is {value!r}; it must be one of {', '.join(known)}",
                    argument=name,
                    value=value,
                )
        self._check_together()
        if self.to == "mqa":
            object.__setattr__(self, "kv_heads", 1)

    def _check_together(self) -> None:
        """Raise for options that contradict each other."""
        heads = self.kv_heads is not None
        rotary, stored = self.rotary_layout is not None, self.stored_layout is not None
        reasons = (
            (
                self.rank is not None and self.to != "mla",
                "rank",
                "is given, but only mla has one: give to='mla'",
            ),
            (
                heads and self.to == "mla",
                "kv_heads",
                "is given, but mla has no key/value heads: leave it out",
            ),
            (
                heads and self.to == "mha",
                "kv_heads",
                "is given, but mha has as many as query heads: leave it out",
            ),
            (
                self.to == "mqa" and self.kv_heads not in (None, 1),
                "kv_heads",
                f"is {self.kv_heads}, but mqa has 1: leave it out",
            ),
            (self.to == "gqa" and not heads, "to", "is gqa, and kv_heads is missing: give it"),
            (
                self.pooling is not None and not (heads or self.to == "mqa"),
                "pooling",
                f"{self.pooling} is only for fewer key/value heads: give kv_heads",
            ),
            (
                self.scaling != "yarn" and self.context is None,
                "scaling",
                f"{self.scaling} is given without context: give both",
            ),
            (
                stored and not rotary,
                "stored_layout",
                "is given without rotary_layout, the layout of the result: give both",
            ),
            (
                self.to == "mla" and rotary and not stored,
                "rotary_layout",
                "is given, but the rotary key of mla is always interleaved: leave it out",
            ),
        )
        for is_wrong, name, problem in reasons:
            if is_wrong:
                raise ArgumentError(f"{name} {problem}", argument=name)


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
    finetune: Finetune | None = None,
    report_progress: Callable[[str], None] | None = None,
) -> ConversionReport:
    """Convert a checkpoint folder, measure the effect, and write another folder.

    The result is written next to `out`, loaded again, measured, and then renamed, so that `out` is
    complete or not there. The order is: layout of the stored weights, heads or latents, context,
    rotary layout, dtype.

    Args:
        source: a folder, "tiny", or a repository of the hub: see `regard.load`.
        out: a folder that does not exist, or is empty; never the source folder.
        wanted: what to change.
        text: the text for the measurement; None is a built-in one, the topics of `pydoc`.
        tokens: the largest number of its tokens to use.
        length: the tokens of a window; None is the trained length, at most 512.
        revision: the revision of a repository of the hub.
        ignore: parts of the source to ignore, as in `regard.load`; the result does not have them.
        finetune: trains the converted network on windows of the text; None does not train.
        report_progress: called with a line of text at the beginning of each part of the work.

    Returns:
        What changed, and how the two models compare.

    Raises:
        ArgumentError: this model cannot be converted in this way.
        FileError: a folder cannot be read or written.

    >>> report = convert("tiny", "one-head", ConversionOptions(to="mqa"), tokens=256)
    >>> report.before.cached_values, report.after.cached_values
    (1024, 256)
    """
    source = packaged_source(source)
    place, target = gguf_file(source, revision) or resolve_source(source, revision), Path(out)
    report_progress = report_progress or (lambda _: None)
    with new_folder(target, partial(check_out, place, target)) as staging:
        report_progress(f"reading {source}")
        before = load(place, kind=Model, ignore=ignore)
        if not before.has_head:
            raise ArgumentError(
                f"{source} is a base model without a head, and a conversion is measured by logits; "
                "convert the checkpoint of the language model"
            )
        if wanted.weights is not None and is_stored(before.decoder):
            raise ArgumentError(
                f"{source} has weights that are stored in fewer bits, and "
                f"weights='{wanted.weights}' would round them a second time; leave weights out, or "
                "convert the checkpoint that it was made from",
                argument="weights",
            )
        first = Checkpoint(before.decoder, before.config)
        limit = min(512, before.config.max_position_embeddings) if length is None else length
        ids, source_text = evaluation_windows(before, text, limit, tokens)
        report_progress(
            Phrase("converting {layers}", layers=counted(len(before.decoder.layers), "layer"))
        )
        measured_on = calibration_windows(before, text, ids) if source_text else None
        after, steps = apply_conversions(first, wanted, measured_on)
        finetuning = None
        if finetune is not None:
            if not source_text:
                raise ArgumentError(
                    "finetuning needs a text, and the model has no tokenizer to encode one"
                )
            report_progress(Phrase("finetuning on {tokens}", tokens=counted(ids.numel(), "token")))
            after, finetuning = _finetuned(after, finetune, ids)
        if wanted.weights is not None:
            report_progress(Phrase("storing weights as {weights}", weights=wanted.weights))
            after = rebuild(after.config, after.weights())
            steps = (*steps, to_stored_weights(after, wanted.weights))
        report_progress(Phrase("writing {target}", target=target))
        write_checkpoint(after, before, place, staging)
        again = load(staging, kind=Model)
        report_progress(Phrase("measuring on {tokens}", tokens=counted(ids.numel(), "token")))
        measured = compare_models(before.decoder, again.decoder, ids, text=source_text)
        rename_to(staging, target)
        return ConversionReport(
            str(source),
            str(target),
            steps,
            summarize(first),
            summarize(Checkpoint(again.decoder, again.config)),
            measured,
            finetuning,
            before.ignored,
            hidden_errors(before.decoder, again.decoder, ids) if wanted.weights is not None else (),
        )


def apply_conversions(
    checkpoint: Checkpoint, wanted: ConversionOptions, ids: Int[Tensor, "N T"] | None = None
) -> tuple[Checkpoint, tuple[ConversionStep, ...]]:
    """Apply all conversions one after the other; the given checkpoint stays as it is.

    Poolings and latents are computed for the inputs that the layers have on the ids.
    """
    todo: list[Callable[[Checkpoint], tuple[Checkpoint, ConversionStep]]] = []
    stored, relayout = is_stored(checkpoint.network), None
    if stored:
        todo.append(to_dense)
    if wanted.rotary_layout is not None:
        relayout = partial(to_layout, layout=wanted.rotary_layout, stored=wanted.stored_layout)
    if relayout is not None and wanted.stored_layout is not None:
        todo.append(relayout)
    if wanted.to == "mla":
        todo.append(partial(to_latent, rank=wanted.rank, ids=ids))
    elif wanted.to == "mha":
        todo.append(partial(to_groups, groups=checkpoint.config.num_attention_heads))
    elif wanted.kv_heads is not None:
        pooling = wanted.pooling or best_pooling(checkpoint)
        todo.append(partial(to_groups, groups=wanted.kv_heads, pooling=pooling, ids=ids))
    if wanted.context is not None:
        todo.append(partial(extend_context, length=wanted.context, extension=wanted.scaling))
    if relayout is not None and wanted.stored_layout is None:
        todo.append(relayout)
    if wanted.dtype is not None and not (stored and wanted.dtype == "float32"):
        todo.append(partial(to_dtype, dtype=wanted.dtype))
    steps = []
    for step in todo:
        checkpoint, done = step(checkpoint)
        steps.append(done)
    return checkpoint, tuple(steps)


def summarize(checkpoint: Checkpoint) -> ModelSummary:
    """Return the family, the dtype and the sizes of a checkpoint."""
    records = {id(r): r for _, r in stored_modules(checkpoint.network)}.values()
    dtypes = [str(p.dtype).removeprefix("torch.") for p in checkpoint.network.parameters()]
    dtypes += [record.form for record in records]
    projections = [m for m in checkpoint.network.modules() if isinstance(m, Projection)]
    cached_values = sum(sum(project.shape.memory) for project in projections)
    return ModelSummary(
        checkpoint.model_type,
        max(set(dtypes), key=dtypes.count),
        count_parameters(checkpoint.network),
        cached_values,
    )


def _finetuned(
    checkpoint: Checkpoint, finetune: Finetune, ids: Tensor
) -> tuple[Checkpoint, FinetuneResult]:
    """Train a copy, since converted checkpoints share weights with the original."""
    trained = rebuild(
        checkpoint.config, {name: x.clone() for name, x in checkpoint.weights().items()}
    )
    done = finetune(trained.network.requires_grad_(True), ids)
    return Checkpoint(trained.network.eval().requires_grad_(False), checkpoint.config), done


def check_out(source: Path, out: Path) -> None:
    """Check that a conversion would not overwrite anything."""
    if out.resolve() == source.resolve() or source.resolve() in out.resolve().parents:
        raise ArgumentError(
            f"out is {out}, which is the source or is inside it; a conversion never writes there: "
            "give another folder",
            argument="out",
        )
    check_free(out, "a conversion")


def write_checkpoint(checkpoint: Checkpoint, before: Model, source: Path, folder: Path) -> None:
    """Write a converted checkpoint, with every file of the source folder that is not a weight, or
    with what a GGUF file says beside its weights.
    """
    assert checkpoint.network.head is not None  # `convert` raises for a model without one
    head = checkpoint.network.head
    record = getattr(head, "stored_weight", None)  # its weight would be dequantized to be read
    weight = head.weight if record is None else record
    assert isinstance(weight, (Tensor, StoredWeight))
    save(checkpoint.network, checkpoint.config, folder, weight.dtype)
    config_path = folder / "config.json"
    config = read_json(config_path)
    raw: Raw = read_json(source / "config.json") if source.is_dir() else {}
    copied_keys = {
        key: raw[key] for key in raw if key in IGNORED_KEYS - SOURCE_ONLY_KEYS and key not in config
    }
    name = config["model_type"]
    if name == raw.get("model_type") and "architectures" in raw:
        copied_keys["architectures"] = raw["architectures"]
    elif name in ARCHITECTURES:
        copied_keys["architectures"] = [ARCHITECTURES[name]]
    config_path.write_text(json.dumps({**config, **copied_keys}, indent=2) + "\n", "utf-8")
    if not source.is_dir():
        before.write_text_files(folder)
    for file in COPIED_FILES if source.is_dir() else ():
        if (path := checked_path_or_none(source, file)) is not None:
            shutil.copyfile(path, folder / file)
