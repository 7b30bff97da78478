"""Text to token ids and back: a byte-level BPE tokenizer and its file.

Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; over bytes: Radford et al. 2019) starts
from the 256 bytes of UTF-8 and joins the most frequent neighbouring pair again and again. Every
text is encodable and decodes to itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from regard.errors import ArgumentError, FileError
from regard.files.regular import whole
from regard.files.strict import parse
from regard.files.write import written
from regard.foreign import shown, told
from regard.models.glyphs import BYTE_OF, visible
from regard.models.plain_text import cut, encodable
from regard.models.streaming import StreamDecoder

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
        # a file may say so, and then texts would lose their ends, or have ends that are not theirs, unseen
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
            FileError: missing, no regular file, not JSON (with line and column), or not a tokenizer this version can read.
        """
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        return _read(cls, file)

    def save(self, path: str | Path) -> Path:
        """Write tokenizer.json to a file, or into a folder; gives the path written."""
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        try:
            with written(file) as place:
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

        `template=True` adds what the tokenizer's file puts around a text, such as a token for its beginning.

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
        """Ids of a text, or of two, with what the tokenizer's file puts around them; and which text each belongs to, 0 or 1.

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
                f"the tokenizer's file does not fit itself: {told(error, 300)}; is it damaged?"
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
    """The tokenizer of a file, whose parts are looked at before the `tokenizers` package gets it."""
    raw = whole(file, LONGEST)
    try:
        content = parse(raw)
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
            f"{file}: the tokenizers package {tokenizers.__version__} cannot read it ({told(error, 300)}); "
            "damaged, or written by a newer version?"
        ) from error


class _BackendError(Exception):
    """What the backend raises: it has no error of its own."""


def _asked(question: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """An answer of the backend; a failed check inside it is no `Exception`, and is an error like its others."""
    try:
        return question(*given, **more)
    except Exception as error:
        raise _BackendError(str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _BackendError(str(error)) from None


def _check_ids(content: dict[str, Any], file: Path) -> None:
    """No id is beyond what a vocabulary can have: the backend fills every gap below the largest one."""
    model, added = content["model"], content.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i < LARGEST_ID), None)
    if wrong is not None:
        raise FileError(
            f"{file}: a token has the id {shown(wrong)}; ids are from 0 to {LARGEST_ID - 1}, without large gaps"
        )
