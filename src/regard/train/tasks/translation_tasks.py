"""Translation tasks: numbers in English words and Chinese numerals, and dates into one form."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from random import Random

from regard.errors import ArgumentError
from regard.train.tasks.task import Example, Task, Vocabulary

LIMIT = 10**12
"""Numbers are smaller than this: 九千九百九十九亿... is the largest group of Chinese numerals
with one reading.
"""

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


def english(number: int) -> list[str]:
    """A number as English words, without hyphens and without "and".

    Raises:
        ArgumentError: the number is negative, or `LIMIT` or more.

    >>> " ".join(english(427_016))
    'four hundred twenty seven thousand sixteen'
    """
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
    """1 to 999."""
    hundreds, rest = divmod(number, 100)
    words = [UNITS[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        words.append(TENS[rest // 10 - 2])
        rest %= 10
    return [*words, UNITS[rest]] if rest else words


def chinese(number: int) -> list[str]:
    """A number as Chinese numerals, a character each.

    Groups of four digits carry 万 and 亿. Zeros between digits are one 零, zeros at the end of a
    group are silent, a whole group of zeros in front of digits is one 零. A number that begins
    with 一十 drops the 一.

    Raises:
        ArgumentError: the number is negative, or `LIMIT` or more.

    >>> ["".join(chinese(n)) for n in (10, 12, 110, 427_016, 100_500, 300_000_007)]
    ['十', '十二', '一百一十', '四十二万七千零一十六', '十万零五百', '三亿零七']
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
    """1 to 9999, with one 零 for zeros between digits."""
    text, gap = "", False
    for place in range(3, -1, -1):
        digit = number // 10**place % 10
        if digit:
            text += (DIGITS[0] if gap and text else "") + DIGITS[digit] + PLACES[place]
        gap = not digit
    return text


def _check(number: int) -> None:
    if not 0 <= number < LIMIT:
        raise ArgumentError(f"number is {number}; it must be from 0 to {LIMIT - 1}")


COMMA = ","
MOST_DIGITS = 12
SPARSE = 0.3

Writer = Callable[[int], list[str]]


def numbers_of(random: Random, length: int, write: Writer) -> list[int]:
    """Numbers that together, a comma between two, have `length` words, or one less: of 1 to 12
    digits as far as they fit.
    """
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
    """A number below 10^digits; of some, half the digits are zeros, which have a grammar of their
    own.
    """
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
    sentence="English number words to Chinese numerals: "
    "four hundred seven , twelve -> 四百零七,十二",
    origin=_ORIGIN,
    kind="pairs",
    vocabulary=_WORDS,
    draw=_draw(english, chinese),
    lengths=(1, 32, 64),
    writes="",
)
BACK = Task(
    name="translate-back",
    sentence="Chinese numerals to English number words: "
    "四百零七,十二 -> four hundred seven , twelve",
    origin=_ORIGIN,
    kind="pairs",
    vocabulary=_WORDS,
    draw=_draw(chinese, english),
    lengths=(1, 32, 64),
    reads="",
)


FIRST, LAST = date(1600, 1, 1), date(2199, 12, 31)
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
    """A day of the month as it is spoken of.

    >>> [ordinal(day) for day in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 31)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '13th', '21st', '22nd', '23rd', '31st']
    """
    last = {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{'th' if day in (11, 12, 13) else last}"


def _month(d: date) -> str:
    return MONTHS[d.month - 1]


def _weekday(d: date) -> str:
    return WEEKDAYS[d.weekday()]


FORMS: tuple[Callable[[date], str], ...] = (
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
    lambda d: (
        f"{d.month}/{d.day}/{d.year}"
    ),  # with slashes the month leads, as in the United States
    lambda d: f"{d.month:02d}/{d.day:02d}/{d.year}",
    lambda d: f"{d.day}.{d.month}.{d.year}",  # with dots the day leads, as in Germany
    lambda d: f"{d.day:02d}.{d.month:02d}.{d.year}",
    lambda d: f"{d.year}/{d.month}/{d.day}",
    lambda d: f"{d.year}{d.month:02d}{d.day:02d}",
    lambda d: f"{d.year} {_month(d)} {d.day}",
)
"""From a date to a way of writing it; no two dates are written alike."""

_CHARACTERS = sorted({*"0123456789/.,- dfhnorst", *"".join((*MONTHS, *WEEKDAYS)), *"theofstndrd"})


def _draw_dates(random: Random, length: int) -> Example:
    """A date in a form that comes close to the length: of all forms of a random day, the closest of
    three.
    """
    day = FIRST + timedelta(days=random.randrange((LAST - FIRST).days + 1))
    texts = [form(day) for form in random.sample(FORMS, 3)]
    text = min(texts, key=lambda text: abs(len(text) - length))
    return Example(tuple(text), tuple(day.isoformat()))


DATES = Task(
    name="dates",
    sentence="Dates in many forms to YYYY-MM-DD: Tuesday, 5th of March, 2024 -> 2024-03-05",
    origin="the usual first task of attention, on the real calendar from 1600 to 2199",
    kind="pairs",
    vocabulary=Vocabulary(tuple(_CHARACTERS)),
    draw=_draw_dates,
    lengths=(8, 20, 36),
    reads="",
    writes="",
)
