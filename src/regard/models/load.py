"""Finding a model by its source."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch import nn

from regard.errors import ArgumentError, FileError
from regard.files.regular import present
from regard.foreign import shown
from regard.models.checkpoint import fill, read_config, read_raw
from regard.models.checkpoint.ends import read_ends
from regard.models.checkpoint.family import Raw
from regard.models.checkpoint.store import Store
from regard.models.checkpoint.unpacked import unpacked
from regard.models.decoder import Decoder
from regard.models.demo import minilm
from regard.models.encoder import HeadedEncoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.families import family
from regard.models.model import Model
from regard.models.pooling import read_longest, read_pooling
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder
from regard.models.tokenizer import Tokenizer

EMBEDDED = ("tiny",)
"""Models that come with the package."""
Held = TypeVar("Held", bound=Model | TextEncoder | Seq2Seq)


@overload
def load(
    source: Literal["tiny"] = "tiny",
    *,
    dtype: torch.dtype | None = ...,
    allow_missing: Sequence[str] = ...,
    finite: bool = ...,
) -> Model: ...


@overload
def load(
    source: str | Path,
    *,
    kind: type[Held],
    dtype: torch.dtype | None = ...,
    allow_missing: Sequence[str] = ...,
    finite: bool = ...,
) -> Held: ...


@overload
def load(
    source: str | Path,
    *,
    dtype: torch.dtype | None = ...,
    allow_missing: Sequence[str] = ...,
    finite: bool = ...,
) -> Model | TextEncoder | Seq2Seq: ...


def load(
    source: str | Path = "tiny",
    *,
    kind: type[Any] | None = None,
    dtype: torch.dtype | None = None,
    allow_missing: Sequence[str] = (),
    finite: bool = False,
) -> Model | TextEncoder | Seq2Seq:
    """Load a model and its tokenizer from a Hugging Face folder, or an embedded one by name.

    A decoder is held as a `Model`, an encoder as a `TextEncoder`, an encoder-decoder as a `Seq2Seq`.

    The folder is data, never code: config.json, safetensors (one file, or shards with an index) and tokenizer.json are
    checked before anything is allocated. A folder without tokenizer.json gives a model that takes ids only.

    Args:
        source: `"tiny"`, a Llama-shaped decoder that comes with the package; `"minilm"`, a trained BERT, if the extra `demo`
            is installed; or a folder.
        kind: one of these three, for who can use no other; None is what the folder holds.
        dtype: of the weights, and so of the computation; None is the one that config.json names, else that of the stored
            weights. On a CPU, float16 decodes fastest, and bfloat16 reads prompts fastest (LOG.md).
        allow_missing: patterns (`*`, `?`) of stored names that may be absent; such weights are fresh, not trained.
        finite: whether to refuse weights that are NaN or infinite; it takes about as long again as reading them.

    Raises:
        FileError: the folder or a file in it is missing, damaged, not supported, or contradicts another; or
            it holds another kind of model.
        ArgumentError: dtype is not a floating-point one.

    >>> load("tiny").config.vocab_size
    1024
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(f"dtype is {dtype}; weights are float32, float16, bfloat16 or float64")
    folder = folder_of(source)
    found, raw = read_raw(folder, family)
    held = KINDS[found.text]
    if kind not in (None, held):
        raise FileError(
            f"{folder}: {raw['model_type']} models are {found.text}s, held as a {held.__name__}, and a {kind.__name__} is "
            f"asked for; `regard.load` without a kind gives it"
        )
    store = unpacked(Store.open(folder), raw.get("quantization_config"))
    config = read_config(folder, found, raw, tensors=len(store.tensors))
    config = found.settle(config, raw, store.tensors)
    with torch.device("meta"):
        network = found.build(config)
    fresh = fill(
        network, found, store,
        dtype=dtype or _dtype(folder, raw, store),
        allow_missing=allow_missing, finite=finite, fresh=partial(found.build, config),
    )  # fmt: skip
    network = network.eval().requires_grad_(False)
    return _model(network, config, folder, raw, fresh)


KINDS: dict[str, type[Model | TextEncoder | Seq2Seq]] = {
    "decoder": Model,
    "encoder": TextEncoder,
    "encoder-decoder": Seq2Seq,
}
"""What a family's `text` is held as."""


def _model(
    network: nn.Module, config: Any, folder: Path, raw: Raw, fresh: Sequence[str]
) -> Model | TextEncoder | Seq2Seq:
    name = "tokenizer.json"
    file = present(folder, name)
    tokenizer = None if file is None else Tokenizer.load(file)
    if isinstance(network, HeadedEncoder):
        longest = [config.max_position_embeddings, read_longest(folder)]
        return TextEncoder(
            network, tokenizer, config, pooling=read_pooling(folder),
            longest=min(n for n in longest if n is not None), fresh=fresh,
        )  # fmt: skip
    ends = read_ends(folder, raw, tokenizer)
    if isinstance(network, EncoderDecoder):
        start = config.decoder_start_token_id
        return Seq2Seq(
            network, tokenizer, config, start=config.pad_token_id if start is None else start,
            ends=ends or {config.eos_token_id}, fresh=fresh,
        )  # fmt: skip
    return Model(cast("Decoder", network), tokenizer, config, ends=ends, fresh=fresh)


def _dtype(folder: Path, raw: Raw, store: Store) -> torch.dtype:
    """The one dtype that config.json names, else that of most stored bytes."""
    text = raw.get("dtype") or raw.get("torch_dtype")
    if text is not None:
        found = getattr(torch, str(text).removeprefix("torch."), None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise FileError(
                f"{folder / 'config.json'}: torch_dtype is {shown(text)}; it must be float32, float16, bfloat16 or float64"
            )
        return found
    bytes_of: dict[torch.dtype, int] = {}
    for x in store.tensors.values():
        if x.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            bytes_of[x.dtype] = bytes_of.get(x.dtype, 0) + x.bytes
    return max(bytes_of, key=lambda d: bytes_of[d], default=torch.float32)


def folder_of(source: str | Path) -> Path:
    """The folder that a source names.

    Raises:
        FileError: it names none.
    """
    if source in EMBEDDED:
        config = Path(str(resources.files("regard") / "assets" / str(source) / "config.json"))
        return config.resolve().parent  # an installer may have linked each file
    if source == "minilm" and not Path(source).is_dir():
        return minilm()
    folder = Path(source)
    if not folder.is_dir():
        raise FileError(
            f"no model {str(source)!r}: it is neither an embedded one ({', '.join(EMBEDDED)}) nor a folder"
        )
    return folder
