"""Text of unknown origin as it is shown: nothing in it is obeyed, and none of it is endless."""

from __future__ import annotations

import pytest

from regard.untrusted_text import (
    MULTILINE,
    error_text,
    escape_controls,
    parse_integer,
    short_repr,
)

HOSTILE = "\x1b[2J\x1b]0;t\x07\u202eb\u2066\r\x00\x9b\u200f\ud800\ufeff"


def test_nothing_is_obeyed() -> None:
    for text in (
        escape_controls(HOSTILE),
        escape_controls(HOSTILE, keep=MULTILINE),
        short_repr(HOSTILE),
        short_repr([HOSTILE]),
        short_repr({HOSTILE: 1}),
        error_text(ValueError(HOSTILE)),
    ):
        assert text.isprintable(), text
        text.encode()
    assert escape_controls("a\tb\nc\r👩\u200d🔬", keep=MULTILINE) == "a\tb\nc‹0D›👩\u200d🔬"
    assert escape_controls("né 你好") == "né 你好"


ENDLESS = {
    "text": "x" * 10**6,
    "in a list": ["x" * 10**6] * 99,
    "mapping": dict.fromkeys(range(10**5), "x"),
    "number": 10**5000,
    "list": [[[[]]]] * 10**5,
}


@pytest.mark.parametrize("value", ENDLESS.values(), ids=ENDLESS)
def test_nothing_is_endless(value: object) -> None:
    assert len(short_repr(value)) < 120
    assert len(error_text("x" * 10**6)) < 620


def test_integers_fit_in_64_bits() -> None:
    assert parse_integer("-" + "9" * 18) == 1 - 10**18
    assert parse_integer("9" * 19) is parse_integer("+1") is parse_integer("１") is None


def test_plain_values_are_as_python_writes_them() -> None:
    values = ("a", 3, -1.5, None, True, [1, "b"], {"c": [None]}, ("d",))
    assert [short_repr(x) for x in values] == [repr(x) for x in values]
    assert error_text(OSError(28, "No space left on device")) == "No space left on device"
