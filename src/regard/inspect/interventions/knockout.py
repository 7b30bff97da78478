"""Attention knockout: some queries can no longer see some keys, and what changes is measured."""

from __future__ import annotations

import math
from collections.abc import Collection

from torch import Tensor

from regard.errors import ArgumentError
from regard.inspect.interventions.edited_runs import EditedRun, ReportCell, fill_table
from regard.inspect.interventions.effect_table import EffectTable, Metric, changes_table, metric_of
from regard.inspect.interventions.patching import check_heads, chosen_places
from regard.inspect.model_run import (
    AnyModel,
    Edit,
    Input,
    check_index,
    check_passed,
    prepare_run,
    repeat_notes,
)
from regard.language import Phrase


def cut_attention(
    queries: Collection[int], keys: Collection[int], *, head: int | None = None
) -> Edit:
    """Return the edit of `scores` `[B, H, T, S]` by which some queries do not see some keys.

        s_ij = -inf  for the queries i and keys j

    The other weights of a row grow, so that they sum to 1 again; a row without a key gives 0.

    Args:
        queries: positions of queries, negative from the end.
        keys: positions of keys.
        head: query head; None cuts all heads.

    Returns:
        A function for `regard.Trace(edit={"layers.3.scores": ...})`.

    >>> import torch
    >>> cut_attention([-1], [0])(torch.zeros(1, 1, 2, 2)).tolist()
    [[[[0.0, 0.0], [-inf, 0.0]]]]

    Source: Geva et al. 2023 (arXiv 2304.14767), section 3.
    """
    rows, columns = [[i] for i in queries], list(keys)

    def edit(scores: Tensor) -> Tensor:
        scores = scores.clone()
        # a view on the chosen heads, in which pairs of positions are set
        (scores if head is None else scores[:, head])[..., rows, columns] = -math.inf
        return scores

    return edit


def knockout(
    model: AnyModel,
    text: Input,
    metric: Metric = None,
    *,
    queries: Collection[int] = (-1,),
    keys: Collection[int],
    layers: Collection[str | int] | None = None,
    heads: Collection[int] | None = None,
    window: int = 1,
    report: ReportCell | None = None,
) -> EffectTable:
    """Hide keys from queries in one layer after the other, and measure the effect of each.

        effect(layer) = metric(run with s_ij = -inf in the layers around it) - metric(unchanged run)

    Args:
        model: a model, as for `ablate`.
        text: the input, as for `ablate`.
        metric: what is measured, as for `ablate`.
        queries: positions of queries, negative from the end.
        keys: positions of the keys that they no longer see.
        layers: names of places or indices; None is all.
        heads: query heads, each cut alone; None cuts all heads of a layer together.
        window: how many layers are cut together: those around the layer of the row.

    Returns:
        A table of the effects by layer and head.

    Raises:
        KeyboardInterrupt: Ctrl-C; `table` of the error has the effects that were measured.
        ArgumentError: a position, a layer or a head does not exist, or the window is below 1.
        ArgumentTypeError: the model, the text or the metric has an unsupported type.

    >>> import regard
    >>> table = knockout(regard.load("tiny"), "to be or not to", " be", keys=[1])
    >>> table.rows, table.columns
    (('layers.0', 'layers.1', 'layers.2', 'layers.3'), ('all',))

    Source: Geva et al. 2023 (arXiv 2304.14767), section 3.
    """
    if window < 1:
        raise ArgumentError(argument="window", value=window, allowed="at least 1")
    run = prepare_run(model, text)
    measured = metric_of(run, metric)
    unchanged = run.run(capture=["pattern"])
    trace = unchanged.trace
    sizes = {name.replace("pattern", "scores"): trace[name].shape for name in trace}
    names = list(sizes)
    check_passed(names, "pattern")
    chosen = chosen_places(names, layers)
    for name in names:
        for axis, chosen_positions, size in (
            ("queries", queries, sizes[name][2]),
            ("keys", keys, sizes[name][3]),
        ):
            if not chosen_positions:
                raise ArgumentError(f"{axis} are empty; give at least one", argument=axis)
            for position in chosen_positions if name in chosen else ():
                check_index(axis, position, size, "position", "positions")
    selected: list[int | None] = [None]
    if heads is not None:
        selected = list(check_heads(heads, max(sizes[name][1] for name in chosen)))
    cells = {}
    for i, name in enumerate(chosen):
        place = names.index(name)
        around = names[max(0, place - (window - 1) // 2) : place + window // 2 + 1]
        for j, head in enumerate(selected):
            if head is None or all(head < sizes[each][1] for each in around):
                edit = cut_attention(queries, keys, head=head)
                cells[i, j] = EditedRun(dict.fromkeys(around, edit))
    table = changes_table(
        measured,
        Phrase(
            "knockout of attention from {queries} to {keys}",
            queries=",".join(map(str, queries)),
            keys=",".join(map(str, keys)),
        ),
        [name.removesuffix(".scores") for name in chosen],
        ["all" if head is None else str(head) for head in selected],
        baseline=float(measured.measure(unchanged.output)),
        notes=repeat_notes(unchanged.trace),
    )
    return fill_table(table, run, measured, cells, report)
