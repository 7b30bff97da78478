"""What the served page knows before it asks for tiles: places, heads, texts, positions; and, on
request, the audit of a place and the hits of a search.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from regard.inspect.record.recorded_place import Place
from regard.inspect.record.row_sums import row_sums
from regard.inspect.report.page_data import AUDITED_SCORES, label, source_facts
from regard.inspect.tile_server.head_overviews import METRICS
from regard.inspect.tile_server.session import ViewSession

MAX_HITS = 10_000


def page_facts(session: ViewSession) -> dict[str, Any]:
    """Return the places and texts of a session as plain data."""
    texts: list[list[str]] = []
    sources = [source_facts(recording) for recording in session.recordings]
    opened = {
        (name, h) for name, place in session.recordings[0].places.items() for h in place.heads
    }
    reduced = [key for key in session.overviews.heads if key not in opened]
    return {
        "title": " | ".join(str(x["title"]) for x in sources if x["title"]) or "recording",
        "sources": sources,
        "texts": texts,
        "places": [_place(session, n, texts) for n in range(len(session.places))],
        "metrics": list(METRICS),
        "not_kept": len(reduced),
    }


def _place(session: ViewSession, number: int, texts: list[list[str]]) -> dict[str, Any]:
    """Return the facts about a place; equal texts are stored once."""
    place = session.places[number]
    recording = replace(session.recordings[session.sources[number]], places={place.name: place})
    rows, columns = recording.labels(place.name)

    def text(pieces: tuple[str, ...]) -> int:
        if list(pieces) not in texts:
            texts.append(list(pieces))
        return texts.index(list(pieces))

    return {
        "name": place.name,
        "label": label(place.name),
        "H": place.H,
        "G": place.G,
        "heads": list(place.heads),
        "T": place.T,
        "N": place.N,
        "D": place.pools[0].k.shape[-1],
        "q_text": text(rows),
        "q_first": 0,
        "k_text": text(columns),
        "q_positions": _positions(place.row_positions[session.batch].tolist()),
        "k_positions": _positions(place.column_positions[session.batch].tolist()),
        "source": session.sources[number],
        "top": session.head(number, place.heads[0]).top_level,
        "rule": _rule(place),
        "kernel": ", ".join(dict.fromkeys(step.kernel for step in place.steps)),
    }


def audit_facts(session: ViewSession, number: int) -> dict[str, Any]:
    """Return the audit of a place: how far its row sums differ from 1."""
    audit = row_sums(session.places[number], cells=AUDITED_SCORES)
    return {**asdict(audit), "sound": audit.sound}


def _positions(positions: list[int]) -> list[int] | None:
    """Return positions, or None if they are 0, 1, 2, ..."""
    return None if positions == list(range(len(positions))) else positions


def _rule(place: Place) -> str:
    """Return the masks of a place as text."""
    return "; ".join(dict.fromkeys(str(step.mask) for step in place.steps))


def search_text(session: ViewSession, query: str) -> dict[str, Any]:
    """Return the indices of the tokens in which a plain text begins, in the text of the first
    place's keys; matches may span tokens, and upper and lower case are equal.
    """
    place = session.places[0]
    recording = replace(session.recordings[0], places={place.name: place})
    pieces = recording.labels(place.name)[1]
    starts: list[int] = []
    text: list[str] = []
    length = 0
    for piece in pieces:
        starts.append(length)
        text.append(piece.lower())
        length += len(text[-1])
    whole, offset = "".join(text), -1
    hits: list[int] = []
    wanted = query.lower()
    token = 0
    while len(hits) < MAX_HITS and (offset := whole.find(wanted, offset + 1)) >= 0:
        while token + 1 < len(starts) and starts[token + 1] <= offset:
            token += 1
        if not hits or hits[-1] != token:
            hits.append(token)
    return {"hits": hits, "complete": len(hits) < MAX_HITS}
