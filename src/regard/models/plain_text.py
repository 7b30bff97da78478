"""Text before it is encoded: whether it is Unicode, and where names of special tokens stand in it."""

from __future__ import annotations

from collections.abc import Iterable

from regard.errors import ArgumentError, ArgumentTypeError


def encodable(text: str) -> str:
    """The text itself, when it is Unicode text.

    Raises:
        ArgumentError: it has a lone surrogate.
        ArgumentTypeError: it is no str.

    >>> encodable("né 你好")
    'né 你好'
    """
    if not isinstance(text, str):
        raise ArgumentTypeError(
            f"text is {type(text).__name__}; it must be str (decode bytes first)"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ArgumentError(
            f"text has a lone surrogate U+{code:04X} at offset {error.start}; it is no Unicode "
            "text: decode its source with errors='replace'"
        ) from error
    return text


def cut(text: str, names: Iterable[str]) -> list[str]:
    """Text cut before and after every name, the longest name first where two begin together.

    >>> cut("a<b>c", ["<b>"])
    ['a', '<b>', 'c']
    """
    parts, start, at = [], 0, 0
    ordered = sorted(names, key=len, reverse=True)
    while at < len(text):
        name = next((n for n in ordered if text.startswith(n, at)), None)
        if name is None:
            at += 1
            continue
        parts += [text[start:at], name]
        at = start = at + len(name)
    return [part for part in [*parts, text[start:]] if part]
