"""JSON from a file that nobody vouches for: what Python's reader forgives is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from regard.errors import ArgumentError, FileError
from regard.files.regular_files import read_bytes
from regard.untrusted_text import short_repr

MAX_DEPTH = 128
"""How deep lists and objects may nest."""
MAX_BYTES = 16 << 20
"""Bytes of a JSON file that nothing else bounds: a config.json with the longest label tables has
some 2 MB.
"""

_MARKS = 1 << 22
_DIGITS = 20  # those of the largest number of 64 bits
_FLOAT = 400  # letters of a number with a fraction
# with or without its end, so that no text is looked at twice
_STRING = re.compile(rb'"[^"\\]*(?:\\.?[^"\\]*)*(?:"|\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(path: Path, *, limit: int = MAX_BYTES, kind: type[Any] = dict) -> Any:
    """What a JSON file holds, read as `parse_json` does.

    Args:
        path: of a regular file.
        limit: the most bytes that it may have.
        kind: what it must hold, `dict` or `list`.

    Raises:
        FileError: it is missing, not regular, too long, or `parse_json` refuses what it holds.

    >>> _ = Path("a.json").write_text('{"a": 1}')
    >>> read_json(Path("a.json"))
    {'a': 1}
    """
    try:
        return parse_json(read_bytes(path, limit), kind)
    except ArgumentError as e:
        raise FileError(f"{path} {e}") from None


def parse_json(raw: bytes, kind: type[Any] = dict) -> Any:
    """A JSON object, or a list: UTF-8, no key twice, no NaN, no number without end, not too many
    parts, not too deep.

    Python's reader needs up to 25 bytes of memory for a byte of brackets; their number is bounded
    first.

    Args:
        raw: the text.
        kind: what it must be, `dict` or `list`.

    Raises:
        ArgumentError: it is not; its message begins with a verb: the caller says what it is about.

    >>> parse_json(b'{"a": {"b": [1, 2]}}')
    {'a': {'b': [1, 2]}}
    >>> parse_json(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    regard.errors.ArgumentError: has the key 'a' twice
    """
    marks = sum(raw.count(mark) for mark in (b"{", b"[", b","))
    if marks > _MARKS:
        raise ArgumentError(f"has {marks} brackets and commas; at most {_MARKS} are read")
    if _depth(raw) > MAX_DEPTH:
        raise ArgumentError(f"is nested too deep; at most {MAX_DEPTH} levels are read")
    try:
        found = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_int,
            parse_float=_float,
            parse_constant=_constant,
        )
    except ArgumentError:
        raise
    except ValueError as e:  # UnicodeDecodeError and JSONDecodeError are among them
        raise ArgumentError(f"is no JSON: {e}") from None
    if not isinstance(found, kind):
        wanted = "an object" if kind is dict else "a list"
        raise ArgumentError(f"is a JSON {type(found).__name__}; it must be {wanted}")
    if _SURROGATE.search(raw):
        half = next((text for text in _texts(found) if _is_half(text)), None)
        if half is not None:
            raise ArgumentError(f"has half a character in {short_repr(half)}")
    return found


def _depth(raw: bytes) -> int:
    """How deep the brackets nest, those in strings left out."""
    brackets = _STRING.sub(b"", raw).translate(None, _NOT_BRACKETS)
    return max(accumulate(1 if mark in b"[{" else -1 for mark in brackets), default=0)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ArgumentError(f"has the key {short_repr(twice)} twice")
    return found


def _int(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ArgumentError(f"has a number of {len(digits)} digits; at most {_DIGITS} are read")
    return int(digits)


def _float(digits: str) -> float:
    if len(digits) > _FLOAT or not math.isfinite(found := float(digits)):
        raise ArgumentError(
            f"has the number {short_repr(digits, 20)}, which no computer's number holds"
        )
    return found


def _constant(name: str) -> NoReturn:
    raise ArgumentError(f"has the constant {name}, which is no JSON")


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, names of keys too."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one


def _is_half(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)
