"""Ablation and activation patching: replace the output of a head, or put activations of one run
into another, and measure what changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.inspect.interventions.edges import EdgeRuns
from regard.inspect.interventions.edited_runs import (
    EditedRun,
    ReportCell,
    fill_table,
    measure_cells,
)
from regard.inspect.interventions.effect_table import (
    EffectTable,
    Metric,
    NamedMetric,
    changes_table,
    metric_of,
)
from regard.inspect.model_run import (
    AnyModel,
    Edit,
    Input,
    ModelRun,
    check_index,
    check_option,
    check_passed,
    passed_once,
    prepare_run,
    repeat_notes,
)
from regard.language import Phrase
from regard.process_state import random_generator
from regard.tracing import Trace
from regard.units import plural

Ablation = Literal["zero", "mean", "resample"]
"""What takes the place of a head's output."""
ABLATIONS: dict[Ablation, str] = {
    "zero": "zero ablation of heads",
    "mean": "mean ablation of heads",
    "resample": "resample ablation of heads",
}
"""The titles of tables of ablation."""


def ablate(
    model: AnyModel,
    text: Input,
    metric: Metric = None,
    *,
    method: Ablation = "zero",
    reference: Input | None = None,
    layers: Collection[str | int] | None = None,
    heads: Collection[int] | None = None,
    seed: int = 0,
    report: ReportCell | None = None,
) -> EffectTable:
    """Replace the output z of one head at a time, and measure the effect of each on a metric.

        effect(layer, head) = metric(run with z[:, head] replaced) - metric(unchanged run)

    The replacement is 0 ("zero"); the mean of the head's output over all positions of the reference
    ("mean"); or, at each position, its output at a random position of the reference ("resample").
    Many heads of a `Model` are rows of one batch, and layers below the first of them are computed
    once.

    Args:
        model: a `Model`, a `TextEncoder`, a `Seq2Seq`, or any module (see `watch`).
        text: a text, several texts, or token ids `[B, T]`; for a `Model` also a list of ids, or
            messages, as in `generate`; for a module ids, or a mapping of its arguments; for a
            `Seq2Seq` a pair (source, target).
        metric: what is measured: a function from the model's output to a number; a token, for its
            log probability after the last position; a pair of tokens, for the difference of their
            logits; None, for the model's own most likely token. For a `TextEncoder`: a text, for
            the cosine of both sentence vectors, or None, for that with the unchanged vector.
        method: "zero", "mean" or "resample".
        reference: the input whose outputs "mean" and "resample" use; None is `text` itself.
        layers: names of places ("layers.3") or their indices in the order of the run; None is all.
        heads: query heads; None is all.
        seed: random seed of "resample".
        report: called after each effect with the number of effects so far, the number of all, and
            the effect as in `EffectTable.records`.

    Returns:
        A table of the effects by layer and head, which draws itself as a map.

    Raises:
        KeyboardInterrupt: Ctrl-C; `table` of the error has the effects that were measured.
        ArgumentError: the method, a layer or a head does not exist, or the metric is no token.
        ArgumentTypeError: the model, the text or the metric has an unsupported type.

    >>> import regard
    >>> table = ablate(regard.load("tiny"), "to be or not to", layers=[0])
    >>> table.values.shape, len(table.top(3))
    ((1, 8), 3)

    Source: Michel et al. 2019 (arXiv 1905.10650), section 2.2; mean and resample ablation: Wang et
    al. 2022 (arXiv 2211.00593), section 2.1; Chan et al. 2022, "Causal scrubbing".
    """
    check_option("method", method, get_args(Ablation))
    run = prepare_run(model, text)
    measured = metric_of(run, metric)
    unchanged = run.run(capture=["z"])
    z = unchanged.trace
    source: Mapping[str, Tensor] | Trace = z if method == "zero" else passed_once(z)
    if reference is not None:
        source = passed_once(prepare_run(model, reference).run(capture=["z"]).trace)
    chosen = chosen_places(list(z), layers)
    most = max(z[name].shape[1] for name in chosen)
    selected = check_heads(heads, most)
    before = float(measured.measure(unchanged.output))
    cells = {}
    for i, name in enumerate(chosen):
        for j, head in enumerate(selected):
            if head < z[name].shape[1]:
                generator = random_generator(seed)
                new = replacement(method, source[name][:, head], generator)
                cells[i, j] = EditedRun({name: replace_head(head, new)})
    table = changes_table(
        measured,
        ABLATIONS[method],
        [name.removesuffix(".z") for name in chosen],
        list(map(str, selected)),
        baseline=before,
        notes=repeat_notes(unchanged.trace),
    )
    return fill_table(table, run, measured, cells, report)


