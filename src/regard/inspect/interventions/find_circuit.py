"""Automatic circuit discovery: the few edges of a model that keep its result on a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.inspect.interventions.edges import EdgeRuns
from regard.inspect.interventions.effect_table import EffectTable, Metric, metric_of
from regard.inspect.model_run import AnyModel, Input, prepare_run
from regard.language import Phrase, translate
from regard.text_table import format_table

SHARED_HEADS = (
    "k and v of a receiving part are counted by key and value heads, which several heads read"
)


class Edge(NamedTuple):
    """An edge of a circuit.

    Args:
        sender: such as "embed", "layers.0.head.3" or "layers.0.mlp".
        receiver: such as "layers.1.q.0", "layers.1.k.0" (a key head), "layers.1.mlp" or "logits".
        score: the estimated change of the metric if this edge alone is cut, with the other sign.

    >>> Edge("embed", "layers.0.v.0", 0.5).receiver
    'layers.0.v.0'
    """

    sender: str
    receiver: str
    score: float


@dataclass(frozen=True, eq=False)
class Circuit:
    """Edges that keep the result of a model while all others carry another input.

    Args:
        edges: the edges, those with the largest scores first.
        quantity: what was measured.
        clean, corrupt: the metric of both inputs.
        value: the metric of the run in which all other edges are cut, computed exactly.
        without: the metric of the run in which only the circuit is cut.
        table: the scores of all edges, senders by receivers; NaN where there is no edge.
        runs: how many exact runs were measured.

    >>> print(Circuit((Edge("embed", "logits", 1.0),), "a", 1.0, 0.0, 0.9, 0.1, None, 3))
    1 edge keeps 90.0 % of a (clean 1, corrupt 0); without it 10.0 % is left
    sending part  receiving part  score
    embed         logits              1
    """

    edges: tuple[Edge, ...]
    quantity: str
    clean: float
    corrupt: float
    value: float
    without: float
    table: EffectTable | None
    runs: int

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks that belong beside every use of the circuit."""
        return () if self.table is None else self.table.notes

    @property
    def faithfulness(self) -> float:
        """The share of the difference between both inputs that the circuit keeps."""
        return (self.value - self.corrupt) / (self.clean - self.corrupt)

    def __repr__(self) -> str:
        return f"Circuit(edges={len(self.edges)}, faithfulness={self.faithfulness:.3f})"

    def __str__(self) -> str:
        """Return the summary and the edges as text."""
        return self.text()

    def text(self, n: int = 20) -> str:
        """Return the summary and the edges with the largest scores, as text for a terminal.

        Args:
            n: how many edges.

        Returns:
            The lines, without a line break at the end.
        """
        one = len(self.edges) == 1
        left = (self.without - self.corrupt) / (self.clean - self.corrupt)
        head = translate(
            "{count} edge keeps {share} % of {name} (clean {clean}, corrupt {corrupt}); without "
            "it {left} % is left"
            if one
            else "{count} edges keep {share} % of {name} (clean {clean}, corrupt {corrupt}); "
            "without them {left} % is left",
            count=len(self.edges),
            share=f"{100 * self.faithfulness:.1f}",
            name=translate(self.quantity),
            clean=f"{self.clean:.4g}",
            corrupt=f"{self.corrupt:.4g}",
            left=f"{100 * left:.1f}",
        )
        rows = [[edge.sender, edge.receiver, f"{edge.score:.3g}"] for edge in self.edges[:n]]
        title = [translate("sending part"), translate("receiving part"), translate("score")]
        notes = [translate("note: {note}", note=translate(note)) for note in self.notes]
        return "\n".join([head, format_table([title, *rows], left=range(2), names=2), *notes])

    def as_dict(self) -> dict[str, object]:
        """Return the circuit as data that JSON can represent.

        Returns:
            The edges and the metrics.
        """
        return {
            "quantity": self.quantity,
            "clean": self.clean,
            "corrupt": self.corrupt,
            "value": self.value,
            "without": self.without,
            "faithfulness": self.faithfulness,
            "edges": [edge._asdict() for edge in self.edges],
            "notes": list(self.notes),
        }


