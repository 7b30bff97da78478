"""Finding a model by its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch import nn

from regard.configs.base import Raw
from regard.configs.reader import is_harmless
from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.files.regular_files import checked_path_or_none, open_regular
from regard.files.safetensors_header import identify_format
from regard.models import hub
from regard.models.checkpoint.config import read_config, read_ends, read_raw
from regard.models.checkpoint.family import Family
from regard.models.checkpoint.names import OWN
from regard.models.checkpoint.quantized import unpacked
from regard.models.checkpoint.store import Store
from regard.models.checkpoint.weights import fill, placed, table
from regard.models.decoder import Decoder
from regard.models.demo import minilm
from regard.models.encoder import HeadedEncoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.families import family
from regard.models.model import Model
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder, read_longest, read_pooling
from regard.models.tokenizer import Tokenizer
from regard.untrusted_text import short_repr

EMBEDDED = ("tiny",)
"""Models that come with the package."""
Held = TypeVar("Held", bound=Model | TextEncoder | Seq2Seq)


@overload
def load(
    source: Literal["tiny"] = "tiny",
    *,
    dtype: torch.dtype | None = ...,
    revision: str | None = ...,
    allow_missing: Sequence[str] = ...,
    ignore: Sequence[str] = ...,
    finite: bool = ...,
) -> Model: ...


@overload
def load(
    source: str | Path,
    *,
    kind: type[Held],
    dtype: torch.dtype | None = ...,
    revision: str | None = ...,
    allow_missing: Sequence[str] = ...,
    ignore: Sequence[str] = ...,
    finite: bool = ...,
) -> Held: ...


@overload
def load(
    source: str | Path,
    *,
    dtype: torch.dtype | None = ...,
    revision: str | None = ...,
    allow_missing: Sequence[str] = ...,
    ignore: Sequence[str] = ...,
    finite: bool = ...,
) -> Model | TextEncoder | Seq2Seq: ...


def load(
    source: str | Path = "tiny",
    *,
    kind: type[Any] | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    allow_missing: Sequence[str] = (),
    ignore: Sequence[str] = (),
    finite: bool = False,
) -> Model | TextEncoder | Seq2Seq:
    """Load a model and its tokenizer from a Hugging Face folder, from the hub, or an embedded one
    by name.

    A decoder is held as a `Model`, an encoder as a `TextEncoder`, an encoder-decoder as a
    `Seq2Seq`.

    The folder is data, never code: config.json, safetensors (one file, or shards with an index) and
    tokenizer.json are checked before anything is allocated. A folder without tokenizer.json gives a
    model that takes ids only.

    Weights of a base model that was saved alone (names without "model." in front, no head) load
    too. Its head is the embedding where config.json or the family ties the two; otherwise the model
    has states (`hidden`) and refuses logits.

    Args:
        source: `"tiny"`, a Llama-shaped decoder that comes with the package; `"minilm"`, a trained
            BERT, if the extra `demo` is installed; a folder; or `"org/name"`, a repository of the
            Hugging Face hub, if the extra `hub` is installed. `"hub:org/name"` says so where a
            folder may be meant. A `Path` is a folder and never downloaded.
        kind: one of these three, for who can use no other; None is what the folder holds.
        dtype: of the weights, and so of the computation; None is the one that config.json names,
            else that of the stored weights. On a CPU, float16 decodes fastest, and bfloat16 reads
            prompts fastest (LOG.md).
        revision: of a repository on the hub: a branch, a tag or a commit; None is its main branch.
        allow_missing: patterns (`*`, `?`) of stored names that may be absent; such weights are
            fresh, not trained.
        ignore: patterns of what the folder holds and the family does not know: keys of config.json,
            stored tensors, and adapter_config.json. The model's `ignored` says what was passed
            over.
        finite: whether to refuse weights that are NaN or infinite; it takes about as long again as
            reading them.

    Raises:
        FileError: the folder or a file in it is missing, damaged, not supported, or contradicts
            another; or it holds another kind of model; or the hub does not give the repository.
        ArgumentTypeError: allow_missing or ignore is one str.
        ArgumentError: dtype is not a floating-point one; ignore names a key or tensor that the
            family needs; a revision is given for what is not on the hub.

    >>> load("tiny").config.vocab_size
    1024
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(f"dtype is {dtype}; weights are float32, float16, bfloat16 or float64")
    for name, patterns in (("allow_missing", allow_missing), ("ignore", ignore)):
        if isinstance(patterns, str):  # which is a sequence of letters
            raise ArgumentTypeError(f"{name} is a str; give several: {name}=[{patterns!r}]")

    def check(folder: Path) -> None:
        # of a repository on the hub, before its weights are downloaded: the number of tensors is
        # not known yet
        _adapters(folder, ignore)
        read_config(folder, *_family(folder, kind), tensors=_MANY, ignore=ignore)

    folder = folder_of(source, revision, check)
    found, raw = _family(folder, kind)
    store = unpacked(Store.open(folder), raw.get("quantization_config"))
    beside = _adapters(folder, ignore)
    config, passed = read_config(folder, found, raw, tensors=len(store.tensors), ignore=ignore)
    config, headless = _settled(found, config, raw, store)
    network = found.build_empty(config)
    if headless:
        cast("Decoder", network).head = None
    filled = fill(
        network,
        found,
        store,
        dtype=dtype or _dtype(folder, raw, store),
        allow_missing=allow_missing,
        ignore=ignore,
        finite=finite,
        fresh=partial(found.build, config),
    )
    ignored = (*beside, *passed, *filled.ignored)
    _check_ignored(ignore, ignored, raw, store)
    network = network.eval().requires_grad_(False)
    return _model(network, config, folder, raw, {"fresh": filled.fresh, "ignored": ignored})


