"""Finding again what was said before: copy, induction, multi-query associative recall, passkey."""

from __future__ import annotations

from random import Random
from string import ascii_lowercase

from regard.train.tasks.task import Example, Task, Vocabulary

SYMBOLS = tuple(f"s{i}" for i in range(64))
KEYS = tuple(f"k{i}" for i in range(64))
VALUES = tuple(f"v{i}" for i in range(64))
GAP = "."

FILLER = (
    "the grass is green .",
    "the sky is blue .",
    "the sun is yellow .",
    "here we go .",
    "there and back again .",
)
ASK = "what is the pass key ? the pass key is"
DIGITS = tuple("0123456789")
KEY_DIGITS = 5


def _copy(random: Random, length: int) -> Example:
    words = tuple(random.choices(ascii_lowercase, k=length))
    return Example(words, words)


def row(tokens: list[str], asked: set[int]) -> Example:
    """A row of tokens as an example: token i + 1 must follow token i where i + 1 is one of `asked`.

    >>> row(["a", "b", "a", "b"], {3})
    Example(source=('a', 'b', 'a'), target=('', '', 'b'))
    """
    target = [token if i in asked else "" for i, token in enumerate(tokens)]
    return Example(tuple(tokens[:-1]), tuple(target[1:]))


def _induction(random: Random, length: int) -> Example:
    """n different symbols, then a stretch of them again: whatever follows the first of the stretch
    is known.
    """
    n = random.randint(length // 2 + 1, length - 1)
    n = min(max(n, 2), len(SYMBOLS))
    again = min(length + 1 - n, n)
    first = random.sample(SYMBOLS, n)
    start = random.randint(0, n - again)
    tokens = [*first, *first[start : start + again]]
    return row(tokens, set(range(n + 1, len(tokens))))


def _recall(random: Random, length: int) -> Example:
    """n keys with their values, then the keys again and again, each time in another order; rows of
    few keys come as often.

    Few keys and many questions are what makes it learnable: from 8 to 12 keys that are asked once,
    a small model learns which values were said and never whose they are.
    """
    room = length + 1
    n = min(random.randint(1, max(1, room // 4)), len(KEYS))
    keys = random.sample(KEYS, n)
    values = dict(zip(keys, random.choices(VALUES, k=n), strict=True))
    tokens = [token for key in keys for token in (key, values[key])]
    tokens += [GAP] * (room % 2)  # every row ends with an answer
    asked: set[int] = set()
    while len(tokens) < room:
        for key in random.sample(keys, min(n, (room - len(tokens)) // 2)):
            tokens += [key, values[key]]
            asked.add(len(tokens) - 1)
    return row(tokens, asked)


def _passkey(random: Random, length: int) -> Example:
    """A number somewhere in talk about nothing, asked for at the end."""
    digits = random.choices(DIGITS, k=KEY_DIGITS)
    told = ["the", "pass", "key", "is", *digits, "."]
    end = [*ASK.split(), *digits]
    room = length + 1 - len(told) - len(end)
    before: list[list[str]] = []
    while sum(map(len, before)) < room:
        before.append(random.choice(FILLER).split())
    before = before[:-1] or before
    before.insert(random.randint(0, len(before)), told)
    tokens = [*(word for sentence in before for word in sentence), *end]
    return row(tokens, set(range(len(tokens) - KEY_DIGITS, len(tokens))))


COPY = Task(
    name="copy",
    sentence="Say again what was read: c a f e -> c a f e",
    origin="Graves et al. 2014 (arXiv 1410.5401), section 4.1",
    kind="pairs",
    vocabulary=Vocabulary(tuple(ascii_lowercase)),
    draw=_copy,
    lengths=(1, 20, 40),
)
INDUCTION = Task(
    name="induction",
    sentence="Continue what was seen before: ... A B C ... A -> B C",
    origin="Olsson et al. 2022 (arXiv 2209.11895)",
    kind="rows",
    vocabulary=Vocabulary(SYMBOLS),
    draw=_induction,
    lengths=(4, 64, 112),
)
MQAR = Task(
    name="mqar",
    sentence="Multi-query associative recall: k3 v7 k1 v2 ... k1 -> v2 ... k3 -> v7",
    origin="Arora et al. 2023 (arXiv 2312.04927), section 3.1",
    kind="rows",
    vocabulary=Vocabulary((*KEYS, *VALUES, GAP)),
    draw=_recall,
    lengths=(7, 48, 96),
)
PASSKEY = Task(
    name="passkey",
    sentence="A number hidden in talk about nothing, asked for at the end",
    origin="Mohtashami and Jaggi 2023 (arXiv 2305.16300), section 4.2",
    kind="rows",
    vocabulary=Vocabulary(
        tuple(sorted({*" ".join((*FILLER, ASK)).split(), "pass", "key"} - {*DIGITS})) + DIGITS
    ),
    draw=_passkey,
    lengths=(27, 56, 128),
)
