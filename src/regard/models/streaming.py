"""Text from token ids that arrive one at a time."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.models.tokenizer import Tokenizer


class StreamDecoder:
    """Text as ids arrive: `push(id)` gives the characters now complete, `flush()` what is left.

    The parts joined equal `Tokenizer.decode` of all ids; half a character is never given out. The one exception are byte
    tokens beside words (sentencepiece's byte fallback) that spell no UTF-8: they make U+FFFD of letters before them, too.

    >>> from regard.models.tokenizer import Tokenizer
    >>> tokenizer = Tokenizer.train(["x"], vocab_size=257)
    >>> stream = tokenizer.stream()
    >>> [stream.push(i) for i in tokenizer.encode("é!")]
    ['', 'é', '!']
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # not of one byte-level alphabet: the ids given out last, and those that make no whole text yet
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
        """What is new in the text of the ids; how a token reads depends on the one in front of it, and on no earlier one."""
        new = text[len(self._shown) :]
        self._ids = self._ids[self._given :]
        self._given, self._shown = len(self._ids), self._tokenizer.decode(self._ids)
        return new
