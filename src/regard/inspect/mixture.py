"""Heads whose pattern is a mix: of several calls, of two heads, or of a softmax and a memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.inspect.calls import Call
from regard.inspect.capture import Capture
from regard.inspect.effective import effective_row
from regard.inspect.parts import Mixture, Term
from regard.inspect.reading import Site
from regard.inspect.row import array, row_of
from regard.nn.gated import Differential
from regard.nn.infini import InfiniAttention
from regard.nn.nsa import BRANCHES, NSA
from regard.ops.memory import infini_attention
from regard.span import Span


def mixture(
    found: Capture, site: Site, calls: list[Call], call: Call, head: int, i: int, n: int
) -> Mixture | None:
    """How the call's row enters what the head gives; None where it is all of it.

    n: the tokens of the keys' sequence.
    """
    attention: Any = site.attention
    project = getattr(attention, "project", None)
    if isinstance(attention, InfiniAttention):
        return _infini(attention, found, call, head, i)
    if isinstance(attention, NSA):
        return _gated(attention, found, calls, call, head, i)
    if isinstance(project, Differential):
        return _difference(project, call, head, n)
    if len(calls) > 1:
        return _several(found, calls, call, head, i, n)
    return None


def _difference(project: Differential, call: Call, head: int, n: int) -> Mixture:
    """Two softmaxes over the same values, the second taken off the first."""
    H = len(call.weights) // 2
    first, second, share = head % H, head % H + H, float(project.share)
    rows = call.by_key(n).numpy()
    return Mixture(
        f"the pattern of output head {first} is a difference of two softmaxes, λ = {share:.4f}: a "
        "weight may be "
        "negative, and the row sums to 1 - λ; then a norm, times 1 - λ₀",
        (
            Term(f"head {first}", 1.0, float(rows[first].sum()), head == first),
            Term(f"head {second}", -share, float(rows[second].sum()), head == second),
        ),
        rows[first] - share * rows[second],
    )


def _several(found: Capture, calls: list[Call], call: Call, head: int, i: int, n: int) -> Mixture:
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
    same = [z is not None and float(np.abs(out - z).max()) <= 1e-5 * scale for out in outs]
    if any(same) and not (
        z is not None and float(np.abs(joined - z).max()) <= 1e-5 * scale and not same[-1]
    ):
        shares = np.array(
            [float(k == len(same) - 1 - same[::-1].index(True)) for k in range(len(same))]
        )
        text = (
            f"{len(calls)} calls for this query; the kernel's answer that goes on is that of "
            "one: the others are replaced"
        )
    else:
        text = (
            f"{len(calls)} calls for this query, joined exactly by their lse: one softmax over "
            "all their keys"
        )
    rows = [one.by_key(n).numpy()[head] for one in calls]
    terms = tuple(
        Term(f"call {k}", float(share), float(row.sum()), one is call)
        for k, (share, row, one) in enumerate(zip(shares, rows, calls, strict=True))
    )
    return Mixture(text, terms, sum(share * row for share, row in zip(shares, rows, strict=True)))


def _gated(
    attention: NSA, found: Capture, calls: list[Call], call: Call, head: int, i: int
) -> Mixture:
    """Branches, each times its gate."""
    gate = attention.gate(found.hidden["x"][i]).sigmoid()
    gates = array(torch.unflatten(gate, -1, (3, -1)))[:, head]
    names = [one.place.name.rpartition(".")[2] for one in calls]
    terms = tuple(
        Term(name, float(gates[BRANCHES.index(name)]), float(one.weights[head].sum()), one is call)
        for name, one in zip(names, calls, strict=True)
    )
    return Mixture(
        "three branches with keys and values of their own, each times its gate; a weight of one "
        "is no share of the whole",
        terms,
        None,
    )


def _infini(attention: InfiniAttention, found: Capture, call: Call, head: int, i: int) -> Mixture:
    """A softmax inside the segment, and a memory of all segments before, mixed by a gate."""
    q, k, v = (found.taps[name][None] for name in ("q", "k", "v"))
    rotary, at = attention.rotary, Span(0, k.shape[2])

    def run(unit: Tensor, gate: Tensor) -> Tensor:
        return infini_attention(
            q,
            k,
            unit,
            gate=gate,
            segment=attention.segment,
            update=attention.update,
            empty=attention.empty,
            q_rotated=None if rotary is None else rotary(q, at),
            k_rotated=None if rotary is None else rotary(k, at),
            positions=at,
        )[0]

    gate = attention.gate
    whole = effective_row(lambda unit: run(unit, gate), v, head, i)
    memory = effective_row(lambda unit: run(unit, torch.full_like(gate, 1e4)), v, head, i)
    share = float(gate[head].sigmoid())
    local = call.by_key(len(whole)).numpy()[head]
    return Mixture(
        f"σ(gate) = {share:.4f} of a memory that all segments before wrote, the rest of the "
        "softmax in this segment",
        (
            Term("memory", share, float(memory.sum()), False),
            Term("softmax", 1 - share, float(local.sum()), True),
        ),
        whole,
    )
