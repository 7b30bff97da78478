"""Translation tasks: numbers between English and Chinese, and dates into ISO format."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from random import Random

from regard.errors import ArgumentError
from regard.train.tasks.task import Example, Task, Vocabulary

NUMBER_LIMIT = 10**12
"""Numbers are smaller than this limit: larger Chinese numerals have more than one form."""

UNITS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
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
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
THOUSANDS = ("", "thousand", "million", "billion")
ENGLISH = (*UNITS, *TENS, "hundred", *THOUSANDS[1:])
"""The words of English numbers."""

DIGITS = "零一二三四五六七八九"
PLACES = ("", "十", "百", "千")
MYRIADS = ("", "万", "亿")
CHINESE = (*DIGITS, *PLACES[1:], *MYRIADS[1:])
"""The characters of Chinese numerals."""


def english_words(number: int) -> list[str]:
    """Return a number as English words, without hyphens and without "and"."""
    _check(number)
    if number == 0:
        return [UNITS[0]]
    words: list[str] = []
    for power in range(3, -1, -1):
        group = number // 1000**power % 1000
        if group:
            words += [*_hundreds(group), *THOUSANDS[power].split()]
    return words


def _hundreds(number: int) -> list[str]:
    """Return the English words of a number from 1 to 999."""
    hundreds, rest = divmod(number, 100)
    words = [UNITS[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        words.append(TENS[rest // 10 - 2])
        rest %= 10
    return [*words, UNITS[rest]] if rest else words


def chinese_numerals(number: int) -> list[str]:
    """Return a number as Chinese numerals, one character per item.

    Groups of four digits are followed by 万 (10^4) or 亿 (10^8). Zeros before digits are one 零;
    zeros at the end of a group are not read; 一十 at the beginning is 十.
    """
    _check(number)
    if number == 0:
        return [DIGITS[0]]
    text = ""
    for power in range(2, -1, -1):
        group = number // 10_000**power % 10_000
        above = number // 10_000 ** (power + 1)
        if not group:
            continue
        if above and (group < 1000 or above % 10_000 == 0):
            text += DIGITS[0]
        text += _thousands(group) + MYRIADS[power]
    return list(text.removeprefix("一") if text.startswith("一十") else text)


def _thousands(number: int) -> str:
    """Return the numerals of 1 to 9999, with one 零 for each run of zeros between digits."""
    text, gap = "", False
    for place in range(3, -1, -1):
        digit = number // 10**place % 10
        if digit:
            text += (DIGITS[0] if gap and text else "") + DIGITS[digit] + PLACES[place]
        gap = not digit
    return text


def _check(number: int) -> None:
    if not 0 <= number < NUMBER_LIMIT:
        raise ArgumentError(
            f"number is {number}; it must be from 0 to {NUMBER_LIMIT - 1}", argument="number"
        )


COMMA = ","
MOST_DIGITS = 12
"""The largest number of digits of a number; `NUMBER_LIMIT` has one digit more."""
SPARSE_SHARE = 0.3
"""The share of numbers in which about half of the digits are replaced by zeros."""

NumberWriter = Callable[[int], list[str]]
"""A function that returns the words of a number in one language."""


def random_numbers(random: Random, length: int, write: NumberWriter) -> list[int]:
    """Return numbers of 1 to 12 digits whose words, with commas, fill a length."""
    numbers: list[int] = []
    remaining = length
    while remaining > 0:
        digits = random.randint(1, MOST_DIGITS)
        number = _number(random, digits)
        while len(write(number)) > remaining:
            digits = random.randint(1, digits)
            number = _number(random, digits)
        numbers.append(number)
        remaining -= len(write(number)) + 1
    random.shuffle(numbers)  # the number that was drawn last fills the rest and is often small
    return numbers


def _number(random: Random, digits: int) -> int:
    """Return a random number below 10^digits, sometimes with many zeros."""
    number = random.randrange(10**digits)
    if random.random() < SPARSE_SHARE:
        number = int("".join(d if random.random() < 0.5 else "0" for d in str(number)))
    return number


def joined_numbers(numbers: list[int], write: NumberWriter) -> tuple[str, ...]:
    """Return the words of numbers, with a comma between two numbers.

    >>> joined_numbers([1, 20], english_words)
    ('one', ',', 'twenty')
    """
    words: list[str] = []
    for number in numbers:
        words += [*([COMMA] if words else []), *write(number)]
    return tuple(words)


def _draw(
    write_source: NumberWriter, write_target: NumberWriter
) -> Callable[[Random, int], Example]:
    """Return the `draw` function of a task that translates numbers."""

    def draw(random: Random, length: int) -> Example:
        numbers = random_numbers(random, length, write_source)
        source = joined_numbers(numbers, write_source)
        return Example(source, joined_numbers(numbers, write_target))

    return draw


_WORDS = Vocabulary((*ENGLISH, *CHINESE, COMMA))
_REFERENCE = (
    "Sutskever et al. 2014 (arXiv 1409.3215) and Bahdanau et al. 2015 (arXiv 1409.0473), on numbers"
)

TRANSLATE = Task(
    name="translate",
    description="English number words to Chinese numerals: "
    "four hundred seven , twelve -> 四百零七,十二",
    reference=_REFERENCE,
    kind="seq2seq",
    vocabulary=_WORDS,
    draw=_draw(english_words, chinese_numerals),
    lengths=(1, 32, 64),
    target_separator="",
)
TRANSLATE_BACK = Task(
    name="translate-back",
    description="Chinese numerals to English number words: "
    "四百零七,十二 -> four hundred seven , twelve",
    reference=_REFERENCE,
    kind="seq2seq",
    vocabulary=_WORDS,
    draw=_draw(chinese_numerals, english_words),
    lengths=(1, 32, 64),
    source_separator="",
)


FIRST_DATE, LAST_DATE = date(1600, 1, 1), date(2199, 12, 31)
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def ordinal(day: int) -> str:
    """Return a day of the month as an English ordinal.

    >>> [ordinal(day) for day in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 31)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '13th', '21st', '22nd', '23rd', '31st']
    """
    last = {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{'th' if day in (11, 12, 13) else last}"


def _month(d: date) -> str:
    return MONTHS[d.month - 1]


def _weekday(d: date) -> str:
    return WEEKDAYS[d.weekday()]


DATE_FORMATS: tuple[Callable[[date], str], ...] = (
    lambda d: f"{d.day} {_month(d)} {d.year}",
    lambda d: f"{_month(d)} {d.day}, {d.year}",
    lambda d: f"{_month(d)} {ordinal(d.day)}, {d.year}",
    lambda d: f"{ordinal(d.day)} of {_month(d)}, {d.year}",
    lambda d: f"the {ordinal(d.day)} of {_month(d)} {d.year}",
    lambda d: f"{_month(d)[:3]} {d.day} {d.year}",
    lambda d: f"{d.day}-{_month(d)[:3]}-{d.year}",
    lambda d: f"{_weekday(d)[:3]}, {d.day:02d} {_month(d)[:3]} {d.year}",
    lambda d: f"{_weekday(d)}, {_month(d)} {d.day}, {d.year}",
    lambda d: f"{_weekday(d)}, {d.day} {_month(d)} {d.year}",
    lambda d: f"{_weekday(d)}, the {ordinal(d.day)} of {_month(d)} {d.year}",
    # with slashes the month comes first, as in the United States
    lambda d: f"{d.month}/{d.day}/{d.year}",
    lambda d: f"{d.month:02d}/{d.day:02d}/{d.year}",
    # with dots the day comes first, as in Germany
    lambda d: f"{d.day}.{d.month}.{d.year}",
    lambda d: f"{d.day:02d}.{d.month:02d}.{d.year}",
    lambda d: f"{d.year}/{d.month}/{d.day}",
    lambda d: f"{d.year}{d.month:02d}{d.day:02d}",
    lambda d: f"{d.year} {_month(d)} {d.day}",
)
"""Functions from a date to a text; no two dates have the same text."""

_CHARACTERS = sorted({*"0123456789/.,- dfhnorst", *"".join((*MONTHS, *WEEKDAYS)), *"theofstndrd"})


def _draw_dates(random: Random, length: int) -> Example:
    """Return a random date in that of three formats whose length is closest to `length`."""
    day = FIRST_DATE + timedelta(days=random.randrange((LAST_DATE - FIRST_DATE).days + 1))
    texts = [form(day) for form in random.sample(DATE_FORMATS, 3)]
    text = min(texts, key=lambda text: abs(len(text) - length))
    return Example(tuple(text), tuple(day.isoformat()))


DATES = Task(
    name="dates",
    description="Dates in many forms to YYYY-MM-DD: Tuesday, 5th of March, 2024 -> 2024-03-05",
    reference="a usual first example of attention, on the real calendar from 1600 to 2199",
    kind="seq2seq",
    vocabulary=Vocabulary(tuple(_CHARACTERS)),
    draw=_draw_dates,
    lengths=(8, 20, 36),
    source_separator="",
    target_separator="",
)