def replacement(method: Ablation, source: Tensor, generator: torch.Generator) -> Edit:
    """Return the function from a head's output `[B, T, E]` to what takes its place.

    >>> source = torch.tensor([[[1.0], [3.0]]])
    >>> replacement("mean", source, torch.Generator())(torch.zeros(1, 1, 1)).item()
    2.0
    """
    if method == "zero":
        return torch.zeros_like
    rows = source.flatten(0, 1)
    if method == "mean":
        mean = rows.double().mean(0)
        return lambda z: mean.to(z).expand_as(z)

    def drawn(z: Tensor) -> Tensor:
        count = z.shape[0] * z.shape[1]
        drawn_rows = torch.randint(len(rows), (count,), generator=generator)
        return rows[drawn_rows.to(rows.device)].view_as(z).to(z)

    return drawn


def replace_head(head: int, change: Edit) -> Edit:
    """Return the edit of z `[B, H, T, E]` that changes one head.

    >>> replace_head(1, torch.zeros_like)(torch.ones(1, 2, 1, 1)).flatten().tolist()
    [1.0, 0.0]
    """

    def edit(z: Tensor) -> Tensor:
        z = z.clone()
        z[:, head] = change(z[:, head])
        return z

    return edit


def chosen_places(names: Sequence[str], layers: Collection[str | int] | None) -> list[str]:
    """Return the full names of the taps at the chosen layers; "embed" has a name and no index.

    >>> chosen_places(["embed", "layers.0.z", "layers.1.z"], ["embed", -1])
    ['embed', 'layers.1.z']
    """
    check_passed(names, "z")
    if layers is None:
        return list(names)
    places = {name.rpartition(".")[0] or name: name for name in names}
    counted = [name for name in names if name != "embed"]
    chosen = []
    for layer in layers:
        if isinstance(layer, int) and -len(counted) <= layer < len(counted):
            chosen.append(counted[layer])
        elif isinstance(layer, str) and layer in places:
            chosen.append(places[layer])
        else:
            raise ArgumentError(
                f"there is no layer {layer!r}; the layers are {', '.join(places)}"
                f"{suggest(str(layer), places)}",
                argument="layers",
            )
    if not chosen:
        raise ArgumentError("layers are empty; give at least one, or None", argument="layers")
    return chosen


def check_heads(heads: Collection[int] | None, count: int) -> list[int]:
    """Return the chosen heads as indices from 0.

    >>> check_heads([-1], 4)
    [3]
    """
    if heads is None:
        return list(range(count))
    for head in heads:
        if not -count <= head < count:
            raise ArgumentError(
                f"head {head} does not exist; the heads are 0 to {count - 1}", argument="heads"
            )
    return [head % count for head in heads]


What = Literal["residual", "mlp", "out", "heads", "paths", "edges"]
"""What is patched."""


Tap = Literal["q", "k", "v", "mlp"]
"""The input of a receiver."""


class Receiver(NamedTuple):
    """The end of a path: an input of a head, or the logits.

    Args:
        layer: name of the place, such as "layers.3"; "logits" for the logits.
        head: the query head; it is not used for the logits.
        tap: "q", "k" or "v", the input through which the head is reached; "mlp" for the
            feed-forward layer, as the end of an edge.

    >>> Receiver("layers.1", 0, "k").tap
    'k'
    """

    layer: str = "logits"
    head: int = 0
    tap: Tap = "k"


