"""One row of one head: its scores link by link, its softmax, and what other rows are mixed with it.

A `HeadRow` comes from a recorded call of a softmax kernel, or from the mechanism itself where no
such kernel ran (`regard.nn.explainable.EffectiveRow`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.caches import Parts
from regard.inspect.explain.capture import Capture, QueryCall
from regard.inspect.explain.explanation import (
    EQUATIONS,
    Array,
    Block,
    Mixture,
    SoftmaxRow,
    State,
    Step,
    Term,
)
from regard.nn.explainable import CallWeights, EffectiveRow, Explainable, LayerRun

Checks: TypeAlias = dict[str, float]
"""What was compared -> the largest difference."""

LEAST_BLOCK, BLOCKS = 4, 8
"""Keys that the online softmax takes together, at least; and into how many blocks it cuts a row, at
most.
"""


class ScoreFunction(NamedTuple):
    """One score's function of the row: q [D], k [n,D], and what happens to q . k on its way.

    bias: [n], or None. visible: [n].
    """

    q: Array
    k: Array
    scale: float
    softcap: float | None
    bias: Array | None
    visible: NDArray[np.bool_]

    def steps(self) -> tuple[Step, ...]:
        """The scores [n] behind each link."""
        s: Array = self.k @ self.q
        steps = [Step("dot", EQUATIONS["dot"], s)]

        def then(name: str, s: Array) -> Array:
            steps.append(Step(name, EQUATIONS[name], s))
            return s

        s = then("scaled", self.scale * s)
        if self.softcap is not None:
            s = then("capped", self.softcap * np.tanh(s / self.softcap))
        if self.bias is not None:
            s = then("biased", s + self.bias)
        then("masked", np.where(self.visible, s, -np.inf))
        return tuple(steps)


@dataclass(frozen=True, eq=False)
class KernelRow:
    """One head of a call: `chain`, values v [n,E], the sink's logit, and what the kernel answered:
    lse and out [E].
    """

    call: QueryCall
    head: int
    chain: ScoreFunction
    v: Array
    sink: float | None
    lse: float
    out: Array

    @property
    def group(self) -> int:
        """h // (H/G)."""
        return self.head // (self.call.place.H // self.call.groups)


def row_of(call: QueryCall, head: int) -> KernelRow:
    """The row of a head in a call, in float64."""
    step, place, i = call.step, call.place, call.row
    group = head // (place.H // call.groups)
    bias, where = None, (step.q_positions, step.k_positions, slice(i, i + 1))
    if step.bias is not None:
        bias = array(_head(step.bias.block(*where, dtype=torch.float64), head))
    visible = _head(step.mask.block(*where), head).numpy()
    chain = ScoreFunction(
        array(step.q[0, head, i]),
        array(place.keys(step)[0, group]),
        step.scale,
        step.softcap,
        bias,
        visible,
    )
    values = place.values(step)
    assert values is not None, "a watch keeps values"
    assert step.out is not None, "and outputs"
    sink = None if step.sink is None else float(step.sink[head])
    return KernelRow(
        call,
        head,
        chain,
        array(values[0, group]),
        sink,
        float(step.lse[0, head, i]),
        array(step.out[0, head, i]),
    )


def scored(row: KernelRow) -> tuple[tuple[Step, ...], SoftmaxRow, Checks]:
    """The chain of scores, the softmax, and how far the kernel's own answers are from it."""
    steps = row.chain.steps()
    ours = softmax(steps[-1].values, row.sink)
    denominator = row.lse if row.sink is None else float(np.logaddexp(row.lse, row.sink))
    with np.errstate(invalid="ignore"):
        theirs = np.where(np.isneginf(steps[-1].values), 0, np.exp(steps[-1].values - denominator))
    rest = 0.0 if row.sink is None else float(np.exp(row.sink - denominator))
    seen = bool(row.chain.visible.any())
    blocks = online(steps[-1].values, values_seen(row))
    lse, z = finish_online(blocks, row.sink)
    mixed = ours.weights @ values_seen(row)
    checks = {
        "weights against exp(s - lse) of the kernel": apart(ours.weights, theirs),
        "row sum of exp(s - lse) of the kernel against 1": abs(float(theirs.sum()) + rest - 1)
        if seen
        else 0.0,
        "lse of the kernel": apart(np.array(ours.lse), np.array(row.lse)),
        "output of the kernel": apart(mixed, row.out),
        "online softmax": max(apart(np.array(lse), np.array(ours.lse)), apart(z, mixed)),
    }
    return steps, replace(ours, sink=row.sink, online=blocks), checks


