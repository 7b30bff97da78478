"""Ablation and activation patching: replace the output of a head, or put activations of one run
into another, and measure what changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.inspect.interventions.effect_table import EffectTable, Metric, NamedMetric, metric_of
from regard.inspect.model_run import (
    AnyModel,
    Edit,
    Input,
    ModelRun,
    check_passed,
    prepare_run,
)
from regard.language import Phrase
from regard.units import plural

Ablation = Literal["zero", "mean", "resample"]
"""What takes the place of a head's output."""


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
) -> EffectTable:
    """Replace the output z of one head after the other, and measure the effect of each on a metric.

        effect(layer, head) = metric(run with z[:, head] replaced) - metric(unchanged run)

    The replacement is 0 ("zero"); the mean of the head's output over all positions of the reference
    ("mean"); or, at each position, its output at a random position of the reference ("resample").

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

    Returns:
        A table of the effects by layer and head, which draws itself as a map.

    Raises:
        ArgumentError: the method, a layer or a head does not exist, or the metric is no token.
        ArgumentTypeError: the model, the text or the metric has an unsupported type.

    >>> import regard
    >>> table = ablate(regard.load("tiny"), "to be or not to", layers=[0])
    >>> table.values.shape, len(table.top(3))
    ((1, 8), 3)

    Source: Michel et al. 2019 (arXiv 1905.10650), section 2.2; mean and resample ablation: Wang et
    al. 2022 (arXiv 2211.00593), section 2.1; Chan et al. 2022, "Causal scrubbing".
    """
    if method not in get_args(Ablation):
        known = get_args(Ablation)
        raise ArgumentError(
            f"method is {method!r}; it must be one of {', '.join(known)}{suggest(method, known)}",
            argument="method",
        )
    run = prepare_run(model, text)
    measured = metric_of(run, metric)
    unchanged = run.run(capture=["z"])
    z = {name: unchanged.trace[name] for name in unchanged.trace}
    source = z
    if reference is not None:
        other = prepare_run(model, reference).run(capture=["z"]).trace
        source = {name: other[name] for name in other}
    chosen = chosen_places(list(z), layers)
    most = max(z[name].shape[1] for name in chosen)
    selected = check_heads(heads, most)
    before = float(measured.measure(unchanged.output))
    values = np.full((len(chosen), len(selected)), np.nan)
    for i, name in enumerate(chosen):
        for j, head in enumerate(selected):
            if head >= z[name].shape[1]:
                continue
            generator = torch.Generator().manual_seed(seed)
            edit = replace_head(head, replacement(method, source[name][:, head], generator))
            values[i, j] = float(measured.measure(run.run({name: edit}).output)) - before
    return EffectTable(
        Phrase("{method} ablation of heads", method=Phrase(method)),
        Phrase("change of {name}", name=measured.name),
        values,
        "layer",
        "head",
        tuple(name.removesuffix(".z") for name in chosen),
        tuple(map(str, selected)),
        baseline=before,
    )


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
    """Return the full names of the taps at the chosen layers.

    >>> chosen_places(["layers.0.z", "layers.1.z"], [-1])
    ['layers.1.z']
    """
    check_passed(names, "z")
    if layers is None:
        return list(names)
    places = {name.rpartition(".")[0]: name for name in names}
    chosen = []
    for layer in layers:
        if isinstance(layer, int) and -len(names) <= layer < len(names):
            chosen.append(names[layer])
        elif isinstance(layer, str) and layer in places:
            chosen.append(places[layer])
        else:
            raise ArgumentError(
                f"there is no layer {layer!r}; the layers are {', '.join(places)}"
                f"{suggest(str(layer), places)}",
                argument="layers",
            )
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
    """Both runs of a patching experiment: `run` starts from `start` and is changed."""

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
    runs = {"clean": prepare_run(model, clean), "corrupt": prepare_run(model, corrupt)}
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
