"""The tokenizer: text to ids and back, streaming decoding, and how tokens are displayed."""

from __future__ import annotations

import codecs
import json
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.files.atomic_write import write_atomically
from regard.files.regular_files import read_bytes
from regard.files.strict_json import parse_json
from regard.untrusted_text import error_text, short_repr

_GLYPHS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"}


def visible(text: str) -> str:
    """`text` with what a page would hide or obey shown as glyphs: spaces, controls, marks.

    >>> visible(" a\\x00\\u202e")
    '·a␀‹U+202E›'
    """
    return "".join(_glyph(letter) for letter in text)


def _glyph(letter: str) -> str:
    if letter in _GLYPHS:
        return _GLYPHS[letter]
    kind = unicodedata.category(letter)
    if ord(letter) < 32:
        return chr(0x2400 + ord(letter))
    if kind[0] == "C" or kind[0] == "Z":
        return f"‹U+{ord(letter):04X}›"
    return f"◌{letter}" if kind[0] == "M" else letter


def _byte_alphabet() -> dict[str, int]:
    """Letter -> byte: printable bytes are themselves, the others follow from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in own]
    return {chr(b): b for b in own} | {chr(0x100 + i): b for i, b in enumerate(moved)}


BYTE_OF = _byte_alphabet()


def encodable(text: str) -> str:
    """The text itself, when it is Unicode text.

    Raises:
        ArgumentError: it has a lone surrogate.
        ArgumentTypeError: it is no str.

    >>> encodable("né 你好")
    'né 你好'
    """
    if not isinstance(text, str):
        raise ArgumentTypeError(
            f"text is {type(text).__name__}; it must be str (decode bytes first)"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ArgumentError(
            f"text has a lone surrogate U+{code:04X} at offset {error.start}; it is no Unicode "
            "text: decode its source with errors='replace'"
        ) from error
    return text


def cut(text: str, names: Iterable[str]) -> list[str]:
    """Text cut before and after every name, the longest name first where two begin together.

    >>> cut("a<b>c", ["<b>"])
    ['a', '<b>', 'c']
    """
    parts, start, at = [], 0, 0
    ordered = sorted(names, key=len, reverse=True)
    while at < len(text):
        name = next((n for n in ordered if text.startswith(n, at)), None)
        if name is None:
            at += 1
            continue
        parts += [text[start:at], name]
        at = start = at + len(name)
    return [part for part in [*parts, text[start:]] if part]


class StreamDecoder:
    """Text as ids arrive: `push(id)` gives the characters now complete, `flush()` what is left.

    The parts joined equal `Tokenizer.decode` of all ids; half a character is never given out. The
    one exception are byte tokens beside words (sentencepiece's byte fallback) that spell no UTF-8:
    they make U+FFFD of letters before them, too.

    >>> from regard.models.tokenizer import Tokenizer
    >>> tokenizer = Tokenizer.train(["x"], vocab_size=257)
    >>> stream = tokenizer.stream()
    >>> [stream.push(i) for i in tokenizer.encode("é!")]
    ['', 'é', '!']
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # not of one byte-level alphabet: the ids given out last, and those that make no whole text
        # yet
        self._ids: list[int] = []
        self._given, self._shown = 0, ""

    def push(self, index: int) -> str:
        """The text that this id completes, often one word, sometimes nothing."""
        raw = self._tokenizer.token_bytes(index)
        if raw is not None:
            return self._utf8.decode(raw)
        self._ids.append(index)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith("�") else self._emit(text)

    def flush(self) -> str:
        """The rest, when no more ids come; bytes that never became a character are U+FFFD."""
        rest = self._utf8.decode(b"", final=True)
        return rest + (self._emit(self._tokenizer.decode(self._ids)) if self._ids else "")

    def _emit(self, text: str) -> str:
        """What is new in the text of the ids; how a token reads depends on the one in front of it,
        and on no earlier one.
        """
        new = text[len(self._shown) :]
        self._ids = self._ids[self._given :]
        self._given, self._shown = len(self._ids), self._tokenizer.decode(self._ids)
        return new


LONGEST = 128 << 20
"""Bytes of a tokenizer.json; those of a quarter of a million tokens have some 35 MB."""
LARGEST_ID = 1 << 22
"""Ids are below it; the largest vocabulary in use has a million."""
END_OF_TEXT = "<|endoftext|>"
"""The one special token of a tokenizer trained here: it stands between documents."""


class Tokenizer:
    """Text <-> token ids, over a `tokenizers` backend; control tokens in user text are literal.

    `decode(encode(text)) == text` for every text of a byte-level tokenizer. Ids are 0-based.

    Raises:
        ArgumentError: a token id outside the vocabulary, or text with a lone surrogate.
        FileError: the file that it was read from asks for parts that it does not have.

    >>> tokenizer = Tokenizer.train(["low lower lowest"] * 9, vocab_size=260)
    >>> tokenizer.pieces(tokenizer.encode("low low"))
    ['low', '·low']
    >>> tokenizer.decode(tokenizer.encode("né 你好"))
    'né 你好'
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.encode_special_tokens = True  # never matched in user text
        # a file may say so, and then texts would lose their ends, or have ends that are not theirs,
        # unseen
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._byte_level = '"ByteLevel"' in json.dumps(json.loads(backend.to_str())["decoder"])
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: index for index, token in added.items() if token.special}

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn merges from `texts` until there are `vocab_size` tokens or no pair is left.

        >>> Tokenizer.train(["aaaa"], vocab_size=258).vocab_size
        258
        """
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
        backend.train_from_iterator((encodable(text) for text in texts), trainer)
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json (any kind the `tokenizers` package knows), or the one in a folder.

        Raises:
            FileError: missing, no regular file, not JSON (with line and column), or not a tokenizer
                this version can read.
        """
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        return _read(cls, file)

    def save(self, path: str | Path) -> Path:
        """Write tokenizer.json to a file, or into a folder; gives the path written."""
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

    @property
    def vocab_size(self) -> int:
        """How many tokens there are; ids are 0 ... vocab_size - 1."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def special(self) -> dict[str, int]:
        """Special tokens and their ids, a copy."""
        return dict(self._special)

    @property
    def end_of_text(self) -> int | None:
        """The id of `<|endoftext|>`, or None when the tokenizer has no such token."""
        return self._special.get(END_OF_TEXT)

    def encode(self, text: str, *, special: bool = False, template: bool = False) -> list[int]:
        """Token ids of `text`; `special=True` also turns names of special tokens into their ids.

        `template=True` adds what the tokenizer's file puts around a text, such as a token for its
        beginning.

        >>> tokenizer = Tokenizer.train(["x"], vocab_size=257)
        >>> len(tokenizer.encode("<|endoftext|>")), tokenizer.encode("<|endoftext|>", special=True)
        (13, [0])
        """
        encodable(text)
        if not special:
            return list(self._ask(self._backend.encode, text, add_special_tokens=template).ids)
        ids: list[int] = []
        for part in cut(text, self._special):
            known = self._special.get(part)
            ids += [known] if known is not None else self.encode(part)
        return ids

    def encode_pair(self, first: str, second: str | None = None) -> tuple[list[int], list[int]]:
        """Ids of a text, or of two, with what the tokenizer's file puts around them; and which text
        each belongs to, 0 or 1.

        >>> Tokenizer.train(["x"], vocab_size=257).encode_pair("a", "bc")[1]
        [0, 1, 1]
        """
        pair = None if second is None else encodable(second)
        found = self._ask(self._backend.encode, encodable(first), pair, add_special_tokens=True)
        return list(found.ids), list(found.type_ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, in parallel; special tokens stay literal."""
        for text in texts:
            encodable(text)
        return [
            list(row.ids)
            for row in self._ask(self._backend.encode_batch, list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; special tokens show by name unless skipped, broken UTF-8 as U+FFFD."""
        chosen = list(ids)
        for index in chosen:
            self._token(index)
        if skip_special:
            hidden = set(self._special.values())
            chosen = [i for i in chosen if i not in hidden]
        return str(self._ask(self._backend.decode, chosen, skip_special_tokens=False))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """One visible string per token: spaces as glyphs, part of a character as bytes, ‹E4 BD›.

        >>> tokenizer = Tokenizer.train(["x"], vocab_size=257)
        >>> tokenizer.pieces(tokenizer.encode("a\\n é"))
        ['a', '⏎', '·', '‹C3›', '‹A9›']
        """
        return [self._piece(index) for index in ids]

    def stream(self) -> StreamDecoder:
        """A decoder to be fed one id at a time."""
        return StreamDecoder(self)

    def token_bytes(self, index: int) -> bytes | None:
        """The bytes that a token stands for, or None where the tokenizer is not byte-level."""
        token = self._token(index)
        if not self._byte_level:
            return None
        if any(letter not in BYTE_OF for letter in token):  # a token added by name
            return token.encode("utf-8")
        return bytes(BYTE_OF[letter] for letter in token)

    def _ask(self, question: Callable[..., Any], *given: Any, **more: Any) -> Any:
        try:
            return _asked(question, *given, **more)
        except _BackendError as error:
            raise FileError(
                f"the tokenizer's file does not fit itself: {error_text(error, 300)}; is it "
                "damaged?"
            ) from error

    def _piece(self, index: int) -> str:
        raw = self.token_bytes(index)
        if raw is None:
            return visible(self._token(index))
        try:
            return visible(raw.decode("utf-8"))
        except UnicodeDecodeError:
            return f"‹{raw.hex(' ').upper()}›"

    def _token(self, index: int) -> str:
        token = self._backend.id_to_token(index) if 0 <= index < 2**32 else None
        if token is None:
            raise ArgumentError(
                f"token id {index} outside [0, {self.vocab_size}); is it another tokenizer's?"
            )
        return token


def _read(kind: type[Tokenizer], file: Path) -> Tokenizer:
    """The tokenizer of a file, whose parts are looked at before the `tokenizers` package gets
    it.
    """
    raw = read_bytes(file, LONGEST)
    try:
        content = parse_json(raw)
    except ArgumentError as error:
        raise FileError(f"{file} {error}; is the download complete?") from None
    for key in ("model", "decoder"):
        if key not in content:
            raise FileError(f"{file}: no {key!r} at the top level; is this a tokenizer.json?")
    _check_ids(content, file)
    try:
        return kind(_asked(tokenizers.Tokenizer.from_str, raw.decode("utf-8")))
    except _BackendError as error:
        raise FileError(
            f"{file}: the tokenizers package {tokenizers.__version__} cannot read it "
            f"({error_text(error, 300)}); "
            "damaged, or written by a newer version?"
        ) from error


class _BackendError(Exception):
    """What the backend raises: it has no error of its own."""


def _asked(question: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """An answer of the backend; a failed check inside it is no `Exception`, and is an error like
    its others.
    """
    try:
        return question(*given, **more)
    except Exception as error:
        raise _BackendError(str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _BackendError(str(error)) from None


def _check_ids(content: dict[str, Any], file: Path) -> None:
    """No id is beyond what a vocabulary can have: the backend fills every gap below the largest
    one.
    """
    model, added = content["model"], content.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i < LARGEST_ID), None)
    if wrong is not None:
        raise FileError(
            f"{file}: a token has the id {short_repr(wrong)}; ids are from 0 to {LARGEST_ID - 1}, "
            "without large gaps"
        )
