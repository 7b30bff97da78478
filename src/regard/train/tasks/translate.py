"""Numbers from English words to Chinese numerals, and back: another grammar, and lists as long as one likes.

Thousands regroup into 万 and 亿, so a word may depend on words far from it, and order in the source is not order in the
target: what attention was invented for.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from regard.train.tasks.base import Example, Task
from regard.train.tasks.numbers import CHINESE, ENGLISH, chinese, english
from regard.train.tasks.vocabulary import Vocabulary

COMMA = ","
MOST_DIGITS = 12
SPARSE = 0.3

Writer = Callable[[int], list[str]]


def numbers_of(random: Random, length: int, write: Writer) -> list[int]:
    """Numbers that together, a comma between two, have `length` words, or one less: of 1 to 12 digits as far as they fit."""
    numbers: list[int] = []
    room = length
    while room > 0:
        digits = random.randint(1, MOST_DIGITS)
        number = _number(random, digits)
        while len(write(number)) > room:
            digits = random.randint(1, digits)
            number = _number(random, digits)
        numbers.append(number)
        room -= len(write(number)) + 1
    random.shuffle(numbers)  # the last that was drawn is small: it stands anywhere
    return numbers


def _number(random: Random, digits: int) -> int:
    """A number below 10^digits; of some, half the digits are zeros, which have a grammar of their own."""
    number = random.randrange(10**digits)
    if random.random() < SPARSE:
        number = int("".join(d if random.random() < 0.5 else "0" for d in str(number)))
    return number


def listed(numbers: list[int], write: Writer) -> tuple[str, ...]:
    """Numbers in words, a comma between two.

    >>> listed([1, 20], english)
    ('one', ',', 'twenty')
    """
    words: list[str] = []
    for number in numbers:
        words += [*([COMMA] if words else []), *write(number)]
    return tuple(words)


def _draw(read: Writer, say: Writer) -> Callable[[Random, int], Example]:
    def draw(random: Random, length: int) -> Example:
        numbers = numbers_of(random, length, read)
        return Example(listed(numbers, read), listed(numbers, say))

    return draw


_WORDS = Vocabulary((*ENGLISH, *CHINESE, COMMA))
_ORIGIN = (
    "Sutskever et al. 2014 (arXiv 1409.3215) and Bahdanau et al. 2015 (arXiv 1409.0473), on numbers"
)

TRANSLATE = Task(
    name="translate",
    sentence="English number words to Chinese numerals: four hundred seven , twelve -> 四百零七,十二",
    origin=_ORIGIN,
    kind="pairs",
    vocabulary=_WORDS,
    draw=_draw(english, chinese),
    lengths=(1, 32, 64),
    writes="",
)
BACK = Task(
    name="translate-back",
    sentence="Chinese numerals to English number words: 四百零七,十二 -> four hundred seven , twelve",
    origin=_ORIGIN,
    kind="pairs",
    vocabulary=_WORDS,
    draw=_draw(chinese, english),
    lengths=(1, 32, 64),
    reads="",
)
