"""Ablation: replace the output of a head, and measure what changes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.inspect.interventions.answer_metric import Metric, metric_of
from regard.inspect.interventions.effect_table import EffectTable
from regard.inspect.interventions.model_run import (
    AnyModel,
    Edit,
    Input,
    check_passed,
    prepare,
)
from regard.language import Phrase

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
        text: a text, several texts, or token ids `[B, T]`; for a module ids, or a mapping of its
            arguments; for a `Seq2Seq` a pair (source, target).
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
    run = prepare(model, text)
    measured = metric_of(run, metric)
    unchanged = run.run(capture=["z"])
    z = {name: unchanged.trace[name] for name in unchanged.trace}
    source = z
    if reference is not None:
        other = prepare(model, reference).run(capture=["z"]).trace
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
