"""The hint in an error message at the known name that a mistyped one was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable

MAX_COMPARED = 100
"""Letters of a mistyped name that are compared: comparing takes quadratic time."""


def suggest(
    name: object, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6, otherwise: str = ""
) -> str:
    """The middle of a message: "; did you mean 'window'?", or `otherwise` if nothing is near.

    Args:
        name: what was given, of any origin.
        known: the names that exist.
        most: how many of them are offered at most, the nearest first.
        cutoff: how alike they must be, from 0 to 1.
        otherwise: returned if no name is near, such as "." where another sentence follows.

    Returns:
        A text to put right behind the part of the message that says what is wrong.

    >>> suggest("widow", ["window", "groups"])
    "; did you mean 'window'?"
    >>> suggest("x", ["window"], otherwise=".")
    '.'
    """
    from regard.untrusted_text import short_repr

    near = close_matches(name, known, most=most, cutoff=cutoff)
    return f"; did you mean {' or '.join(map(short_repr, near))}?" if near else otherwise


def close_matches(
    name: object,
    known: Iterable[str],
    *,
    most: int = 1,
    cutoff: float = 0.6,
    longest: int = MAX_COMPARED,
) -> list[str]:
    """The known names that are most like a given one, the nearest first, at most `most`.

    Of the given name its first `longest` letters are compared.

    >>> close_matches("fourty", ["forty", "four", "two"], most=2)
    ['forty', 'four']
    """
    import difflib  # only an error needs it

    return difflib.get_close_matches(str(name)[:longest], list(known), most, cutoff)