@dataclass(frozen=True, eq=False)
class _TwoRuns:
    """Both runs of a patching experiment: `run` starts from `start` and is changed."""

    run: ModelRun
    start: Mapping[str, Tensor]
    source: Mapping[str, Tensor]
    metric: NamedMetric
    baseline: float
    target: float
    report: ReportCell | None


def patch(
    model: AnyModel,
    clean: Input,
    corrupt: Input,
    metric: Metric = None,
    *,
    what: What = "residual",
    receiver: Receiver | tuple[str, int, str] | None = None,
    restore: bool = True,
    layers: Collection[str | int] | None = None,
    heads: Collection[int] | None = None,
    positions: Collection[int] | None = None,
    report: ReportCell | None = None,
) -> EffectTable:
    """Run a model on a corrupt text with one activation of the clean run at a time (activation
    patching), and measure how much of the clean result comes back.

        effect = metric(corrupt run with one clean activation) - metric(corrupt run)

    `EffectTable.share` divides it by metric(clean run) - metric(corrupt run). What is patched:
    "residual", "mlp" and "out" (the output of attention) are tables of layers and positions;
    "heads" is the output z of each head at all positions, a table of layers and heads; "paths" is
    the direct path from each head to one receiver, with all other heads kept at their values of the
    corrupt run, while norms and feed-forward layers are computed anew (path patching); "edges" is
    the edge from each head, feed-forward layer or the embedding to one receiver alone, of a `Model`
    (see `EdgeRuns`).

    Args:
        model: a `Model`, a `TextEncoder`, a `Seq2Seq`, or any module (see `watch`).
        clean: the input with the activations to put in, as for `ablate`.
        corrupt: another input with the same number of tokens.
        metric: what is measured, as for `ablate`; None is the most likely token of the clean run.
        what: "residual", "mlp", "out", "heads", "paths" or "edges".
        receiver: the end of the paths: a `Receiver` or (layer, head, "q", "k" or "v"); None is the
            logits. Only for "paths" and "edges", which may also end at "mlp".
        restore: True starts from the corrupt run and puts clean activations in (denoising); False
            starts from the clean run and puts corrupt ones in (noising).
        layers: names of places ("layers.3", "embed") or indices of layers; None is all.
        heads: query heads, for "heads", "paths" and "edges"; None is all.
        positions: positions of tokens, negative from the end, for the others; None is all.
        report: called after each effect, as in `ablate`.

    Returns:
        A table of the effects, which draws itself as a map.

    Raises:
        KeyboardInterrupt: Ctrl-C; `table` of the error has the effects that were measured.
        ArgumentError: the inputs have different numbers of tokens, `what` or the receiver does not
            exist, or the metric is no token.
        ArgumentTypeError: the model, a text or the metric has an unsupported type.

    >>> import regard
    >>> table = patch(regard.load("tiny"), "to be or not to", "to do or not to", what="residual")
    >>> table.rows[0], table.values.shape
    ('embed', (5, 5))

    Source: Vig et al. 2020 (arXiv 2004.12265); Meng et al. 2022 (arXiv 2202.05262), section 2.1;
    paths: Wang et al. 2022 (arXiv 2211.00593), section 3.1.
    """
    check_option("what", what, get_args(What))
    if receiver is not None and what not in ("paths", "edges"):
        raise ArgumentError(
            f"a receiver ends paths; what is {what!r}: use what='paths'", argument="receiver"
        )
    by_head = what in ("heads", "paths", "edges")
    unused, other = ("positions", positions) if by_head else ("heads", heads)
    if other is not None:
        raise ArgumentError(
            f"{unused} do not apply to what={what!r}, which is a table of layers and "
            f"{'heads' if by_head else 'positions'}; leave them out",
            argument=unused,
        )
    end = Receiver() if receiver is None else Receiver(*receiver)  # type: ignore[arg-type]
    if what == "edges":
        pair = (clean, corrupt) if not restore else (corrupt, clean)
        measured = metric_of(prepare_run(model, clean), metric)
        return _patch_edges(EdgeRuns(model, *pair), measured, end, layers, heads, report)
    names = {"heads": ["z"], "paths": ["z", "q", "k", "v"], "residual": ["embed", "residual"]}.get(
        what, [what]
    )
    both = _two_runs(model, clean, corrupt, metric, names, restore=restore, report=report)
    if what == "heads":
        return _patch_heads(both, layers, heads)
    if what == "paths":
        return _patch_paths(both, end, layers, heads)
    return _patch_positions(both, what, layers, positions)


