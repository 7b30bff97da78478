"""The tokenizer in the metadata of a GGUF file: "gpt2" (byte-level BPE, whose pattern has one of
the names in `PATTERNS`) or "llama" (SentencePiece's BPE by scores). A tokenizer.json beside the
file, with the same tokens, replaces it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from regard.did_you_mean import suggest
from regard.errors import FileError
from regard.files.gguf_files import GgufHeader, MetadataValue, invalid_gguf
from regard.files.regular_files import checked_path_or_none
from regard.models.tokenizer import MAX_TOKEN_ID, Tokenizer
from regard.units import plural
from regard.untrusted_text import error_text, short_repr

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
PATTERNS: Mapping[str, str | None] = {
    "gpt-2": None,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": r"\p{N}",
}
"""`tokenizer.ggml.pre` -> the pattern of words; None is the pattern of GPT-2."""
_THEN_GPT2 = ("smollm",)  # each digit is a word; what is between them is split as by GPT-2
_NORMALIZED = ("qwen2", "deepseek-r1-qwen")  # published with the normalization NFC
_WHOLE_WORDS = ("llama-bpe", "llama-v3", "llama3")  # a word that is a token is not split first

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""Types of tokens in `tokenizer.ggml.token_type`."""
_SPACE = "\u2581"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_tokenizer(header: GgufHeader) -> Tokenizer | None:
    """Return the tokenizer of a GGUF file, or of tokenizer.json beside it."""
    values = _Values(header)
    kind = values.get("model", "none")
    tokens = None if kind == "none" else _tokens(values)
    beside = checked_path_or_none(header.file.parent, "tokenizer.json")
    if beside is not None:
        tokenizer = Tokenizer.load(beside)
        _check_same(header, tokenizer, tokens or [])
        return tokenizer
    if tokens is None:
        return None
    if kind == "gpt2":
        backend = _byte_level(values, tokens)
    elif kind == "llama":
        backend = _sentencepiece(values, tokens)
    else:
        raise _cannot_build(header, f"is of the kind {short_repr(kind)}; built are gpt2 and llama")
    types = values.numbers("token_type", len(tokens))
    backend.add_special_tokens(_added(tokens, types, CONTROL, special=True))
    backend.add_tokens(_added(tokens, types, USER_DEFINED, special=False))
    begins = kind == "llama" or values.get("pre", None) in _WHOLE_WORDS  # as in llama.cpp
    _add_template(values, backend, tokens, default=begins)
    return Tokenizer(backend)


def gguf_eos_ids(header: GgufHeader) -> frozenset[int] | None:
    """Return the ids that end a text, or None if the file names none."""
    values = _Values(header)
    ids = [values.get(key, None) for key in _END_KEYS]
    return frozenset(i for i in ids if type(i) is int) or None


class _Values:
    """The keys of a file that describe its tokenizer."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header

    def get(self, key: str, default: MetadataValue | None) -> MetadataValue | None:
        return self.header.metadata.get(f"tokenizer.ggml.{key}", default)

    def texts(self, key: str) -> list[str]:
        value = self.get(key, None)
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise self.invalid(key, "must be a list of strings")
        return [str(x) for x in value]

    def numbers(self, key: str, count: int) -> list[Any]:
        value = self.get(key, [0] * count)
        number = (int, float)
        if not isinstance(value, list) or not all(type(x) in number for x in value):
            raise self.invalid(key, "must be a list of numbers")
        if len(value) != count:
            raise self.invalid(
                key, f"has {plural(len(value), 'value')} for {plural(count, 'token')}"
            )
        return value

    def token_id(self, key: str, count: int) -> int | None:
        value = self.get(key, None)
        if value is not None and not (type(value) is int and 0 <= value < count):
            raise self.invalid(key, f"is {short_repr(value)}; there are {plural(count, 'token')}")
        return value

    def invalid(self, key: str, problem: str) -> FileError:
        return invalid_gguf(self.header.file, f"tokenizer.ggml.{key} {problem}")


def _tokens(values: _Values) -> list[str]:
    tokens = values.texts("tokens")
    if not tokens or len(tokens) >= MAX_TOKEN_ID:
        raise values.invalid("tokens", f"has {len(tokens)}; 1 to {MAX_TOKEN_ID - 1} are read")
    twice = next((x for x, count in Counter(tokens).items() if count > 1), None)
    if twice is not None:
        raise values.invalid("tokens", f"has {short_repr(twice)} twice")
    return tokens


def _check_same(header: GgufHeader, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Raise if tokenizer.json beside the file has other tokens than the file."""
    vocabulary = tokenizer.vocabulary()
    wrong = next((i for i, x in enumerate(tokens) if vocabulary.get(x, i) != i), None)
    if wrong is not None or any(i >= len(tokens) > 0 for i in vocabulary.values()):
        problem = (
            "more tokens than the file"
            if wrong is None
            else f"the token {short_repr(tokens[wrong])} at {vocabulary[tokens[wrong]]} and not at "
            f"{wrong}, where the file has it"
        )
        raise FileError(
            f"{header.file}: tokenizer.json beside it has {problem}; put the one of this model "
            "there, or move it away"
        )


