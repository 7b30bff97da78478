"""What a layer holds, as numbers: its weights by kind, and what its cache keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Weights:
    """Numbers that training changes: of matrices, of biases (sinks and gates included), and of norms.

    >>> Weights(12, 4) + Weights(norms=2)
    Weights(matrices=12, biases=4, norms=2)
    """

    matrices: int = 0
    biases: int = 0
    norms: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            self.matrices + other.matrices, self.biases + other.biases, self.norms + other.norms
        )

    @property
    def total(self) -> int:
        """All of them."""
        return self.matrices + self.biases + self.norms


@dataclass(frozen=True)
class Memory:
    """What a cache keeps of one text: for each of some tokens the same parts, and a state of fixed size.

    Attributes:
        parts: heads and dims of what is kept of a token, in turn: keys and values, or a latent.
        tokens: how many tokens are kept.
        state: numbers that are kept whatever the length.
        bounded: whether old tokens are forgotten.
        given: whether the tokens are another text's, so that a written token adds nothing.

    >>> kept = Memory(parts=((8, 128), (8, 128)), tokens=100)
    >>> kept.per_token, kept.numbers
    (2048, 204800)
    """

    parts: tuple[tuple[int, int], ...] = ()
    tokens: int = 0
    state: int = 0
    bounded: bool = False
    given: bool = False

    @property
    def per_token(self) -> int:
        """Numbers of one token."""
        return sum(heads * dims for heads, dims in self.parts)

    @property
    def numbers(self) -> int:
        """All numbers, the state included."""
        return self.per_token * self.tokens + self.state
