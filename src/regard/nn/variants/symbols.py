"""The symbols of the equations of the catalogue, where an entry gives no other meaning."""

from __future__ import annotations

import re

from regard.nn.variants.registry import Variant

SYMBOLS: dict[str, str] = {
    "x": "hidden states, one row a token",
    "q": "queries of a head",
    "k": "keys of a head",
    "v": "values of a head",
    "z": "result of a head",
    "out": "result of the layer",
    "i": "position of the query",
    "j": "position of the key",
    "t": "position of the token",
    "h": "index of a query head",
    "g": "index of a key/value head",
    "H": "number of query heads",
    "G": "number of key/value heads",
    "D": "width of a query and key head",
    "W": "a learned matrix",
    "W_q": "learned matrix of the queries",
    "W_k": "learned matrix of the keys",
    "W_v": "learned matrix of the values",
    "W_o": "learned matrix of the output",
    "W_g": "learned matrix of the output gate",
    "b": "a learned bias",
    "b_o": "learned bias of the output",
    "S": "state of a head, a matrix with a row for each channel of a key",
    "n": "sum of the keys in the state, by which the result is divided",
    "s_ij": "score of query i and key j",
    "p_ij": "weight of query i and key j",
    "causal": "0 where j <= i, and minus infinity where j > i",
    "norm": "RMS norm of a head",
    "rotary": "rotary position embedding",
    "phi": "feature map, which makes queries and keys positive",
    "silu": "x sigmoid(x)",
    "elu": "x for x > 0, exp(x) - 1 below",
    "beta": "share of the old value that is replaced, between 0 and 1",
    "I": "the selected keys",
    "K": "keys",
    "V": "values",
    "topk": "number of selected keys or blocks",
    "m": "the second sequence, from which keys and values come",
}
"""The meaning of a symbol in the equations, unless a mechanism gives another one."""

FUNCTIONS = frozenset(
    {
        "softmax",
        "sqrt",
        "exp",
        "ln",
        "max",
        "tanh",
        "sigmoid",
        "softplus",
        "relu",
        "sum",
        "min",
        "mod",
    }
    | {"mean", "abs", "product", "cos"}
    | {"diag", "concat", "dot", "general", "T"}
)
"""Functions and words with a common meaning; T is a transpose."""

_INDICES = "ijthg"
"""Letters that say, below another symbol, which one of several it is."""
_SYMBOL = re.compile(r"[A-Za-z]+[0-9]?(?:_[A-Za-z0-9]+)?(?:\^[QKV]\b)?'?")
_ENGLISH = frozenset(
    {"a", "after", "all", "and", "as", "block", "blocks", "by", "compressed", "document", "each"}
    | {"earlier", "every", "for", "global", "globals", "heads", "in", "infini", "keys", "largest"}
    | {"convolution", "first", "mixed"}
    | {"layer", "memory", "of", "or", "over", "query", "random", "rotated", "same", "segment"}
    | {"selected", "split", "th", "the", "then", "token", "tokens", "way", "window", "with"}
    | {"any", "head", "page", "pages"}
    | {"are", "before", "bias", "blocks", "chunk", "floor", "half", "head", "number", "one"}
    | {"others", "pair", "pairs", "positions", "rotates", "without"}
)
"""Words of the equations that are no symbols."""


def equation_symbols(entry: Variant) -> dict[str, str]:
    """Return the symbols of a mechanism with their meanings, in the order of its equation.

    The index of a symbol such as q_h has a line of its own; a KeyError names what has no meaning.
    """
    known = {**SYMBOLS, **entry.symbols}
    meanings: dict[str, str] = {}
    for token in _SYMBOL.findall(entry.equation.replace("'s ", " ")):
        base, _, index = token.partition("_")
        names = [x for x in (token, token.rstrip("'"), base, base.rstrip("'")) if x in known]
        if names:
            meanings.setdefault(names[0], known[names[0]])
        elif base.rstrip("'") not in FUNCTIONS | _ENGLISH:
            raise KeyError(f"{token} in the equation of {entry.name}")
        if not names or "_" not in names[0]:
            meanings |= {x: known[x] for x in index if x in _INDICES and x not in meanings}
    return meanings
