"""`regard.load`: a model from a Hugging Face folder, a GGUF file, the hub, or the package."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from torch import nn

from regard.configs import quantization_settings
from regard.configs.base import Raw
from regard.configs.reader import is_harmless
from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.files.named_packages import NAMED_PACKAGES, packaged_source
from regard.files.reading import checked_path_or_none, open_regular
from regard.files.safetensors_files import identify_format
from regard.freed_memory import give_back_freed_memory
from regard.models import hub
from regard.models.chat_template import ChatTemplate, gguf_chat_template, read_chat_template
from regard.models.checkpoint.adapter import adapted
from regard.models.checkpoint.config import read_config, read_eos_ids, read_raw
from regard.models.checkpoint.family import SAME_NAMES, Family
from regard.models.checkpoint.gguf import GgufModel, find_gguf
from regard.models.checkpoint.gguf_tokenizer import gguf_eos_ids, gguf_tokenizer
from regard.models.checkpoint.quantized import dequantized
from regard.models.checkpoint.stored_forms import (
    StoredRecords,
    WeightForm,
    take_records,
    weight_form,
)
from regard.models.checkpoint.tensors import CheckpointTensors, Conversion, largest_dtype
from regard.models.checkpoint.weights import fill_parameters, map_names, name_matcher
from regard.models.decoder import Decoder
from regard.models.encoder import HeadedEncoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.families import find_family
from regard.models.model import Model
from regard.models.sentence_settings import (
    DenseSettings,
    Pooling,
    SentenceSettings,
    read_sentence_settings,
    transformer_folder,
)
from regard.models.seq2seq import Seq2Seq
from regard.models.speech_to_text import SpeechEncoder, SpeechToText
from regard.models.text_encoder import SentenceDense, TextEncoder
from regard.models.tokenizer import Tokenizer
from regard.untrusted_text import short_repr

BUNDLED_MODELS = ("tiny",)
"""The models that the package contains."""
LoadedKind = TypeVar("LoadedKind", bound=Model | TextEncoder | Seq2Seq)


@overload
def load(
    source: Literal["tiny"] = "tiny",
    *,
    dtype: torch.dtype | None = ...,
    weights: str | None = ...,
    revision: str | None = ...,
    adapter: str | Path | None = ...,
    allow_missing: Sequence[str] = ...,
    ignore: Sequence[str] = ...,
    finite: bool = ...,
) -> Model: ...


@overload
def load(
    source: str | Path,
    *,
    kind: type[LoadedKind],
    dtype: torch.dtype | None = ...,
    weights: str | None = ...,
    revision: str | None = ...,
    adapter: str | Path | None = ...,
    allow_missing: Sequence[str] = ...,
    ignore: Sequence[str] = ...,
    finite: bool = ...,
) -> LoadedKind: ...


@overload
def load(
    source: str | Path,
    *,
    dtype: torch.dtype | None = ...,
    weights: str | None = ...,
    revision: str | None = ...,
    adapter: str | Path | None = ...,
    allow_missing: Sequence[str] = ...,
    ignore: Sequence[str] = ...,
    finite: bool = ...,
) -> Model | TextEncoder | Seq2Seq: ...


def load(
    source: str | Path = "tiny",
    *,
    kind: type[object] | None = None,
    dtype: torch.dtype | None = None,
    weights: str | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    allow_missing: Sequence[str] = (),
    ignore: Sequence[str] = (),
    finite: bool = False,
) -> Model | TextEncoder | Seq2Seq:
    """Load a model and its tokenizer from a Hugging Face folder, from a GGUF file, from the hub, or
    from the package.

    A decoder is returned as a `Model`, an encoder as a `TextEncoder`, an encoder-decoder as a
    `Seq2Seq`, or as a `SpeechToText` if its source is speech.

    The folder is read as data; no code from it is run. Its files are checked before anything is
    allocated. Without tokenizer.json the model takes only ids.

    A base model (names without "model." in front, no head) loads too: its head is the embedding
    where config.json or the family ties the two, or else the model only returns hidden states
    (`hidden`).

    Matrices that GPTQ, AWQ, compressed-tensors, bitsandbytes or MXFP4 quantized keep their numbers:
    integers of 4 and 8 bits in equal groups of inputs stay so, and others, FP8 and NF4 among them,
    are dequantized to `dtype` (`converted` of the model counts them).

    A GGUF file of llama.cpp is a whole model with its tokenizer, which a tokenizer.json beside it
    replaces; of a model in several files, give any one. Its matrices in Q4_0, Q4_1 and Q4_K stay in
    5 or 6 bits per number, those in formats that are exact in 8 bits take 8.5 or 9, and others are
    dequantized, with a warning.

    Args:
        source: `"tiny"`, a small Llama in the package; a name of `NAMED_PACKAGES`: `"minilm"`, a
            trained BERT, `"smollm2"`, a small language model that answers, or `"gemma3"`, a base
            model; a folder; a GGUF
            file, or a folder with one and without safetensors; or `"org/name"`, a repository of the
            Hugging Face hub (extra `hub`), which `"hub:org/name"` always means. A `Path` is never
            downloaded.
        kind: `Model`, `TextEncoder`, `Seq2Seq` or `SpeechToText`, to raise for any other; None
            accepts all. With `TextEncoder` a folder of sentence-transformers with a decoder gives
            the vectors that it is for.
        dtype: the dtype of the weights and of the computation; None is the one that config.json
            names, or else that of the stored weights (float32 for quantized GGUF files). On a CPU,
            bfloat16 and float16 decode equally fast, and bfloat16 reads prompts fastest (LOG.md).
        weights: the form in which linear maps, the head and the embedding are stored: "int8" or
            "int4", codes with a scale (and for int4 a zero point) for each group of up to 128
            inputs; "float16" or "bfloat16", multiplied in float32, which `dtype` then is. Other
            weights keep `dtype`. None stores all weights in `dtype`, except those that the source
            holds in 8 or 4 bits. `regard convert --weights` shows what is lost.
        revision: for a repository of the hub: a branch, a tag or a commit; None is its main branch.
        adapter: a folder of PEFT with a LoRA or DoRA adapter of this model, which is merged into
            the weights; None is no adapter. Matrices in few bits that it changes are dequantized,
            which `converted` of the model counts.
        allow_missing: patterns (`*`, `?`) of stored names that may be missing and stay random.
        ignore: patterns (`*`, `?`) of keys of config.json, stored tensors, and adapter files that
            the family does not know; `ignored` of the model lists them.
        finite: whether to raise for NaN or infinite weights; it takes as long as reading them.

    Returns:
        The model, in evaluation mode and without gradients.

    Raises:
        FileError: a file is missing, damaged, not supported, or contradicts another; it is another
            kind of model; or the hub does not serve the repository.
        ArgumentTypeError: allow_missing or ignore is a str; give a sequence of patterns.
        ArgumentError: `dtype`, or `weights` in it, is not possible; ignore names a key or tensor
            that the family needs; or revision is given for a source that is not on the hub.

    >>> load("tiny").config.vocab_size
    1920
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(
            f"dtype is {dtype}; weights are float32, float16, bfloat16 or float64", argument="dtype"
        )
    for name, patterns in (("allow_missing", allow_missing), ("ignore", ignore)):
        if isinstance(patterns, str):  # a str is a sequence of characters
            raise ArgumentTypeError(
                f"{name} is a str; give a sequence of patterns: {name}=[{patterns!r}]"
            )

    def check(folder: Path) -> None:
        # called before the weights of a repository are downloaded, when the number of tensors is
        # not known yet
        _check_adapter_files(folder, ignore, adapter)
        read_config(folder, *_family(folder, kind), tensors=_ASSUMED_TENSORS, ignore=ignore)

    form = None if weights is None else weight_form(weights)
    source = packaged_source(source)
    load_checkpoint = partial(
        _load_checkpoint,
        dtype=dtype,
        form=form,
        allow_missing=allow_missing,
        ignore=ignore,
        finite=finite,
    )
    if (file := gguf_file(source, revision)) is not None:
        gguf = GgufModel.open(file, ignore)
        checkpoint = _open_gguf(gguf, kind, form, dtype or gguf.dtype, adapter)
        tokenizer = gguf_tokenizer(gguf.header)  # before the weights, because it may be refused
        network, config, record, converted = load_checkpoint(checkpoint)
        texts = _Texts(
            tokenizer,
            sentences=lambda: SentenceSettings(Pooling(gguf.pooling_mode)),
            eos_ids=lambda: gguf_eos_ids(gguf.header),
            chat_template=lambda: gguf_chat_template(gguf.header),
        )
        return _model(network, config, texts, record, file.parent, converted)
    root = resolve_source(source, revision, check)
    folder = transformer_folder(root)
    checkpoint = _open_folder(folder, kind, form, ignore, adapter)
    network, config, record, converted = load_checkpoint(checkpoint)
    _check_ignored(ignore, record["ignored"], checkpoint.raw, checkpoint.store)
    place = checked_path_or_none(folder, "tokenizer.json")
    tokenizer = None if place is None else Tokenizer.load(place)
    texts = _Texts(
        tokenizer,
        sentences=lambda: read_sentence_settings(root),
        eos_ids=lambda: read_eos_ids(folder, checkpoint.raw, tokenizer),
        chat_template=lambda: read_chat_template(folder),
        pools=kind is TextEncoder,
    )
    return _model(network, config, texts, record, root, converted)


