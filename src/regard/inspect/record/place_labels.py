"""Texts of the caller for the rows and columns of recorded places: words, patches, frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.record.recorded_place import Place
from regard.units import plural

Axes: TypeAlias = Sequence[str] | tuple[Sequence[str], Sequence[str]]
"""The texts of tokens, or a pair: those of the queries and those of the keys."""

Labels: TypeAlias = Axes | Mapping[str, Axes]
"""The texts of all places, or a mapping from the beginning of a place's name to its texts."""


class PlaceLabels(NamedTuple):
    """The texts of a place.

    Args:
        rows: one text for each row, or ().
        columns: one text for each column, or ().
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]


def label_places(places: Mapping[str, Place], labels: Labels) -> dict[str, PlaceLabels]:
    """Assign texts to the rows and columns of places.

    One sequence of texts labels every axis of its length. Of a pair, the first labels rows and the
    second columns; where the lengths show that a place is self-attention of one of the two, that
    one labels both.
    """
    if isinstance(labels, Mapping):
        return _by_name(places, labels)
    pair = _pair(labels)
    if len(pair[0]) == len(pair[1]) and pair[0] != pair[1] and len(places) > 1:
        raise ArgumentError(
            f"labels are two different sequences of {plural(len(pair[0]), 'text')}, so that their "
            "lengths do not show which tokens a place has: give a mapping from the names of places "
            f"to their labels; the places are {', '.join(places)}"
        )
    place_labels = {name: _fitting(place, pair) for name, place in places.items()}
    place_labels = {name: texts for name, texts in place_labels.items() if any(texts)}
    if not place_labels:
        sizes = ", ".join(f"{name} {place.T} x {place.N}" for name, place in places.items())
        raise ArgumentError(
            f"labels are {len(pair[0])} texts for queries and {len(pair[1])} for keys, which fit "
            f"no place; the places have so many queries x keys: {sizes}"
        )
    return place_labels


def _by_name(places: Mapping[str, Place], labels: Mapping[str, Axes]) -> dict[str, PlaceLabels]:
    """Assign the texts of a mapping; of several names that fit a place, the longest counts."""
    place_labels: dict[str, PlaceLabels] = {}
    used = set()
    for name, place in places.items():
        fitting = [x for x in labels if not x or name == x or name.startswith(f"{x}.")]
        if not fitting:
            continue
        key = max(fitting, key=len)
        used.update(fitting)
        place_labels[name] = _fitting(place, _pair(labels[key]))
        if key == name and not all(place_labels[name]):
            pair = _pair(labels[key])
            raise ArgumentError(
                f"labels of {name} are {len(pair[0])} texts for queries and {len(pair[1])} for "
                f"keys; it has {plural(_queries(place), 'query', 'queries')} and "
                f"{plural(place.N, 'key')}"
            )
    if unknown := [name for name in labels if name not in used]:
        raise ArgumentError(
            f"labels are given for {', '.join(map(repr, unknown))}, which is the beginning of no "
            f"place's name; the places are {', '.join(places)}"
        )
    return {name: texts for name, texts in place_labels.items() if any(texts)}


def _pair(axes: Axes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts of queries and keys."""
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise ArgumentTypeError(
            f"labels are {type(axes).__name__}; they must be texts, or a pair of sequences of texts"
        )
    is_pair = len(axes) == 2 and not any(isinstance(part, str) for part in axes)
    both = (tuple(axes[0]), tuple(axes[1])) if is_pair else (tuple(axes), tuple(axes))
    for texts in both:
        for text in texts:
            if not isinstance(text, str):
                raise ArgumentTypeError(f"a label is {type(text).__name__}; labels must be texts")
    return both  # type: ignore[return-value]


def _queries(place: Place) -> int:
    """Return the number of queries that reached a place, with those that were not kept."""
    return max((step.token + step.T for step in place.steps), default=0)


def _fitting(place: Place, pair: tuple[tuple[str, ...], tuple[str, ...]]) -> PlaceLabels:
    """Return the texts of a place, by the lengths of its axes."""
    T, N = _queries(place), place.N
    rows = next((texts for texts in pair if len(texts) == T), ())
    columns = next((texts for texts in reversed(pair) if len(texts) == N), ())
    query_indices = [i for step in place.steps for i in step.tokens()]
    return PlaceLabels(tuple(rows[i] for i in query_indices) if rows else (), columns)
