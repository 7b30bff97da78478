"""Safe display of text from untrusted files, prompts and models: through `short_repr` or
`escape_controls`, it cannot move the cursor, be invisible, or change the direction.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any

MAX_LENGTH = 100
"""The number of characters of an untrusted value in a message."""
MULTILINE = "\n\t\u200c\u200d\ufe0e\ufe0f"
"""Characters that text of several lines may contain: newlines, tabs, and marks that join letters or
choose the form of a character.
"""

_INTEGER = re.compile("-?[0-9]{1,18}")
_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufe00-\ufe0f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff]"
)


def escape_controls(text: str, *, keep: str = "") -> str:
    """Replace control characters and marks of writing direction by their code in ‹›."""

    def number(match: re.Match[str]) -> str:
        return match[0] if match[0] in keep else f"‹{ord(match[0]):02X}›"

    return _CONTROLS.sub(number, text)


def short_repr(value: object, longest: int = MAX_LENGTH) -> str:
    """Return the `repr` of an untrusted value, escaped and of bounded length."""
    if isinstance(value, str):
        return repr(value) if len(value) <= longest else f"{value[:longest]!r}..."
    if isinstance(value, int) and value.bit_length() > 4 * longest:
        return f"an integer of {value.bit_length()} bits"
    text = _ShortRepr(longest).repr(value)
    return text if len(text) <= longest else f"{text[:longest]}..."


def tuple_repr(value: Any) -> str:
    """Return the `repr` of a named tuple on one line, with shapes in place of tensors."""
    parts = (
        f"{name}={list(x.shape) if hasattr(x, 'shape') else short_repr(x, 40)}"
        for name, x in value._asdict().items()
    )
    return f"{type(value).__name__}({', '.join(parts)})"


def error_text(message: object, longest: int = 600) -> str:
    """Return the message of another error on one safe and bounded line."""
    reason = message.strerror if isinstance(message, OSError) and message.strerror else message
    text = " ".join(str(reason).split("\n"))
    if len(text) > longest:
        text = f"{text[: longest * 2 // 3]} ... {text[-(longest // 3) - 1 :]}"
    return escape_controls(text)


def parse_integer(text: str) -> int | None:
    """Return the integer that a text is, or None: at most 18 digits, perhaps a minus."""
    return int(text) if _INTEGER.fullmatch(text) else None


class _ShortRepr(reprlib.Repr):
    """A `repr` that visits no more elements than it shows, and limits the depth."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.maxlevel = 20
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = longest
        self.maxstring = self.maxlong = self.maxother = 2 * longest

    def repr_str(self, x: str, level: int) -> str:
        """Return the beginning of a string; `reprlib` would remove the middle."""
        return repr(x[: self.maxstring])

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        """Return a mapping in its own order."""
        pairs = (f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in x.items())
        shown = [pair for _, pair in zip(range(self.maxdict), pairs, strict=False)]
        return "{" + ", ".join(shown) + ("..." if len(x) > len(shown) else "") + "}"
