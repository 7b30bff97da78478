"""The words of a made task as numbers: whole words or single characters, nothing to be learned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from regard.errors import ArgumentError

PAD, BOS, EOS = 0, 1, 2
"""An empty slot; in front of a target; behind a source and behind a target."""

SPECIAL = ("<pad>", "<bos>", "<eos>")


@dataclass(frozen=True)
class Vocabulary:
    """Words, each with an id: 0, 1 and 2 are `PAD`, `BOS` and `EOS`, the words follow.

    Raises:
        ArgumentError: a word stands there twice, is empty, or is one of the special ones.

    >>> vocabulary = Vocabulary(("one", "two"))
    >>> vocabulary.encode(["two", "one"]), vocabulary.decode([1, 4, 3, 2, 0])
    ([4, 3], ['two', 'one'])
    """

    words: tuple[str, ...]
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = {word: i for i, word in enumerate((*SPECIAL, *self.words))}
        if len(ids) != len(self):
            twice = sorted({w for w in self.words if self.words.count(w) > 1 or w in SPECIAL})
            raise ArgumentError(f"words stand in the vocabulary twice: {', '.join(twice)}")
        if "" in ids:
            raise ArgumentError("the empty string is not a word; leave it out")
        object.__setattr__(self, "_ids", ids)

    def __len__(self) -> int:
        return len(SPECIAL) + len(self.words)

    def encode(self, words: Iterable[str]) -> list[int]:
        """The ids of words.

        Raises:
            ArgumentError: a word is not in the vocabulary; names it and its neighbours.
        """
        found = []
        for word in words:
            if word not in self._ids or word in SPECIAL:
                near = get_close_matches(word, self.words, 3)
                hint = f"did you mean {' or '.join(near)}?" if near else f"it has {self._some()}"
                raise ArgumentError(f"{word!r} is not a word of this vocabulary; {hint}")
            found.append(self._ids[word])
        return found

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The words of ids, up to the first `EOS`; `PAD` and `BOS` are passed over.

        Raises:
            ArgumentError: an id lies outside the vocabulary.
        """
        found = []
        for i in ids:
            if not 0 <= i < len(self):
                raise ArgumentError(f"id {i} lies outside [0, {len(self)})")
            if i == EOS:
                break
            if i not in (PAD, BOS):
                found.append(self.words[i - len(SPECIAL)])
        return found

    def _some(self, most: int = 12) -> str:
        more = f" and {len(self.words) - most} more" if len(self.words) > most else ""
        return ", ".join(self.words[:most]) + more
