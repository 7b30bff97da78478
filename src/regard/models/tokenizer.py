"""`Tokenizer`: text to ids and back, streaming decoding, and the display of tokens."""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.files.atomic_write import write_atomically
from regard.files.reading import parse_json, read_bytes
from regard.units import plural
from regard.untrusted_text import error_text, short_repr

_SPACE_SYMBOL = "▁"
"""What sentencepiece writes for a space."""
MAX_RUN = 16
"""Tokens, each with parts of two characters, whose characters are shown together."""
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_DISPLAY_SYMBOLS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"}


def display_text(text: str) -> str:
    """Return the text with spaces, control characters and marks shown as visible symbols."""
    return "".join(_display_symbol(letter) for letter in text)


def _display_symbol(letter: str) -> str:
    if letter in _DISPLAY_SYMBOLS:
        return _DISPLAY_SYMBOLS[letter]
    kind = unicodedata.category(letter)
    if ord(letter) < 32:
        return chr(0x2400 + ord(letter))
    if kind[0] == "C" or kind[0] == "Z":
        return f"‹U+{ord(letter):04X}›"
    return f"◌{letter}" if kind[0] == "M" else letter


def _byte_alphabet() -> dict[str, int]:
    """Return character -> byte: printable bytes are themselves, the others start at U+0100."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in own]
    return {chr(b): b for b in own} | {chr(0x100 + i): b for i, b in enumerate(moved)}


BYTE_OF = _byte_alphabet()
"""Character of the byte-level alphabet -> byte."""
LETTER_OF = {byte: letter for letter, byte in BYTE_OF.items()}


def _shares_of(text: str, parts: Sequence[bytes]) -> list[str]:
    """Return a visible string for each part of the bytes of a text."""
    owners = [n for n, part in enumerate(parts) for _ in part]  # byte -> the part that has it
    shown, begin = ["" for _ in parts], 0
    for letter in text:
        own = list(dict.fromkeys(owners[begin : begin + len(letter.encode())]))
        for k, n in enumerate(own, 1):
            shown[n] += display_text(letter) + (f"‹{k}/{len(own)}›" if len(own) > 1 else "")
        begin += len(letter.encode())
    return shown


_CHINESE = re.compile(
    # punctuation and kana, Han characters in three blocks, wide forms
    "[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef]"
)
"""A character of Chinese text: Han, kana, or wide punctuation."""


def check_unicode(text: str) -> str:
    """Return the text if it is valid Unicode text."""
    if not isinstance(text, str):
        raise ArgumentTypeError(
            f"text is {type(text).__name__}; it must be str (decode bytes first)"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ArgumentError(
            f"text has a lone surrogate U+{code:04X} at offset {error.start}; it is not valid "
            "Unicode text: decode its source with errors='replace'"
        ) from error
    return text


class StreamDecoder:
    """Decodes ids one at a time: `push(id)` returns the characters that are complete, `flush()` the
    rest.

    The parts joined equal `Tokenizer.decode` of all ids after the same context, and no part of a
    character is returned. There is one exception: byte tokens beside words (the byte fallback of
    sentencepiece) that are not valid UTF-8 can turn characters before them into U+FFFD.

    >>> from regard.models.tokenizer import Tokenizer
    >>> tokenizer = Tokenizer.train(["x"], vocab_size=257)
    >>> stream = tokenizer.stream()
    >>> [stream.push(i) for i in tokenizer.encode("é!")]
    ['', 'é', '!']
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._has_half = False  # of a character, in the bytes before the first id
        # only for tokenizers that are not byte-level: the ids whose text was returned last,
        # followed by the ids whose text is not complete yet
        self._ids: list[int] = []
        self._emitted, self._shown = 0, ""
        before = tokenizer.ordinary(after)
        if tokenizer.is_byte_level:
            for index in before[-3:]:  # a character has at most three bytes before its last one
                self.push(index)
            self._has_half = bool(self._utf8.getstate()[0])
        elif before:
            self._ids, self._shown = before, tokenizer.decode(before)
            self._emitted = 0 if self._shown.endswith("�") else len(before)

    def push(self, index: int) -> str:
        """Return the text that this id completes, often one word and sometimes empty."""
        if self._tokenizer.is_byte_level:
            raw = self._tokenizer.token_bytes(index)
            assert raw is not None, "each token is a sequence of bytes"
            return self._decode_bytes(raw)
        self._ids.append(index)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith("�") else self._emit(text)

    def flush(self) -> str:
        """Return the rest after the last id; incomplete characters are U+FFFD."""
        rest = self._decode_bytes(b"", final=True)
        return rest + (self._emit(self._tokenizer.decode(self._ids)) if self._ids else "")

    def _decode_bytes(self, raw: bytes, *, final: bool = False) -> str:
        """Return the characters that the bytes complete, without a half one at the start."""
        text = self._utf8.decode(raw, final)
        if text and self._has_half:
            self._has_half = False
            return text.removeprefix("�")
        return text

    def _emit(self, text: str) -> str:
        """Return the new text; the last ids are decoded again, as tokens depend on them."""
        new = _text_after(self._shown, text)
        self._ids = self._ids[self._emitted :]
        self._emitted, self._shown = len(self._ids), self._tokenizer.decode(self._ids)
        return new


