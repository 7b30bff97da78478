"""Tasks of retrieving earlier tokens: copy, induction, associative recall and passkey."""

from __future__ import annotations

from random import Random
from string import ascii_lowercase

from regard.train.tasks.task import Example, Task, Vocabulary

SYMBOLS = tuple(f"s{i}" for i in range(64))
KEYS = tuple(f"k{i}" for i in range(64))
VALUES = tuple(f"v{i}" for i in range(64))
GAP = "."
"""A token without information, which fills the space between others."""

FILLER = (
    "the grass is green .",
    "the sky is blue .",
    "the sun is yellow .",
    "here we go .",
    "there and back again .",
)
QUESTION = "what is the pass key ? the pass key is"
DIGITS = tuple("0123456789")
KEY_DIGITS = 5


def _draw_copy(random: Random, length: int) -> Example:
    """Return random letters whose target is the same letters."""
    words = tuple(random.choices(ascii_lowercase, k=length))
    return Example(words, words)


def causal_example(tokens: list[str], asked: set[int]) -> Example:
    """Return a sequence of tokens as an example of a "causal" task."""
    target = [token if i in asked else "" for i, token in enumerate(tokens)]
    return Example(tuple(tokens[:-1]), tuple(target[1:]))


def _draw_induction(random: Random, length: int) -> Example:
    """Return n different symbols, then a segment of them again, whose answers can be copied."""
    n = random.randint(length // 2 + 1, length - 1)
    n = min(max(n, 2), len(SYMBOLS))
    repeated = min(length + 1 - n, n)
    symbols = random.sample(SYMBOLS, n)
    start = random.randint(0, n - repeated)
    tokens = [*symbols, *symbols[start : start + repeated]]
    return causal_example(tokens, set(range(n + 1, len(tokens))))


def _draw_mqar(random: Random, length: int) -> Example:
    """Return n keys with their values, then the keys again and again, in random orders.

    The number of keys is uniform from 1: from rows of 8 to 12 keys that are asked once each, a
    small model never learns which value belongs to which key.
    """
    total = length + 1
    n = min(random.randint(1, max(1, total // 4)), len(KEYS))
    keys = random.sample(KEYS, n)
    values = dict(zip(keys, random.choices(VALUES, k=n), strict=True))
    tokens = [token for key in keys for token in (key, values[key])]
    tokens += [GAP] * (total % 2)  # every row ends with an answer
    asked: set[int] = set()
    while len(tokens) < total:
        for key in random.sample(keys, min(n, (total - len(tokens)) // 2)):
            tokens += [key, values[key]]
            asked.add(len(tokens) - 1)
    return causal_example(tokens, asked)


def _draw_passkey(random: Random, length: int) -> Example:
    """Return filler sentences with a number among them, and at the end a question for it."""
    digits = random.choices(DIGITS, k=KEY_DIGITS)
    statement = ["the", "pass", "key", "is", *digits, "."]
    question = [*QUESTION.split(), *digits]
    filler_length = length + 1 - len(statement) - len(question)
    sentences: list[list[str]] = []
    while sum(map(len, sentences)) < filler_length:
        sentences.append(random.choice(FILLER).split())
    sentences = sentences[:-1] or sentences
    sentences.insert(random.randint(0, len(sentences)), statement)
    tokens = [*(word for words in sentences for word in words), *question]
    return causal_example(tokens, set(range(len(tokens) - KEY_DIGITS, len(tokens))))


COPY = Task(
    name="copy",
    description="Copy the source: c a f e -> c a f e",
    reference="Graves et al. 2014 (arXiv 1410.5401), section 4.1",
    kind="seq2seq",
    vocabulary=Vocabulary(tuple(ascii_lowercase)),
    draw=_draw_copy,
    lengths=(1, 20, 40),
)
INDUCTION = Task(
    name="induction",
    description="Continue a repeated sequence: ... A B C ... A -> B C",
    reference="Olsson et al. 2022 (arXiv 2209.11895)",
    kind="causal",
    vocabulary=Vocabulary(SYMBOLS),
    draw=_draw_induction,
    lengths=(4, 64, 112),
)
MQAR = Task(
    name="mqar",
    description="Multi-query associative recall: k3 v7 k1 v2 ... k1 -> v2 ... k3 -> v7",
    reference="Arora et al. 2023 (arXiv 2312.04927), section 3.1",
    kind="causal",
    vocabulary=Vocabulary((*KEYS, *VALUES, GAP)),
    draw=_draw_mqar,
    lengths=(7, 48, 96),
)
PASSKEY = Task(
    name="passkey",
    description="Find a number in unrelated text: ... the pass key is 7 1 3 0 4 ... -> 7 1 3 0 4",
    reference="Mohtashami and Jaggi 2023 (arXiv 2305.16300), section 4.2",
    kind="causal",
    vocabulary=Vocabulary(
        tuple(sorted({*" ".join((*FILLER, QUESTION)).split(), "pass", "key"} - {*DIGITS})) + DIGITS
    ),
    draw=_draw_passkey,
    lengths=(27, 56, 128),
)
