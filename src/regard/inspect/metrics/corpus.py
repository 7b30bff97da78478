"""Metrics of every head over a corpus, one text at a time."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.files.atomic_write import write_user_file
from regard.inspect.interventions.effect_table import EffectTable
from regard.inspect.record.recorded_place import Place
from regard.inspect.record.recording import Recording
from regard.language import Phrase, counted

LARGEST = ("max_logit", "missing")
"""Metrics that are a maximum, so that the largest number of all texts counts."""


@dataclass(frozen=True, eq=False)
class CorpusMeasures:
    """Metrics of every head over a corpus.

    Args:
        texts: number of texts.
        tokens: number of tokens, over all texts.
        places: names of the places, one per layer.
        values: by the name of a metric the mean over texts, `[layers, H]`, each text counting once
            (the largest number for `max_logit` and `missing`); NaN where no text defines it.
        deviations: the standard deviation over texts, of the same shape; NaN for one text.
        counts: the number of texts that define the metric, by its name.
    """

    texts: int
    tokens: int
    places: tuple[str, ...]
    values: Mapping[str, Float[Tensor, "layers H"]]
    deviations: Mapping[str, Float[Tensor, "layers H"]]
    counts: Mapping[str, int]

    def __getitem__(self, name: str) -> Tensor:
        """Return a metric `[layers, H]` by its name."""
        if name not in self.values:
            raise ArgumentError(
                f"{name!r} was not measured; measured: {', '.join(self.values)}"
                f"{suggest(name, self.values)}",
                argument="metric",
                value=name,
            )
        return self.values[name]

    def table(self, name: str) -> EffectTable:
        """Return a metric as a table of layers and heads, which draws itself as a map.

        Args:
            name: the metric.

        Returns:
            The table.

        Raises:
            ArgumentError: the metric was not measured.
        """
        values = self[name].numpy()
        return EffectTable(
            Phrase(
                "{name} of every head, over {texts} of {tokens}",
                name=name,
                texts=counted(self.texts, "text"),
                tokens=counted(self.tokens, "token"),
            ),
            name,
            values,
            "layer",
            "head",
            self.places,
            tuple(map(str, range(values.shape[1]))),
            notes=("behaviour on these texts; another corpus may show another one",),
        )

    def records(self) -> list[dict[str, Any]]:
        """Return one mapping per head, with its layer, its index and all metrics.

        Returns:
            The heads, layer by layer; metrics that no text defines are left out.
        """
        H = next(iter(self.values.values())).shape[1]
        return [
            {
                "layer": place,
                "head": h,
                **{n: float(x[i, h]) for n, x in self.values.items() if not x[i, h].isnan()},
            }
            for i, place in enumerate(self.places)
            for h in range(H)
        ]

    def to(self, path: str | Path) -> Path:
        """Write one line per head to a .csv file.

        Args:
            path: the file.

        Returns:
            The path.

        Raises:
            ArgumentError: the name does not end in .csv.
            FileError: the file cannot be written.
        """
        path = Path(path)
        if path.suffix.lower() != ".csv":
            raise ArgumentError(f"{path}: the name must end in .csv; table(metric) draws pictures")
        with write_user_file(path) as place, place.open("w", encoding="utf-8") as stream:
            names = ["layer", "head", *self.values]
            writer = csv.DictWriter(stream, names, lineterminator="\n", restval="")
            writer.writeheader()
            writer.writerows(self.records())
        return path


class _Running:
    """The mean, the variance and the maximum of a stream of tensors (Welford's method)."""

    def __init__(self, like: Tensor) -> None:
        self.count = 0
        self.mean, self.squares = torch.zeros_like(like), torch.zeros_like(like)
        self.largest = torch.full_like(like, -torch.inf)

    def add(self, x: Tensor) -> None:
        self.count += 1
        before = x - self.mean
        self.mean = self.mean + before / self.count
        self.squares = self.squares + before * (x - self.mean)
        self.largest = torch.maximum(self.largest, x)

    def deviation(self) -> Tensor:
        """Return the standard deviation with n - 1."""
        if self.count < 2:
            return torch.full_like(self.mean, torch.nan)
        return (self.squares / (self.count - 1)).sqrt()


def measure_corpus(
    record_text: Callable[[Any], Recording],
    measure_place: Callable[[Place, Tensor | None], Mapping[str, Tensor]],
    corpus: Iterable[Any],
) -> CorpusMeasures:
    """Record one text after the other, and accumulate the metrics of all heads.

    Only one recording is in memory at a time.
    """
    places: tuple[str, ...] = ()
    running: dict[tuple[str, int], _Running] = {}
    names: dict[str, None] = {}
    texts = tokens = 0
    for text in corpus:
        recording = record_text(text)
        if texts and tuple(recording.places) != places:
            raise ArgumentError(
                f"text {texts} reached the places {', '.join(recording.places)}, and text 0 "
                f"{', '.join(places)}; measure texts of one kind"
            )
        places = tuple(recording.places)
        texts += 1
        tokens += next(iter(recording.places.values())).T
        for i, place in enumerate(recording.places.values()):
            ids = None if recording.ids is None else recording.ids[0]
            measures = measure_place(
                place, ids if ids is not None and len(ids) == place.N else None
            )
            for name, x in measures.items():
                names[name] = None
                running.setdefault((name, i), _Running(x)).add(x)
    if not texts:
        raise ArgumentError("the corpus is empty; give at least one text")
    H = max(each.mean.shape[0] for each in running.values())
    values, deviations = {}, {}
    for name in names:
        rows = [running.get((name, i)) for i in range(len(places))]
        values[name] = _stacked([_result(name, each) for each in rows], H)
        deviations[name] = _stacked([None if r is None else r.deviation() for r in rows], H)
    counts = {n: max(r.count for (m, _), r in running.items() if m == n) for n in names}
    return CorpusMeasures(texts, tokens, places, values, deviations, counts)


def _result(name: str, running: _Running | None) -> Tensor | None:
    if running is None:
        return None
    return running.largest if name in LARGEST else running.mean


def _stacked(rows: list[Tensor | None], H: int) -> Tensor:
    """Stack the numbers of layers, with NaN for heads that a layer lacks."""
    result = np.full((len(rows), H), np.nan)
    for i, row in enumerate(rows):
        if row is not None:
            result[i, : len(row)] = row.double().numpy()
    return torch.from_numpy(result)
