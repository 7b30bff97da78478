"""Attribution: how much of a logit, or of another metric, comes from each head and each layer;
heads that move a name; and what the model would predict after each layer (the logit lens).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.inspect.interventions.effect_table import (
    Answer,
    EffectTable,
    Metric,
    answer_ids,
    answer_names,
    head_table,
    last_logits,
    metric_of,
    token_id,
)
from regard.inspect.interventions.residual_terms import FrozenNorm, OutputMap, decompose
from regard.inspect.model_run import (
    AnyModel,
    Edit,
    Input,
    ModelRun,
    check_option,
    check_passed,
    passed_once,
    prepare_run,
)
from regard.language import Phrase
from regard.models.text_encoder import TextEncoder
from regard.models.text_model import TextModel
from regard.tracing import Trace

Edits: TypeAlias = Mapping[str, Edit]
"""Edits by the name of a tap."""

Method = Literal["direct", "gradient", "integrated_gradients"]
"""How an effect is attributed."""


def attribute(
    model: AnyModel,
    text: Input,
    metric: Metric = None,
    *,
    method: Method = "direct",
    corrupt: Input | None = None,
    by_key: bool = False,
    steps: int = 8,
) -> EffectTable:
    """Attribute the result of a run to heads and layers.

    "direct" (direct logit attribution) takes the hidden state of the last token apart into what the
    embedding, each head, each feed-forward layer and each bias has added to it. The last norm keeps
    the scale that it had, so that it is linear, and the logit is the sum of the terms:

        logit = sum over terms t of w . A t + constants,  norm(x) = A x + b

    "gradient" (attribution patching) estimates the effect of patching each head, from one backward
    pass on the corrupt run: sum (z_clean - z_corrupt) * d metric / d z. Without `corrupt` it
    estimates zero ablation, sum (0 - z) * d metric / d z.

    "integrated_gradients" attributes the metric to the weights of each head, from no attention to
    the pattern P of its layer: sum P * mean over a in (0, 1) of d metric / d P at a P. The heads of
    a layer sum to the metric minus that with the layer's pattern set to 0.

    Args:
        model: a `Model`, a `Seq2Seq`, or a module with logits; the two gradient methods take every
            model of `ablate`.
        text: the input, as for `ablate`; for "gradient" with `corrupt` the clean one.
        metric: a token or a pair of tokens; for the gradient methods also what `ablate` takes. For
            "direct" it means logits, not log probabilities.
        method: "direct", "gradient" or "integrated_gradients".
        corrupt: another input with the same number of tokens, for "gradient".
        by_key: for "direct": whether the terms of heads are split by the key whose value they are;
            columns are then positions, of an encoder-decoder those of source and target.
        steps: for "integrated_gradients": the number of points (Gauss-Legendre).

    Returns:
        For "direct" one row per term, with the logit as `baseline`: all numbers sum to it. Else a
        table of layers and heads.

    Raises:
        ArgumentError: an option does not apply to the method, the metric is no token, or the model
            adds in a way that is not known.
        ArgumentTypeError: the model, the text or the metric has an unsupported type.

    >>> import regard
    >>> table = attribute(regard.load("tiny"), "to be or not to")
    >>> table.rows[0], table.rows[-1], bool(abs(table.values.sum() - table.baseline) < 1e-9)
    ('embed', 'rounding of the run', True)

    Source: direct: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Wang et
    al. 2022 (arXiv 2211.00593), section 3.1; gradient: Nanda 2023, "Attribution patching"; Syed et
    al. 2023 (arXiv 2310.10348); integrated gradients: Hao et al. 2021 (arXiv 2004.11207), section
    3.
    """
    check_option("method", method, get_args(Method))
    if corrupt is not None and method != "gradient":
        raise ArgumentError(
            f"corrupt does not apply to method {method!r}; use method='gradient'",
            argument="corrupt",
        )
    if by_key and method != "direct":
        raise ArgumentError(
            f"by_key does not apply to method {method!r}; use method='direct'", argument="by_key"
        )
    run = prepare_run(model, text)
    if method == "direct":
        return attribute_run(run, metric, by_key=by_key)
    if method == "gradient":
        return _gradient(run, None if corrupt is None else prepare_run(model, corrupt), metric)
    return _integrated(run, metric, steps)


class Direction(NamedTuple):
    """The logit of an answer, before a cap, as a linear function w `[M]` of the normed state."""

    vector: Tensor
    constant: float
    logit: float
    name: str


def answer_direction(
    run: ModelRun, output: OutputMap, state: Tensor, ids: tuple[int, ...]
) -> Direction:
    """Return the direction of a logit, or of the difference of two, in a normed state."""
    signs = (1.0, -1.0)[: len(ids)]
    with torch.enable_grad():
        x = torch.zeros_like(state).requires_grad_()
        logits = output.before_cap(x)[0, -1]
        constant = torch.stack([s * logits[i] for s, i in zip(signs, ids, strict=True)]).sum()
        (vector,) = torch.autograd.grad(constant, x)
    logit = sum(s * float(output.logits[i]) for s, i in zip(signs, ids, strict=True))
    name = Phrase("logit of {names}", names=answer_names(run, ids))
    if output.cap is not None:
        name = Phrase("{logit} before the cap", logit=name)
    return Direction(vector[0, 0].double().cpu(), float(constant.detach()), logit, name)


def attribute_run(
    run: ModelRun, metric: Metric, *, by_key: bool, taps: Mapping[str, Tensor] | None = None
) -> EffectTable:
    """Attribute a logit of the last token to the terms of its hidden state, from the activations of
    a run, if they are known.
    """
    if callable(metric):
        raise ArgumentError(
            "direct attribution needs a token or a pair of tokens as metric, because only a logit "
            "is linear in the hidden state; for a function use method='gradient', or ablate"
        )
    if metric is None:
        metric = int(last_logits(run.run().output)[0].argmax())
    decomposition = decompose(run, -1, by_key=by_key, taps=taps)
    output, x = decomposition.output, decomposition.terms.state(decomposition.states[-1])
    with torch.no_grad():
        normed = output.norm(x)
        norm = FrozenNorm(output.norm, x, normed)
    direction = answer_direction(run, output, normed, answer_ids(run, metric))
    columns: tuple[str, ...] = ("last",)
    if by_key:
        T = decomposition.terms.taps[decomposition.states[0]].shape[1]
        columns = run.labels(T) if run.tokens is None else run.key_labels()
    width = len(columns)
    names, rows = [], []
    for term in decomposition.terms.terms:
        effect = norm(term.vector.reshape(-1, norm.gain.numel())) @ direction.vector
        row = np.zeros(width)
        if term.vector.ndim > 1:
            keys = effect.detach().flatten().numpy()
            # attention to a source reads the first columns, all other attention the last ones
            reads_source = "source" in run.sequences and ".cross." in term.name
            row[slice(0, len(keys)) if reads_source else slice(-len(keys), None)] = keys
        else:
            row[-1] = float(effect.detach())
        names.append(term.name)
        rows.append(row)
    for name, constant in (
        ("bias of the last norm", float(norm.bias @ direction.vector)),
        ("bias of the head", direction.constant),
    ):
        if constant:
            names.append(name)
            rows.append(np.eye(width)[-1] * constant)
    names.append("rounding of the run")
    rows.append(np.eye(width)[-1] * (direction.logit - float(np.sum(rows))))
    return EffectTable(
        "direct logit attribution by key" if by_key else "direct logit attribution",
        Phrase("part of the {name}", name=direction.name),
        np.stack(rows),
        "term",
        "key" if by_key else "token",
        tuple(names),
        columns,
        baseline=direction.logit,
        notes=(
            "only direct effects: what a head does through later layers is not counted",
            "the scale of each norm is that of the run",
        ),
    )


def _gradient(run: ModelRun, corrupt: ModelRun | None, metric: Metric) -> EffectTable:
    """Estimate the effect of patching, or of zero ablation, of each head by its gradient."""
    if metric is None and corrupt is None and isinstance(run.model, TextEncoder):
        raise ArgumentError(
            "the cosine with the unchanged vector is largest at that vector, so that its gradient "
            "there is 0; give a text as metric (--answer), corrupt, or use ablate",
            argument="metric",
        )
    measured = metric_of(run, metric)
    start = run if corrupt is None else corrupt
    trace, before = _with_gradients(start, measured.measure, "z")
    other = None
    if corrupt is not None:
        clean = run.run(capture=["z"])
        other, target = passed_once(clean.trace), float(measured.measure(clean.output))
    effects = {}
    for name in trace:
        z = trace[name].detach().double()
        there = torch.zeros_like(z) if other is None else other[name].double()
        if there.shape != z.shape:
            raise ArgumentError(
                f"{name} is {tuple(there.shape)} in the clean run and {tuple(z.shape)} in the "
                "corrupt one; both inputs must have the same number of tokens",
                argument="corrupt",
            )
        effect = ((there - z) * trace.gradient(name).double()).sum((0, 2, 3))
        effects[name.removesuffix(".z")] = effect.tolist()
    aim = "zero ablation" if corrupt is None else "patching"
    return head_table(
        Phrase("attribution patching: {aim} of heads, estimated by one gradient", aim=Phrase(aim)),
        Phrase("estimated change of {name}", name=measured.name),
        effects,
        baseline=before,
        target=None if other is None else target,
        notes=("a linear estimate, which fails where the metric is far from linear",),
    )


def _with_gradients(
    run: ModelRun, measure: Callable[[Tensor], Tensor], name: str, edit: Edits | None = None
) -> tuple[Trace, float]:
    """Run with autograd, and return the trace of a tap with gradients, and the metric."""
    result = run.run(edit, capture=[name], gradients=True)
    value = measure(result.output)
    if not value.requires_grad:
        raise ArgumentError(
            "the metric does not depend on the captured activations through autograd; return a "
            "tensor that was computed from the model's output, and do not detach it"
        )
    trace = result.trace
    wanted = list(passed_once(trace).values())
    check_passed(wanted, name)
    gradients = torch.autograd.grad(value, wanted, allow_unused=True)
    for x, gradient in zip(wanted, gradients, strict=True):
        x.grad = torch.zeros_like(x) if gradient is None else gradient
    return trace, float(value.detach())


def _integrated(run: ModelRun, metric: Metric, steps: int) -> EffectTable:
    """Attribute the metric to the patterns of each layer, by integrated gradients."""
    if steps < 1:
        raise ArgumentError(f"steps is {steps}; it must be at least 1", argument="steps")
    measured = metric_of(run, metric)
    plain = run.run(capture=["pattern"])
    names = list(passed_once(plain.trace))
    check_passed(names, "pattern")
    points, weights = np.polynomial.legendre.leggauss(steps)  # on (-1, 1)
    effects = {}
    for name in names:
        pattern = plain.trace[name]
        mean = torch.zeros_like(pattern, dtype=torch.float64)
        for point, weight in zip(points, weights, strict=True):
            share = (point + 1) / 2
            edit = {name: lambda p, share=share: p * share}
            trace, _ = _with_gradients(run, measured.measure, name, edit)
            mean += weight / 2 * trace.gradient(name).double()
        effect = (pattern.double() * mean).sum((0, 2, 3))
        effects[name.removesuffix(".pattern")] = effect.tolist()
    return head_table(
        "integrated gradients of the patterns",
        Phrase("part of {name}", name=measured.name),
        effects,
        baseline=float(measured.measure(plain.output)),
        notes=("the heads of a layer sum to the metric minus that without the layer's attention",),
    )


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
    run = prepare_run(model, text)
    answer_id = token_id(run, answer)
    parts = attribute(model, text, answer_id, by_key=True)
    keys = (run.key_ids() == answer_id).numpy()
    if not keys.any():
        raise ArgumentError(
            f"the answer {answer!r} does not stand in the text, so that no head moves it"
        )
    scores: dict[str, list[float]] = {}
    for name, row in zip(parts.rows, parts.values, strict=True):
        place, is_head, _ = name.partition(".head.")  # the heads of a place stand in their order
        if is_head:
            scores.setdefault(place, []).append(float(row[keys].sum()))
    quantity = Phrase("{part} from its copies", part=parts.quantity)
    return head_table("name movers", quantity, scores, baseline=parts.baseline)


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
        ArgumentError: the model has no logits, the answer is no token, or the model normalizes its
            states after each layer, so that its last norm does not fit the earlier states.

    >>> import regard
    >>> table = logit_lens(regard.load("tiny"), "to be or not to")
    >>> table.rows, table.values.shape
    (('embed', 'layers.0', 'layers.1', 'layers.2', 'layers.3'), (5, 5))

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
    """
    run = prepare_run(model, text)
    chosen = None if answer is None else token_id(run, answer)
    decomposition = decompose(run, -1)
    if decomposition.is_post_norm:
        raise ArgumentError(
            "the blocks normalize their own results (post-norm), and there is no last norm that "
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
