"""The pattern of what has none: a row of the matrix that a recurrence applies to the values, and
its state.

Whatever a recurrence does with queries, keys, gates and decays, it is linear in the values: z_i =
sum_j a_ij v_j. So the row a_i is what the module's own rule gives for values that are unit vectors,
a block of keys at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.inspect.equations import EQUATIONS
from regard.inspect.parts import Array, State, Step
from regard.inspect.row import Checks, Fields, apart, array
from regard.nn.recurrent import Features, Recurrent

COLUMNS = 64
"""Keys whose columns are computed together: the rule runs once for each block."""


def effective_row(
    mix: Callable[[Tensor], Tensor], v: Tensor, head: int, i: int, columns: int = COLUMNS
) -> Array:
    """a_i [n]: what head `head` of query i has of each value.

    Args:
        mix: values [1,G,S,E'] -> what the queries read [1,H,T,E'], linear in the values.
        v: the values [1,G,S,E] of the call; their shape and dtype.
        head, i: whose row.
        columns: keys in a block.

    >>> pattern = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    >>> effective_row(lambda v: pattern @ v, torch.zeros(1, 1, 2, 3), 0, 1).tolist()
    [0.25, 0.75]
    """
    _, G, S, _ = v.shape
    found = np.zeros(S)
    for start in range(0, min(S, i + 1), columns):
        stop = min(start + columns, S)
        unit = v.new_zeros(1, G, S, stop - start)
        unit[:, :, torch.arange(start, stop), torch.arange(stop - start)] = 1
        found[start:stop] = array(mix(unit)[0, head, i])
    return found


@dataclass(frozen=True, eq=False)
class Rule:
    """A recurrence as it was called: x, q, k, v, state, positions, form; and what it read, z
    [H,T,E].
    """

    mixer: Recurrent
    given: tuple[Any, ...]
    read: Tensor

    def run(self, v: Tensor, upto: int | None = None) -> Any:
        """The rule on other values, or on the first tokens only."""
        x, q, k, _, state, positions, _ = self.given
        if upto is not None:
            x, q, k, v, positions = (
                x[:, :upto],
                q[:, :, :upto],
                k[:, :, :upto],
                v[:, :, :upto],
                positions[:upto],
            )
        return self.mixer.rule(x, q, k, v, state, positions, "auto")


def recurrent(
    mixer: Recurrent, called: tuple[tuple[Any, ...], Any] | None, head: int, i: int
) -> tuple[Fields, Checks]:
    """The row of a recurrence: q . k, what is left of each value, and the state behind the
    query.
    """
    if called is None:
        raise ArgumentError("the recurrence was not called; nothing was recorded")
    given, (read, _) = called
    rule = Rule(mixer, given, read)
    _, q, k, v = given[:4]
    n, group = i + 1, head // (q.shape[1] // k.shape[1])
    row = effective_row(lambda unit: rule.run(unit)[0], v, head, i)
    dots = array(k[0, group]) @ array(q[0, head, i])
    visible, scale = np.arange(len(row)) <= i, scale_of(mixer, q.shape[-1])
    values = array(v[0, group])
    checks = {"output of the recurrence": apart(row @ values, read[0, head, i])}
    steps = [Step("dot", EQUATIONS["dot"], dots)]
    if isinstance(mixer.rule, Features):
        steps.append(Step("unnormalised", "a_ij = φ(q_i) · φ(k_j)", unnormalised(rule, head, i)))
    else:
        steps.append(Step("scaled", EQUATIONS["scaled"], scale * dots))
    steps.append(Step("effective", EQUATIONS["effective"], np.where(visible, row, -np.inf)))
    _, state = rule.run(v, upto=n)
    before = rule.run(v, upto=i)[1] if i else tuple(torch.zeros_like(part) for part in state)
    return {
        "kind": "linear",
        "scale": scale,
        "sink": None,
        "scores": tuple(steps),
        "weights": np.where(visible, row, 0.0),
        "row_max": float(row[:n].max()),
        "exps": np.full(len(row), np.nan),
        "total": float(row[:n].sum()),
        "lse": float("nan"),
        "online": (),
        "state": state_of(state, before, group),
        "q_row": array(q[0, head, i]),
        "k_rows": array(k[0, group]),
        "v": values,
        "visible": visible,
        "read": array(read[0, head, i]),
    }, checks


def scale_of(mixer: Recurrent, D: int) -> float:
    """The factor on q . k: 1/sqrt(D), but for linear attention, which has its own.

    >>> from regard.nn.variants import retention
    >>> scale_of(retention(32, 4), 4)
    0.5
    """
    rule = mixer.rule
    if isinstance(rule, Features):
        return 1.0 if rule.normalise else rule.scale
    return 1 / math.sqrt(D)


def unnormalised(rule: Rule, head: int, i: int) -> Array:
    """phi(q_i) . phi(k_j) [n] of linear attention: its row in front of the division by its sum."""
    own = rule.mixer.rule
    assert isinstance(own, Features)
    plain = Features(own.feature_map, normalise=False)
    x, q, k, v, _, positions, _ = rule.given
    found: Array = effective_row(
        lambda unit: plain(x, q, k, unit, None, positions, "auto")[0], v, head, i
    )
    return found


def state_of(parts: tuple[Tensor, ...], before: tuple[Tensor, ...], group: int) -> State:
    """The state of a head, in numbers: its first part is the matrix S [D,E]."""
    S, old = array(parts[0][0, group]), array(before[0][0, group])
    sizes = np.linalg.svd(S, compute_uv=False) if S.ndim == 2 else np.abs(S)
    share = sizes / max(float(sizes.sum()), np.finfo(float).tiny)
    rank = float(np.exp(-(share * np.log(np.maximum(share, 1e-300))).sum()))
    numbers = sum(int(part[0, group].numel()) for part in parts)
    return State(
        tuple(S.shape),
        numbers,
        numbers * parts[0].element_size(),
        float(np.linalg.norm(S)),
        float(np.linalg.norm(old)),
        rank,
        S,
    )
