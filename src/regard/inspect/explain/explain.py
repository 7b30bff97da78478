"""Explain one query and one key of one head, with the numbers that the kernel computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.explain.attention_row import (
    Checks,
    KernelRow,
    effective_row_scores,
    kernel_row,
    layer_run,
    max_difference,
    mix_of_rows,
    recurrent_state,
    rule_row,
    score_and_compare,
    to_array,
    why_masked,
)
from regard.inspect.explain.captured_run import (
    CapturedRun,
    QueryCall,
    calls_for_query,
    capture_site,
    effective_calls,
    main_call,
)
from regard.inspect.explain.explanation import (
    Array,
    Counterfactual,
    Explanation,
    HeadPatterns,
    Location,
    RecurrentState,
    RowTokens,
    ScoreChain,
    SoftmaxRow,
)
from regard.inspect.explain.explanation_parts import (
    counterfactuals,
    head_output,
    head_patterns,
    hidden_states,
    input_chain,
    row_cost,
    row_sizes,
)
from regard.inspect.explain.head_choice import find_token, strongest_key
from regard.inspect.explain.layer_stages import summarize_layer
from regard.inspect.explain.recorded_row import explain_recorded_row
from regard.inspect.model_run import (
    AnyModel,
    AttentionSite,
    ModelRun,
    PretokenizedInput,
    TokenSequence,
    check_index,
    find_words,
    prepare_run,
)
from regard.inspect.record.record_model import record
from regard.inspect.record.recording import Labels, Recording
from regard.language import Phrase, counted
from regard.models.model import Model
from regard.models.prompts import encode_prompt
from regard.models.text_encoder import TextEncoder
from regard.models.text_model import TextModel
from regard.nn.explainable import Explainable, ProjectionQuery, explainable
from regard.span import Positions, Span, as_tensor
from regard.tracing import TAP_NAMES, is_edited
from regard.units import plural
from regard.untrusted_text import parse_integer, short_repr

NUM_PREDICTIONS = 5
"""Number of next tokens that are listed."""


@dataclass(frozen=True, eq=False)
class Target:
    """What is explained: one attention module of a prepared run, and one query."""

    prepared: ModelRun
    site: AttentionSite
    i: int

    @property
    def columns(self) -> TokenSequence:
        """Return the token sequence of the keys."""
        return self.prepared.sequences[self.site.key_sequence]

    @property
    def rows(self) -> TokenSequence:
        """Return the token sequence of the queries."""
        return self.prepared.sequences[self.site.query_sequence]

    @property
    def is_self_attention(self) -> bool:
        """Return whether queries and keys come from the same sequence (self-attention)."""
        return self.site.query_sequence == self.site.key_sequence


def call_names(calls: Sequence[QueryCall]) -> tuple[str, ...]:
    """Return the name of each call: the name of its branch, or its number."""
    return tuple(
        call.branch if call.branch and not call.branch.startswith("part") else f"call {n}"
        for n, call in enumerate(calls)
    )


def call_index(call: int | str, names: Sequence[str]) -> int:
    """Return the index of a call that is given by number or name.

    >>> call_index("window", ["compressed", "selected", "window"])
    2
    """
    number = parse_integer(call) if isinstance(call, str) else call
    if number is not None:
        return check_index("call", number, len(names), "call", "calls")
    if call in names:
        return names.index(str(call))
    raise ArgumentError(
        f"call is {short_repr(call)}; the calls for this query are {', '.join(names)}",
        argument="call",
    )


def row_tokens(
    target: Target, positions: Sequence[int], rows: Sequence[str], *, blocks: bool = False
) -> RowTokens:
    """Return the tokens of the keys by position (of a block its last one), and of the queries."""
    tokens, ids, pieces = target.columns, [], []
    for n, p in enumerate(positions):
        real = 0 <= p < len(tokens.ids)
        ids.append(tokens.ids[p] if real else -1)
        name = tokens.pieces[p] if real else "‹empty›"
        pieces.append(f"block {n} …{name}" if blocks and real else name)
    return RowTokens(
        np.array(ids),
        tuple(pieces),
        np.array(positions),
        target.rows.pieces[target.i],
        target.i,
        tuple(rows),
        find_words(target.columns)
        if list(positions) == list(range(len(target.columns.ids))) and not blocks
        else (),
    )


def find_key(
    target: Target,
    key: int | str | None,
    weights: Array,
    positions: Sequence[int],
    visible: NDArray[np.generic],
) -> tuple[int, str]:
    """Return the index of the key in the call, and the rule that chose it ("" if it was given)."""
    if key is not None:
        token = find_token(target.columns, key, "key")
        if token not in positions:
            raise ArgumentError(
                f"key is token {token}, which this call does not contain; it has "
                f"{plural(len(positions), 'key')}, at positions "
                f"{', '.join(map(str, list(positions)[:8]))}"
                f"{', ...' if len(positions) > 8 else ''}",
                argument="key",
            )
        return list(positions).index(token), ""
    left_out = [p in (0, target.i) for p in positions] if target.is_self_attention else None
    return strongest_key(np.where(visible, np.abs(weights), -1.0), left_out)


def query_pieces(target: Target, call: QueryCall) -> tuple[str, ...]:
    """Return the text of each query of the call."""
    positions = as_tensor(call.step.q_positions)[0].tolist()
    known = target.rows.pieces
    return tuple(known[p] if 0 <= p < len(known) else "‹empty›" for p in positions)


def predictions(target: Target, run: CapturedRun) -> tuple[tuple[str, int, float], ...]:
    """Return the most likely next tokens after the query, if the network predicts any."""
    prepared = target.prepared
    if (
        prepared.predict is None
        or target.site.query_sequence != prepared.predicted
        or "last" not in run.hidden
    ):
        return ()
    logits = prepared.predict(run.hidden["last"][None, target.i : target.i + 1])[0, 0]
    likely = logits.double().softmax(-1).topk(min(NUM_PREDICTIONS, logits.shape[-1]))
    ids = likely.indices.tolist()
    return tuple(zip(prepared.names(ids), ids, likely.values.tolist(), strict=True))


def explain(
    model: AnyModel | PretokenizedInput | ModelRun | Recording,
    text: Any = None,
    *,
    layer: int | None = None,
    head: int = 0,
    query: int | str = -1,
    key: int | str | None = None,
    place: str | None = None,
    call: int | str | None = None,
    target: str | None = None,
    labels: Labels | None = None,
    batch: int = 0,
) -> Explanation:
    """Run a text through a model, and return every number of one query and one key in one head.

    embedding -> norm -> q, k, v -> q_i . k_j -> scaled -> masked -> softmax -> sum_j p_ij v_j ->
    heads joined -> W_O -> + h

    The model runs on its usual kernels, which are observed: queries, keys, values and the lse are
    the inputs and results of the kernel. The steps between them are computed again in float64 from
    their definition. The steps before them (a query before its rotation, for example) are computed
    by the model's own modules. Each recomputed step is compared with what the model used: see
    `Explanation.checks`. The model runs once more without an observer, and the outputs are
    compared.

    The explanation of a `Recording`, or of any other module (see `record`), begins at q, k and v
    and ends at the output of the head.

    Args:
        model: a decoder, text encoder or encoder-decoder from `regard.load`; a `PretokenizedInput`;
            a prepared run, such as that of `random_model`, a mechanism with random weights; a
            recording; or any other module that `record` supports.
        text: the text, at least one token; for a decoder also its ids, or messages, as in
            `Model.generate`. None for a `PretokenizedInput`, a prepared run or a recording, which
            contain theirs. For any other module: its input, a tuple of its inputs,
            or a mapping of its keyword arguments.
        layer: index of the layer; negative counts from the end. In an encoder-decoder this is the
            cross-attention of the layer, in a recording the index of the place.
        head: query head; negative counts from the end.
        query: index of the query token (negative counts from the end), or a word of the text, which
            stands for its last token.
        key: the key, given in the same way; None chooses the strongest key that is neither the
            query nor the first token.
        place: dotted name of the attention, such as "decoder.layers.0.attention", instead of
            `layer`.
        call: number or name of the call, where a place is called several times; None chooses the
            one with the largest weight.
        target: output text that an encoder-decoder is forced to produce; None uses its own answer.
        labels: texts for the tokens of any other module, as in `record`; query and key may then be
            one of them.
        batch: the row of the batch, for a recording or any other module.

    Returns:
        The explanation.

    Raises:
        ArgumentError: the text is empty, or the layer, place, head, call, query or key does not
            exist.
        ArgumentTypeError: an argument has a wrong type.

    >>> import regard
    >>> explanation = explain(regard.load("tiny"), "to be or not to be", layer=1, head=2)
    >>> bool(abs(explanation.weights.sum() - 1) < 1e-6), explanation.check < 1e-3
    (True, True)

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.
    """
    is_recorded = isinstance(model, (Recording, nn.Module))
    unused = {"call": call is not None, "target": target is not None}
    if not is_recorded:
        unused = {"labels": labels is not None, "batch": batch != 0}
    for name, is_given in unused.items():
        if is_given:
            raise ArgumentError(f"{name} does not apply to a {type(model).__name__}; leave it out")
    if isinstance(model, (Recording, nn.Module)):
        recording = _recording_of(model, text, labels)
        name = recording[place if place is not None else layer or 0].name
        kind = _mechanism_at(model, name)
        return explain_recorded_row(recording, name, head, query, key, batch=batch, mechanism=kind)
    takes_ids = isinstance(model, TextEncoder) and isinstance(text, Tensor)
    if isinstance(model, Model) and isinstance(text, (list, tuple, Tensor)):
        text = torch.tensor([encode_prompt(model, text)], device=model.device)
    elif isinstance(model, TextModel) and not (isinstance(text, str) or takes_ids):
        raise ArgumentTypeError(f"text is {type(text).__name__}; it must be str", argument="text")
    prepared = model if isinstance(model, ModelRun) else prepare_run(model, text, target, last=1)
    site = prepared.site(layer, place)
    prepared = _note_edits(prepared, site)
    location = Target(prepared, site, find_token(prepared.sequences[site.query_sequence], query))
    mechanism = explainable(site.attention)
    with torch.inference_mode():
        run = capture_site(prepared, site)
        if mechanism.has_own_row:
            row = _mechanism_row(location, mechanism, run, head, key)
        else:
            row = _recorded_row(location, run, head, key, call)
        return _assemble(location, mechanism, run, row)


def _recording_of(model: Recording | nn.Module, inputs: object, labels: Labels | None) -> Recording:
    """Return a recording as it is, or that of a module."""
    if isinstance(model, nn.Module):
        return record(model, *(inputs if isinstance(inputs, tuple) else (inputs,)), labels=labels)
    if inputs is not None or labels is not None:
        raise ArgumentError(
            "text and labels do not apply to a Recording, which has its own; leave them out"
        )
    return model


def _mechanism_at(model: Recording | nn.Module, place: str) -> str:
    """Return the class of the module at a place, as far as it is known."""
    if isinstance(model, Recording):
        return "attention"
    path = place.partition(".call")[0].partition(".part")[0]
    return type(dict(model.named_modules()).get(path, model)).__name__


@dataclass(frozen=True, eq=False)
class _ExplainedRow:
    """A row to be explained; `input_heads` are the indices of its query, key and value head."""

    head: int
    input_heads: tuple[int, int, int]
    key: int
    key_chosen_by: str
    positions: Sequence[int]
    row_pieces: tuple[str, ...]
    q: Array
    k: Array
    v: Array
    score: ScoreChain
    softmax: SoftmaxRow
    visible: NDArray[np.bool_]
    query: ProjectionQuery
    columns: Tensor
    dtype: torch.dtype
    checks: Checks
    kind: str = "softmax"
    kernel: str = "the module's own"
    key_kind: str = "keys"
    call: int = 0
    calls: tuple[str, ...] = ("",)
    recorded: tuple[KernelRow, tuple[QueryCall, ...]] | None = None
    state: RecurrentState | None = None


def _assemble(
    target: Target, mechanism: Explainable, run: CapturedRun, explained: _ExplainedRow
) -> Explanation:
    """Add projections, output and cost to a row, and return the explanation."""
    site, head, row = target.site, explained.head, explained.softmax
    recorded_inputs = (explained.q, explained.k, explained.v)
    input_steps = mechanism.explain_inputs(explained.query)
    inputs, checks = input_chain(
        input_steps, explained.query, explained.input_heads, recorded_inputs, explained.columns
    )
    tokens = row_tokens(
        target, explained.positions, explained.row_pieces, blocks=input_steps.keys_are_blocks
    )
    seen_values = np.where(explained.visible[:, None], explained.v, 0.0)
    output, output_checks = head_output(mechanism, row.weights, seen_values, run, head, target.i)
    hidden, hidden_checks = hidden_states(run, site, target.i)
    column = int(explained.columns[explained.key])
    if column >= 0 and not input_steps.keys_are_blocks:
        hidden = replace(hidden, normed_key=to_array(explained.query.memory[0, column]))
    others: tuple[Counterfactual, ...] = ()
    heads, mix = HeadPatterns(), None
    if explained.recorded is not None:
        one, calls = explained.recorded
        H, G = one.call.place.H, one.call.groups
        if one.call.step.score is None:  # other mechanisms have no such rule
            others = counterfactuals(one, row.weights, output.mixed, explained.key)
        heads = head_patterns(one.call, head)
        mix = mix_of_rows(mechanism, run, calls, one.call, head, target.i, len(target.columns.ids))
    else:
        H, G = (len(run.taps[name]) for name in "qk")
    layers, T, M = len(target.prepared.main_sites), len(target.rows.ids), run.taps["out"].shape[1]
    sizes = row_sizes(layers, H, G, T, explained.k, explained.v, M)
    where = Location(
        model=target.prepared.name,
        text=target.prepared.text,
        place=site.place,
        mechanism=type(site.attention).__name__,
        layer=site.layer,
        head=head,
        group=explained.input_heads[1],
        query=target.i,
        key=explained.key,
        sizes=sizes,
        kind=explained.kind,
        kernel=explained.kernel,
        dtype=str(explained.dtype)[6:],
        key_kind=explained.key_kind,
        call=explained.call,
        calls=explained.calls,
        key_chosen_by=explained.key_chosen_by,
        notes=_all_notes(target),
    )
    checks = {**checks, **explained.checks, **output_checks, **hidden_checks}
    checks["the network without an observer"] = run.observer_difference
    return Explanation(
        where=where,
        tokens=tokens,
        hidden=hidden,
        inputs=inputs,
        score=explained.score,
        softmax=row,
        output=output,
        heads=heads,
        checks=checks,
        cost=row_cost(
            site.attention, sizes, int(explained.visible.sum()), explained.dtype.itemsize
        ),
        mixture=mix,
        state=explained.state,
        counterfactuals=others,
        predictions=predictions(target, run),
        tensors=summarize_layer(site.attention, run.hidden, run.taps, own=target.is_self_attention),
    )


def _all_notes(target: Target) -> tuple[str, ...]:
    """Return the remarks about the run."""
    T, trained = len(target.rows.ids), target.prepared.max_trained_tokens
    if trained is None or trained >= T:
        return target.prepared.notes
    return (
        *target.prepared.notes,
        Phrase(
            "the text has {tokens}; the model was trained on at most {trained}",
            tokens=counted(T, "token"),
            trained=trained,
        ),
    )


def _note_edits(prepared: ModelRun, site: AttentionSite) -> ModelRun:
    """Add a remark to a run if an active `regard.Trace` edits tensors at the site."""
    changed = [name for name in TAP_NAMES if is_edited(site.place, name)]
    inner = [name for name in changed if name in ("scores", "pattern")]
    if inner:
        raise _cannot_show(inner, site)
    if not changed:
        return prepared
    note = Phrase(
        "an active Trace edits {changed} at {place}: the inputs of the kernel are edited, but the "
        "recomputed steps before them are not",
        changed=", ".join(changed),
        place=site.place,
    )
    return replace(prepared, notes=(*prepared.notes, note))


def _cannot_show(edited_names: Collection[str], site: AttentionSite) -> ArgumentError:
    """Return the error about edited scores or patterns, with what to do instead."""
    return ArgumentError(
        f"an active Trace edits {' and '.join(edited_names)} at {site.place}: an explanation "
        "computes both from q and k, and would show them without the edit; explain another place, "
        "edit q, k, v, z or out instead, or record(...) the run, which keeps edited values"
    )


def _recorded_row(
    target: Target, run: CapturedRun, head: int, key: int | str | None, call: int | str | None
) -> _ExplainedRow:
    """Return the row of a recorded call of a softmax kernel."""
    calls = calls_for_query(run, target.site, target.i)
    if not calls:
        raise ArgumentError(
            f"{target.site.place} is a {type(target.site.attention).__name__}, which ran no "
            f"softmax for query {target.i}; "
            "choose another layer or place, or implement explain_row in the mechanism "
            "(regard.nn.explainable.Explainable.explain_row)"
        )
    # An edit may name a branch of the place, such as layers.3.window, instead of the place itself.
    # A call with a score rule always keeps its scores and weights, edited or not.
    plain = [each for each in calls if each.step.score is None]
    if inner := sorted({name for each in plain for name in each.step.edited}):
        raise _cannot_show(inner, target.site)
    names = call_names(calls)
    head = check_index("head", head, len(calls[0].weights), "head", "heads")
    counted = effective_calls(target.site, calls)
    chosen = main_call(counted, head) if call is None else calls[call_index(call, names)]
    number, row, step = calls.index(chosen), kernel_row(chosen, head), chosen.step
    if step.score is None:
        kind, (steps, softmax, checks) = "softmax", score_and_compare(row)
    else:
        kind, steps, softmax, checks = rule_row(row)
    chain = row.chain
    positions = chosen.keys.tolist()
    j, rule = find_key(target, key, softmax.weights, positions, chain.visible)
    reasons = why_masked(
        step.mask, step.q_positions, chosen.row, chain.visible, head, step.k_positions
    )
    query, columns = _projection_query(
        target, run, step.q_positions, step.k_positions, chosen.branch, number, len(chain.q)
    )
    return _ExplainedRow(
        head,
        (head, row.group, row.group),
        j,
        rule,
        positions,
        query_pieces(target, chosen),
        chain.q,
        chain.k,
        row.v,
        ScoreChain(chain.scale, steps, chain.q * chain.k[j], reasons),
        softmax,
        chain.visible,
        query,
        columns,
        step.q.dtype,
        checks,
        kind=kind,
        kernel=step.kernel,
        key_kind=chosen.place.key_kind,
        call=number,
        calls=names,
        recorded=(row, tuple(calls)),
    )


def _mechanism_row(
    target: Target, mechanism: Explainable, captured: CapturedRun, head: int, key: int | str | None
) -> _ExplainedRow:
    """Return the row of a mechanism without a softmax kernel, its keys in the order of tokens."""
    if mechanism.explain_refusal is not None:
        raise ArgumentError(
            f"{target.site.place} is a {type(target.site.attention).__name__}, which "
            f"{mechanism.explain_refusal}"
        )
    run = layer_run(captured)
    if missing := [name for name in ("q", "k", "v", "z") if name not in run.taps]:
        raise ArgumentError(
            f"{target.site.place} is a {type(target.site.attention).__name__}, which implements "
            f"explain_row but has no tap {', '.join(missing)}; pass q, k, v and z through "
            "regard.tracing.tap"
        )
    head = check_index("head", head, run.heads, "head", "heads")
    effective = mechanism.explain_row(run, head, target.i)
    assert effective is not None, "has_own_row is True"
    heads, S = run.input_heads(head), run.k.shape[2]
    q, k, v = (to_array(x[0, h]) for x, h in zip((run.q, run.k, run.v), heads, strict=True))
    q = q[target.i]
    steps, softmax = effective_row_scores(effective)
    visible = ~np.isneginf(steps[-1].values)
    j, rule = find_key(target, key, softmax.weights, range(S), visible)
    products = q * k[j] if effective.products is None else to_array(effective.products[j])
    reasons = tuple("" if is_visible else "future" for is_visible in visible)
    T = len(target.rows.ids)
    query, columns = _projection_query(target, captured, Span(0, T), Span(0, S), "", 0, k.shape[1])
    read = softmax.weights @ np.where(visible[:, None], v, 0.0)
    return _ExplainedRow(
        head,
        heads,
        j,
        rule,
        range(S),
        target.rows.pieces,
        q,
        k,
        v,
        ScoreChain(effective.scale, steps, products, reasons),
        softmax,
        visible,
        query,
        columns,
        run.q.dtype,
        {"output of the mechanism": max_difference(read, effective.output), **effective.checks},
        kind=effective.kind,
        state=None if effective.state is None else recurrent_state(*effective.state),
    )


def _projection_query(
    target: Target,
    run: CapturedRun,
    q: Positions,
    k: Positions,
    branch: str,
    number: int,
    head_dim: int,
) -> tuple[ProjectionQuery, Tensor]:
    """Return the `ProjectionQuery` for q, k and v of a call, and each key's row of the memory."""
    x = run.hidden["x"]
    memory = x if target.is_self_attention else run.hidden.get("memory")
    if memory is None:  # the memory came from a cache: encoder states, which are the values
        memory = run.taps["v"].transpose(0, 1).flatten(1)
    # even a call with only some of the queries was computed from the whole sequence
    positions = Span(0, x.shape[0]) if target.is_self_attention else q
    memory_positions = Span(0, memory.shape[0])
    first = run.hidden.get("first_values")
    query = ProjectionQuery(
        x[None],
        positions,
        memory[None],
        memory_positions,
        target.i,
        branch,
        number,
        head_dim,
        None if first is None else first[None],
    )
    return query, as_tensor(k)[0]
