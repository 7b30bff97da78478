"""Choose which query, key, layer and head to look at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.explain.capture import calls_at, counting, look, looks_of
from regard.inspect.explain.reading import Reading, Site, Source, Tokens, check_index, reading
from regard.models.model import Model
from regard.nn.explainable import explainable

RULE = (
    "the head that looks hardest at one other token: the largest single weight of the query on a "
    "key that is neither "
    "the first token, nor a neighbour of the query, nor the query itself"
)
"""How `strongest_head` chooses, in words."""

AT_KEY = "the head that looks hardest at the key: the largest weight of the query on it"
"""How a head is chosen where the key is given."""

UNCOMPARED = "the first one: this mechanism has no softmax to compare heads by"

KEY_RULE = "the strongest key that is neither the query nor the first token"
"""How the key is chosen, in words."""


@dataclass(frozen=True)
class Choice:
    """A layer and a head, and the rule that chose them."""

    layer: int
    head: int
    rule: str


def find_query(model: Model, text: str, query: int | str) -> int:
    """The index of the query token: an index (negative counts from the end), or the last token of a
    word of the text.

    Of several occurrences of a word it is the last; whole words win over parts of words.

    Raises:
        ArgumentError: the index is out of range, or the word does not occur.
        ArgumentTypeError: query is neither.

    >>> import regard
    >>> find_query(regard.load("tiny"), "a b", -1) == len(regard.load("tiny").encode("a b")[0]) - 1
    True
    """
    return find_token(reading(model, text).sides["text"], query)


def find_token(tokens: Tokens, token: int | str, name: str = "query") -> int:
    """The index of a token, as `find_query`; `name` is what a refusal calls it.

    >>> from regard.inspect.explain.reading import spoken
    >>> find_token(spoken((5, 6, 7), ("one", "two", "three")), "two")
    1
    """
    if isinstance(token, bool) or not isinstance(token, (int, str)):
        raise ArgumentTypeError(
            f"{name} is {type(token).__name__}; it must be the index of a token, or a word of the "
            "text"
        )
    if isinstance(token, int):
        return check_index(name, token, len(tokens.ids), "token", "tokens")
    return _last_token(tokens.ends, _end_of(token, tokens.text, name))


def strongest_head(
    model: Model,
    ids: Int[Tensor, "1 T"],
    query: int,
    *,
    layer: int | None = None,
    head: int | None = None,
) -> Choice:
    """The layer and head whose query looks hardest at one other token, the first and the neighbours
    excepted.

    argmax over (layer, head) of max_j p_ij, 0 < j, |i - j| > 1, or 0 < j != i where there is no
    such j

    The first token is left out because heads with nothing to do park their weight there, and the
    neighbours because a previous-token head looks there whatever the words are. If there is no
    other token, it is the first head of the first layer. A `layer` or `head` that is given is kept,
    and only the other is chosen.

    Raises:
        ArgumentError: the query, layer or head is out of range.

    >>> import regard
    >>> model = regard.load("tiny")
    >>> strongest_head(model, model.encode("x"), 0).layer
    0
    """
    query = check_index("query", query, ids.shape[1], "token", "tokens")
    return strongest(_reading(model, ids), query, layer=layer, head=head)


def strongest(
    read: Reading,
    query: int,
    *,
    layer: int | None = None,
    head: int | None = None,
    place: str | None = None,
    key: int | None = None,
) -> Choice:
    """The choice of `strongest_head` for anything that can be read; of one place, if that is given.

    Where the key is given, the number of a token, it is the head that looks hardest at it.

    >>> import regard
    >>> strongest(reading(regard.load("tiny"), "x"), 0).head
    0
    """
    sites = read.main if place is None else (read.site(place=place),)
    if all(explainable(site.attention).has_own_row for site in sites):
        first = sites[
            0 if layer is None else check_index("layer", layer, len(sites), "layer", "layers")
        ]
        return Choice(first.layer, head or 0, UNCOMPARED)
    rows = _rows(read, sites, query, everything=key is not None)
    if key is None and sites[0].rows == sites[0].columns:
        far = rows.clone()
        far[..., max(query - 1, 0) : query + 2] = -1
        rows = far if bool((far > 0).any()) else rows
    looks = (rows.amax(-1) if key is None else rows[..., key]).clamp(min=0)
    layers, heads = looks.shape
    if layer is not None and place is None:
        layer = check_index("layer", layer, layers, "layer", "layers")
        looks[torch.arange(layers) != layer] = -1
    if head is not None:
        head = check_index("head", head, heads, "head", "heads")
        looks[:, torch.arange(heads) != head] = -1
    alone = not bool((looks > 0).any())
    layer, head = divmod(int(looks.argmax()), heads)
    rule = RULE if key is None else AT_KEY
    if alone:
        rule = "the first one: " + (
            "there is no other token to look at" if key is None else "no head looks at the key"
        )
    return Choice(layer if place is None else sites[0].layer, head, rule)


def strongest_keys(
    model: Model, ids: Int[Tensor, "1 T"], query: int
) -> tuple[Float[Tensor, "layers H"], Int[Tensor, "layers H"]]:
    """For each head of each layer: the largest weight of the query on another token than the first,
    and that token.

    Raises:
        ArgumentError: the query is out of range.

    >>> import regard
    >>> model = regard.load("tiny")
    >>> weights, keys = strongest_keys(model, model.encode("to be or not to be"), -1)
    >>> weights.shape == keys.shape
    True
    """
    query = check_index("query", query, ids.shape[1], "token", "tokens")
    return looks(_reading(model, ids), query)


def looks(
    read: Reading, query: int, place: str | None = None
) -> tuple[Float[Tensor, "layers H"], Int[Tensor, "layers H"]]:
    """The weights and keys of `strongest_keys` for anything that can be read."""
    sites = read.main if place is None else (read.site(place=place),)
    best = _rows(read, sites, query).max(-1)
    return best.values.clamp(min=0), best.indices


def _reading(model: Source, ids: Tensor) -> Reading:
    """A reading of ids whose text does not matter."""
    from dataclasses import replace

    assert isinstance(model, Model), "text encoders and others are read by their texts"
    one = reading(model, "x")
    row = tuple(ids[0].tolist())
    sides = {"text": Tokens(row, tuple(map(str, row)), "", ())}
    run = model.decoder if model.has_head else model.decoder.hidden
    return replace(one, sides=sides, run=lambda: run(ids, last=1))


def _rows(read: Reading, sites: Sequence[Site], query: int, *, everything: bool = False) -> Tensor:
    """The query's weights [sites, H, S]; -1 on the first token and on itself where keys are its own
    sequence, if not everything.
    """
    found = look(read, sites)
    rows: list[Tensor | None] = []
    for site in sites:
        calls = calls_at(found, site, query)
        if not calls:
            rows.append(None)
            continue
        rows.append(looks_of(counting(site, calls), len(read.sides[site.columns].ids)))
    known = next((row for row in rows if row is not None), None)
    if known is None:
        names = ", ".join(dict.fromkeys(type(site.attention).__name__ for site in sites))
        raise ArgumentError(
            f"{names} ran no softmax for query {query}: there are no weights to compare heads by; "
            "give a layer and a head"
        )
    weights = torch.stack([torch.zeros_like(known) if row is None else row for row in rows])
    if sites[0].rows == sites[0].columns and not everything:
        weights[..., 0] = -1  # less than any weight, 0 included
        weights[..., min(query, weights.shape[-1] - 1)] = -1
    return weights


def _end_of(word: str, text: str, name: str) -> int:
    """The offset behind the last occurrence of a word."""
    for where, what in ((text, word), (text.casefold(), word.casefold())):
        whole = list(re.finditer(rf"(?<!\w){re.escape(what)}(?!\w)", where)) if what else []
        if whole:
            return whole[-1].end()
        start = where.rfind(what) if what else -1
        if start >= 0:
            return start + len(what)
    words = list(dict.fromkeys(re.findall(r"\w+", text)))
    shown = ", ".join(words[:12]) + (", ..." if len(words) > 12 else "")
    raise ArgumentError(
        f"{name} is {word[:100]!r}, which does not occur in the text; give a token index, or one "
        f"of its words: {shown}"
    )


def _last_token(ends: Sequence[int], end: int) -> int:
    """The first token by which the text is complete up to an offset."""
    low, high = 0, len(ends) - 1
    while low < high:  # the length of the decoded text grows with the tokens
        middle = (low + high) // 2
        low, high = (low, middle) if ends[middle] >= end else (middle + 1, high)
    return low
