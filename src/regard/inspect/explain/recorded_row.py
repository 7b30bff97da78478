"""Explain one row of a recording: every step between q, k, v and the output of the head.

A recording of any model has the inputs and results of the kernel, but neither the hidden states nor
the projections around it. The explanation of its row therefore begins at q, k and v, and ends at
the output of the head.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from regard.biases import DenseBias
from regard.errors import ArgumentError
from regard.inspect.explain.attention_row import (
    KernelRow,
    kernel_row,
    score_and_compare,
    to_array,
    visible_values,
    why_masked,
)
from regard.inspect.explain.captured_run import QueryCall
from regard.inspect.explain.explanation import (
    Array,
    Explanation,
    HeadOutput,
    HiddenStates,
    InputChain,
    Location,
    RotaryAngles,
    RowTokens,
    ScoreChain,
)
from regard.inspect.explain.explanation_parts import (
    counterfactuals,
    head_patterns,
    input_step,
    row_cost,
    row_sizes,
)
from regard.inspect.explain.head_choice import strongest_key
from regard.inspect.model_run import check_index
from regard.inspect.record.recorded_place import Place, RecordedStep
from regard.inspect.record.recording import Recording
from regard.masks import Dense, Mask
from regard.span import Positions, as_tensor
from regard.untrusted_text import short_repr

NO_PROJECTION = (
    "the recording has q, k, v and the output of each head, but not the projections around them"
)


def explain_recorded_row(
    recording: Recording,
    layer: int | str,
    head: int,
    query: int | str,
    key: int | str | None,
    *,
    batch: int = 0,
    mechanism: str = "attention",
) -> Explanation:
    """Explain one row of a recording."""
    place = recording[layer]
    rows, columns = recording.labels(layer)
    _check_is_whole(place)
    batch = check_index("batch", batch, place.B, "batch row", "batch rows")
    if batch:
        place = select_batch_row(place, batch)
        if place.name not in recording.token_labels:  # the pieces of the first text
            rows = columns = ()
    head = check_index("head", head, place.H, "head", "heads")
    i = _index_of("query", query, place.T, rows)
    number, own = _step_of(place, i)
    step = place.steps[number]
    call = QueryCall(place, number, own)
    row = kernel_row(call, head)
    steps, softmax, checks = score_and_compare(row)
    visible_columns = step.columns.tolist()
    names = tuple(columns[c] if columns else str(c) for c in visible_columns)
    seen_weights = np.where(row.chain.visible, softmax.weights, -1)
    j, rule = _find_key(place, i, visible_columns, columns, key, seen_weights)
    mixed_terms = softmax.weights[:, None] * visible_values(row)
    mixed = mixed_terms.sum(0)
    assert step.out is not None, "checked above"
    z, nothing = to_array(step.out[0, :, own]), np.zeros(0)
    G, M = row.call.groups, place.H * row.v.shape[1]
    sizes = row_sizes(len(recording), place.H, G, step.T, row.chain.k, row.v, M)
    names_of_rows = tuple(rows[t] if rows else str(t) for t in range(place.T))
    text = "".join(recording.pieces).replace("·", " ").strip()
    return Explanation(
        where=Location(
            model=recording.metadata.get("model", ""),
            text=text,
            place=place.name,
            mechanism=mechanism,
            layer=list(recording.places).index(place.name),
            head=head,
            group=row.group,
            query=i,
            key=j,
            sizes=sizes,
            kernel=step.kernel,
            dtype=str(step.q.dtype).removeprefix("torch."),
            key_kind=place.key_kind,
            key_chosen_by=rule,
            notes=(NO_PROJECTION,),
        ),
        tokens=RowTokens(
            np.array(visible_columns),
            names,
            as_tensor(step.k_positions)[0].numpy(),
            names_of_rows[i],
            call.position,
            names_of_rows[place.first_row(number) : place.first_row(number) + step.T],
        ),
        hidden=HiddenStates(),
        inputs=_inputs(row),
        score=ScoreChain(
            row.chain.scale,
            steps,
            row.chain.q * row.chain.k[j],
            why_masked(step.mask, step.q_positions, own, row.chain.visible, head, step.k_positions),
        ),
        softmax=softmax,
        # without an output projection
        output=HeadOutput(mixed_terms, mixed, z[head], z.reshape(-1), nothing, nothing, nothing),
        heads=head_patterns(call, head),
        checks=checks,
        cost=row_cost(nn.Identity(), sizes, int(row.chain.visible.sum()), step.q.dtype.itemsize),
        counterfactuals=counterfactuals(row, softmax.weights, mixed, j),
    )


def select_batch_row(place: Place, batch: int) -> Place:
    """Return the part of a place that belongs to one row of the batch."""
    b = slice(batch, batch + 1)
    pools = tuple(
        replace(pool, k=pool.k[b], v=None if pool.v is None else pool.v[b]) for pool in place.pools
    )
    return replace(place, steps=tuple(_select_step(step, b) for step in place.steps), pools=pools)


def _select_step(step: RecordedStep, b: slice) -> RecordedStep:
    """Return the part of a step that belongs to one row of the batch."""
    where = step.q_positions, step.k_positions
    mask: Mask = step.mask
    visible = mask.block(*where)
    if visible.shape[0] > 1:
        mask = Dense(visible[b])
    bias = step.bias
    if bias is not None:
        added = bias.block(*where, dtype=torch.float64)
        bias = DenseBias(added[b]) if added.shape[0] > 1 else bias

    def part(x: Positions) -> Positions:
        return x[b] if isinstance(x, Tensor) and x.shape[0] > 1 else x

    return replace(
        step,
        q=step.q[b],
        lse=step.lse[b],
        out=None if step.out is None else step.out[b],
        mask=mask,
        bias=bias,
        q_positions=part(step.q_positions),
        k_positions=part(step.k_positions),
    )


def _check_is_whole(place: Place) -> None:
    """Refuse a place of which something was not recorded, or was edited after q and k."""
    if edited := sorted({name for step in place.steps for name in step.edited}):
        raise ArgumentError(
            f"{' and '.join(edited)} of {place.name} were edited while it was recorded: an "
            "explanation computes both from q and k, and would show them without the edit; record "
            "without that edit, or read recording.weights"
        )
    lacks = {
        "all heads": place.heads != tuple(range(place.H)),
        "all rows": any(step.first for step in place.steps),
        "v": any(pool.v is None for pool in place.pools),
        "out": any(step.out is None for step in place.steps),
    }
    if missing := [name for name, is_missing in lacks.items() if is_missing]:
        raise ArgumentError(
            f"{place.name} was recorded without {', '.join(missing)}, which an explanation needs; "
            "record without heads=, rows= and keep="
        )


def _index_of(name: str, token: int | str, count: int, labels: tuple[str, ...]) -> int:
    """Return the index of a row or column that is given as a number or a label."""
    if isinstance(token, str):
        if token not in labels:
            known = ", ".join(labels[:12]) or "none: give labels= when you record"
            raise ArgumentError(
                f"{name} is {short_repr(token)}, which is no label; the labels are {known}"
            )
        return len(labels) - 1 - labels[::-1].index(token)
    return check_index(name, token, count, name, {"query": "queries", "key": "keys"}[name])


def _step_of(place: Place, row: int) -> tuple[int, int]:
    """Return the step that has a row, and the index of the row in it."""
    starts = [place.first_row(number) for number in range(len(place.steps))]
    number = bisect_right(starts, row) - 1
    return number, row - starts[number]


def _find_key(
    place: Place,
    query: int,
    visible_columns: list[int],
    labels: tuple[str, ...],
    key: int | str | None,
    weights: Array,
) -> tuple[int, str]:
    """Return the index of the key among those of the call, and the rule that chose it."""
    if key is not None:
        column = _index_of("key", key, place.N, labels)
        if column not in visible_columns:
            raise ArgumentError(
                f"key is column {column}, which the call of query {query} does not contain",
                argument="key",
            )
        return visible_columns.index(column), ""
    # self-attention: as for every explanation
    left_out = [c in (0, query) for c in visible_columns] if place.T == place.N else None
    return strongest_key(weights, left_out)


def _inputs(row: KernelRow) -> InputChain:
    """Return the inputs of the kernel as the first steps."""
    D, n = row.chain.k.shape[1], len(row.chain.k)
    return InputChain(
        (input_step("q_i", row.chain.q),),
        (input_step("k_j", row.chain.k),),
        (input_step("v_j", row.v),),
        row.v,
        RotaryAngles("", np.zeros((n, 0)), np.zeros(0), (-1,) * D),
    )
