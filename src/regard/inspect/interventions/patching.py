"""Activation patching: put activations of one run into another, and measure what they restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.inspect.interventions.ablation import replace_head
from regard.inspect.interventions.answer_metric import Metric, NamedMetric, metric_of
from regard.inspect.interventions.effect_table import EffectTable
from regard.inspect.interventions.model_run import (
    AnyModel,
    Edit,
    Input,
    ModelRun,
    check_passed,
    prepare,
)
from regard.language import Phrase
from regard.units import plural

What = Literal["residual", "mlp", "out", "heads", "paths"]
"""What is patched."""


class Receiver(NamedTuple):
    """The end of a path: an input of a head, or the logits.

    Args:
        layer: name of the place, such as "layers.3"; "logits" for the logits.
        head: the query head; it is not used for the logits.
        tap: "q", "k" or "v", the input through which the head is reached.

    >>> Receiver("layers.1", 0, "k").tap
    'k'
    """

    layer: str = "logits"
    head: int = 0
    tap: Literal["q", "k", "v"] = "k"


@dataclass(frozen=True, eq=False)
class _TwoRuns:
    """Both runs of a patching experiment.

    Args:
        run: the run that is changed, and which starts from `start`.
        start: its activations by full name.
        source: the activations of the other run.
        metric: what is measured.
        baseline, target: the metric of the changed run and of the other one.
    """

    run: ModelRun
    start: Mapping[str, Tensor]
    source: Mapping[str, Tensor]
    metric: NamedMetric
    baseline: float
    target: float

    def effect(self, edit: Mapping[str, Edit]) -> float:
        """Return the change of the metric by these edits."""
        return float(self.metric.measure(self.run.run(edit).output)) - self.baseline


def patch(
    model: AnyModel,
    clean: Input,
    corrupt: Input,
    metric: Metric = None,
    *,
    what: What = "residual",
    receiver: Receiver | tuple[str, int, str] | None = None,
    restore: bool = True,
) -> EffectTable:
    """Run a model on a corrupt text with one activation of the clean run at a time (activation
    patching), and measure how much of the clean result comes back.

        effect = metric(corrupt run with one clean activation) - metric(corrupt run)

    `EffectTable.share` divides it by metric(clean run) - metric(corrupt run). What is patched:
    "residual", "mlp" and "out" (the output of attention) are tables of layers and positions;
    "heads" is the output z of each head at all positions, a table of layers and heads; "paths" is
    the direct path from each head to one receiver, with all other heads kept at their values of the
    corrupt run, while norms and feed-forward layers are computed anew (path patching).

    Args:
        model: a `Model`, a `TextEncoder`, a `Seq2Seq`, or any module (see `watch`).
        clean: the input with the activations to put in, as for `ablate`.
        corrupt: another input with the same number of tokens.
        metric: what is measured, as for `ablate`; None is the most likely token of the clean run.
        what: "residual", "mlp", "out", "heads" or "paths".
        receiver: the end of the paths: a `Receiver` or (layer, head, "q", "k" or "v"); None is the
            logits. Only for "paths".
        restore: True starts from the corrupt run and puts clean activations in (denoising); False
            starts from the clean run and puts corrupt ones in (noising).

    Returns:
        A table of the effects, which draws itself as a map.

    Raises:
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
    if what not in get_args(What):
        known = get_args(What)
        raise ArgumentError(
            f"what is {what!r}; it must be one of {', '.join(known)}{suggest(what, known)}",
            argument="what",
        )
    if receiver is not None and what != "paths":
        raise ArgumentError(
            f"a receiver ends paths; what is {what!r}: use what='paths'", argument="receiver"
        )
    names = {"heads": ["z"], "paths": ["z", "q", "k", "v"], "residual": ["embed", "residual"]}.get(
        what, [what]
    )
    both = _two_runs(model, clean, corrupt, metric, names, restore=restore)
    if what == "heads":
        return _patch_heads(both)
    if what == "paths":
        return _patch_paths(both, Receiver() if receiver is None else Receiver(*receiver))  # type: ignore[arg-type]
    return _patch_positions(both, what)


def _two_runs(
    model: AnyModel,
    clean: Input,
    corrupt: Input,
    metric: Metric,
    names: list[str],
    *,
    restore: bool,
) -> _TwoRuns:
    """Run both texts, and keep the activations at the named taps."""
    runs = {"clean": prepare(model, clean), "corrupt": prepare(model, corrupt)}
    measured = metric_of(runs["clean"], metric)
    results = {name: run.run(capture=names) for name, run in runs.items()}
    traces = {name: {tap: r.trace[tap] for tap in r.trace} for name, r in results.items()}
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
        runs[start], traces[start], traces[source], measured, values[start], values[source]
    )