def find_circuit(
    model: AnyModel,
    clean: Input,
    corrupt: Input,
    metric: Metric = None,
    *,
    threshold: float = 0.1,
    steps: int = 5,
    report: Callable[[int], None] | None = None,
) -> Circuit:
    """Find few edges that keep the result of a model, and check them by exact runs.

        score(s -> r) = sum (s_clean - s_corrupt) * mean over a in (0, 1) of d metric / d input_r

    at embeddings a of the way from the corrupt to the clean input (EAP-IG). The edges with the
    largest scores are kept, as few as keep the difference of the metric, up to the threshold, in a
    run in which all other edges carry the corrupt input. Then edges are cut, first those with small
    scores, in blocks and one by one, as long as the exact run stays within the threshold (ACDC).

    Args:
        model: a `Model` whose blocks add what heads and feed-forward layers write (pre-norm).
        clean: the input whose result is kept, as for `ablate`.
        corrupt: another input with as many tokens.
        metric: what is measured, as for `ablate`; None is the most likely token of the clean run.
        threshold: the share of the difference of the metric by which the circuit may be off, on
            either side.
        steps: the number of points of the integral.
        report: called with the number of exact runs after each batch of them.

    Returns:
        The circuit, with scores and exact metrics.

    Raises:
        ArgumentError: both inputs have the same metric, other numbers of tokens, or the threshold
            is not between 0 and 1; or the blocks add in another way.
        ArgumentTypeError: the model, an input or the metric has an unsupported type.

    >>> import regard
    >>> found = find_circuit(regard.load("tiny"), "to be or not to", "to do or not to", " be",
    ...                      threshold=0.5)
    >>> abs(found.faithfulness - 1) <= 0.5, len(found.edges) < 40
    (True, True)

    Source: Conmy et al. 2023 (arXiv 2304.14997); Hanna et al. 2024 (arXiv 2403.17806).
    """
    if not 0 < threshold < 1:
        raise ArgumentError(argument="threshold", value=threshold, allowed="between 0 and 1")
    if steps < 1:
        raise ArgumentError(argument="steps", value=steps, allowed="at least 1")
    measured = metric_of(prepare_run(model, clean), metric)
    runs = EdgeRuns(model, clean, corrupt)
    before, other = (float(measured.measure(x.logits)) for x in (runs.start, runs.other))
    if before == other:
        raise ArgumentError(
            f"both inputs have the same {measured.name} ({before:.4g}), so that no edge carries it",
            argument="corrupt",
        )
    scores = _edge_scores(runs, measured.measure, steps)
    search = _Search(runs, measured.measure, (before, other), report)
    circuit = search.prune(search.grow(scores, threshold), threshold)
    edges = [Edge(runs.senders[s], runs.receivers[r], float(scores[r, s])) for r, s in circuit]
    value, without = search.values([circuit])[0], search.values([circuit], cut=True)[0]
    values = torch.where(runs.exists, scores, torch.nan).T.numpy()
    table = EffectTable(
        "scores of edges (EAP-IG)",
        Phrase("estimated part of {name}", name=measured.name),
        values,
        "sending part",
        "receiving part",
        tuple(runs.senders),
        tuple(runs.receivers),
        baseline=before,
        target=other,
        notes=(SHARED_HEADS,) if any(x.groups < x.heads for x in runs.layers) else (),
    )
    return Circuit(
        tuple(sorted(edges, key=lambda edge: -abs(edge.score))),
        measured.name,
        before,
        other,
        value,
        without,
        table,
        search.runs_done,
    )


def _edge_scores(runs: EdgeRuns, measure: Callable[[Tensor], Tensor], steps: int) -> Tensor:
    """Return the score of each edge `[R, S]`, in fp64."""
    change = (runs.start.sent - runs.other.sent).double().flatten(1)
    scores = torch.zeros(runs.exists.shape, dtype=torch.float64)
    points, weights = np.polynomial.legendre.leggauss(steps)  # on (-1, 1)
    every = runs.exists[None]
    for point, weight in zip(points, weights, strict=True):
        inputs: list[Tensor] = []
        with torch.enable_grad():
            output = runs.logits(every, embedded=(point + 1) / 2, inputs=inputs)
            gradients = torch.autograd.grad(
                measure(output[0]), inputs, allow_unused=True, materialize_grads=True
            )
        # [1, r, B, T, M] -> [R, B T M]
        slope = torch.cat([g[0].flatten(1) for g in gradients]).double()
        scores += weight / 2 * (slope @ change.T).cpu()
    return scores * runs.exists


