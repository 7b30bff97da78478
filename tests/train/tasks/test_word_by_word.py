"""Why a translator must look around: word by word, the numbers come out wrong."""

from __future__ import annotations

from regard.train.tasks import TASKS

UNITS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEENS = [
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
DIGITS = "一二三四五六七八九"
WORDS = {
    **dict(zip(UNITS, DIGITS, strict=True)),
    **{word: f"一十{digit}" for word, digit in zip(TEENS, DIGITS, strict=True)},
    **{word: f"{digit}十" for word, digit in zip(TENS, DIGITS, strict=True)},
    "zero": "零",
    "hundred": "百",
    "thousand": "千",
    "million": "百万",
    "billion": "十亿",
    ",": ",",
}


def word_by_word(source: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("".join(WORDS[word] for word in source))


def test_word_by_word_translation_fails_where_words_depend_on_one_another() -> None:
    task = TASKS["translate"]
    examples = [*task.examples("validation", 300), *task.examples("train", 300)]
    short = [e for e in examples if e.length <= 3]
    long = [e for e in examples if e.length >= 12]
    right = [[word_by_word(e.source) == e.target for e in part] for part in (short, long)]
    assert len(short) > 20
    assert len(long) > 100
    assert sum(right[0]) > len(short) / 2, "the dictionary is right where a word stands alone"
    assert sum(right[1]) < len(long) / 20, "a list of small numbers, at most"
    assert word_by_word(("forty", "two", "thousand")) == tuple("四十二千"), "and not 四万二千"
