"""How queries, keys and values came about: the steps of their projections, run again by the model's
own modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.inspect.parts import Array, Step
from regard.inspect.row import array
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
    y = heads.flat(heads.linear(x[None]))
    y = torch.unflatten(y, -1, (heads.heads, heads.head_dim)).transpose(1, 2)
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