def gguf_file(source: str | Path, revision: str | None = None) -> Path | None:
    """Return the GGUF file that a source names, or None if it names something else."""
    named = revision is not None or hub.repository_of(source) is not None
    return None if named or source in BUNDLED_MODELS else find_gguf(Path(source))


_ASSUMED_TENSORS = 1 << 16
"""The number of tensors that is assumed while the weights are not downloaded yet."""
_READ_KEYS = frozenset(
    {"dtype", "eos_token_id", "model_type", "quantization_config", "torch_dtype"}
)
"""Keys that are read although they do not change the structure of the network."""
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


class _Checkpoint(NamedTuple):
    """A model's files, of which the headers are checked.

    Attributes:
        file: where the keys are, for messages.
        records: the weights that are stored in fewer bits, or None.
        default_dtype: returns the dtype of the computation if the caller gives none.
        ignored: what was ignored so far.
        adapter: the folder of the adapter to merge, or None.
    """

    family: Family
    raw: Raw
    file: Path
    store: CheckpointTensors
    records: StoredRecords | None
    default_dtype: Callable[[], torch.dtype]
    ignored: tuple[str, ...]
    adapter: Path | None


def _open_folder(
    folder: Path,
    kind: type[object] | None,
    form: WeightForm | None,
    ignore: Sequence[str],
    adapter: str | Path | None,
) -> _Checkpoint:
    """Check the files of a folder with config.json and safetensors."""
    its_family, raw = _family(folder, kind)
    stored = CheckpointTensors.open(folder)
    settings = quantization_settings(raw)
    store, records = take_records(stored, settings)
    if records is None:
        store = dequantized(store, settings)
    elif form is not None:
        raise ArgumentError(
            f"weights is {form.name!r}, and the weights in {folder} are {records.form} already; "
            "leave weights out, or load the folder that they were made from"
        )
    adapter_files = _check_adapter_files(folder, ignore, adapter)
    file = folder / "config.json"
    dtype = partial(_dtype, folder, raw, store)
    merged = None if adapter is None else Path(adapter)
    return _Checkpoint(its_family, raw, file, store, records, dtype, adapter_files, merged)


