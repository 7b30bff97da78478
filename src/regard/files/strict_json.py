"""Strict parsing of JSON from untrusted files: input that Python's parser tolerates is refused."""

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

INFINITY = {"__float__": "Infinity"}
"""How a file of transformers has infinity in JSON."""
MAX_DEPTH = 128
"""The deepest nesting of lists and objects."""
MAX_BYTES = 16 << 20
"""The default limit for a JSON file: a config.json with the longest label tables has some 2 MB."""

_MAX_PARTS = 1 << 22  # brackets and commas
_MAX_DIGITS = 20  # digits of the largest unsigned 64-bit number
_MAX_FLOAT_LENGTH = 400  # characters of a number with a fraction or an exponent
# also matches an unterminated string, so that matching takes linear time
_STRING = re.compile(rb'"[^"\\]*(?:\\.?[^"\\]*)*(?:"|\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(
    path: Path, *, limit: int = MAX_BYTES, kind: type[object] = dict, infinity: bool = False
) -> Any:
    """Read a JSON file of bounded size and depth."""
    try:
        return parse_json(read_bytes(path, limit), kind, infinity=infinity)
    except ArgumentError as e:
        raise FileError(f"{path} {e}") from None


def parse_json(raw: bytes, kind: type[object] = dict, *, infinity: bool = False) -> Any:
    """Parse a JSON object or list strictly: UTF-8, no repeated keys, no NaN, bounded numbers and
    nesting, and parts counted first, as Python needs up to 25 bytes per bracket.
    """
    marks = sum(raw.count(mark) for mark in (b"{", b"[", b","))
    if marks > _MAX_PARTS:
        raise ArgumentError(f"has {marks} brackets and commas; at most {_MAX_PARTS} are read")
    if _depth(raw) > MAX_DEPTH:
        raise ArgumentError(f"is nested too deep; at most {MAX_DEPTH} levels are read")
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_int,
            parse_float=_float,
            parse_constant=_constant_or_infinity if infinity else _constant,
        )
    except ArgumentError:
        raise
    except ValueError as e:  # includes UnicodeDecodeError and JSONDecodeError
        raise ArgumentError(f"is not JSON: {e}") from None
    if not isinstance(value, kind):
        wanted = "an object" if kind is dict else "a list"
        raise ArgumentError(f"is a JSON {type(value).__name__}; it must be {wanted}")
    if _SURROGATE.search(raw):
        broken = next((text for text in _texts(value) if _has_unpaired_surrogate(text)), None)
        if broken is not None:
            raise ArgumentError(f"has an unpaired surrogate in {short_repr(broken)}")
    return value


def _depth(raw: bytes) -> int:
    """Return how deep the brackets outside of strings are nested."""
    brackets = _STRING.sub(b"", raw).translate(None, _NOT_BRACKETS)
    return max(accumulate(1 if mark in b"[{" else -1 for mark in brackets), default=0)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        earlier: set[str] = set()
        repeated = next(key for key, _ in pairs if key in earlier or earlier.add(key))  # type: ignore[func-returns-value]
        raise ArgumentError(f"has the key {short_repr(repeated)} twice")
    return mapping


def _int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ArgumentError(f"has a number of {len(digits)} digits; at most {_MAX_DIGITS} are read")
    return int(digits)


def _float(digits: str) -> float:
    if len(digits) > _MAX_FLOAT_LENGTH or not math.isfinite(number := float(digits)):
        raise ArgumentError(
            f"has the number {short_repr(digits, 20)}, which float64 cannot represent"
        )
    return number


def _constant(name: str) -> NoReturn:
    raise ArgumentError(f"has the constant {name}, which is not JSON")


def _constant_or_infinity(name: str) -> dict[str, str]:
    return dict(INFINITY) if name == "Infinity" else _constant(name)


def _texts(value: object) -> Iterator[str]:
    """Iterate over all strings in a JSON value, including keys."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, list):
            pending += item


def _has_unpaired_surrogate(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)