def _text_after(shown: str, text: str) -> str:
    """Return what a text adds to the shown one; a half character counts where it is complete."""
    whole = shown if text.startswith(shown) else shown.rstrip("�")
    return text[len(whole) :]


MAX_FILE_BYTES = 128 << 20
"""The largest size of a tokenizer.json in bytes; a file with 250,000 tokens has about 35 MB."""
MAX_TOKEN_ID = 1 << 22
"""Token ids must be smaller; the largest vocabulary in use has a million."""
MAX_PIECE_LENGTH = 4096
"""The most characters of a token of a unigram model, whose tree the backend frees recursively."""
END_OF_TEXT = "<|endoftext|>"
"""The only special token of a tokenizer trained here; it separates documents."""


class Tokenizer:
    """Converts text to token ids and back, with the `tokenizers` package.

    Names of special tokens in a user's text are encoded as ordinary text. `decode(encode(text)) ==
    text` for every text of a byte-level tokenizer. Ids count from 0.

    Raises:
        ArgumentError: a token id is outside the vocabulary, or a text has a lone surrogate.
        FileError: the file that it was read from refers to parts that it does not have.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.encode_special_tokens = True  # special tokens are never matched in user text
        # a file may enable truncation or padding, which would silently change texts
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._parts = _parts_of(backend)
        decoder = json.dumps(self._parts["decoder"], ensure_ascii=False)
        self._byte_level = '"ByteLevel"' in decoder
        self._has_space_symbol = _SPACE_SYMBOL in decoder
        self._has_byte_tokens = '"ByteFallback"' in decoder
        self._unknown = _unknown_id(backend)
        # (special, continued) -> the backend that encodes so; see `_backend_for`
        self._backends = {(False, False): backend}
        self.has_warned = False
        """Whether `regard.models.prompts` has warned about the name of a special token."""
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: index for index, token in added.items() if token.special}

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn merges from `texts` until there are `vocab_size` tokens or no pair is left."""
        smallest = 257  # every byte, and the end of text
        if vocab_size < smallest:
            raise ArgumentError(
                f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least {smallest}: "
                f"256 bytes and {END_OF_TEXT}"
            )
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator((check_unicode(text) for text in texts), trainer)
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json of the `tokenizers` package, or the one in a folder."""
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        return _read(cls, file)

    def save(self, path: str | Path) -> Path:
        """Write tokenizer.json to a file, or into a folder, and return the path written."""
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        try:
            with write_atomically(file) as place:
                place.write_text(self._backend.to_str(pretty=True), encoding="utf-8")
        except OSError as error:
            raise FileError(
                f"{file}: cannot write the tokenizer: {error.strerror or error}"
            ) from error
        return file

    def with_chinese(self, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Return this tokenizer with a token for each of the most frequent Chinese characters of
        some texts; a rare one is its bytes, and other text keeps its tokens.
        """
        content = json.loads(self._backend.to_str())
        model, splitter = content["model"], content["pre_tokenizer"]
        if not self._byte_level or model["type"] != "BPE" or splitter["type"] != "ByteLevel":
            raise ArgumentError(
                "this tokenizer is not a byte-level BPE, to which characters can be added; train a "
                "new tokenizer instead"
            )
        if vocab_size <= self.vocab_size:
            raise ArgumentError(
                f"vocab_size is {vocab_size} and this tokenizer has "
                f"{plural(self.vocab_size, 'token')}; give a larger number"
            )
        counts = Counter(c for text in texts for c in _CHINESE.findall(check_unicode(text)))
        tokens = {c: "".join(LETTER_OF[byte] for byte in c.encode()) for c in counts}
        # the most frequent first; of equally frequent ones the smallest code point
        new = sorted(
            (c for c in counts if tokens[c] not in model["vocab"]), key=lambda c: (-counts[c], c)
        )
        for index, character in enumerate(new[: vocab_size - self.vocab_size], self.vocab_size):
            model["vocab"][tokens[character]] = index
        model["ignore_merges"] = True  # a piece that is a token is not built from its bytes
        split = pre_tokenizers.Split(tokenizers.Regex(_CHINESE.pattern), "isolated")
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=splitter["add_prefix_space"])]
        )
        return type(self)(backend)

    def lowercased(self) -> Tokenizer:
        """Return this tokenizer with all letters of a text made small before anything else."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        own = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        return type(self)(backend)

    @property
    def vocab_size(self) -> int:
        """The number of tokens; ids are 0 ... vocab_size - 1."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """Return all tokens, as they are stored, and their ids."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @property
    def special(self) -> dict[str, int]:
        """The special tokens and their ids, as a copy."""
        return dict(self._special)

    def special_names(self, text: str) -> list[str]:
        """Return the special tokens whose names are in a text."""
        if not any(letter in text for letter in {name[:1] for name in self._special}):
            return []
        return [name for name in self._special if name and name in text]

    @property
    def is_byte_level(self) -> bool:
        """Whether each token is a sequence of bytes, which is joined without regard to context."""
        return self._byte_level

    @property
    def end_of_text(self) -> int | None:
        """The id of `<|endoftext|>`, or None if the tokenizer has no such token."""
        return self._special.get(END_OF_TEXT)

    @property
    def unknown(self) -> int | None:
        """The id of the token for what the tokenizer does not know; None without one."""
        return self._unknown

    def encode(
        self,
        text: str,
        *,
        special: bool = False,
        template: bool = False,
        after: Sequence[int] = (),
    ) -> list[int]:
        """Convert a text to token ids."""
        backend = self._backend_for(special=special, continued=bool(self.ordinary(after)))
        ids = self._run(backend.encode, check_unicode(text), add_special_tokens=template).ids
        return list(ids)

    def encode_pair(self, first: str, second: str | None = None) -> tuple[list[int], list[int]]:
        """Convert one text, or a pair of texts, to ids, with the special tokens around them."""
        pair = None if second is None else check_unicode(second)
        encoding = self._run(
            self._backend.encode, check_unicode(first), pair, add_special_tokens=True
        )
        return list(encoding.ids), list(encoding.type_ids)

    def encode_pairs(
        self,
        firsts: Sequence[str],
        seconds: Sequence[str | None] | None = None,
        *,
        special: bool = False,
    ) -> list[tuple[list[int], list[int]]]:
        """Convert many texts or pairs as `encode_pair` does, on all threads of the package."""
        others = [None] * len(firsts) if seconds is None else seconds
        inputs = [
            check_unicode(first)
            if second is None
            else (check_unicode(first), check_unicode(second))
            for first, second in zip(firsts, others, strict=True)
        ]
        backend = self._backend_for(special=special, continued=False)
        rows = self._run(backend.encode_batch, inputs, add_special_tokens=True)
        return [(row.ids, row.type_ids) for row in rows]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Convert many texts to token ids in parallel; special tokens stay ordinary text."""
        for text in texts:
            check_unicode(text)
        return [
            list(row.ids)
            for row in self._run(self._backend.encode_batch, list(texts), add_special_tokens=False)
        ]

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = False, after: Sequence[int] = ()
    ) -> str:
        """Convert ids to text; special tokens by name unless skipped, bad UTF-8 as U+FFFD."""
        chosen = self.ordinary(ids) if skip_special else list(ids)
        before = self.ordinary(after)
        for index in chosen:
            self._token(index)
        text = self._decode([*before, *chosen])
        return _text_after(self._decode(before), text) if before else text

    def ordinary(self, ids: Iterable[int]) -> list[int]:
        """Return the ids that are not those of special tokens."""
        hidden = set(self._special.values())
        return [i for i in ids if i not in hidden]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return a visible string per token: spaces as symbols, and a token that has a part of a
        character as the character and its part, 字‹2/3›; where the rest is not there, its bytes,
        ‹E4 BD›.
        """
        ids = list(ids)
        pieces = [self._piece(index) for index in ids]
        run: list[int] = []  # tokens whose last character is still incomplete
        for i, piece in enumerate(pieces):
            raw = self.token_bytes(ids[i]) if run or piece.startswith("‹") else None
            for start in ([*run, i], [i]) if raw is not None else ():
                parts = [self.token_bytes(ids[n]) or b"" for n in start]
                try:
                    shown = _shares_of(b"".join(parts).decode("utf-8"), parts)
                except UnicodeDecodeError as error:
                    is_open = error.reason == "unexpected end of data" and len(start) < MAX_RUN
                    run = start if is_open else []
                    if run:
                        break
                else:
                    for n, share in zip(start, shown, strict=True):
                        pieces[n] = share
                    run = []
                    break
            else:
                run = []
        return pieces

    def stream(self, after: Sequence[int] = ()) -> StreamDecoder:
        """Return a decoder that takes one id at a time, after the given ids."""
        return StreamDecoder(self, after)

    def token_bytes(self, index: int) -> bytes | None:
        """Return the bytes of a token: of every token of a byte-level tokenizer, and of a token of
        another one that stands for one byte; otherwise None.
        """
        token = self._token(index)
        if self._has_byte_tokens and _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        if not self._byte_level:
            return None
        if any(letter not in BYTE_OF for letter in token):  # a token added by name
            return token.encode("utf-8")
        return bytes(BYTE_OF[letter] for letter in token)

    def _decode(self, ids: list[int]) -> str:
        return str(self._run(self._backend.decode, ids, skip_special_tokens=False))

    def _backend_for(self, *, special: bool, continued: bool) -> tokenizers.Tokenizer:
        """Return a backend that matches names of special tokens or not, and adds a space at the
        beginning of a text or not; all of them share one model.
        """
        parts = dict(self._parts)
        if continued:
            for name in ("normalizer", "pre_tokenizer"):
                parts[name] = _without_prefix(parts[name])
        kind = (special, parts != self._parts)
        if kind not in self._backends:
            backend = tokenizers.Tokenizer.from_str(json.dumps(parts))
            backend.model = self._backend.model
            added = self._backend.get_added_tokens_decoder()
            backend.add_tokens([added[i] for i in sorted(added)])
            backend.encode_special_tokens = not special
            self._backends[kind] = backend
        return self._backends[kind]

    def _run(self, function: Callable[..., object], *args: object, **kwargs: object) -> Any:
        try:
            return _call_backend(function, *args, **kwargs)
        except _BackendError as error:
            raise FileError(
                f"the tokenizer's file contradicts itself: {error_text(error, 300)}; is it damaged?"
            ) from error

    def _piece(self, index: int) -> str:
        raw = self.token_bytes(index)
        if raw is None:
            token = self._token(index)
            text = token.replace(_SPACE_SYMBOL, " ") if self._has_space_symbol else token
            return display_text(text)
        try:
            return display_text(raw.decode("utf-8"))
        except UnicodeDecodeError:
            return f"‹{raw.hex(' ').upper()}›"

    def _token(self, index: int) -> str:
        token = self._backend.id_to_token(index) if 0 <= index < 2**32 else None
        if token is None:
            raise ArgumentError(
                f"token id {index} is outside [0, {self.vocab_size}); does it belong to another "
                "tokenizer?"
            )
        return token


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    """Return the id of the token for what a vocabulary lacks; Unigram names it by its index."""
    if isinstance(backend.model, models.Unigram):
        unknown: int | None = json.loads(backend.to_str())["model"]["unk_id"]
        return unknown
    name = backend.model.unk_token
    return None if name is None else backend.token_to_id(name)


