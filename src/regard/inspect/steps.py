"""From weights to what the layer writes: values mixed, the head finished, its slice of the output,
and whole patterns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.inspect.calls import Call
from regard.inspect.capture import Capture
from regard.inspect.inputs import Ask, Inputs, inputs
from regard.inspect.parts import Array, Step
from regard.inspect.reading import Site
from regard.inspect.row import Checks, Fields, apart, array
from regard.positions import Rotary
from regard.span import Positions, as_tensor

MOST_CELLS = 32  # a side of a small pattern
ROWS = 256
"""Queries whose weights are computed together."""
MOST_PAIRS = 2**25
"""Query-key pairs of a pattern, over all its heads, up to which it is drawn."""


def projected(ask: Ask, q: Array, k: Array, v: Array) -> tuple[Fields, Checks]:
    """The steps of q, k and v, the last of each compared with what attention was given, q [D], k
    [n,D], v [n,E].
    """
    found = inputs(ask)
    given = {"q": q, "k": k, "v": v}
    steps, checks = {}, {}
    for name, made in (("q", found.q), ("k", found.k), ("v", found.v)):
        if name != "q" and made and len(made[-1].values) > len(k) and int(ask.held.min()) >= 0:
            made = tuple(
                s._replace(values=s.values[ask.held]) for s in made
            )  # the call had some keys only
        fits = bool(made) and made[-1].values.shape == given[name].shape
        if fits:
            checks[name] = apart(made[-1].values, given[name])
        index = "i" if name == "q" else "j"
        steps[name] = (
            made if fits else (Step("given", f"{name}_{index}, as attention got it", given[name]),)
        )
    angles, turned = _angles(found, ask, q.shape[0])
    fields = {"q": steps["q"], "k": steps["k"], "values": steps["v"], "v": v, **angles}
    return fields, checks | ({"angles": turned} if angles["layout"] else {})


def _angles(found: Inputs, ask: Ask, D: int) -> tuple[Fields, float]:
    """The pairs' layout and angles, and how far the module's own rotation is from them."""
    rotary = found.rotary
    n = len(as_tensor(ask.k_positions)[0])
    if rotary is None:
        return {
            "layout": "",
            "angles": np.zeros((n, 0)),
            "angle": np.zeros(0),
            "pairs": (-1,) * D,
        }, 0.0
    at, off = array(as_tensor(ask.k_positions)[0]), 0.0
    mine = float(as_tensor(ask.positions)[0, ask.i])
    if rotary.follows:  # the frequencies are those of the call, which only the module knows
        frequencies, _ = _turned(rotary, ask.positions, ask.i)
        angle = frequencies
        angles = np.zeros((n, 0))
    else:
        inv_freq = array(rotary.inv_freq)
        angle, angles = mine * inv_freq, at[:, None] * inv_freq
        turned, factor = _turned(rotary, ask.positions, ask.i)
        off = float(np.abs(np.exp(1j * turned) - np.exp(1j * angle)).max(initial=0.0))
        off = max(off, abs(factor - rotary.rotary_factor))
    pairs = [-1] * D
    count = len(angle)
    for pair in range(count):
        both = (pair, pair + count) if rotary.layout == "half" else (2 * pair, 2 * pair + 1)
        for dim in both:
            if found.first + dim < D:
                pairs[found.first + dim] = pair
    return {"layout": rotary.layout, "angles": angles, "angle": angle, "pairs": tuple(pairs)}, off


def _turned(rotary: Rotary, positions: Positions, i: int) -> tuple[Array, float]:
    """What the module does to the pairs (1, 0) of query i: the angles by which they turn, and the
    factor.
    """
    n, T = rotary.inv_freq.shape[0], as_tensor(positions).shape[1]
    unit = torch.zeros(1, 1, T, rotary.dim, dtype=torch.float32, device=rotary.inv_freq.device)
    first = slice(0, n) if rotary.layout == "half" else slice(0, 2 * n, 2)
    second = slice(n, 2 * n) if rotary.layout == "half" else slice(1, 2 * n, 2)
    unit[..., first] = 1
    turned = array(rotary(unit, positions)[0, 0, i])
    pairs = turned[first] + 1j * turned[second]
    return np.angle(pairs), float(np.abs(pairs).max(initial=1.0))


def mixed(
    weights: Array, v: Array, found: Capture, site: Site, head: int, i: int
) -> tuple[Fields, Checks]:
    """The weighted values, their sum, the finished head, and what it writes through its slice of
    the output projection.
    """
    contributions = np.where(weights[:, None] != 0, weights[:, None] * v, 0.0)
    joined, taps = found.taps["z"][:, i], found.taps
    slot = head % joined.shape[0]
    out = array(taps["out"][i])
    written, bias = _written(site.attention, joined)
    fields: Fields = {
        "contributions": contributions,
        "mixed": contributions.sum(0),
        "z": array(joined[slot]),
        "joined": array(joined).reshape(-1),
        "head_out": written[slot],
        "shares": written @ out / max(float(out @ out), np.finfo(float).tiny),
        "out": out,
    }
    checks = {"out": apart(written.sum(0) + bias, out)}
    if site.around is not None and "entering" in found.hidden:
        entering, residual = (found.hidden[name][i] for name in ("entering", "residual"))
        around = site.around(found.hidden["entering"][None], lambda _: taps["out"][None])[0, i]
        checks["residual"] = apart(array(around), residual)
        fields |= {"entering": array(entering), "residual": array(residual)}
    for name in ("embedding", "x"):
        if name in found.hidden and found.hidden[name].shape[0] > i:
            fields["normed" if name == "x" else name] = array(found.hidden[name][i])
    return fields, checks


def _written(attention: Any, joined: Tensor) -> tuple[Array, Array]:
    """What each head alone writes [H,M], through the output module, and what it writes for nothing
    (its bias) [M].
    """
    output: nn.Module = attention.output
    alone = (
        torch.diag_embed(joined.T).permute(1, 2, 0).flatten(1)
    )  # [H, H*E]: row h has head h, the rest 0
    rows = torch.cat([alone, torch.zeros_like(alone[:1])])
    found = array(output(rows[:, None])[:, 0])
    return found[:-1] - found[-1], found[-1]


def patterns(call: Call, head: int, whole: int) -> Fields:
    """The pattern of the head, if it has at most `whole` queries and keys, and small ones of every
    head.

    Of a long text only the small one of the head is made, some rows at a time; of a very long one
    none.
    """
    step = call.step
    H, T, S = len(call.weights), step.T, len(call.keys)
    short = max(T, S) <= whole
    heads = range(H) if short else range(head, head + 1)
    if len(heads) * T * S > MOST_PAIRS:
        return {"pattern": np.zeros((0, 0)), "pool": 0, "patterns": np.zeros((0, 0, 0))}
    n = max(1, -(-max(T, S) // MOST_CELLS))
    shape = (H, -(-T // n), -(-S // n))
    small, full = np.full(shape, np.nan), np.zeros((T if short else 0, S))
    for start in range(0, T, ROWS // n * n or n):
        rows = slice(start, min(start + (ROWS // n * n or n), T))
        s, p = (x[0].numpy() for x in call.place.part(step, rows, slice(0, S), tuple(heads)))
        part = np.where(np.isneginf(s), np.nan, p)
        small[list(heads), rows.start // n : -(-rows.stop // n)] = pool_largest(part, n)
        if short:
            full[rows] = part[head]
    return {"pattern": full, "pool": n, "patterns": small}


def pool_largest(blocks: Array, n: int) -> Array:
    """Patterns [H,T,S] with NaN where masked -> [H,t,s]: each cell the largest of n x n; NaN where
    all are masked.

    >>> pool_largest(np.eye(4)[None], 2).tolist()
    [[[1.0, 0.0], [0.0, 1.0]]]
    """
    H, T, S = blocks.shape
    t, s = -(-T // n), -(-S // n)
    padded = np.full((H, t * n, s * n), np.nan)
    padded[:, :T, :S] = blocks
    filled = np.where(np.isnan(padded), -np.inf, padded).reshape(H, t, n, s, n).max((2, 4))
    return np.where(np.isneginf(filled), np.nan, filled)
