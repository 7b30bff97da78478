"""Numbers in words: tables checked by hand, and readers written from the grammar that must give the
number back.
"""

from __future__ import annotations

import functools
import random

import pytest

from regard.errors import ArgumentError
from regard.train.tasks.translation_tasks import (
    CHINESE,
    ENGLISH,
    NUMBER_LIMIT,
    chinese_numerals,
    english_words,
)
from tests.train.tasks.test_word_by_word import TEENS, TENS, UNITS

TABLE = {
    0: ("zero", "零"),
    10: ("ten", "十"),
    20: ("twenty", "二十"),
    99: ("ninety nine", "九十九"),
    100: ("one hundred", "一百"),
    111: ("one hundred eleven", "一百一十一"),
    1_001: ("one thousand one", "一千零一"),
    2_030: ("two thousand thirty", "二千零三十"),
    10_001: ("ten thousand one", "一万零一"),
    10_500: ("ten thousand five hundred", "一万零五百"),
    427_000: ("four hundred twenty seven thousand", "四十二万七千"),
    1_100_000: ("one million one hundred thousand", "一百一十万"),
    20_000_003: ("twenty million three", "二千万零三"),
    100_000_001: ("one hundred million one", "一亿零一"),
    1_200_000_000: ("one billion two hundred million", "十二亿"),
    110_000_000_000: ("one hundred ten billion", "一千一百亿"),
    999_999_999_999: (
        " ".join(
            f"nine hundred ninety nine {power}" for power in ("billion", "million", "thousand", "")
        ).strip(),
        "九千九百九十九亿九千九百九十九万九千九百九十九",
    ),
}


@pytest.mark.parametrize("number", TABLE)
def test_the_table(number: int) -> None:
    words, numerals = TABLE[number]
    assert " ".join(english_words(number)) == words
    assert "".join(chinese_numerals(number)) == numerals


def read_english(words: list[str]) -> int:
    """Small numbers add, hundred multiplies, thousand and its kin close a group."""
    small = {"zero": 0} | {word: i for i, word in enumerate(UNITS, 1)}
    small |= {word: i for i, word in enumerate(TEENS, 11)}
    small |= {word: 10 * i for i, word in enumerate(TENS, 1)}
    total, group = 0, 0
    for word in words:
        if word in small:
            group += small[word]
        elif word == "hundred":
            group *= 100
        else:
            total += group * {"thousand": 10**3, "million": 10**6, "billion": 10**9}[word]
            group = 0
    return total + group


def read_chinese(characters: list[str]) -> int:
    """A digit waits for its place; 万 and 亿 close a group; 零 says nothing."""
    total, group, digit = 0, 0, 0
    for character in characters:
        if character in "零一二三四五六七八九":
            digit = "零一二三四五六七八九".index(character)
        elif character in "十百千":
            group += (digit or 1) * {"十": 10, "百": 100, "千": 1000}[character]
            digit = 0
        else:
            total += (group + digit) * {"万": 10**4, "亿": 10**8}[character]
            group, digit = 0, 0
    return total + group + digit


@functools.cache
def some() -> list[int]:
    """All small ones, all with few digits that are not zero, and random ones of every size."""
    pick = random.Random(5)
    sparse = [
        a * 10**i + b * 10**j for i in range(12) for j in range(i) for a in (1, 9) for b in (1, 5)
    ]
    return [
        *range(1_200),
        *sparse,
        *(pick.randrange(10 ** pick.randint(1, 12)) for _ in range(2_000)),
    ]


def test_both_read_back() -> None:
    for number in some():
        assert read_english(english_words(number)) == number
        assert read_chinese(chinese_numerals(number)) == number


def test_the_grammar_of_zero() -> None:
    for number in filter(None, some()):
        text = "".join(chinese_numerals(number))
        assert "零零" not in text
        assert not text.endswith("零")
        assert not text.startswith(("零", "一十"))
        for unit in "十百千万亿":  # a zero has no place of its own, and closes no group
            assert f"零{unit}" not in text


def test_every_word_is_used_and_no_other() -> None:
    numbers = some()
    assert {word for n in numbers for word in english_words(n)} == set(ENGLISH)
    assert {word for n in numbers for word in chinese_numerals(n)} == set(CHINESE)


@pytest.mark.parametrize("write", [english_words, chinese_numerals])
@pytest.mark.parametrize("number", [-1, NUMBER_LIMIT])
def test_what_has_no_words_is_refused(write, number: int) -> None:
    with pytest.raises(
        ArgumentError, match=rf"number is {number}; it must be from 0 to 999999999999"
    ):
        write(number)