def _parts_of(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return a tokenizer.json with the parts of a tokenizer around an empty model."""
    shell = tokenizers.Tokenizer(models.BPE())
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        setattr(shell, name, getattr(backend, name))
    parts: dict[str, Any] = json.loads(shell.to_str())
    return parts


def _without_prefix(part: Any) -> Any:
    """Return a normalizer or pre-tokenizer without the space that it puts before a text."""
    if isinstance(part, list):
        return [_without_prefix(each) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    return {key: never.get(key, _without_prefix(value)) for key, value in part.items()}


def _read(kind: type[Tokenizer], file: Path) -> Tokenizer:
    """Read a tokenizer file, whose parts are checked before `tokenizers` gets it."""
    raw = read_bytes(file, MAX_FILE_BYTES)
    try:
        content = parse_json(raw)
    except ArgumentError as error:
        raise FileError(f"{file} {error}; is the download complete?") from None
    for key in ("model", "decoder"):
        if key not in content:
            raise FileError(f"{file}: no {key!r} at the top level; is this a tokenizer.json?")
    _check_ids(content, file)
    _check_lengths(content, file)
    try:
        return kind(_call_backend(tokenizers.Tokenizer.from_str, raw.decode("utf-8")))
    except _BackendError as error:
        raise FileError(
            f"{file}: the tokenizers package {tokenizers.__version__} cannot read it "
            f"({error_text(error, 300)}); damaged, or written by a newer version?"
        ) from error


class _BackendError(Exception):
    """Any error of the `tokenizers` package, which has no error class of its own."""


def _call_backend(function: Callable[..., object], *args: object, **kwargs: object) -> Any:
    """Call the backend; its errors and panics become `_BackendError`."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise _BackendError(str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _BackendError(str(error)) from None


def _check_ids(content: dict[str, object], file: Path) -> None:
    """Check that every id is small: the backend fills all gaps below the largest one."""
    model, added = content["model"], content.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i < MAX_TOKEN_ID), None)
    if wrong is not None:
        raise FileError(
            f"{file}: a token has the id {short_repr(wrong)}; ids are from 0 to "
            f"{MAX_TOKEN_ID - 1}, without large gaps"
        )


def _check_lengths(content: dict[str, object], file: Path) -> None:
    """Check the tokens of a unigram model, a list of tokens with scores: the backend's recursion
    kills the process at 70,000 characters.
    """
    model = content["model"]
    vocab = model.get("vocab") if isinstance(model, dict) else None
    rows = vocab if isinstance(vocab, list) else []
    pieces = (x[0] for x in rows if isinstance(x, list) and x and isinstance(x[0], str))
    longest = max(pieces, key=len, default="")
    if len(longest) > MAX_PIECE_LENGTH:
        raise FileError(
            f"{file}: the token {short_repr(longest)} has {len(longest)} characters; a unigram "
            f"model's have at most {MAX_PIECE_LENGTH}"
        )
