"""The steps between the taps, computed by the model's own modules on captured inputs, and compared with what followed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.inspect.capture import Capture
from regard.inspect.equations import EQUATIONS
from regard.inspect.explanation import Array, Step
from regard.nn import Attention, Block, Heads, Separate
from regard.positions import Rotary
from regard.span import as_tensor

Fields: TypeAlias = dict[str, Any]
"""Some attributes of an `Explanation`."""
Checks: TypeAlias = dict[str, float]
"""What was compared -> the largest difference."""

MOST_CELLS = 32  # a side of a small pattern


@dataclass(frozen=True, eq=False)
class Place:
    """What was captured, and which query i of which head to look at; the head reads key/value head `group`."""

    c: Capture
    head: int
    i: int

    @property
    def group(self) -> int:
        """h // (H/G)."""
        return self.head // (self.c.q.shape[0] // self.c.k.shape[0])

    @property
    def attention(self) -> Attention:
        """The layer's attention."""
        found = self.c.block.attention
        assert isinstance(found, Attention), "projection_of has looked"
        return found


def projection_of(block: nn.Module, layer: int) -> Separate:
    """The projection of a layer, if it makes queries, keys and values from heads of their own."""
    project = getattr(getattr(block, "attention", None), "project", None)
    if not isinstance(block, Block) or not isinstance(project, Separate):
        kind = type(project or block).__name__
        raise ArgumentError(
            f"layer {layer} projects with {kind}; explain shows layers with separate queries, keys and values"
        )
    return project


def projected(at: Place) -> tuple[Fields, Checks]:
    """q, k and v, step by step, and the angles of the rotation."""
    c, project = at.c, projection_of(at.c.block, at.c.layer)
    q = _head(project.q, c, at.head, "q_i = W_Q x_i")
    k = _head(project.k, c, at.group, "k_j = W_K x_j")
    v = _head(project.v, c, at.group, "v_j = W_V x_j")
    layout, angles, turned = _angles(project.q, c)
    found = {
        "q": tuple(step._replace(values=step.values[at.i]) for step in q),
        "k": k, "v": array(c.v[at.group]), "layout": layout, "angles": angles,
    }  # fmt: skip
    checks = {
        "q": apart(q[-1].values, c.q[at.head]),
        "k": apart(k[-1].values, c.k[at.group]),
        "v": apart(v[-1].values, c.v[at.group]),
    }
    return found, checks | ({"angles": turned} if layout else {})


def _head(heads: Heads, c: Capture, n: int, equation: str) -> tuple[Step, ...]:
    """Head n of a projection: the linear map, then each of its steps; values [T,d]."""
    x = heads.flat(heads.linear(c.normed[None])).unflatten(-1, (heads.heads, heads.head_dim))
    x = x.transpose(1, 2)
    found = [Step("projected", equation, array(x[0, n]))]
    letter = equation[:3]
    for step in heads.steps:
        x = step(x, c.positions)
        name, how = (
            ("rotated", "R(p)") if isinstance(step, Rotary) else (_lower(step), _lower(step))
        )
        found.append(Step(name, f"{letter} ← {how} {letter}", array(x[0, n])))
    return tuple(found)


def _angles(heads: Heads, c: Capture) -> tuple[str, Array, float]:
    """The pairs' layout, their angles [T,n], and how far the module's own rotation is from them."""
    rotary = next((step for step in heads.steps if isinstance(step, Rotary)), None)
    if rotary is None:
        return "", np.zeros((len(c.ids), 0)), 0.0
    n = rotary.inv_freq.shape[0]
    unit = c.q.new_zeros(1, 1, len(c.ids), heads.head_dim)
    first = slice(0, n) if rotary.layout == "half" else slice(0, 2 * n, 2)
    second = slice(n, 2 * n) if rotary.layout == "half" else slice(1, 2 * n, 2)
    unit[..., first] = 1  # the pair (1, 0) turns into (cos, sin)
    turned = array(rotary(unit, c.positions)[0, 0])
    cos, sin = turned[:, first], turned[:, second]
    if rotary.follows:  # the frequencies are those of the call, which only the module knows
        return rotary.layout, np.arctan2(sin, cos), 0.0
    angles = array(as_tensor(c.positions)[0, :, None] * rotary.inv_freq.cpu())
    factor = rotary.rotary_factor
    off = max(apart(cos, factor * np.cos(angles)), apart(sin, factor * np.sin(angles)))
    return rotary.layout, angles, off


