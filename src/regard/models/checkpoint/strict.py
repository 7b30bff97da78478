"""JSON from a file that nobody vouches for: what Python's reader forgives is refused."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from regard.errors import ArgumentError
from regard.models.checkpoint.advice import shown

_MARKS = 1 << 22
_DIGITS = 20  # those of the largest number of 64 bits


def parse(raw: bytes) -> dict[str, Any]:
    """A JSON object: UTF-8, no key twice, no NaN, no number without end, not too many parts.

    Python's reader needs up to 25 bytes of memory for a byte of brackets; their number is bounded first.

    Raises:
        ArgumentError: it is not; its message begins with a verb: the caller says what it is about.

    >>> parse(b'{"a": {"b": [1, 2]}}')
    {'a': {'b': [1, 2]}}
    >>> parse(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    regard.errors.ArgumentError: has the key 'a' twice
    """
    marks = sum(raw.count(mark) for mark in (b"{", b"[", b","))
    if marks > _MARKS:
        raise ArgumentError(f"has {marks} brackets and commas; at most {_MARKS} are read")
    try:
        found = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_int,
            parse_constant=_constant,
        )
    except ArgumentError:
        raise
    except RecursionError:
        raise ArgumentError("is nested too deep") from None
    except ValueError as e:  # UnicodeDecodeError and JSONDecodeError are among them
        raise ArgumentError(f"is no JSON: {e}") from None
    if not isinstance(found, dict):
        raise ArgumentError(f"is a JSON {type(found).__name__}; it must be an object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ArgumentError(f"has the key {shown(twice)} twice")
    return found


def _int(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ArgumentError(f"has a number of {len(digits)} digits; at most {_DIGITS} are read")
    return int(digits)


def _constant(name: str) -> NoReturn:
    raise ArgumentError(f"has the constant {name}, which is no JSON")
