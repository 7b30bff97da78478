"""Direct logit attribution of a whole answer, from one run over its text and its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.interventions.attribution import attribute_run
from regard.inspect.interventions.effect_table import EffectTable
from regard.inspect.interventions.residual_terms import CAPTURED
from regard.inspect.model_run import (
    AnyModel,
    Input,
    ModelRun,
    TokenSequence,
    encode_ids,
    passed_once,
    prepare_run,
)
from regard.language import Phrase
from regard.models.model import Model
from regard.models.seq2seq import Seq2Seq


def attribute_answer(
    model: AnyModel, text: Input, answer: str | Sequence[int], *, by_key: bool = False
) -> EffectTable:
    """Attribute the logits of all tokens of an answer to heads, layers and, on request, keys.

        sum over tokens n of the answer of  logit(answer_n | text, answer_1 ... answer_(n-1))

    Each logit is a sum of terms, as `attribute` computes it; all of them come from one run.

    Args:
        model: a `Model`, or a `Seq2Seq`, whose answer is the target.
        text: the input before the answer; of a `Seq2Seq` the source.
        answer: the answer, as a text or ids.
        by_key: True sums over the answer, with a column for each key; False has a column for each
            token of the answer.

    Returns:
        A table with one row per term and the sum of the logits as `baseline`: all numbers sum to
        it.

    Raises:
        ArgumentError: the answer has no token, or the model adds in a way that is not known.
        ArgumentTypeError: the model or the text has an unsupported type.

    >>> import regard
    >>> table = attribute_answer(regard.load("tiny"), "to be or", " not to be")
    >>> table.columns, bool(abs(table.values.sum() - table.baseline) < 1e-9)
    (('3 ·not', '4 ·to', '5 ·be'), True)

    Source: as for `attribute`.
    """
    whole, ids = _whole_run(model, text, answer)
    taps = passed_once(whole.run(capture=(*CAPTURED, "pattern") if by_key else CAPTURED).trace)
    length = len(ids) if whole.tokens is None else len(whole.tokens.ids)
    first = length - len(ids)
    tables = []
    for length_before, token in enumerate(ids, first):
        known = {name: _cut(name, x, length_before) for name, x in taps.items()}
        before = _first_tokens(whole, length_before)
        tables.append(attribute_run(before, token, by_key=by_key, taps=known))
    names = list(dict.fromkeys(name for table in tables for name in table.rows))
    columns = tables[-1].columns if by_key else whole.labels(length)[first:]
    values = np.zeros((len(names), len(columns)))
    for n, table in enumerate(tables):
        rows = [names.index(name) for name in table.rows]
        if by_key:
            values[rows, : table.values.shape[1]] += table.values
        else:
            values[rows, n] = table.values[:, 0]
    return EffectTable(
        "direct logit attribution of an answer",
        Phrase("part of the sum of {count} logits", count=len(ids)),
        values,
        "term",
        "key" if by_key else "token",
        tuple(names),
        columns,
        baseline=float(sum(table.baseline or 0.0 for table in tables)),
        notes=tables[0].notes,
    )


def _whole_run(
    model: AnyModel, text: Input, answer: str | Sequence[int]
) -> tuple[ModelRun, list[int]]:
    """Return the run over a text and its answer, and the ids of the answer."""
    if not isinstance(model, (Model, Seq2Seq)):
        raise ArgumentTypeError(
            f"model is {type(model).__name__}; an answer is attributed in a Model or a Seq2Seq: "
            "regard.load reads checkpoints as these",
            argument="model",
        )
    is_pair = isinstance(model, Seq2Seq)
    before = torch.tensor([[model.start]]) if isinstance(model, Seq2Seq) else None
    before = encode_ids(model, text)[0] if before is None else before  # type: ignore[arg-type]
    if len(before) != 1:
        raise ArgumentError("text is several texts; give one text, whose answer is attributed")
    ids = list(answer) if not isinstance(answer, str) else []
    if isinstance(answer, str):
        after = () if is_pair else tuple(before[0].tolist())
        ids = list(model.tokenizer.encode(answer, after=after))
    if not ids:
        raise ArgumentError("the answer has no token; give a text or ids", argument="answer")
    joined = torch.cat([before, before.new_tensor([ids])], 1)
    return prepare_run(model, (text, joined) if is_pair else joined), ids


def _first_tokens(run: ModelRun, length: int) -> ModelRun:
    """Return the run with the first of its tokens, whose activations are known."""
    if run.tokens is None:
        return run
    tokens = TokenSequence(run.tokens.ids[:length], run.tokens.pieces[:length])
    return replace(run, sequences={**run.sequences, run.predicted: tokens})


def _cut(name: str, x: Tensor, length: int) -> Tensor:
    """Return the part of an activation that belongs to the first tokens."""
    place, _, tap = name.rpartition(".")
    is_cross = place.endswith(".cross")
    if place.startswith("encoder") or (is_cross and tap in ("k", "v")):
        return x
    if tap == "pattern":
        return x[:, :, :length] if is_cross else x[:, :, :length, :length]
    return x[:, :, :length] if tap in ("q", "k", "v", "z") else x[:, :length]