_MANY = 1 << 16
_READ = frozenset({"dtype", "eos_token_id", "model_type", "quantization_config", "torch_dtype"})
"""Keys that shape no network, and say what is stored and what ends a text."""
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def _family(folder: Path, kind: type[Any] | None) -> tuple[Family, Raw]:
    """What config.json names, and what it says; another kind of model than is asked for is
    refused.
    """
    found, raw = read_raw(folder, family)
    held = KINDS[found.text]
    if kind not in (None, held):
        raise FileError(
            f"{folder}: {raw['model_type']} models are {found.text}s, held as a {held.__name__}, "
            f"and a {kind.__name__} is "
            f"asked for; `regard.load` without a kind gives it"
        )
    return found, raw


def _adapters(folder: Path, ignore: Sequence[str]) -> tuple[str, ...]:
    """The first file of an adapter beside the model, if it is to be passed over; otherwise it is
    refused.
    """
    name = next((name for name in _ADAPTERS if (folder / name).exists()), None)
    if name is None:
        return ()
    if not any(fnmatchcase(name, pattern) for pattern in ignore):
        raise FileError(
            f"{folder} holds an adapter ({name}) beside the model, and adapters are not applied: "
            "the model would answer "
            "without it. Merge it into the weights first (peft: merge_and_unload), or load the "
            "model without it: "
            f"regard.load(folder, ignore=({name!r},)), or --ignore {name}"
        )
    return (name,)


def _settled(found: Family, config: Any, raw: Raw, store: Store) -> tuple[Any, bool]:
    """The config with what only the stored tensors tell; and whether they are a base model's that
    has no head at all.
    """
    if found.names is OWN:
        return found.settle(config, raw, store.tensors), False
    where = placed(store.folder, store.tensors, found, table(found))
    stored = set(where.names.values())
    alone = where.bare and found.head is not None and found.head not in stored
    if alone and not config.tie_word_embeddings:
        return config, True
    return found.settle(config, raw, stored), False


