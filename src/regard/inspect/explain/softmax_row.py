"""The softmax of one query and head, link by link, from what was recorded: dot, scale, softcap,
bias, mask, softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from regard.inspect.explain.capture import Call
from regard.inspect.explain.explanation import EQUATIONS, Array, Block, Step

Fields: TypeAlias = dict[str, Any]
"""Some attributes of an `Explanation`."""
Checks: TypeAlias = dict[str, float]
"""What was compared -> the largest difference."""

LEAST_BLOCK, BLOCKS = 4, 8
"""Keys that the online softmax takes together, at least; and into how many blocks it cuts a row, at
most.
"""


class Chain(NamedTuple):
    """One score's function of the row: q [D], k [n,D], and what happens to q . k on its way.

    bias: [n], or None. visible: [n].
    """

    q: Array
    k: Array
    scale: float
    softcap: float | None
    bias: Array | None
    visible: Any

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
class Row:
    """One head of a call: `chain`, values v [n,E], the sink's logit, and what the kernel answered:
    lse and out [E].
    """

    call: Call
    head: int
    chain: Chain
    v: Array
    sink: float | None
    lse: float
    out: Array

    @property
    def group(self) -> int:
        """h // (H/G)."""
        return self.head // (self.call.place.H // self.call.groups)


def row_of(call: Call, head: int) -> Row:
    """The row of a head in a call, in float64."""
    step, place, i = call.step, call.place, call.row
    group = head // (place.H // call.groups)
    bias, where = None, (step.q_positions, step.k_positions, slice(i, i + 1))
    if step.bias is not None:
        bias = array(_head(step.bias.block(*where, dtype=torch.float64), head))
    visible = _head(step.mask.block(*where), head).numpy()
    chain = Chain(
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
    return Row(
        call,
        head,
        chain,
        array(values[0, group]),
        sink,
        float(step.lse[0, head, i]),
        array(step.out[0, head, i]),
    )


def scored(row: Row) -> tuple[Fields, Checks]:
    """The chain of scores, the softmax, and how far the kernel's own answers are from it."""
    steps = row.chain.steps()
    found = softmax(steps[-1].values, row.sink)
    ours = found["weights"]
    denominator = row.lse if row.sink is None else float(np.logaddexp(row.lse, row.sink))
    with np.errstate(invalid="ignore"):
        theirs = np.where(np.isneginf(steps[-1].values), 0, np.exp(steps[-1].values - denominator))
    rest = 0.0 if row.sink is None else float(np.exp(row.sink - denominator))
    seen = bool(row.chain.visible.any())
    checks = {
        "weights against exp(s - lse) of the kernel": apart(ours, theirs),
        "row sum of exp(s - lse) of the kernel against 1": abs(float(theirs.sum()) + rest - 1)
        if seen
        else 0.0,
        "lse of the kernel": apart(np.array(found["lse"]), np.array(row.lse)),
        "output of the kernel": apart(ours @ values_seen(row), row.out),
    }
    fields = {
        "scale": row.chain.scale,
        "sink": row.sink,
        "scores": steps,
        "online": online(steps[-1].values, values_seen(row)),
        **found,
    }
    return fields, checks


def values_seen(row: Row) -> Array:
    """Values [n,E], 0 where the mask says no: what is masked may hold anything."""
    return np.where(row.chain.visible[:, None], row.v, 0.0)


def softmax(s: Array, sink: float | None = None) -> Fields:
    """Each part of the softmax of a row of scores: m, exp(s - m), their sum, ln sum exp(s), and the
    weights.

    The sink is one more term of the denominator of the weights; it is not in the sum, nor in the
    lse.

    >>> found = softmax(np.array([0.0, 0.0, -np.inf]))
    >>> found["row_max"], found["total"], found["weights"].tolist()
    (0.0, 2.0, [0.5, 0.5, 0.0])
    """
    top = float(s.max(initial=-np.inf))
    if top == -np.inf:  # it sees nothing
        none = np.zeros_like(s)
        return {"row_max": top, "exps": none, "total": 0.0, "lse": top, "weights": none}
    exps = np.exp(s - top)
    total = float(exps.sum())
    lse = top + float(np.log(total))
    weights = exps / total if sink is None else np.exp(s - np.logaddexp(lse, sink))
    return {"row_max": top, "exps": exps, "total": total, "lse": lse, "weights": weights}


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
