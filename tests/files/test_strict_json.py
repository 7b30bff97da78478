"""The one reader of JSON: what it refuses, in bounded time; and regular files only."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from regard.errors import ArgumentError, FileError
from regard.files.reading import checked_path_or_none, parse_json, read_json, read_text


@pytest.mark.parametrize(
    "raw, message",
    [
        (b'{"a": 1, "a": 2}', "has the key 'a' twice"),
        (b"[1]", "is a JSON list; it must be an object"),
        (b'{"a": NaN}', "has the constant NaN, which is not JSON"),
        (b'{"a": 1e999}', "has the number '1e999', which float64 cannot represent"),
        (b'{"a": ' + b"1" * 21 + b"}", "has a number of 21 digits; at most 20 are read"),
        (b'{"a": 0.' + b"1" * 500 + b"}", "which float64 cannot represent"),
        (b'{"a": "\\ud800"}', "has an unpaired surrogate in '\\ud800'"),
        (b'{"\\udc00": 1}', "has an unpaired surrogate in '\\udc00'"),
        (b'{"a": ' + b"[" * 128 + b"]" * 128 + b"}", "is nested too deep; at most 128 levels"),
        (b'{"a": [' + b"[]," * (1 << 22) + b"[]]}", "brackets and commas; at most 4194304"),
        (b'{"' + b'\\"' * (1 << 20), "is not JSON: Unterminated string"),
    ],
    ids=lambda x: repr(x)[:20],
)
def test_what_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        parse_json(raw)


def test_what_is_read() -> None:
    brackets = b'{"a": "' + b"[" * 500 + b'\\"[", "b": ["\\ud83d\\ude00", 1.5, -2, null]}'
    assert parse_json(brackets) == {"a": "[" * 500 + '"[', "b": ["😀", 1.5, -2, None]}
    assert parse_json(b'{"a":' + b"[" * 127 + b"]" * 127 + b"}")["a"] != []
    assert parse_json(b"[3]", list) == [3]


def test_only_regular_files_of_a_bounded_size_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("\x1b[2J")
    for name, message in (
        ("pipe", "pipe is a named pipe; it must be a regular file"),
        ("zero", "zero is a device; it must be a regular file"),
        ("", "is a folder; it must be a regular file"),
        ("loop", "loop cannot be read: Too many levels of symbolic links"),
        ("no", "no is missing"),
    ):
        with pytest.raises(FileError, match=message):
            read_json(tmp_path / name)
    with pytest.raises(
        FileError, match=re.escape(r"gone is a link to '\x1b[2J', which is missing")
    ):
        checked_path_or_none(tmp_path, "gone")
    assert checked_path_or_none(tmp_path, "no") is None
    (tmp_path / "long").write_bytes(b"\xff" * 9)
    with pytest.raises(FileError, match="long has 9 bytes; at most 8 are read"):
        read_json(tmp_path / "long", limit=8)
    with pytest.raises(FileError, match="long is not text: not UTF-8 at byte 0"):
        read_text(tmp_path / "long", 9)
