"""One query token, step by step, in the numbers that the model really computed."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.capture import Capture, capture
from regard.inspect.choose import check_index, find_query
from regard.inspect.equations import EQUATIONS
from regard.inspect.explanation import Explanation
from regard.inspect.reasons import why_masked
from regard.inspect.steps import (
    Fields,
    Place,
    array,
    mixed,
    pool_largest,
    projected,
    projection_of,
    scored,
)
from regard.models.model import Model

MOST_TOKENS = 512
"""The longest text that is explained in one piece: its whole pattern is kept and drawn."""

PREDICTIONS = 5


def explain(
    model: Model, text: str, *, layer: int = 0, head: int = 0, query: int | str = -1
) -> Explanation:
    """Run a text through a model and keep every number of one query token in one head.

    embedding -> norm -> q, k, v -> q_i . k_j -> scaled -> masked -> softmax -> sum_j p_ij v_j -> heads joined -> W_O -> + h

    What passes a tap is captured from the reference kernel. What does not (a query before its rotation, say) is computed
    by the model's own modules on captured inputs. Each recomputed step is compared with what the model went on with:
    `Explanation.checks`. The text runs once more as the model runs it when nobody looks, and the logits are compared.

    Args:
        model: from `regard.load`, or any `regard.models.Model`.
        text: 1 to 512 tokens.
        layer, head: where to look; negative counts from the end.
        query: the index of a token (negative counts from the end), or a word of the text: its last token.

    Raises:
        ArgumentError: the text is empty or too long, the layer, head or query does not exist, or the layer's projection
            has no separate queries, keys and values.
        ArgumentTypeError: an argument has a wrong type.

    >>> import regard
    >>> found = explain(regard.load("tiny"), "to be or not to be", layer=1, head=2)
    >>> bool(abs(found.weights.sum() - 1) < 1e-6), found.check < 1e-3
    (True, True)

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError(f"text is {type(text).__name__}; it must be str")
    ids, layers = check_length(model.encode(text)), model.decoder.layers
    layer = check_index("layer", layer, len(layers), "layer", "layers")
    heads = projection_of(layers[layer], layer).q.heads
    head = check_index("head", head, heads, "head", "heads")
    i = find_query(model, text, query)
    with torch.inference_mode():
        at = Place(capture(model, ids, layer), head, i)
        inputs, input_checks = projected(at)
        scores, score_checks = scored(at)
        outputs, output_checks = mixed(at, scores["weights"])
    kernel = {"logits of the usual kernel": at.c.kernel}
    return Explanation(
        text=text,
        layer=layer,
        **_about(model, at),
        **_hidden(at.c, at.i),
        **inputs,
        **scores,
        **outputs,
        **_pattern(at),
        predictions=_predictions(model, at),
        checks=input_checks | score_checks | output_checks | kernel,
        equations=dict(EQUATIONS),
    )


def check_length(ids: Int[Tensor, "1 T"]) -> Int[Tensor, "1 T"]:
    """The ids [1,T], if they are few enough to be explained; else ArgumentError.

    >>> import torch
    >>> check_length(torch.zeros(1, 513, dtype=torch.long))
    Traceback (most recent call last):
    regard.errors.ArgumentError: the text has 513 tokens; at most 512 are explained in one piece: shorten it
    """
    if ids.shape[1] > MOST_TOKENS:
        raise ArgumentError(
            f"the text has {ids.shape[1]} tokens; at most {MOST_TOKENS} are explained in one piece: shorten it"
        )
    return ids


def _about(model: Model, at: Place) -> Fields:
    """What was run, and where to look."""
    c = at.c
    (H, T, D), G, (_, E), M = c.q.shape, c.k.shape[0], c.v.shape[1:], c.out.shape[1]
    trained = getattr(model.config, "max_position_embeddings", None)
    notes = []
    if trained is not None and trained < T:
        notes.append(f"the text has {T} tokens; the model was trained on at most {trained}")
    return {
        "model": type(model.config).__module__.rpartition(".")[2],
        "chosen_by": "",
        "notes": tuple(notes),
        "head": at.head,
        "group": at.group,
        "query": at.i,
        "sizes": {
            "layers": len(model.decoder.layers), "H": H, "G": G, "T": T, "D": D, "E": E, "M": M,
        },
        "ids": c.ids.cpu().numpy(),
        "pieces": tuple(model.tokenizer.pieces(c.ids.tolist())),
        "positions": c.positions.tensor()[0].numpy(),
    }  # fmt: skip


def _hidden(c: Capture, i: int) -> Fields:
    """The hidden state of the query token."""
    return {name: array(getattr(c, name)[i]) for name in ("embedding", "entering", "normed")}


def _pattern(at: Place) -> Fields:
    """The whole pattern of the head, a small one of each head, and why keys are masked."""
    visible = ~np.isneginf(array(at.c.scores))
    pool, patterns = pool_largest(np.where(visible, array(at.c.pattern), np.nan))
    return {
        "masked": why_masked(
            at.attention.mask, at.c.positions, at.i, visible[at.head, at.i], at.head
        ),
        "pattern": array(at.c.pattern[at.head]),
        "visible": visible[at.head],
        "pool": pool,
        "patterns": patterns,
    }


def _predictions(model: Model, at: Place) -> tuple[tuple[str, int, float], ...]:
    """The likeliest tokens after the query."""
    likely = at.c.logits[at.i].double().softmax(-1).topk(min(PREDICTIONS, at.c.logits.shape[-1]))
    ids = likely.indices.tolist()
    return tuple(zip(model.tokenizer.pieces(ids), ids, likely.values.tolist(), strict=True))
