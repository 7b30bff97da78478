"""The task of writing the source backwards."""

from __future__ import annotations

from random import Random
from string import ascii_lowercase

from regard.train.tasks.task import Example, Task, Vocabulary


def _draw_reverse(random: Random, length: int) -> Example:
    """Return random letters whose target is the same letters in reverse order."""
    words = tuple(random.choices(ascii_lowercase, k=length))
    return Example(words, words[::-1])


REVERSE = Task(
    name="reverse",
    description="Write the source backwards: c a f e -> e f a c",
    reference="Graves et al. 2014 (arXiv 1410.5401), section 4.1",
    kind="seq2seq",
    vocabulary=Vocabulary(tuple(ascii_lowercase)),
    draw=_draw_reverse,
    lengths=(1, 20, 40),
)