def _open_gguf(
    gguf: GgufModel,
    kind: type[object] | None,
    form: WeightForm | None,
    dtype: torch.dtype,
    adapter: str | Path | None,
) -> _Checkpoint:
    """Check the tensors of a GGUF file."""
    its_family = gguf.family
    _check_kind(gguf.header.file, gguf.config["model_type"], its_family, kind)
    # a form rounds the dequantized numbers, which are therefore read in full
    read = dtype if form is None else torch.float32
    store, records = gguf.split(its_family.names, None if form is None else form.name, read)
    file, default = gguf.header.file, gguf.dtype
    if adapter is not None:  # it is added to unrounded numbers
        store = replace(store, dtype=torch.float32)
    merged = None if adapter is None else Path(adapter)
    return _Checkpoint(
        its_family, gguf.config, file, store, records, lambda: default, gguf.ignored, merged
    )


def _load_checkpoint(
    checkpoint: _Checkpoint,
    *,
    dtype: torch.dtype | None,
    form: WeightForm | None,
    allow_missing: Sequence[str],
    ignore: Sequence[str],
    finite: bool,
) -> tuple[nn.Module, Any, dict[str, Any], Conversion | None]:
    """Build the network without values, and read the tensors into it; also return what became of
    quantized matrices.
    """
    its_family, raw, store = checkpoint.family, checkpoint.raw, checkpoint.store
    records = checkpoint.records
    count = len(store.tensors) + (0 if records is None else len(records.names))
    config, ignored_keys = read_config(
        store.folder, its_family, raw, tensors=count, ignore=ignore, file=checkpoint.file
    )
    config, has_no_head = _complete_config(its_family, config, raw, store)
    network = its_family.build_empty(config)
    if has_no_head:
        assert isinstance(network, Decoder)  # only decoders are saved without their head
        network.head = None
    if checkpoint.adapter is not None:
        store, records = adapted(store, records, checkpoint.adapter, its_family, network)
    compute = dtype or (form and form.compute) or checkpoint.default_dtype()
    if form is not None:
        form.check_dtype(compute)
    filled = fill_parameters(
        network,
        its_family,
        store,
        dtype=compute,
        allow_missing=allow_missing,
        ignore=ignore,
        finite=finite,
        initialize=partial(its_family.build, config),
        form=form,
        records=records,
    )
    ignored = (*checkpoint.ignored, *ignored_keys, *filled.ignored)
    network = network.eval().requires_grad_(False)
    give_back_freed_memory()
    record = {"newly_initialized": filled.newly_initialized, "ignored": ignored}
    return network, config, record, filled.converted


