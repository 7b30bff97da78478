"""How queries, keys and values came about: the steps of their projections, run again by the model's
own modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.inspect.explain.capture import Call, Capture
from regard.inspect.explain.explanation import Array, Step
from regard.inspect.explain.reading import Site
from regard.inspect.explain.softmax_row import Checks, Fields, apart, array
from regard.nn import Heads, Separate
from regard.nn.dynamic_rotary import RowRotary
from regard.nn.latent import Latent
from regard.nn.nsa import BRANCHES, NSA
from regard.nn.projections import Fused, States
from regard.nn.streaming import StreamingAttention
from regard.positions import Rotary, rotate
from regard.span import Positions, as_tensor

Steps = tuple[Step, ...]


class Ask(NamedTuple):
    """What is looked at: query row i of x [T,M], head and group, and all keys, of memory [S,M3]
    where that is another.

    branch: which of several calls at a site. width: the dims of the recorded key, which tell the
        form of a latent.
    held: the rows of the keys that the call had.
    """

    attention: nn.Module
    x: Tensor
    positions: Positions
    i: int
    memory: Tensor
    k_positions: Positions
    head: int
    group: int
    branch: int
    width: int
    held: Tensor


class Inputs(NamedTuple):
    """Steps of the query [D] and of the keys [n,D] and values [n,E]; () where the projection is of
    no known kind.

    rotary: the rotation of query and keys, and its first dim; or None.
    """

    q: Steps
    k: Steps
    v: Steps
    rotary: Rotary | None
    first: int = 0


def inputs(ask: Ask) -> Inputs:
    """The steps, where the projection is one that is known; the last of each is what attention was
    given.
    """
    attention: Any = ask.attention
    if isinstance(attention, NSA):
        return _nsa(attention, ask)
    project = getattr(attention, "project", None)
    if project is None:  # Longformer: the second projection is of global tokens
        project = attention.globally if ask.branch else getattr(attention, "local", None)
    while project is not None and not isinstance(project, _KINDS) and hasattr(project, "project"):
        project = project.project  # a gate around another
    if isinstance(project, Latent):
        return _latent(project, ask)
    if isinstance(attention, StreamingAttention) and ask.branch and isinstance(project, Separate):
        return _evicted(attention, _separate(project, ask, None), ask)
    if isinstance(project, Separate):
        return _separate(project, ask, getattr(attention, "rotary", None))
    if isinstance(project, Fused):
        return _fused(project, ask)
    if isinstance(project, States):
        return _states(project, ask)
    return Inputs((), (), (), None)


_KINDS = (Latent, Separate, Fused, States)


def heads_steps(
    heads: Heads, x: Tensor, positions: Positions | None, letter: str
) -> list[tuple[str, str, Tensor]]:
    """The linear map of `Heads`, then each of its steps: (name, equation, [1,n,L,d])."""
    y = (
        heads.flat(heads.linear(x[None]))
        .unflatten(-1, (heads.heads, heads.head_dim))
        .transpose(1, 2)
    )
    index = "i" if letter == "q" else "j"
    flat = "" if isinstance(heads.flat, nn.Identity) else f"{_lower(heads.flat)} "
    found = [("projected", f"{letter}_{index} = {flat}W_{letter.upper()} x_{index}", y)]
    return found + run_steps(heads.steps, y, positions, letter)


def run_steps(
    steps: Iterable[nn.Module], y: Tensor, positions: Positions | None, letter: str
) -> list[tuple[str, str, Tensor]]:
    """Steps on heads y [1,n,L,d], one behind the other."""
    found, index = [], "i" if letter == "q" else "j"
    for step in steps:
        y = step(y, positions)
        turns = isinstance(step, (Rotary, RowRotary))
        name, how = ("rotated", "R(p)") if turns else (_lower(step), _lower(step))
        found.append((name, f"{letter}_{index} ← {how} {letter}_{index}", y))
    return found


def _separate(project: Separate, ask: Ask, extra: nn.Module | None) -> Inputs:
    """Queries, keys and values from heads of their own; `extra` turns both behind them
    (Infini-attention).
    """
    q = heads_steps(project.q, ask.x, ask.positions, "q")
    k = heads_steps(project.k, ask.memory, ask.k_positions, "k")
    v = heads_steps(project.v, ask.memory, ask.k_positions, "v")
    late = [step for step in (project.late,) if step is not None]
    if late:
        q += run_steps(late, q[-1][2], ask.positions, "q")
        k += run_steps(late, k[-1][2], ask.k_positions, "k")
    if extra is not None:
        q += run_steps([extra], q[-1][2], ask.positions, "q")
        k += run_steps([extra], k[-1][2], ask.k_positions, "k")
    steps = [*project.q.steps, *late, *([extra] if extra is not None else [])]
    return Inputs(
        _of(q, ask.head, ask.i),
        _of(k, ask.group % k[-1][2].shape[1]),
        _of(v, ask.group % v[-1][2].shape[1]),
        _rotary(steps),
    )


def _evicted(attention: StreamingAttention, found: Inputs, ask: Ask) -> Inputs:
    """The call that sees the sinks: its query is turned back by what was evicted, so that they
    stand where the cache has them.
    """
    rotary = found.rotary
    assert rotary is not None, "the constructor has looked"
    evicted = max(
        int(as_tensor(ask.positions)[0, ask.i]) - (attention.sinks + attention.recent - 1), 0
    )
    q = torch.from_numpy(found.q[-1].values)[None, None, None]
    back = rotate(q, torch.tensor([[-evicted]]), rotary.inv_freq.cpu(), layout=rotary.layout)
    step = Step(
        "turned back",
        f"q_i ← R(-{evicted}) q_i, the tokens that were evicted",
        array(back[0, 0, 0]),
    )
    return found._replace(q=(*found.q, step))


def _fused(project: Fused, ask: Ask) -> Inputs:
    q, k, v = (project._heads(x[None], n) for n, x in enumerate((ask.x, ask.memory, ask.memory)))
    names = [("projected", f"{a}_{i} = W_{a.upper()} x_{i}") for a, i in ("qi", "kj", "vj")]
    queries = [(*names[0], q), *run_steps(project.steps, q, ask.positions, "q")]
    keys = [(*names[1], k), *run_steps(project.steps, k, ask.k_positions, "k")]
    return Inputs(
        _of(queries, ask.head, ask.i),
        _of(keys, ask.group),
        _of([(*names[2], v)], ask.group),
        _rotary(project.steps),
    )


def _states(project: States, ask: Ask) -> Inputs:
    q = ("projected", "q_i = W_Q s_i", project.query(ask.x[None], None))
    memory = project.remember(ask.memory[None], None)
    k, v = project.recall(memory, None)
    return Inputs(
        _of([q], ask.head, ask.i),
        _of([("projected", "k_j = W_K h_j", k)], ask.group),
        _of([("state", "v_j = h_j", v)], ask.group),
        None,
    )


def _latent(project: Latent, ask: Ask) -> Inputs:
    """Queries and keys through latents: expanded, or the queries absorbed, as the recorded dims
    say.
    """
    x, memory, r, n = ask.x[None], ask.memory[None], project.kv_rank, project.nope_dim
    q, h = project.q(x, ask.positions)[0, ask.head, ask.i], ask.head
    nope, turned = (part[0, h, ask.i] for part in project.parts(x, ask.positions))
    qs = [Step("projected", "q_i = [q_C; q_R] = W_UQ norm(W_DQ x_i)", array(q))]
    qs.append(Step("rotated", "q_R ← R(p) q_R", array(torch.cat((nope, turned)))))
    c, k_r = project.kv_down(memory).split((r, project.rotary.dim), -1)
    latent = project.kv_norm(c)[0]
    rotated = project.rotary(k_r[:, None], ask.k_positions)[0, 0]
    up = project.kv_up(latent[None], ask.k_positions)[0, h]
    ks = [
        Step("latent", "c_j = W_DKV x_j, and k_R", array(torch.cat((c, k_r), -1)[0])),
        Step(
            "remembered",
            "m_j = [norm(c_j); R(p) k_R]: what a cache keeps",
            array(torch.cat((latent, rotated), -1)),
        ),
    ]
    if ask.width == r + project.rotary.dim and ask.width != n + project.rotary.dim:
        w_k, _ = project.up()
        absorbed = torch.cat((torch.einsum("d,dr->r", nope, w_k[h]), turned))
        qs.append(
            Step(
                "absorbed",
                "q_i ← [W_UKᵀ q_C; q_R]: the query comes to the latents",
                array(absorbed),
            )
        )
        vs = (Step("latent", "v_j = norm(c_j), expanded by W_UV after the mix", array(latent)),)
        return Inputs(tuple(qs), tuple(ks), vs, project.rotary, r)
    ks.append(Step("expanded", "k_j = [W_UK c_j; k_R]", array(torch.cat((up[:, :n], rotated), -1))))
    vs = (Step("expanded", "v_j = W_UV c_j", array(up[:, n:])),)
    return Inputs(tuple(qs), tuple(ks), vs, project.rotary, n)


def _nsa(attention: NSA, ask: Ask) -> Inputs:
    q = heads_steps(attention.q, ask.x, ask.positions, "q")
    rotary = _rotary(attention.q.steps)
    if ask.branch == BRANCHES.index("compressed"):
        return Inputs(_of(q, ask.head, ask.i), (), (), rotary)  # keys are blocks, not tokens
    keys, values = attention.keys[ask.branch], attention.values[ask.branch]
    assert isinstance(keys, Heads)
    assert isinstance(values, Heads)
    k = heads_steps(keys, ask.memory, ask.k_positions, "k")
    v = heads_steps(values, ask.memory, ask.k_positions, "v")
    return Inputs(_of(q, ask.head, ask.i), _of(k, ask.group), _of(v, ask.group), rotary)


def _of(steps: list[tuple[str, str, Tensor]], n: int, row: int | None = None) -> Steps:
    """Head n of each step, and a row of it."""

    def part(x: Tensor) -> Array:
        return array(x[0, n] if row is None else x[0, n, row])

    return tuple(Step(name, equation, part(x)) for name, equation, x in steps)


def _rotary(steps: Iterable[nn.Module]) -> Rotary | None:
    for step in steps:
        if isinstance(step, Rotary):
            return step
        if isinstance(step, RowRotary):
            return step.rotary
    return None


def _lower(module: nn.Module) -> str:
    return type(module).__name__.lower()


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