def values_seen(row: KernelRow) -> Array:
    """Values [n,E], 0 where the mask says no: what is masked may hold anything."""
    return np.where(row.chain.visible[:, None], row.v, 0.0)


def softmax(s: Array, sink: float | None = None) -> SoftmaxRow:
    """Each part of the softmax of a row of scores: m, exp(s - m), their sum, ln sum exp(s), and the
    weights.

    The sink is one more term of the denominator of the weights; it is not in the sum, nor in the
    lse.

    >>> found = softmax(np.array([0.0, 0.0, -np.inf]))
    >>> found.row_max, found.total, found.weights.tolist()
    (0.0, 2.0, [0.5, 0.5, 0.0])
    """
    top = float(s.max(initial=-np.inf))
    if top == -np.inf:  # it sees nothing
        none = np.zeros_like(s)
        return SoftmaxRow(top, none, 0.0, top, none)
    exps = np.exp(s - top)
    total = float(exps.sum())
    lse = top + float(np.log(total))
    weights = exps / total if sink is None else np.exp(s - np.logaddexp(lse, sink))
    return SoftmaxRow(top, exps, total, lse, weights)


def online(s: Array, v: Array, size: int | None = None) -> tuple[Block, ...]:
    """Scores [n] and values [n,E] as a fused kernel goes through them: block by block, with a
    running maximum, sum and output.

    m' = max(m, max s);  l' = l exp(m - m') + sum exp(s - m');
    o' = o exp(m - m') + sum exp(s - m') v

    Behind the last block lse = m + ln l and z = o / l; a sink is one more term of l.

    >>> [(block.stop, block.total) for block in online(np.zeros(4), np.ones((4, 1)), 2)]
    [(2, 2.0), (4, 4.0)]
    """
    n = len(s)
    size = size or max(LEAST_BLOCK, 1 << (max(n - 1, 1) // BLOCKS).bit_length())
    m, total, o, found = -np.inf, 0.0, np.zeros(v.shape[1]), []
    for start in range(0, n, size):
        stop = min(start + size, n)
        part = s[start:stop]
        higher = max(m, float(part.max()))
        if higher > -np.inf:
            kept = float(np.exp(m - higher))
            e = np.exp(part - higher)
            total, o = total * kept + float(e.sum()), o * kept + e @ v[start:stop]
        else:
            kept = 1.0
        m = higher
        found.append(Block(start, stop, m, kept, total, o.copy()))
    return tuple(found)


def finish_online(blocks: tuple[Block, ...], sink: float | None = None) -> tuple[float, Array]:
    """lse and z at the end of the blocks.

    >>> finish_online(online(np.zeros(4), np.ones((4, 1)), 2), sink=0.0)[1].tolist()
    [0.8]
    """
    last = blocks[-1]
    if last.total == 0:
        return -np.inf, np.zeros_like(last.output)
    lse = last.top + float(np.log(last.total))
    share = 1.0 if sink is None else float(np.exp(lse - np.logaddexp(lse, sink)))
    return lse, last.output / last.total * share


def array(x: Tensor) -> Array:
    """A tensor as float64."""
    found: Array = x.detach().double().cpu().numpy()
    return found


def apart(x: Array, y: Tensor | Array) -> float:
    """The largest difference; 0 where both are the same infinity."""
    other = array(y) if isinstance(y, Tensor) else y
    same = x == other
    return float(np.abs(np.where(same, 0, x) - np.where(same, 0, other)).max(initial=0.0))


def _head(block: Tensor, head: int) -> Tensor:
    """[B or 1, H or 1, 1, n] -> [n] of the head."""
    return block[0, head if block.shape[1] > 1 else 0, 0]


def own_scores(found: EffectiveRow) -> tuple[tuple[Step, ...], SoftmaxRow]:
    """The scores and the weights that a mechanism tells of a row itself."""
    steps = tuple(
        Step(link.name, link.equation or EQUATIONS.get(link.name, ""), array(link.values))
        for link in found.scores
    )
    if found.weights is None:
        return steps, softmax(steps[-1].values)
    seen, weights = ~np.isneginf(steps[-1].values), array(found.weights)
    top, none = float(weights[seen].max(initial=-np.inf)), np.full(len(weights), np.nan)
    return steps, SoftmaxRow(top, none, float(weights[seen].sum()), float("nan"), weights)


def state_of(parts: Parts, before: Parts) -> State:
    """The state of a head, in numbers: its first part is the matrix S [D,E]."""
    S, old = array(parts[0]), array(before[0])
    sizes = np.linalg.svd(S, compute_uv=False) if S.ndim == 2 else np.abs(S)
    share = sizes / max(float(sizes.sum()), np.finfo(float).tiny)
    rank = float(np.exp(-(share * np.log(np.maximum(share, 1e-300))).sum()))
    numbers = sum(int(part.numel()) for part in parts)
    return State(
        tuple(S.shape),
        numbers,
        numbers * parts[0].element_size(),
        float(np.linalg.norm(S)),
        float(np.linalg.norm(old)),
        rank,
        S,
    )


def mixture(
    mechanism: Explainable,
    found: Capture,
    calls: Sequence[QueryCall],
    call: QueryCall,
    head: int,
    i: int,
    tokens: int,
) -> Mixture | None:
    """How the call's row enters what the head gives; None where it is all of it.

    Args:
        mechanism: the module that made the calls, which is asked first.
        found: the run.
        calls, call: the calls for the query, and the one that is explained.
        head, i: whose row.
        tokens: the tokens of the keys' sequence.
    """
    weights = [CallWeights(one.branch, torch.from_numpy(one.weights), one.keys) for one in calls]
    run = layer_run(found)
    told = mechanism.explain_mix(run, weights, list(calls).index(call), head, i)
    if told is not None:
        terms = tuple(Term(*term) for term in told.terms)
        return Mixture(told.text, terms, None if told.row is None else array(told.row))
    return _joined(found, calls, call, head, i, tokens) if len(calls) > 1 else None


def layer_run(found: Capture) -> LayerRun:
    """The run as a mechanism is asked about it."""
    taps = {name: values[None] for name, values in found.taps.items()}
    return LayerRun(found.hidden["x"][None], taps)


def _joined(
    found: Capture, calls: Sequence[QueryCall], call: QueryCall, head: int, i: int, tokens: int
) -> Mixture:
    """Several calls for one query: the last may replace the others, or all are joined by their lse.
    Measured, not assumed.
    """
    outs = [row_of(one, head).out for one in calls]
    z = array(found.taps["z"][head, i]) if "z" in found.taps else None
    lses = np.array([row_of(one, head).lse for one in calls])
    sink = row_of(call, head).sink
    total = np.logaddexp.reduce(lses if sink is None else np.append(lses, sink))
    with np.errstate(invalid="ignore"):
        shares = np.where(np.isneginf(lses), 0.0, np.exp(lses - total))
    joined = sum(share * out for share, out in zip(shares, outs, strict=True))
    scale = max(float(np.abs(x).max(initial=0.0)) for x in outs) or 1.0

    def goes_on(x: Array) -> bool:
        return z is not None and float(np.abs(x - z).max()) <= 1e-5 * scale

    same = [goes_on(out) for out in outs]
    if any(same) and not (goes_on(joined) and not same[-1]):
        last = len(same) - 1 - same[::-1].index(True)
        shares = np.array([float(n == last) for n in range(len(same))])
        text = (
            f"{len(calls)} calls for this query; the kernel's answer that goes on is that of "
            "one: the others are replaced"
        )
    else:
        text = (
            f"{len(calls)} calls for this query, joined exactly by their lse: one softmax over "
            "all their keys"
        )
    rows = [one.by_key(tokens).numpy()[head] for one in calls]
    terms = tuple(
        Term(f"call {n}", float(share), float(row.sum()), one is call)
        for n, (share, row, one) in enumerate(zip(shares, rows, calls, strict=True))
    )
    return Mixture(text, terms, sum(share * row for share, row in zip(shares, rows, strict=True)))