def _family(folder: Path, kind: type[object] | None) -> tuple[Family, Raw]:
    """Return the family that config.json names, and the content of that file."""
    its_family, raw = read_raw(folder, find_family)
    pools = kind is TextEncoder and its_family.architecture == "decoder"
    if pools and checked_path_or_none(folder, "modules.json") is not None:
        return its_family, raw  # its states are pooled
    _check_kind(folder, str(raw["model_type"]), its_family, kind)
    return its_family, raw


def _check_kind(
    place: Path, model_type: str, its_family: Family, kind: type[object] | None
) -> None:
    """Raise unless a family loads as the class that the caller wants."""
    model_class = MODEL_CLASS_OF_KIND[its_family.architecture]
    if kind not in (None, model_class):
        raise FileError(
            f"{place}: model_type {model_type} is an architecture of kind "
            f"{its_family.architecture!r}, which loads as a "
            f"{model_class.__name__}, and a {kind.__name__} is needed here: give another model; "
            f"the commands explain, inspect, view, cost and audit take a {model_class.__name__}"
        )


def _check_adapter_files(
    folder: Path, ignore: Sequence[str], adapter: str | Path | None
) -> tuple[str, ...]:
    """Return the adapter file beside the model, if it is to be ignored; raise for it if it is not
    the adapter of the caller.
    """
    name = next((name for name in _ADAPTERS if (folder / name).exists()), None)
    if name is None or (adapter is not None and Path(adapter).resolve() == folder.resolve()):
        return ()
    if not any(fnmatchcase(name, pattern) for pattern in ignore):
        raise FileError(
            f"{folder} holds an adapter ({name}) beside the model, which would answer without it. "
            "Merge it: regard.load(folder, adapter=folder), or --adapter; or load the model alone: "
            f"regard.load(folder, ignore=({name!r},)), or --ignore {name}"
        )
    return (name,)


