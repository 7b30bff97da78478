"""Choose which query, key, layer and head to explain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.explain.captured_run import (
    CapturedRun,
    calls_for_query,
    effective_calls,
    main_call_weights,
    record_sites,
)
from regard.inspect.explain.explanation import Array
from regard.inspect.interventions.attribution import name_mover_scores
from regard.inspect.model_run import (
    MAX_WORD_TOKENS,
    AttentionSite,
    ModelRun,
    TokenSequence,
    Word,
    check_index,
    find_words,
    prepare_run,
)
from regard.models.model import Model
from regard.models.text_encoder import TextEncoder
from regard.nn.explainable import explainable

HEAD_RULE = (
    "of the heads compared, it gives the largest weight to a token that is no neighbour; the first "
    "token does not count"
)
"""How `strongest_head` chooses, as shown to the user."""

NEAR_HEAD_RULE = (
    "of the heads compared, it gives the largest weight to another token; the first token does not "
    "count"
)
"""How `strongest_head` chooses where no token further away has any weight."""

CROSS_HEAD_RULE = "of the heads compared, it gives the largest weight to one token"
"""How a head of cross-attention is chosen."""

HEAD_FOR_KEY_RULE = "of the heads compared, it gives the largest weight to this key"
"""How a head is chosen where the key is given."""

NAME_MOVER_RULE = (
    "the model continues with {token} ({share}), and of all heads this one adds the most to the "
    "logit of that token by reading it in the text (+{score})"
)
"""How `name_mover` chooses."""

FIRST_HEAD_RULE = "the first head: this mechanism has no softmax weights to compare heads by"
"""How a head is chosen where the mechanism has no softmax weights."""

KEY_RULE = "the key with the largest weight, leaving out the query and the first token"
"""How the key is chosen, as shown to the user."""


def strongest_key(weights: Array, left_out: Sequence[bool] | None) -> tuple[int, str]:
    """Return the index of the key with the largest weight, and the rule; a key that is `near`
    counts only if no other one has any weight.
    """
    if left_out is not None:
        others = np.where(left_out, -1.0, weights)
        if others.max(initial=-1) > 0:
            return int(others.argmax()), KEY_RULE
    return int(weights.argmax()), "the key with the largest weight"


@dataclass(frozen=True)
class Choice:
    """A layer and a head, and the rule that chose them.

    Args:
        rule: the rule in words; "" if both were given.
        key: index of the token whose weight decided; None if none did.
    """

    layer: int
    head: int
    rule: str
    key: int | None = None


def find_query(model: Model, text: str, query: int | str) -> int:
    """Find the index of the query token.

    A word stands for its last token, at its last occurrence; occurrences as a whole word take
    precedence over parts of words.

    Args:
        model: the model whose tokenizer is used.
        query: an index (negative counts from the end), or a word of the text.

    Returns:
        The index of the token, counted from the start.

    Raises:
        ArgumentError: the index is out of range, or the word does not occur.
        ArgumentTypeError: `query` is neither an int nor a str.

    >>> import regard
    >>> find_query(regard.load("tiny"), "a b", -1) == len(regard.load("tiny").encode("a b")[0]) - 1
    True
    """
    return find_token(prepare_run(model, text).sequences["text"], query)


def find_token(tokens: TokenSequence, token: int | str, name: str = "query") -> int:
    """Find the index of a token, as `find_query` does; errors call the argument `name`.

    >>> from regard.inspect.model_run import pretokenized
    >>> find_token(pretokenized((5, 6, 7), ("one", "two", "three")), "two")
    1
    """
    if isinstance(token, bool) or not isinstance(token, (int, str)):
        raise ArgumentTypeError(
            f"{name} is {type(token).__name__}; it must be the index of a token, or a word of the "
            "text",
            argument=name,
        )
    if isinstance(token, int):
        return check_index(name, token, len(tokens.ids), "token", "tokens")
    return _last_token(tokens.end_offsets, _end_of(token, tokens.text, name))


def strongest_head(
    model: Model,
    ids: Int[Tensor, "1 T"],
    query: int,
    *,
    layer: int | None = None,
    head: int | None = None,
) -> Choice:
    """Find the layer and head in which the query has the largest weight on one other token.

    argmax over (layer, head) of max_j p_ij, over the keys j > 0 with |i - j| > 1; if there is no
    such key, over all keys j > 0 other than i

    The first token is left out because heads that need no information put their weight there, and
    the neighbours because a previous-token head attends to them whatever the words are. If there is
    no other token, the result is the first head of the first layer.

    Args:
        layer: a layer to which the choice is restricted.
        head: a head to which the choice is restricted.

    Returns:
        The layer, the head and the rule.

    Raises:
        ArgumentError: the query, layer or head is out of range.

    >>> import regard
    >>> model = regard.load("tiny")
    >>> strongest_head(model, model.encode("x"), 0).layer
    0
    """
    query = check_index("query", query, ids.shape[1], "token", "tokens")
    return choose_head(prepare_run(model, ids, last=1), query, layer=layer, head=head)


def choose_head(
    prepared: ModelRun,
    query: int,
    *,
    layer: int | None = None,
    head: int | None = None,
    place: str | None = None,
    key: int | None = None,
) -> Choice:
    """Choose as `strongest_head` does, for any prepared run, or for one of its attentions.

    If `key`, the index of a token, is given, the head with the largest weight on it is chosen.
    """
    sites = prepared.main_sites if place is None else (prepared.site(place=place),)
    if all(explainable(site.attention).has_own_row for site in sites):
        first = sites[check_index("layer", layer or 0, len(sites), "layer", "layers")]
        return Choice(first.layer, head or 0, FIRST_HEAD_RULE)
    rows = _query_weights(prepared, sites, query, keep_all=key is not None)
    layers, heads, S = rows.shape
    compared = torch.ones(layers, heads, dtype=torch.bool)
    if layer is not None and place is None:
        layer = check_index("layer", layer, layers, "layer", "layers")
        compared &= (torch.arange(layers) == layer)[:, None]
    if head is not None:
        head = check_index("head", head, heads, "head", "heads")
        compared &= torch.arange(heads) == head
    rule, counted = CROSS_HEAD_RULE, torch.ones(S, dtype=torch.bool)
    if key is not None:
        rule, counted = HEAD_FOR_KEY_RULE, torch.arange(S) == key
    elif sites[0].query_sequence == sites[0].key_sequence:
        far = _far(prepared.sequences[sites[0].key_sequence], query)
        any_far = bool((rows[compared][:, far] > 0).any())
        rule, counted = (HEAD_RULE, far) if any_far else (NEAR_HEAD_RULE, counted)
    rows = rows.clamp(min=0).masked_fill(~compared[:, :, None], -1).masked_fill(~counted, -1)
    best = int(rows.argmax())
    of_head, token = best // S, best % S if float(rows.flatten()[best]) > 0 else None
    if token is None:
        of_head = int(compared.flatten().int().argmax())
        rule = (
            "the first head: there is no other token"
            if key is None
            else "the first head: no head has weight on the key"
        )
    layer, head = divmod(of_head, heads)
    return Choice(layer if place is None else sites[0].layer, head, rule, token)


def name_mover(prepared: ModelRun, query: int) -> Choice | None:
    """Choose the head that moves the next token from the text to the prediction, if there is one.

    argmax over heads of `name_mover_scores` of the most likely token after the last one

    The token must be a word that stands in the text, and of all keys but the first and the query
    the head must read a copy of it most. Otherwise, or if the model cannot be attributed, or for
    more than 512 tokens, the result is None.

    >>> import regard
    >>> name_mover(prepare_run(regard.load("tiny"), "to be or not to", last=1), 0) is None
    True
    """
    tokens = prepared.tokens
    if not isinstance(prepared.model, Model) or tokens is None or prepared.predict is None:
        return None
    T = len(tokens.ids)
    if query != T - 1 or T > MAX_WORD_TOKENS:
        return None
    p = prepared.run().output[0, -1].double().softmax(-1)
    answer = int(p.argmax())
    copies = [j for j, each in enumerate(tokens.ids) if each == answer and j < query]
    name = prepared.names([answer])[0]
    if not copies or not any(letter.isalnum() for letter in name):
        return None
    ids = torch.tensor([tokens.ids], device=prepared.model.device)
    try:
        scores = name_mover_scores(prepared.model, ids, answer).values
    except ArgumentError:  # the parts of this network do not add up to its logits
        return None
    if not np.nanmax(scores) > 0:
        return None
    place, head = divmod(int(np.nanargmax(scores)), scores.shape[1])
    row = _query_weights(prepared, prepared.main_sites, query)[place, head]
    key = int(row.argmax())
    if key not in copies:
        return None
    rule = NAME_MOVER_RULE.format(
        token=name, share=f"{float(p[answer]):.1%}", score=f"{scores[place, head]:.2f}"
    )
    return Choice(prepared.main_sites[place].layer, head, rule, key)


def striking_query(prepared: ModelRun) -> int:
    """Return the query to explain where none is given: the last token, whose next one a decoder
    predicts; of a text encoder the word with the largest weight on a word that is no neighbour.

    >>> import regard
    >>> striking_query(prepare_run(regard.load("tiny"), "to be", last=1))
    -1
    """
    text = prepared.sequences.get("text")
    if not isinstance(prepared.model, TextEncoder) or text is None:
        return -1
    words, run = find_words(text), record_sites(prepared, prepared.main_sites)
    if len(text.ids) > MAX_WORD_TOKENS:
        return -1
    best, largest = -1, 0.0
    for word in words:
        query = word.stop - 1
        counted = _far(text, query)
        if not _is_word(word) or not bool(counted.any()):
            continue
        rows = _weights_of_query(prepared, prepared.main_sites, run, query)
        weight = float(rows[..., counted].max())
        if weight > largest:
            best, largest = query, weight
    return best


def strongest_keys(
    model: Model, ids: Int[Tensor, "1 T"], query: int
) -> tuple[Float[Tensor, "layers H"], Int[Tensor, "layers H"]]:
    """Find, for each head of each layer, the key with the largest weight of one query.

    The first token and the query itself are left out.

    Args:
        model: the model.

    Returns:
        The largest weights and the indices of their keys.

    Raises:
        ArgumentError: the query is out of range.

    >>> import regard
    >>> model = regard.load("tiny")
    >>> weights, keys = strongest_keys(model, model.encode("to be or not to be"), -1)
    >>> weights.shape == keys.shape
    True
    """
    query = check_index("query", query, ids.shape[1], "token", "tokens")
    return strongest_keys_of_run(prepare_run(model, ids, last=1), query)


def strongest_keys_of_run(
    prepared: ModelRun, query: int, place: str | None = None
) -> tuple[Float[Tensor, "layers H"], Int[Tensor, "layers H"]]:
    """Return the weights and keys of `strongest_keys` for any prepared run."""
    sites = prepared.main_sites if place is None else (prepared.site(place=place),)
    best = _query_weights(prepared, sites, query).max(-1)
    return best.values.clamp(min=0), best.indices


def _far(tokens: TokenSequence, query: int) -> Tensor:
    """Return which tokens belong to words that are no neighbours of the query's word, and are not
    that word; signs and special tokens do not count as words, if there are others.
    """
    words = find_words(tokens) or tuple(Word(i, i + 1, "") for i in range(len(tokens.ids)))
    own = next(n for n, word in enumerate(words) if word.start <= query < word.stop)
    counts = [abs(n - own) > 1 for n in range(len(words))]
    named = [far and _is_word(word) for far, word in zip(counts, words, strict=True)]
    sizes = torch.tensor([word.stop - word.start for word in words])
    return torch.tensor(named if any(named) else counts).repeat_interleave(sizes)


def _is_word(word: Word) -> bool:
    """Return whether a word begins with a letter or a digit, unlike signs and special tokens."""
    return word.text.strip("·#")[:1].isalnum()


def _query_weights(
    prepared: ModelRun, sites: Sequence[AttentionSite], query: int, *, keep_all: bool = False
) -> Tensor:
    """Run the network, and return the weights of the query at each site, `[sites, H, S]`.

    In self-attention the first token and the query itself get -1, unless `keep_all`.
    """
    run = record_sites(prepared, sites)
    weights = _weights_of_query(prepared, sites, run, query)
    if sites[0].query_sequence == sites[0].key_sequence and not keep_all:
        weights[..., 0] = -1  # less than any weight, including 0
        weights[..., min(query, weights.shape[-1] - 1)] = -1
    return weights


def _weights_of_query(
    prepared: ModelRun, sites: Sequence[AttentionSite], run: CapturedRun, query: int
) -> Tensor:
    """Return the weights of the query at each recorded site, `[sites, H, S]`."""
    rows: list[Tensor | None] = []
    for site in sites:
        calls, tokens = calls_for_query(run, site, query), prepared.sequences[site.key_sequence].ids
        counted = effective_calls(site, calls)
        rows.append(main_call_weights(counted, len(tokens)) if calls else None)
    known = next((row for row in rows if row is not None), None)
    if known is None:
        names = ", ".join(dict.fromkeys(type(site.attention).__name__ for site in sites))
        raise ArgumentError(
            f"{names} ran no softmax for query {query}: there are no weights to compare heads by; "
            "give a layer and a head"
        )
    return torch.stack([torch.zeros_like(known) if row is None else row for row in rows])


def _end_of(word: str, text: str, name: str) -> int:
    """Return the offset in the text at which the last occurrence of a word ends."""
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
        f"of its words: {shown}",
        argument=name,
        value=word,
    )


def _last_token(end_offsets: Sequence[int], end: int) -> int:
    """Return the first token at which the text is complete up to an offset."""
    low, high = 0, len(end_offsets) - 1
    while low < high:  # the length of the decoded text grows with the tokens
        middle = (low + high) // 2
        low, high = (low, middle) if end_offsets[middle] >= end else (middle + 1, high)
    return low