def _cannot_build(header: GgufHeader, problem: str) -> FileError:
    return FileError(
        f"{header.file}: its tokenizer {problem}. Put tokenizer.json of the model (it is beside "
        "its safetensors) into the folder of the file"
    )


def _byte_level(values: _Values, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    name = values.get("pre", None)
    if not isinstance(name, str) or name not in PATTERNS:
        hint = suggest(str(name), PATTERNS, otherwise=";")
        raise _cannot_build(
            values.header,
            f"splits words by the rule {short_repr(name)}{hint} known are {', '.join(PATTERNS)}",
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs: list[tuple[str, str]] = []
    for merge in values.texts("merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise values.invalid("merges", f"has {short_repr(merge)}, which are not two tokens")
        pairs.append((left, right))
    backend = tokenizers.Tokenizer(
        _model(values, vocabulary, pairs, ignore_merges=name in _WHOLE_WORDS)
    )
    pattern = PATTERNS[name]
    steps: list[Any] = []
    if pattern is not None:
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated")]
    steps.append(
        pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=pattern is None or name in _THEN_GPT2
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if name in _NORMALIZED:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(values: _Values, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    scores = values.numbers("scores", len(tokens))
    types = values.numbers("token_type", len(tokens))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = _merges(vocabulary, scores)
    unknown = next(
        (token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None
    )
    backend = tokenizers.Tokenizer(
        _model(
            values,
            vocabulary,
            pairs,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    prefix = values.get("add_space_prefix", True) is True
    space = normalizers.Replace(" ", _SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), space]) if prefix else space
    )
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)
    return backend


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces whose joined piece exists, the best score first."""
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, i in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                pair = (left, right)
                ranked.append((-scores[i], vocabulary[left], vocabulary[right], pair))
    return [pair for *_, pair in sorted(ranked)]


def _model(
    values: _Values,
    vocabulary: Mapping[str, int],
    pairs: Sequence[tuple[str, str]],
    **options: Any,
) -> models.BPE:
    try:
        return models.BPE(dict(vocabulary), list(pairs), **options)
    except Exception as error:  # the package has no error class of its own
        raise values.invalid("tokens", f"are refused: {error_text(error, 300)}") from error


def _added(
    tokens: Sequence[str], types: Sequence[int], kind: int, *, special: bool
) -> list[AddedToken]:
    """Return the tokens of a type, which are matched as a whole where they are asked for."""
    return [
        AddedToken(token, special=special, normalized=False)
        for token, its_kind in zip(tokens, types, strict=True)
        if its_kind == kind and token
    ]


def _add_template(
    values: _Values, backend: tokenizers.Tokenizer, tokens: Sequence[str], *, default: bool
) -> None:
    """Add the tokens that the file puts around a text."""
    parts: dict[str, str] = {}
    ids: dict[str, int] = {}
    for key, wanted in (("bos", default), ("eos", False)):
        index = values.token_id(f"{key}_token_id", len(tokens))
        if values.get(f"add_{key}_token", wanted) is True and index is not None:
            parts[key], ids[tokens[index]] = f"{tokens[index]}:0", index
    if parts:
        template = [parts.get("bos"), "$A:0", parts.get("eos")]
        try:
            backend.post_processor = processors.TemplateProcessing(
                single=[part for part in template if part is not None],
                special_tokens=list(ids.items()),
            )
        except Exception as error:  # the package has no error class of its own
            raise values.invalid("bos_token_id", f"is refused: {error_text(error, 300)}") from error
