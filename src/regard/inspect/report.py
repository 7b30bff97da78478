"""A recording as the plain data of a page: rules, thumbnails and numbers of every head, and some
heads exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regard.inspect.page_data import PageData
from regard.inspect.recording import Recording

BUDGET = 8_000_000
"""Bytes of the page: heads are embedded exactly until it is nearly full."""


def report(
    recording: Recording,
    b: Recording | None = None,
    *,
    model: Any = None,
    choice: Any = None,
    query: int = -1,
    key: int | None = None,
    title: str | None = None,
    row: int = 0,
    budget: int = BUDGET,
    explanation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `regard.view.report.page` draws: {"meta": plain data, "arrays": {name: numpy array}}.

    Args:
        recording: what the page is of.
        b: another one to compare it with: of another prompt, model or kernel.
        model: the model that was recorded, for what a recording does not hold, such as rotary
            frequencies.
        choice: an object with `layer` and `head`, or that pair: where the page opens, and what is
            embedded first.
        query, key: the row and column where it opens; the key is the strongest by default.
        title: of the page; by default the text.
        row: the row of the batch.
        budget: bytes of the page; heads that it has no room for are thumbnails only, and the page
            says so.
        explanation: of the chosen query, to travel with the page.

    Raises:
        ArgumentError: nothing was recorded, or row, choice, query or key is out of range.

    >>> import regard
    >>> from regard.inspect.record import record
    >>> data = report(record(regard.load("tiny"), "to be or not to be"))
    >>> len(data["meta"]["places"]), data["meta"]["places"][0]["H"]
    (4, 8)
    """
    recordings = [recording] if b is None else [recording, b]
    page = PageData(row)
    for number, each in enumerate(recordings):
        page.add(each, number, model if number == 0 else None)
    place, head = page.start(choice)
    page.embed(place, head, budget)
    meta = page.meta(title)
    meta["start"] = {"place": place, "head": head, **page.cell(place, head, query, key)}
    meta["explanation"] = explanation
    return {"meta": meta, "arrays": page.arrays}
