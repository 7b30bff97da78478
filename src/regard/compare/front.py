"""The Pareto front: what nothing else beats in every respect."""

from __future__ import annotations

from collections.abc import Sequence


def front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """The indices of points that no other dominates; less is better in every number.

    a dominates b  <=>  a_i <= b_i for all i, and a_i < b_i for one

    Equal points stand on the front together.

    >>> front([(1.0, 5.0), (2.0, 2.0), (3.0, 3.0), (9.0, 1.0)])
    [0, 1, 3]

    Source: Pareto 1906, Manuale di economia politica, chapter III.
    """

    def dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    return [i for i, b in enumerate(points) if not any(dominates(a, b) for a in points)]
