"""Weights that are returned."""

from __future__ import annotations

import torch

from regard.inspect.audit.faults import finding
from regard.inspect.audit.probe import Probe
from regard.inspect.audit.result import Finding
from regard.inspect.audit.subject import CannotTry, NotApplicable


def sums(probe: Probe, T: int = 4) -> list[Finding]:
    """Each row of the returned weights sums to 1."""
    if "weights" not in probe.subject.takes:
        raise NotApplicable("it returns no weights")
    x = probe.inputs(1, T)
    weights = probe.ask(x, weights=True).weights
    if weights is None:
        raise CannotTry("it returned no weights when asked")
    rows = weights.double().sum(-1)
    off = (rows - 1).abs()
    # a sum of T rounded numbers, each at most 1
    if float(off.max()) <= 2 * T * torch.finfo(weights.dtype).eps and bool((weights >= 0).all()):
        return []
    b, h, i = (int(n) for n in torch.unravel_index(off.argmax(), off.shape))
    columns = weights.double().sum(-2)
    evenly = float((columns - 1).abs().max()) <= 2 * T * torch.finfo(weights.dtype).eps
    alone = T > 1 and bool((weights == 1).all())  # over an axis of size 1, such as the batch
    name = "softmax-axis" if evenly or alone else "weights-sum"
    sentence = f"The weights of query {i}, head {h} sum to {float(rows[b, h, i]):.6g}"
    sentence += (
        ", and those of each key to 1." if evenly else ": each of them is 1." if alone else "."
    )
    return [finding(name, sentence, {"T": T, "head": h, "query": i}, 1.0, float(rows[b, h, i]))]