def _check_ignored(ignore: Sequence[str], ignored: Sequence[str], raw: Raw, store: Store) -> None:
    """A name that was to be passed over and is there, and was not, would have been used behind the
    caller's back.
    """
    for name in ignore:
        inner: Any = raw
        for part in name.split("."):
            inner = inner.get(part) if isinstance(inner, dict) else None
        there = name in store.tensors or inner is not None or name in raw
        unread = is_harmless(name) and name not in _READ
        if there and name not in ignored and not unread:
            raise ArgumentError(
                f"ignore names {short_repr(name)}, which is no unknown key or tensor: "
                f"{raw['model_type']} needs it; leave it out"
            )


KINDS: dict[str, type[Model | TextEncoder | Seq2Seq]] = {
    "decoder": Model,
    "encoder": TextEncoder,
    "encoder-decoder": Seq2Seq,
}
"""What a family's `text` is held as."""


def _model(
    network: nn.Module, config: Any, folder: Path, raw: Raw, told: dict[str, Any]
) -> Model | TextEncoder | Seq2Seq:
    name = "tokenizer.json"
    file = checked_path_or_none(folder, name)
    tokenizer = None if file is None else Tokenizer.load(file)
    if isinstance(network, HeadedEncoder):
        longest = [config.max_position_embeddings, read_longest(folder)]
        return TextEncoder(
            network,
            tokenizer,
            config,
            pooling=read_pooling(folder),
            longest=min(n for n in longest if n is not None),
            **told,
        )
    ends = read_ends(folder, raw, tokenizer)
    if isinstance(network, EncoderDecoder):
        start = config.decoder_start_token_id
        return Seq2Seq(
            network,
            tokenizer,
            config,
            start=config.pad_token_id if start is None else start,
            ends=ends or {config.eos_token_id},
            **told,
        )
    return Model(cast("Decoder", network), tokenizer, config, ends=ends, **told)


def _dtype(folder: Path, raw: Raw, store: Store) -> torch.dtype:
    """The one dtype that config.json names, else that of most stored bytes."""
    text = raw.get("dtype") or raw.get("torch_dtype")
    if text is not None:
        found = getattr(torch, str(text).removeprefix("torch."), None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise FileError(
                f"{folder / 'config.json'}: torch_dtype is {short_repr(text)}; it must be float32, "
                "float16, bfloat16 or float64"
            )
        return found
    bytes_of: dict[torch.dtype, int] = {}
    for x in store.tensors.values():
        if x.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            bytes_of[x.dtype] = bytes_of.get(x.dtype, 0) + x.bytes
    return max(bytes_of, key=lambda d: bytes_of[d], default=torch.float32)


def folder_of(
    source: str | Path,
    revision: str | None = None,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """The folder that a source names; a repository of the hub is downloaded into the cache of
    Hugging Face.

    Nothing is downloaded but for `"hub:org/name"`, and `"org/name"` where neither that folder nor a
    folder "org" is here: a mistyped path must not become a question to a server.

    Args:
        source, revision: as `load` takes them.
        check: is called with the folder of a repository when all but its weights is there; what it
            raises ends the download.

    Raises:
        FileError: it names none.
        ArgumentError: a revision is given for what is not on the hub.
    """
    repository = hub.repository_of(source)
    if repository is not None:
        return hub.download(repository, revision, check)
    if revision is not None:
        raise ArgumentError(
            f"revision is {revision!r}, and {str(source)!r} is not a repository of the hub; leave "
            "it out, or name one: "
            "org/name, or hub:org/name"
        )
    if source in EMBEDDED:
        config = Path(str(resources.files("regard") / "assets" / str(source) / "config.json"))
        return config.resolve().parent  # an installer may have linked each file
    if source == "minilm" and not Path(source).is_dir():
        return minilm()
    folder = Path(source)
    if folder.is_file():
        with open_regular(folder) as (file, _):
            kind = identify_format(file.read(64) or b"")
        raise FileError(
            f"{folder} is a file{f': {kind}' if kind else ''}; a model is a folder with "
            "config.json and model.safetensors"
        )
    if not folder.is_dir():
        raise FileError(
            f"no model {str(source)!r}: it is neither an embedded one ({', '.join(EMBEDDED)}) nor "
            "a folder, and nothing is "
            f"downloaded for such a name. {hub.ABOUT}"
        )
    return folder
