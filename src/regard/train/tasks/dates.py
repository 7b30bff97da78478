"""Dates as people write them, to the one form that sorts: 5th March, 2024 -> 2024-03-05."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from random import Random

from regard.train.tasks.base import Example, Task, Vocabulary

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


def _draw(random: Random, length: int) -> Example:
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
    draw=_draw,
    lengths=(8, 20, 36),
    reads="",
    writes="",
)