def _two_runs(
    model: AnyModel,
    clean: Input,
    corrupt: Input,
    metric: Metric,
    names: list[str],
    *,
    restore: bool,
    report: ReportCell | None,
) -> _TwoRuns:
    """Run both texts, and keep the activations at the named taps."""
    runs = {"clean": prepare_run(model, clean), "corrupt": prepare_run(model, corrupt)}
    measured = metric_of(runs["clean"], metric)
    results = {name: run.run(capture=names) for name, run in runs.items()}
    traces = {name: passed_once(r.trace) for name, r in results.items()}
    for tap, x in traces["clean"].items():
        other = traces["corrupt"].get(tap)
        if other is None or other.shape != x.shape:
            raise ArgumentError(
                f"{tap} is {tuple(x.shape)} in the clean run and "
                f"{None if other is None else tuple(other.shape)} in the corrupt one; both inputs "
                "must have the same number of tokens, so that positions correspond",
                argument="corrupt",
            )
    values = {name: float(measured.measure(r.output)) for name, r in results.items()}
    start, source = ("corrupt", "clean") if restore else ("clean", "corrupt")
    return _TwoRuns(
        runs[start], traces[start], traces[source], measured, values[start], values[source], report
    )


def _patch_positions(
    both: _TwoRuns,
    what: str,
    layers: Collection[str | int] | None,
    positions: Collection[int] | None,
) -> EffectTable:
    """Patch hidden states at each layer and each position."""
    every = [name for name, x in both.source.items() if x.ndim == 3]
    if not every:
        raise ArgumentError(f"the run passed no tap {what!r} with states [B, T, M]")
    names = chosen_places(every, layers)
    most = max(both.source[name].shape[1] for name in names)
    columns = list(range(most))
    if positions is not None:
        columns = [check_index("positions", p, most, "token", "tokens") for p in positions]
    cells = {
        (i, j): EditedRun({name: _replace_position(both.source[name], position)}, position)
        for i, name in enumerate(names)
        for j, position in enumerate(columns)
        if position < both.source[name].shape[1]
    }
    rows = tuple(name.removesuffix(f".{what}") for name in names)
    labels = both.run.labels(most)
    title = Phrase("patching of {what} at one position", what=Phrase(what))
    return _fill(both, title, "position", rows, tuple(labels[p] for p in columns), cells)


def _patch_heads(
    both: _TwoRuns, layers: Collection[str | int] | None, heads: Collection[int] | None
) -> EffectTable:
    """Patch the output of each head, at all positions."""
    names = chosen_places(list(both.source), layers)
    selected = check_heads(heads, max(both.source[name].shape[1] for name in names))
    cells = {
        (i, j): EditedRun({name: _take_heads(both.source[name], slice(head, head + 1))})
        for i, name in enumerate(names)
        for j, head in enumerate(selected)
        if head < both.source[name].shape[1]
    }
    rows = tuple(name.removesuffix(".z") for name in names)
    return _fill(both, "patching of heads", "head", rows, tuple(map(str, selected)), cells)


