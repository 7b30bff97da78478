"""Suggestions of similar names in error messages: "did you mean 'window'?"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from regard.language import Phrase

MAX_COMPARED = 100
"""The number of characters of a mistyped name that are compared; comparing takes quadratic time."""


def suggest(
    name: object, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6, otherwise: str = ""
) -> str:
    """Return the text "; did you mean 'window'?", or `otherwise` if no name is similar."""
    from regard.untrusted_text import short_repr

    matches = close_matches(name, known, most=most, cutoff=cutoff)
    return did_you_mean([short_repr(match) for match in matches]) or Phrase(otherwise)


def did_you_mean(names: Sequence[str]) -> str:
    """Return the text "; did you mean a or b?" as a phrase; "" without names."""
    if not names:
        return ""
    joined, *others = names
    for name in others:
        joined = Phrase("{names} or {name}", names=joined, name=name)
    return Phrase("; did you mean {names}?", names=joined)


def close_matches(
    name: object,
    known: Iterable[str],
    *,
    most: int = 1,
    cutoff: float = 0.6,
    longest: int = MAX_COMPARED,
) -> list[str]:
    """Return the known names that are most similar to a given one: first those that begin with it,
    then the most similar.
    """
    import difflib  # imported here, since only errors need it

    text = str(name)[:longest]
    matches = difflib.get_close_matches(text, list(known), most, cutoff)
    return sorted(matches, key=lambda match: not match.startswith(text.lower()))
