"""Text from token ids that arrive one at a time."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.models.tokenizer import Tokenizer


class StreamDecoder:
    """Text as ids arrive: `push(id)` gives the characters now complete, `flush()` what is left.

    The parts joined equal `Tokenizer.decode` of all ids; half a character is never given out.

    >>> from regard.models.tokenizer import Tokenizer
    >>> tokenizer = Tokenizer.train(["x"], vocab_size=257)
    >>> stream = tokenizer.stream()
    >>> [stream.push(i) for i in tokenizer.encode("é!")]
    ['', 'é', '!']
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids: list[int] = []
        self._given = ""

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
        new = text[len(self._given) :]
        self._given = text
        return new