def _patch_paths(
    both: _TwoRuns,
    receiver: Receiver,
    layers: Collection[str | int] | None,
    heads: Collection[int] | None,
) -> EffectTable:
    """Patch the direct paths from each head to the receiver."""
    names = [name for name in both.source if name.endswith(".z") or name == "z"]
    check_passed(names, "z")
    end = _receiving_tap(both, receiver)
    reached = names if end is None else names[: names.index(f"{receiver.layer}.z")]
    if layers is not None:
        reached = chosen_places(reached, layers)
    most = max((both.source[name].shape[1] for name in reached), default=0)
    selected = check_heads(heads, most)
    cells = {}
    for i, sender in enumerate(reached):
        for j, head in enumerate(selected):
            if head >= both.source[sender].shape[1]:
                continue
            # all heads keep the values of the changed run, except for the sender
            frozen: dict[str, Edit] = {
                name: _keep(both.start[name]) for name in names if name != sender
            }
            frozen[sender] = _sender(both, sender, head)
            if end is not None:
                received = both.run.run(frozen, capture=[end.name]).trace[end.name]
                frozen = {end.name: _take_heads(received, end.heads)}
            cells[i, j] = EditedRun(frozen)
    rows = tuple(name.removesuffix(".z") for name in reached)
    title = Phrase("patching of the direct paths to {aim}", aim=_aim_of(receiver))
    notes = () if end is None else _shared_by(end.readers, receiver)
    return _fill(both, title, "head", rows, tuple(map(str, selected)), cells, notes)


def _shared_by(readers: range, receiver: Receiver) -> tuple[str, ...]:
    """Return the note which query heads a change of a key or value reaches, if they are several."""
    if len(readers) == 1:
        return ()
    note = Phrase(
        "the heads {first} to {last} of {layer} read one {tap}, so that it changes for all of them",
        first=readers[0],
        last=readers[-1],
        layer=receiver.layer,
        tap=receiver.tap,
    )
    return (note,)


def _aim_of(receiver: Receiver) -> Phrase:
    """Return the words for the end of a path."""
    if receiver.layer == "logits":
        return Phrase("the logits")
    if receiver.tap == "mlp":
        return Phrase("the feed-forward layer of {layer}", layer=receiver.layer)
    tap, layer, head = receiver.tap, receiver.layer, receiver.head
    return Phrase("{tap} of {layer} head {head}", tap=tap, layer=layer, head=head)


def _patch_edges(
    runs: EdgeRuns,
    metric: NamedMetric,
    receiver: Receiver,
    layers: Collection[str | int] | None,
    heads: Collection[int] | None,
    report: ReportCell | None,
) -> EffectTable:
    """Patch the edge from each sender to the receiver, with the rest of the model as it is."""
    layer, head, tap = receiver
    known = [f"layers.{i}" for i in range(len(runs.layers))]
    if layer != "logits" and (layer not in known or tap not in get_args(Tap)):
        raise ArgumentError(
            f"there is no receiver {layer}:{head}:{tap}; it must be 'logits', or q, k, v or mlp of "
            f"one of {', '.join(known)}{suggest(layer, known)}",
            argument="receiver",
        )
    places = ["embed", *(f"{place}.z" for place in known)]
    chosen = [name.removesuffix(".z") for name in chosen_places(places, layers)]
    most = max(each.heads for each in runs.layers)
    columns = [*map(str, check_heads(heads, most)), "mlp", "embed"]
    notes: tuple[str, ...] = ()
    if layer == "logits":
        received = runs.received_logits()
    else:
        reader = runs.layers[known.index(layer)]
        own, group = reader.heads, reader.heads // reader.groups
        head = 0 if tap == "mlp" else check_index("receiver", head, own, "head", "heads")
        received = runs.received(known.index(layer), head, tap)
        if tap in ("k", "v"):
            first = head // group * group
            notes = _shared_by(range(first, first + group), receiver)
    cells: dict[tuple[int, int], Tensor] = {}
    for name, value in zip(runs.senders, received, strict=False):
        place, _, last = name.partition(".head.")
        place, last = (place, last) if last else (name.removesuffix(".mlp"), "mlp")
        last = "embed" if name == "embed" else last
        if place in chosen and last in columns:
            cells[chosen.index(place), columns.index(last)] = value
    table = changes_table(
        metric,
        Phrase("patching of the edges to {aim}", aim=_aim_of(receiver)),
        chosen,
        columns,
        axes=("layer", "sending part"),
        baseline=float(metric.measure(runs.start.logits)),
        target=float(metric.measure(runs.other.logits)),
        notes=notes,
    )
    if layer == "logits":
        return measure_cells(table, enumerate(cells.values()), metric, list(cells), report)

    def edit_of(value: Tensor) -> EditedRun:
        if tap == "mlp":
            return EditedRun({f"{layer}.mlp": _keep(value)})

        def replaced(x: Tensor) -> Tensor:
            group = head * x.shape[1] // own  # heads [B,H,L,D], or G of keys and values
            return replace_head(group, lambda _: value)(x)

        return EditedRun({f"{layer}.{tap}": replaced})

    edits = {cell: edit_of(value) for cell, value in cells.items()}
    return fill_table(table, runs.run, metric, edits, report)