def scored(at: Place) -> tuple[Fields, Checks]:
    """The chain of scores of the query, dot -> scale -> softcap -> bias -> mask, and the softmax of the row."""
    c, a = at.c, at.attention
    scale = c.q.shape[-1] ** -0.5 if a.scale is None else a.scale
    s: Array = array(c.k[at.group]) @ array(c.q[at.head, at.i])
    steps = [Step("dot", EQUATIONS["dot"], s)]

    def then(name: str, s: Array) -> Array:
        steps.append(Step(name, EQUATIONS[name], s))
        return s

    s = then("scaled", scale * s)
    if a.softcap is not None:
        s = then("capped", a.softcap * np.tanh(s / a.softcap))
    if a.bias is not None:
        query = slice(at.i, at.i + 1)
        bias = a.bias.block(c.positions, c.positions, query, dtype=torch.float64)[0]
        s = then("biased", s + array(bias[at.head if bias.shape[0] > 1 else 0, 0]))
    visible = ~np.isneginf(array(c.scores[at.head, at.i]))
    s = then("masked", np.where(visible, s, -np.inf))
    sink = None if a.sink is None else float(a.sink[at.head])
    row = softmax(s, sink)
    checks = {
        "scores": apart(s, c.scores[at.head, at.i]),
        "weights": apart(row["weights"], c.pattern[at.head, at.i]),
        "row sum": abs(float(array(c.pattern[at.head, at.i]).sum()) - float(row["weights"].sum())),
    }
    return {"scale": scale, "sink": sink, "scores": tuple(steps), **row}, checks


def softmax(s: Array, sink: float | None = None) -> Fields:
    """Each part of the softmax of a row of scores: m, exp(s - m), their sum, ln sum exp(s), and the weights.

    The sink is one more term of the denominator of the weights; it is not in the sum, nor in the lse.

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
    below = total if sink is None else total + float(np.exp(sink - top))
    weights, lse = exps / below, top + float(np.log(total))
    return {"row_max": top, "exps": exps, "total": total, "lse": lse, "weights": weights}


def mixed(at: Place, weights: Array) -> tuple[Fields, Checks]:
    """The weighted values, their sum, and what the head writes through its slice of the output projection."""
    c, i = at.c, at.i
    contributions = weights[:, None] * array(c.v[at.group])
    z, out = contributions.sum(0), array(c.out[i])
    written, bias = _written(at)
    found = {
        "contributions": contributions, "z": array(c.z[at.head, i]),
        "joined": array(c.z[:, i]).reshape(-1), "head_out": written[at.head],
        "shares": written @ out / max(float(out @ out), np.finfo(float).tiny),
        "out": out, "residual": array(c.residual[i]),
    }  # fmt: skip
    checks = {
        "z": apart(z, c.z[at.head, i]),
        "out": apart(written.sum(0) + bias, c.out[i]),
        "residual": apart(array(c.entering[i]) + out, c.residual[i]),
    }
    return found, checks


def _written(at: Place) -> tuple[Array, Array]:
    """What each head alone writes [H,M], through the output module, and what it writes for nothing (its bias) [M]."""
    z = at.c.z[:, at.i]
    alone = (
        torch.diag_embed(z.T).permute(1, 2, 0).flatten(1)
    )  # [H, H*E]: row h has head h, the rest 0
    rows = torch.cat([alone, torch.zeros_like(alone[:1])])
    found = array(at.attention.output(rows[:, None])[:, 0])
    return found[:-1] - found[-1], found[-1]


def pool_largest(patterns: Array, most: int = MOST_CELLS) -> tuple[int, Array]:
    """Patterns [H,T,T] with NaN where masked -> (n, [H,t,t]): each cell the largest of n x n; NaN where all are masked.

    >>> n, small = pool_largest(np.eye(4)[None], most=2)
    >>> n, small.tolist()
    (2, [[[1.0, 0.0], [0.0, 1.0]]])
    """
    H, T, _ = patterns.shape
    n = max(1, -(-T // most))
    t = -(-T // n)
    padded = np.full((H, t * n, t * n), np.nan)
    padded[:, :T, :T] = patterns
    filled = np.where(np.isnan(padded), -np.inf, padded).reshape(H, t, n, t, n).max((2, 4))
    return n, np.where(np.isneginf(filled), np.nan, filled)


def array(x: Tensor) -> Array:
    """A tensor as float64."""
    return x.detach().double().cpu().numpy()


def apart(x: Array, y: Tensor | Array) -> float:
    """The largest difference; 0 where both are the same infinity."""
    other = array(y) if isinstance(y, Tensor) else y
    same = x == other
    return float(np.abs(np.where(same, 0, x) - np.where(same, 0, other)).max(initial=0.0))


def _lower(module: nn.Module) -> str:
    return type(module).__name__.lower()