def _patch_positions(both: _TwoRuns, what: str) -> EffectTable:
    """Patch hidden states at each layer and each position."""
    names = [name for name, x in both.source.items() if x.ndim == 3]
    if not names:
        raise ArgumentError(f"the run passed no tap {what!r} with states [B, T, M]")
    most = max(both.source[name].shape[1] for name in names)
    values = np.full((len(names), most), np.nan)
    for i, name in enumerate(names):
        for position in range(both.source[name].shape[1]):
            edit = _replace_position(both.source[name], position)
            values[i, position] = both.effect({name: edit})
    rows = tuple(name.removesuffix(f".{what}") for name in names)
    labels = both.run.labels(most)
    return _table(
        both,
        Phrase("patching of {what} at one position", what=Phrase(what)),
        values,
        "position",
        rows,
        labels,
    )


def _patch_heads(both: _TwoRuns) -> EffectTable:
    """Patch the output of each head, at all positions."""
    names = list(both.source)
    check_passed(names, "z")
    most = max((both.source[name].shape[1] for name in names), default=0)
    values = np.full((len(names), most), np.nan)
    for i, name in enumerate(names):
        for head in range(both.source[name].shape[1]):
            values[i, head] = both.effect({name: _take_head(both.source[name], head)})
    rows = tuple(name.removesuffix(".z") for name in names)
    return _table(both, "patching of heads", values, "head", rows, tuple(map(str, range(most))))


def _patch_paths(both: _TwoRuns, receiver: Receiver) -> EffectTable:
    """Patch the direct paths from each head to the receiver."""
    names = [name for name in both.source if name.endswith(".z") or name == "z"]
    check_passed(names, "z")
    end = _receiving_tap(both, receiver)
    reached = names if end is None else names[: names.index(f"{receiver.layer}.z")]
    most = max((both.source[name].shape[1] for name in reached), default=0)
    values = np.full((len(reached), most), np.nan)
    for i, sender in enumerate(reached):
        for head in range(both.source[sender].shape[1]):
            # all heads keep the values of the changed run, except for the sender
            frozen: dict[str, Edit] = {
                name: _keep(both.start[name]) for name in names if name != sender
            }
            frozen[sender] = _sender(both, sender, head)
            if end is None:
                values[i, head] = both.effect(frozen)
                continue
            received = both.run.run(frozen, capture=[end.name]).trace[end.name]
            values[i, head] = both.effect({end.name: _take_head(received, end.head)})
    rows = tuple(name.removesuffix(".z") for name in reached)
    aim = (
        Phrase("the logits")
        if end is None
        else Phrase(
            "{tap} of {layer} head {head}",
            tap=receiver.tap,
            layer=receiver.layer,
            head=receiver.head,
        )
    )
    labels = tuple(map(str, range(most)))
    return _table(
        both, Phrase("patching of the direct paths to {aim}", aim=aim), values, "head", rows, labels
    )


class _ReceivingTap(NamedTuple):
    """The tap at the end of a path, and the head (or key/value head) there."""

    name: str
    head: int


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
    return _ReceivingTap(name, receiver.head * own // heads)


def _replace_position(source: Tensor, position: int) -> Edit:
    """Return the edit that takes the states `[B, T, M]` of one position from another run."""

    def edit(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, position] = source[:, position]
        return x

    return edit


def _take_head(source: Tensor, head: int) -> Edit:
    """Return the edit that takes one head `[B, H, ...]` from another run."""
    return replace_head(head, lambda _: source[:, head])


def _keep(values: Tensor) -> Edit:
    """Return the edit that sets a tensor to these values."""
    return lambda _: values.clone()


def _sender(both: _TwoRuns, name: str, head: int) -> Edit:
    """Return the edit of a layer in which one head sends and the others are kept."""
    start, sent = both.start[name], both.source[name]
    return lambda _: replace_head(head, lambda _: sent[:, head])(start)


def _table(
    both: _TwoRuns,
    title: str,
    values: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    axis: str,
    rows: tuple[str, ...],
    columns: tuple[str, ...],
) -> EffectTable:
    return EffectTable(
        title,
        Phrase("change of {name}", name=both.metric.name),
        torch.as_tensor(values).numpy(),
        "layer",
        axis,
        rows,
        columns,
        baseline=both.baseline,
        target=both.target,
    )
