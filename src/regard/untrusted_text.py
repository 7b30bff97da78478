"""Text that somebody else wrote, shown to a person: nothing in it moves the cursor, hides, or turns
the direction of writing.

Whatever comes from a file, a prompt or a model reaches a terminal, a page or an error message
through `short_repr` or `escape_controls`.
"""

from __future__ import annotations

import re
import reprlib

MAX_LENGTH = 100
"""Letters of a foreign value in a message."""
MULTILINE = "\n\t\u200c\u200d\ufe0e\ufe0f"
"""What a text of several lines keeps: ends of lines, tabs, and the marks that join letters and
choose the form of a sign.
"""

_INTEGER = re.compile("-?[0-9]{1,18}")
_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufe00-\ufe0f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff]"
)


def escape_controls(text: str, *, keep: str = "") -> str:
    """Text whose controls, and marks that turn the writing direction, are shown by their number,
    not obeyed.

    Args:
        text: of any origin.
        keep: letters that stay as they are; `MULTILINE` for a text of several lines.

    >>> escape_controls("a\\x1b[31m\\u202e")
    'a‹1B›[31m‹202E›'
    >>> escape_controls("two\\nlines\\r", keep=MULTILINE)
    'two\\nlines‹0D›'
    """

    def number(found: re.Match[str]) -> str:
        return found[0] if found[0] in keep else f"‹{ord(found[0]):02X}›"

    return _CONTROLS.sub(number, text)


def short_repr(value: object, longest: int = MAX_LENGTH) -> str:
    """A value out of a file for a message: quoted as Python writes it, its control characters
    escaped, not too long.

    Args:
        value: a text, a number, or lists and mappings of these.
        longest: the most letters, beside the quotes and the mark of a cut.

    >>> print(short_repr("a" + chr(27) + "[2J"))
    'a\\x1b[2J'
    >>> short_repr(["b" * 200])
    "['bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb..."
    """
    if isinstance(value, str):
        return repr(value) if len(value) <= longest else f"{value[:longest]!r}..."
    if isinstance(value, int) and value.bit_length() > 4 * longest:
        return f"an integer of {value.bit_length()} bits"
    text = _ShortRepr(longest).repr(value)
    return text if len(text) <= longest else f"{text[:longest]}..."


def error_text(message: object, longest: int = 600) -> str:
    """What another error says of a foreign file, for the error that replaces it: `escape_controls`,
    of one line, cut in its middle.

    >>> error_text(ValueError("a" + chr(27) + "b")), len(error_text("x" * 9999, 100))
    ('a‹1B›b', 105)
    """
    said = message.strerror if isinstance(message, OSError) and message.strerror else message
    text = " ".join(str(said).split("\n"))
    if len(text) > longest:
        text = f"{text[: longest * 2 // 3]} ... {text[-(longest // 3) - 1 :]}"
    return escape_controls(text)


def parse_integer(text: str) -> int | None:
    """The whole number that a text is, or None: plain digits, at most 18, behind a minus or none.

    >>> parse_integer("-12"), parse_integer("\u00b2"), parse_integer("9" * 5000)
    (-12, None, None)
    """
    return int(text) if _INTEGER.fullmatch(text) else None


class _ShortRepr(reprlib.Repr):
    """`repr` that looks at no more of a value than is shown, and at its inside no deeper."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.maxlevel = 20
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = longest
        self.maxstring = self.maxlong = self.maxother = 2 * longest

    def repr_str(self, x: str, level: int) -> str:
        """A text, its beginning first: what `reprlib` leaves out stands in the middle."""
        return repr(x[: self.maxstring])

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        """A mapping in its own order."""
        pairs = (f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in x.items())
        kept = [pair for _, pair in zip(range(self.maxdict), pairs, strict=False)]
        return "{" + ", ".join(kept) + ("..." if len(x) > len(kept) else "") + "}"
