"""Which query, layer and head to look at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.models.model import Model
from regard.tap import Trace

RULE = (
    "the head that looks hardest at one other token: the largest single weight of the query on a key that is neither "
    "the first token, nor the one in front of the query, nor the query itself"
)
"""How `strongest_head` chooses, in words."""


@dataclass(frozen=True)
class Choice:
    """A layer and a head, and the rule that chose them."""

    layer: int
    head: int
    rule: str


def find_query(model: Model, text: str, query: int | str) -> int:
    """The index of the query token: an index (negative counts from the end), or the last token of a word of the text.

    Of several occurrences of a word it is the last; whole words win over parts of words.

    Raises:
        ArgumentError: the index is out of range, or the word does not occur.
        ArgumentTypeError: query is neither.

    >>> import regard
    >>> find_query(regard.load("tiny"), "a b", -1) == len(regard.load("tiny").encode("a b")[0]) - 1
    True
    """
    ids = model.encode(text)[0].tolist()
    if isinstance(query, bool) or not isinstance(query, (int, str)):
        raise ArgumentTypeError(
            f"query is {type(query).__name__}; it must be the index of a token, or a word of the text"
        )
    if isinstance(query, int):
        return check_index("query", query, len(ids), "token", "tokens")
    return _last_token(model, ids, _end_of(query, text))


def check_index(name: str, index: int, length: int, one: str, many: str) -> int:
    """The index, counted from the front; ArgumentError with the allowed range if there is none such."""
    if isinstance(index, bool) or not isinstance(index, int):
        raise ArgumentTypeError(f"{name} is {type(index).__name__}; it must be an integer")
    if not -length <= index < length:
        some = f"{length} {many if length != 1 else one}"
        raise ArgumentError(
            f"{name} is {index}; there are {some}: it must be 0 to {length - 1}, or {-length} to -1 from the end"
        )
    return index % length


def strongest_head(
    model: Model,
    ids: Int[Tensor, "1 T"],
    query: int,
    *,
    layer: int | None = None,
    head: int | None = None,
) -> Choice:
    """The layer and head whose query looks hardest at one other token, the first and the previous one excepted.

    argmax over (layer, head) of max_j p_ij, 0 < j < i - 1, or 0 < j < i where there is no such j

    The first token is left out because heads with nothing to do park their weight there, and the previous one because
    a previous-token head looks there whatever the words are. If there is no other token, it is the first head of the
    first layer. A `layer` or `head` that is given is kept, and only the other is chosen.

    Raises:
        ArgumentError: the query, layer or head is out of range.

    >>> import regard
    >>> model = regard.load("tiny")
    >>> strongest_head(model, model.encode("x"), 0).layer
    0
    """
    rows, query = _rows(model, ids, query)
    if query > 2:
        rows[..., query - 1] = -1
    looks = rows.amax(-1).clamp(min=0)
    layers, heads = looks.shape
    if layer is not None:
        layer = check_index("layer", layer, layers, "layer", "layers")
        looks[torch.arange(layers) != layer] = -1
    if head is not None:
        head = check_index("head", head, heads, "head", "heads")
        looks[:, torch.arange(heads) != head] = -1
    alone = not bool((looks > 0).any())
    layer, head = divmod(int(looks.argmax()), heads)
    return Choice(
        layer, head, "the first one: there is no other token to look at" if alone else RULE
    )


def strongest_keys(
    model: Model, ids: Int[Tensor, "1 T"], query: int
) -> tuple[Float[Tensor, "layers H"], Int[Tensor, "layers H"]]:
    """For each head of each layer: the largest weight of the query on another token than the first, and that token.

    Raises:
        ArgumentError: the query is out of range.

    >>> import regard
    >>> model = regard.load("tiny")
    >>> weights, keys = strongest_keys(model, model.encode("to be or not to be"), -1)
    >>> weights.shape == keys.shape
    True
    """
    best = _rows(model, ids, query)[0].max(-1)
    return best.values.clamp(min=0), best.indices


def _rows(model: Model, ids: Tensor, query: int) -> tuple[Tensor, int]:
    """The query's weights [layers, H, T], -1 on the first token and on itself; and the query as an index from 0."""
    query = check_index("query", query, ids.shape[1], "token", "tokens")
    rows: list[Tensor] = []

    def keep(pattern: Tensor) -> Tensor:
        rows.append(pattern[0, :, query].clone())
        return pattern

    with torch.inference_mode(), Trace(edit={"pattern": keep}):
        model.forward(ids, backend="reference")
    weights = torch.stack(rows)  # [layers, H, T]
    weights[..., 0] = -1  # less than any weight, 0 included
    weights[..., query] = -1
    return weights, query


def _end_of(word: str, text: str) -> int:
    """The offset behind the last occurrence of a word."""
    whole = list(re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text)) if word else []
    if whole:
        return whole[-1].end()
    start = text.rfind(word) if word else -1
    if start < 0:
        words = list(dict.fromkeys(re.findall(r"\w+", text)))
        shown = ", ".join(words[:12]) + (", ..." if len(words) > 12 else "")
        raise ArgumentError(
            f"query is {word!r}, which does not occur in the text; give a token index, or one of its words: {shown}"
        )
    return start + len(word)


def _last_token(model: Model, ids: Sequence[int], end: int) -> int:
    """The first token by which the text is complete up to an offset."""
    low, high = 0, len(ids) - 1
    while low < high:  # the length of the decoded text grows with the tokens
        middle = (low + high) // 2
        decoded = model.tokenizer.decode(ids[: middle + 1])
        enough = len(decoded.rstrip("�")) >= end
        low, high = (low, middle) if enough else (middle + 1, high)
    return low