def _complete_config(
    its_family: Family, config: Any, raw: Raw, store: CheckpointTensors
) -> tuple[Any, bool]:
    """Return the config as the stored tensors complete it, and whether a head is missing."""
    if its_family.names is SAME_NAMES:
        return its_family.complete_config(config, raw, store.tensors), False
    mapping = map_names(store.folder, store.tensors, its_family, name_matcher(its_family))
    stored = set(mapping.names.values())
    base_only = (
        mapping.is_base_model and its_family.head is not None and its_family.head not in stored
    )
    if base_only and not config.tie_word_embeddings:
        return config, True
    return its_family.complete_config(config, raw, stored), False


def _check_ignored(
    ignore: Sequence[str], ignored: Sequence[str], raw: Raw, store: CheckpointTensors
) -> None:
    """Raise for a name in `ignore` that the family needs and that was therefore used."""
    for name in ignore:
        inner: object = raw
        for part in name.split("."):
            inner = inner.get(part) if isinstance(inner, dict) else None
        exists = name in store.tensors or inner is not None or name in raw
        unread = is_harmless(name) and name not in _READ_KEYS
        if exists and name not in ignored and not unread:
            raise ArgumentError(
                f"ignore names {short_repr(name)}, which is not an unknown key or tensor: "
                f"{raw['model_type']} needs it; leave it out",
                argument="ignore",
            )


MODEL_CLASS_OF_KIND: dict[str, type[Model | TextEncoder | Seq2Seq]] = {
    "decoder": Model,
    "encoder": TextEncoder,
    "encoder-decoder": Seq2Seq,
    "speech-to-text": SpeechToText,
}
"""`architecture` of a family -> the class of its models."""


class _Texts(NamedTuple):
    """What a source says of texts, each read where a model needs it.

    Attributes:
        pools: whether a decoder is loaded for the vectors of its texts.
    """

    tokenizer: Tokenizer | None
    sentences: Callable[[], SentenceSettings]
    eos_ids: Callable[[], Collection[int] | None]
    chat_template: Callable[[], ChatTemplate | None]
    pools: bool = False


def _text_encoder(
    network: nn.Module, config: Any, texts: _Texts, root: Path, load_record: dict[str, Any]
) -> TextEncoder:
    """Combine a network with what a folder of sentence-transformers says of vectors."""
    settings, tokenizer = texts.sentences(), texts.tokenizer
    limits = [getattr(config, "max_position_embeddings", None), settings.max_seq_length]
    if settings.lowercase and tokenizer is not None:
        tokenizer = tokenizer.lowercased()
    assert isinstance(network, HeadedEncoder | Decoder)
    model = TextEncoder(
        network,
        tokenizer,
        config,
        pooling=settings.pooling,
        max_seq_length=min((n for n in limits if n is not None), default=None),
        prompts=settings.prompts,
        default_prompt_name=settings.default_prompt_name,
        similarity_fn_name=settings.similarity,
        dense=[_sentence_dense(root, dense) for dense in settings.dense],
        **load_record,
    )
    model.dense.to(model.dtype)
    return model


