"""The logit lens: what the model would predict if it stopped after a layer."""

from __future__ import annotations

import numpy as np
import torch

from regard.errors import ArgumentError
from regard.inspect.interventions.answer_metric import Answer, token_id
from regard.inspect.interventions.effect_table import EffectTable
from regard.inspect.interventions.model_run import AnyModel, Input, prepare
from regard.inspect.interventions.residual_terms import decompose
from regard.language import Phrase
from regard.models.text_model import TextModel


def logit_lens(model: AnyModel, text: Input, answer: Answer | None = None) -> EffectTable:
    """Read the hidden states after each layer with the model's own last norm and head.

        p_l = softmax(head(norm(x_l)))  at each position, for the state x_l that leaves layer l

    Nothing is trained: the states of early layers need not mean what the head reads. The last row
    is the prediction of the model.

    Args:
        model: a `Model`, a `Seq2Seq` (the states of its decoder), or a module with one stack of
            blocks and logits.
        text: the input, as for `ablate`; the first row of a batch is used.
        answer: the token (text or id) whose probability is shown; None shows the most likely token
            of each cell.

    Returns:
        A table of layers and positions: the probability, and in `cells` the token.

    Raises:
        ArgumentError: the model has no logits, the answer is no token, or the model normalises its
            states after each layer, so that its last norm does not fit the earlier states.

    >>> import regard
    >>> table = logit_lens(regard.load("tiny"), "to be or not to")
    >>> table.rows, table.values.shape
    (('embed', 'layers.0', 'layers.1', 'layers.2', 'layers.3'), (5, 5))

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
    """
    run = prepare(model, text)
    chosen = None if answer is None else token_id(run, answer)
    decomposition = decompose(run, -1)
    if decomposition.is_post_norm:
        raise ArgumentError(
            "the blocks normalise their own results (post-norm), and there is no last norm that "
            "reads a hidden state; the logit lens needs a pre-norm model"
        )
    taps, names = decomposition.terms.taps, decomposition.states
    probabilities, cells = [], []
    with torch.no_grad():
        for name in names:
            logits = decomposition.output(taps[name][:1])
            p = logits[0].double().softmax(-1)
            best = p.argmax(-1) if chosen is None else torch.full_like(p[:, 0], chosen).long()
            probabilities.append(p.gather(-1, best[:, None])[:, 0].cpu().numpy())
            cells.append(_pieces(run.model, best.tolist()))
    return EffectTable(
        "logit lens",
        "probability of the most likely token"
        if chosen is None
        else Phrase("probability of {token!r}", token=cells[0][0]),
        np.stack(probabilities),
        "layer",
        "position",
        tuple(name.removesuffix(".residual") for name in names),
        run.labels(len(cells[0])),
        notes=("the last norm and head read states that they were not trained to read",),
        cells=tuple(cells),
    )


def _pieces(model: AnyModel, ids: list[int]) -> tuple[str, ...]:
    if isinstance(model, TextModel) and model.has_tokenizer:
        return tuple(model.tokenizer.pieces(ids))
    return tuple(map(str, ids))
