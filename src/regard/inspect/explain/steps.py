"""What stands in front of the weights of a row and behind them: the steps that made q, k and v, the
values mixed, what the heads write, and whole patterns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from regard.inspect.explain.capture import Capture, QueryCall
from regard.inspect.explain.explanation import (
    Array,
    HeadOutput,
    HeadPatterns,
    HiddenStates,
    InputChain,
    RotaryAngles,
    Step,
)
from regard.inspect.explain.reading import Site
from regard.inspect.explain.row import Checks, apart, array
from regard.nn.explainable import ComputationSteps, Explainable, InputSteps, ProjectionQuery
from regard.positions import Rotary
from regard.span import Positions, as_tensor

MOST_CELLS = 32  # a side of a small pattern
ROWS = 256
"""Queries whose weights are computed together."""
MOST_PAIRS = 2**25
"""Query-key pairs of a pattern, over all its heads, up to which it is drawn."""


def projected(
    found: InputSteps,
    query: ProjectionQuery,
    head: int,
    group: int,
    given: tuple[Array, Array, Array],
    columns: Tensor,
) -> tuple[InputChain, Checks]:
    """The steps of q, k and v as the mechanism tells them, the last of each compared with what
    attention was given.

    Args:
        found: what the mechanism says of the inputs.
        query: what it was asked.
        head, group: the query head, and the key/value head that it reads.
        given: q [D], k [n,D] and v [n,E] as they were recorded.
        columns: which rows of the memory the call's keys are.
    """
    steps: dict[str, tuple[Step, ...]] = {}
    checks: Checks = {}
    for name, made, got in zip("qkv", (found.q, found.k, found.v), given, strict=True):
        if name == "q":
            chain = _of_head(made, head, row=query.row)
        else:
            chain = _of_head(made, group)
            if made and len(chain[-1].values) > len(got) and int(columns.min()) >= 0:
                # the call had some keys only
                chain = tuple(s._replace(values=s.values[columns]) for s in chain)
        fits = bool(chain) and chain[-1].values.shape == got.shape
        if fits:
            checks[name] = apart(chain[-1].values, got)
        index = "i" if name == "q" else "j"
        steps[name] = (
            chain if fits else (Step("given", f"{name}_{index}, as attention got it", got),)
        )
    angles, turned = _angles(found, query, len(given[0]))
    if angles.layout:
        checks["angles"] = turned
    return InputChain(steps["q"], steps["k"], steps["v"], given[2], angles), checks


def _of_head(links: ComputationSteps, head: int, row: int | None = None) -> tuple[Step, ...]:
    """One head of each step, and a row of it; a step that all heads share has one head."""

    def part(x: Tensor) -> Array:
        own = x[head % len(x)]
        return array(own if row is None else own[row])

    return tuple(Step(link.name, link.equation, part(link.values)) for link in links)


def _angles(found: InputSteps, query: ProjectionQuery, D: int) -> tuple[RotaryAngles, float]:
    """The pairs' layout and angles, and how far the module's own rotation is from them."""
    rotary, k_positions = found.rotary, as_tensor(query.k_positions)[0]
    n = len(k_positions)
    if rotary is None:
        return RotaryAngles("", np.zeros((n, 0)), np.zeros(0), (-1,) * D), 0.0
    mine = float(as_tensor(query.positions)[0, query.row])
    turned, factor = _turned(rotary, query.positions, query.row)
    off = 0.0
    if rotary.follows_length:  # the frequencies are those of the call, which only the module knows
        angle, angles = turned, np.zeros((n, 0))
    else:
        inv_freq = array(rotary.inv_freq)
        angle, angles = mine * inv_freq, array(k_positions)[:, None] * inv_freq
        off = float(np.abs(np.exp(1j * turned) - np.exp(1j * angle)).max(initial=0.0))
        off = max(off, abs(factor - rotary.rotary_factor))
    pairs, count = [-1] * D, len(angle)
    for pair in range(count):
        both = (pair, pair + count) if rotary.layout == "half" else (2 * pair, 2 * pair + 1)
        for dim in both:
            if found.rotary_start + dim < D:
                pairs[found.rotary_start + dim] = pair
    return RotaryAngles(rotary.layout, angles, angle, tuple(pairs)), off


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
    mechanism: Explainable, weights: Array, v: Array, found: Capture, head: int, i: int
) -> tuple[HeadOutput, Checks]:
    """The weighted values, their sum, the finished head, and what it writes through its slice of
    the output projection.
    """
    contributions = np.where(weights[:, None] != 0, weights[:, None] * v, 0.0)
    joined = found.taps["z"][:, i]
    slot = head % joined.shape[0]
    out = array(found.taps["out"][i])
    written, bias = _written(mechanism.output, joined)
    return HeadOutput(
        contributions,
        contributions.sum(0),
        array(joined[slot]),
        array(joined).reshape(-1),
        written[slot],
        written @ out / max(float(out @ out), np.finfo(float).tiny),
        out,
    ), {"out": apart(written.sum(0) + bias, out)}


def _written(output: nn.Module, joined: Tensor) -> tuple[Array, Array]:
    """What each head alone writes [H,M], through the output module, and what it writes for nothing
    (its bias) [M].
    """
    # [H, H*E]: row h has head h, the rest 0
    alone = torch.diag_embed(joined.T).permute(1, 2, 0).flatten(1)
    rows = torch.cat([alone, torch.zeros_like(alone[:1])])
    found = array(output(rows[:, None])[:, 0])
    return found[:-1] - found[-1], found[-1]


def hidden_states(found: Capture, site: Site, i: int) -> tuple[HiddenStates, Checks]:
    """The hidden state of the query on its way, and how far the residual path is from what came
    behind it.
    """
    hidden, checks = found.hidden, Checks()
    none: Array = np.zeros(0)
    entering = residual = none
    if site.around is not None and "entering" in hidden:
        entering, residual = (array(hidden[name][i]) for name in ("entering", "residual"))
        out = found.taps["out"][None]
        checks["residual"] = apart(
            array(site.around(hidden["entering"][None], lambda _: out)[0, i]), residual
        )
    embedding, normed = (
        array(hidden[name][i]) if name in hidden and len(hidden[name]) > i else none
        for name in ("embedding", "x")
    )
    return HiddenStates(embedding, entering, normed, residual), checks


def patterns(call: QueryCall, head: int, whole: int) -> HeadPatterns:
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
        return HeadPatterns()
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
    return HeadPatterns(full, n, small)


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