def _sentence_dense(root: Path, settings: DenseSettings) -> SentenceDense:
    """Return a linear map after the pooling with its stored tensors."""
    store = CheckpointTensors.open(root / settings.folder)
    with torch.device("meta"):
        layer = SentenceDense(settings)
    wanted = {name: tuple(x.shape) for name, x in layer.state_dict().items()}
    stored = {name: x.shape for name, x in store.tensors.items()}
    if stored != wanted:
        raise FileError(
            f"{root / settings.folder}: the tensors are {short_repr(stored)}; config.json beside "
            f"them requires {short_repr(wanted)}"
        )
    layer.load_state_dict(dict(store.read()), assign=True)
    return layer.eval().requires_grad_(False)


def _model(
    network: nn.Module,
    config: Any,
    texts: _Texts,
    load_record: dict[str, Any],
    root: Path,
    converted: Conversion | None,
) -> Model | TextEncoder | Seq2Seq:
    """Combine a network with its tokenizer and with what generation needs."""
    model: Model | TextEncoder | Seq2Seq
    if isinstance(network, HeadedEncoder) or texts.pools:
        model = _text_encoder(network, config, texts, root, load_record)
    elif isinstance(network, EncoderDecoder):
        model = _seq2seq(network, texts.tokenizer, config, texts.eos_ids(), load_record)
    else:
        assert isinstance(network, Decoder)
        ids, template = texts.eos_ids(), texts.chat_template()
        model = Model(
            network, texts.tokenizer, config, eos_ids=ids, chat_template=template, **load_record
        )
    model.converted = converted
    return model


def _seq2seq(
    network: EncoderDecoder,
    tokenizer: Tokenizer | None,
    config: Any,
    eos_ids: Collection[int] | None,
    load_record: dict[str, Any],
) -> Seq2Seq:
    """Combine an encoder-decoder with its tokenizer, and with the ids that begin and end a text."""
    start = config.decoder_start_token_id
    its_class = SpeechToText if isinstance(network.encoder, SpeechEncoder) else Seq2Seq
    return its_class(
        network,
        tokenizer,
        config,
        start=config.pad_token_id if start is None else start,
        eos_ids=eos_ids or {config.eos_token_id},
        **load_record,
    )


def _dtype(folder: Path, raw: Raw, store: CheckpointTensors) -> torch.dtype:
    """Return the dtype that config.json names, or else that of most stored bytes."""
    text = raw.get("dtype") or raw.get("torch_dtype")
    if text is not None:
        dtype = getattr(torch, str(text).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise FileError(
                f"{folder / 'config.json'}: torch_dtype is {short_repr(text)}; it must be float32, "
                "float16, bfloat16 or float64"
            )
        return dtype
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return largest_dtype((x.dtype, x.bytes) for x in store.tensors.values() if x.dtype in floats)


def resolve_source(
    source: str | Path,
    revision: str | None = None,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Return the folder that a source names, downloading "hub:org/name", and "org/name" only if
    neither that folder nor "org" exists: a mistyped path must not become a request.
    """
    repository = hub.repository_of(source)
    if repository is not None:
        return hub.download(repository, revision, check)
    if revision is not None:
        raise ArgumentError(
            f"revision is {revision!r}, and {str(source)!r} is not a repository of the hub; leave "
            "it out, or name one: org/name, or hub:org/name",
            argument="revision",
        )
    if source in BUNDLED_MODELS:
        config = Path(str(resources.files("regard") / "assets" / str(source) / "config.json"))
        return config.resolve().parent  # an installer may have linked each file
    folder = Path(source)
    if folder.is_file():
        with open_regular(folder) as (file, _):
            kind = identify_format(file.read(64) or b"")
        raise FileError(
            f"{folder} is a file{f': {kind}' if kind else ''}; a model is a folder with "
            "config.json and model.safetensors, or a GGUF file (a recording opens in regard view)"
        )
    if not folder.is_dir():
        names = (*BUNDLED_MODELS, *NAMED_PACKAGES)
        raise FileError(
            f"no model {str(source)!r}: it is neither a named model ({', '.join(names)}) nor a "
            f"folder, and nothing is downloaded for such a name. {hub.HUB_HINT}"
        )
    return folder