class _Search:
    """The search for a circuit by exact runs."""

    def __init__(
        self,
        runs: EdgeRuns,
        measure: Callable[[Tensor], Tensor],
        both: tuple[float, float],
        report: Callable[[int], None] | None,
    ) -> None:
        self.runs, self.measure, self.report = runs, measure, report
        self.clean, self.corrupt = both
        self.runs_done = 0
        self.readers: dict[int, list[int]] = {}
        """Sender -> the receivers through which it reads."""
        names = {name: r for r, name in enumerate(runs.receivers)}
        for i, layer in enumerate(runs.layers):
            for h in range(layer.heads):
                g = h * layer.groups // layer.heads
                read = (f"q.{h}", f"k.{g}", f"v.{g}")
                self.readers[layer.begin + h] = [names[f"layers.{i}.{x}"] for x in read]
            self.readers[layer.mlp] = [names[f"layers.{i}.mlp"]]

    def values(self, circuits: list[list[tuple[int, int]]], *, cut: bool = False) -> list[float]:
        """Return the metric of the run of each circuit; or that without its edges."""
        masks = torch.zeros(len(circuits), *self.runs.exists.shape, dtype=torch.bool)
        for mask, edges in zip(masks, circuits, strict=True):
            for edge in edges:
                mask[edge] = True
        outputs = self.runs.batches(~masks if cut else masks)
        values = [float(self.measure(x)) for _, x in outputs]
        self.runs_done += len(values)
        if self.report is not None:
            self.report(self.runs_done)
        return values

    def keep(self, circuits: list[list[tuple[int, int]]], threshold: float) -> list[bool]:
        """Return whether each circuit keeps the metric; one without edges does not."""
        values, whole = self.values(circuits), self.clean - self.corrupt
        errors = [abs((value - self.corrupt) / whole - 1) for value in values]
        return [
            bool(edges) and error <= threshold
            for edges, error in zip(circuits, errors, strict=True)
        ]

    def grow(self, scores: Tensor, threshold: float) -> list[tuple[int, int]]:
        """Return the edges with the largest scores, about as few as keep the metric."""
        S = scores.shape[1]
        order = scores.abs().flatten().argsort(descending=True, stable=True)
        order = order[scores.flatten()[order] != 0]
        ranked = [divmod(int(n), S) for n in order]
        low, high = 0, 1
        while high < len(ranked) and not self.keep([self.connected(ranked[:high])], threshold)[0]:
            low, high = high, 2 * high
        high = min(high, len(ranked))
        while high - low > max(1, high // 16):
            middle = (low + high) // 2
            if self.keep([self.connected(ranked[:middle])], threshold)[0]:
                high = middle
            else:
                low = middle
        return self.connected(ranked[:high])

    def connected(self, edges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the edges on a path from the embedding to the logits; others change nothing."""
        end = len(self.runs.receivers) - 1
        while True:
            receivers, senders = {r for r, _ in edges}, {s for _, s in edges}
            fed = {0, *(s for s, read in self.readers.items() if receivers.intersection(read))}
            used = {end, *(r for s, read in self.readers.items() if s in senders for r in read)}
            left = [(r, s) for r, s in edges if s in fed and r in used]
            if len(left) == len(edges):
                return left
            edges = left

    def prune(self, edges: list[tuple[int, int]], threshold: float) -> list[tuple[int, int]]:
        """Cut edges while the metric is kept: blocks of those with small scores first, then each
        edge, until no edge can be cut. Where blocks could not be cut, the next ones are tried in
        one batch; the first that can be cut is cut, as if they were tried one by one.
        """
        size, tries = max(1, len(edges) // 2), 1
        while edges:
            before, position = len(edges), len(edges)
            while position > 0:
                block_ends = range(position, 0, -size)[:tries]
                blocks = [set(edges[max(0, end - size) : end]) for end in block_ends]
                left = [self.connected([x for x in edges if x not in block]) for block in blocks]
                is_kept = self.keep(left, threshold)
                position = max(0, block_ends[-1] - size)
                tries = min(2 * tries, _TRIES)
                if any(is_kept):
                    n = is_kept.index(True)
                    edges, tries = left[n], 1
                    position = min(max(0, block_ends[n] - size), len(edges))
            if size == 1 and len(edges) == before:
                return edges
            size = max(1, size // 2)
        return edges


_TRIES = 6
"""How many circuits are tried at once, at most."""