class _ReceivingTap(NamedTuple):
    """The tap at the end of a path, the heads there that are changed, and the query heads that read
    them.
    """

    name: str
    heads: slice
    readers: range


def _receiving_tap(both: _TwoRuns, receiver: Receiver) -> _ReceivingTap | None:
    """Return the tap of a receiver; None for the logits."""
    if receiver.layer == "logits":
        return None
    name = f"{receiver.layer}.{receiver.tap}"
    places = [tap.removesuffix(".z") for tap in both.source if tap.endswith(".z")]
    if receiver.tap not in ("q", "k", "v") or name not in both.source:
        raise ArgumentError(
            f"there is no receiver {name!r}; it must be q, k or v of one of {', '.join(places)}, "
            f"or 'logits'{suggest(receiver.layer, places)}",
            argument="receiver",
        )
    heads, own = both.source[f"{receiver.layer}.z"].shape[1], both.source[name].shape[1]
    if not 0 <= receiver.head < heads:
        raise ArgumentError(
            f"head {receiver.head} of {receiver.layer} does not exist; it has "
            f"{plural(heads, 'head')}",
            argument="receiver",
        )
    # the key of a query head is that of its group, also where the model repeats it for each head
    group = heads // own if own < heads else _repeats(both.source[name], both.start[name])
    first = receiver.head // group * group
    changed = (
        slice(first, first + group) if own == heads else slice(first // group, first // group + 1)
    )
    return _ReceivingTap(name, changed, range(first, first + group))


def _repeats(*tensors: Tensor) -> int:
    """Return how many heads in a row are copies of one, the same number in all of `[B, H, ...]`."""
    H = tensors[0].shape[1]
    for n in range(H, 1, -1):
        groups = [x.unflatten(1, (-1, n)) for x in tensors] if H % n == 0 else []
        if groups and all(torch.equal(x, x[:, :, :1].expand_as(x)) for x in groups):
            return n
    return 1


def _replace_position(source: Tensor, position: int) -> Edit:
    """Return the edit that takes the states `[B, T, M]` of one position from another run."""
    from_end = position - source.shape[1]  # a batch of rows may begin at this position

    def edit(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, from_end] = source[:, position]
        return x

    return edit


def _take_heads(source: Tensor, heads: slice) -> Edit:
    """Return the edit that takes some heads `[B, H, ...]` from another run."""

    def edit(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, heads] = source[:, heads]
        return x

    return edit


def _keep(values: Tensor) -> Edit:
    """Return the edit that sets a tensor to these values."""
    return lambda _: values.clone()


def _sender(both: _TwoRuns, name: str, head: int) -> Edit:
    """Return the edit of a layer in which one head sends and the others are kept."""
    start, sent = both.start[name], both.source[name]
    return lambda _: replace_head(head, lambda _: sent[:, head])(start)


def _fill(
    both: _TwoRuns,
    title: str,
    axis: str,
    rows: tuple[str, ...],
    columns: tuple[str, ...],
    cells: Mapping[tuple[int, int], EditedRun],
    notes: tuple[str, ...] = (),
) -> EffectTable:
    """Measure all cells of a table of both runs."""
    table = changes_table(
        both.metric,
        title,
        rows,
        columns,
        axes=("layer", axis),
        baseline=both.baseline,
        target=both.target,
        notes=notes,
    )
    return fill_table(table, both.run, both.metric, cells, both.report)
