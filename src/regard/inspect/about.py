"""What an explanation says of where it looks: names of keys and calls, sizes, notes,
predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.errors import ArgumentError
from regard.foreign import shown, whole
from regard.inspect.calls import Call
from regard.inspect.capture import Capture
from regard.inspect.choose import KEY_RULE, check_index, find_token
from regard.inspect.parts import Array
from regard.inspect.reading import Reading, Site, Tokens
from regard.inspect.row import Fields, Row
from regard.span import as_tensor

PREDICTIONS = 5


@dataclass(frozen=True, eq=False)
class At:
    """Where to look: an attention of what is read, and the index of the query."""

    read: Reading
    site: Site
    i: int

    @property
    def columns(self) -> Tokens:
        """The keys' sequence."""
        return self.read.sides[self.site.columns]

    @property
    def rows(self) -> Tokens:
        """The queries' sequence."""
        return self.read.sides[self.site.rows]

    @property
    def own(self) -> bool:
        """Queries and keys are of one sequence."""
        return self.site.rows == self.site.columns


def call_names(site: Site, calls: Sequence[Call]) -> tuple[str, ...]:
    """What each call is called: the branch that it is at, else its number."""
    found = []
    for n, call in enumerate(calls):
        branch = call.place.name[len(site.place) + 1 :]
        found.append(branch if branch and not branch.startswith("part") else f"call {n}")
    return tuple(found)


def which_call(call: int | str, names: Sequence[str]) -> int:
    """The number of a call, by number or name.

    Raises:
        ArgumentError: there is none such.

    >>> which_call("window", ["compressed", "selected", "window"])
    2
    """
    number = whole(call) if isinstance(call, str) else call
    if number is not None:
        return check_index("call", number, len(names), "call", "calls")
    if call in names:
        return names.index(str(call))
    raise ArgumentError(f"call is {shown(call)}; the calls for this query are {', '.join(names)}")


def keys_of(at: At, positions: Sequence[int], *, blocks: bool = False) -> Fields:
    """ids, pieces and positions of keys, by where they stand; a block of keys is called by its last
    token.
    """
    tokens, ids, pieces = at.columns, [], []
    for n, p in enumerate(positions):
        real = 0 <= p < len(tokens.ids)
        ids.append(tokens.ids[p] if real else -1)
        name = tokens.pieces[p] if real else "‹empty›"
        pieces.append(f"block {n} …{name}" if blocks and real else name)
    return {"ids": np.array(ids), "pieces": tuple(pieces), "positions": np.array(positions)}


def find_key(
    at: At,
    key: int | str | None,
    weights: Array,
    positions: Sequence[int],
    visible: NDArray[Any],
) -> tuple[int, str]:
    """The index of the key among those of the call, and the rule that chose it, or ""."""
    if key is not None:
        token = find_token(at.columns, key, "key")
        if token not in positions:
            raise ArgumentError(
                f"key is token {token}, which this call does not hold; it holds {len(positions)} "
                "keys, at positions "
                f"{', '.join(map(str, list(positions)[:8]))}{', ...' if len(positions) > 8 else ''}"
            )
        return list(positions).index(token), ""
    looks = np.where(visible, np.abs(weights), -1.0)
    others = looks.copy()
    if at.own:
        others[[p in (0, at.i) for p in positions]] = -1
    best = others if others.max(initial=-1) > 0 else looks
    rule = KEY_RULE if best is others and at.own else "the strongest key"
    return int(best.argmax()), rule


def sizes_of(at: At, found: Capture, call: Call, row: Row) -> dict[str, int]:
    """The letters of the call."""
    return {
        "layers": len(at.read.main),
        "H": len(call.weights),
        "G": call.groups,
        "T": len(at.rows.ids),
        "S": len(call.keys),
        "D": row.chain.k.shape[1],
        "E": row.v.shape[1],
        "M": found.taps["out"].shape[1],
    }


def row_pieces(at: At, call: Call) -> tuple[str, ...]:
    """The pieces of all queries of the call."""
    at_rows = as_tensor(call.step.q_positions)[0].tolist()
    known = at.rows.pieces
    return tuple(known[p] if 0 <= p < len(known) else "‹empty›" for p in at_rows)


def about(at: At, found: Capture) -> Fields:
    """What was run, and where to look."""
    read, site, i = at.read, at.site, at.i
    T, trained, notes = len(at.rows.ids), read.trained, []
    if trained is not None and trained < T:
        notes.append(f"the text has {T} tokens; the model was trained on at most {trained}")
    return {
        "model": read.name,
        "text": read.text,
        "place": site.place,
        "layer": site.layer,
        "query": i,
        "mechanism": type(site.attention).__name__,
        "query_piece": at.rows.pieces[i],
        "query_position": i,
        "notes": (*read.notes, *notes),
        "predictions": predictions(at, found),
    }


def predictions(at: At, found: Capture) -> tuple[tuple[str, int, float], ...]:
    """The likeliest tokens for the query, where the network says any."""
    read = at.read
    if read.predict is None or at.site.rows != read.predicts or "last" not in found.hidden:
        return ()
    logits = read.predict(found.hidden["last"][None, at.i : at.i + 1])[0, 0]
    likely = logits.double().softmax(-1).topk(min(PREDICTIONS, logits.shape[-1]))
    ids = likely.indices.tolist()
    return tuple(zip(read.names(ids), ids, likely.values.tolist(), strict=True))
