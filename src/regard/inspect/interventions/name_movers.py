"""Name movers: heads that attend to earlier copies of the answer and write it to the logits."""

from __future__ import annotations

import re

import numpy as np

from regard.errors import ArgumentError
from regard.inspect.interventions.answer_metric import Answer, token_id
from regard.inspect.interventions.attribution import attribute
from regard.inspect.interventions.effect_table import EffectTable
from regard.inspect.interventions.model_run import AnyModel, Input, prepare
from regard.language import Phrase

_HEAD = re.compile(r"(.*)\.head\.(\d+)$")


def name_mover_scores(model: AnyModel, text: Input, answer: Answer) -> EffectTable:
    """Compute how much each head moves an answer that stands in the text to its logit.

        score(head) = sum over keys j with id_j = answer of the part of the logit of the answer
                      that comes directly from p_ij v_j of the head, for the last query i

    Args:
        model: a `Model`, a `Seq2Seq`, or a module with logits.
        text: the input, which contains the answer; of an encoder-decoder the source or the target.
        answer: the token (text or id).

    Returns:
        A table of layers and heads.

    Raises:
        ArgumentError: the answer is no token, or does not stand in the text; or as for `attribute`.

    >>> import regard
    >>> table = name_mover_scores(regard.load("tiny"), "to be or not to", " be")
    >>> table.values.shape
    (4, 8)

    Source: Wang et al. 2022 (arXiv 2211.00593), section 3.1.
    """
    run = prepare(model, text)
    answer_id = token_id(run, answer)
    parts = attribute(model, text, answer_id, by_key=True)
    keys = (run.key_ids() == answer_id).cpu().numpy()
    if not keys.any():
        raise ArgumentError(
            f"the answer {answer!r} does not stand in the text, so that no head moves it"
        )
    scores: dict[str, dict[int, float]] = {}
    for name, row in zip(parts.rows, parts.values, strict=True):
        if match := _HEAD.match(name):
            scores.setdefault(match[1], {})[int(match[2])] = float(row[keys].sum())
    values = np.full((len(scores), 1 + max(h for heads in scores.values() for h in heads)), np.nan)
    for i, heads in enumerate(scores.values()):
        for h, value in heads.items():
            values[i, h] = value
    return EffectTable(
        "name movers",
        Phrase("{part} from its copies", part=parts.quantity),
        values,
        "layer",
        "head",
        tuple(scores),
        tuple(map(str, range(values.shape[1]))),
        baseline=parts.baseline,
    )
