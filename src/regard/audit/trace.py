"""Judge the attention that is found in a module's operations: its scale, softmax, bias, heads,
roles and rotary positions.

The definition needs projections that it can read. A trace needs none, because `regard.audit.graph`
finds attention in the recorded operations themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.audit.adapters.projections import role
from regard.audit.graph import (
    CLOSE,
    MAPS,
    MOVES,
    PRODUCTS,
    Core,
    Node,
    Tape,
    constant_of,
    find_attention,
    gain_of,
    operands,
)
from regard.audit.subject import Ask, CannotTry, Subject

LARGE = 1e3


@dataclass
class Seen:
    """One fault that a trace shows: its name, a sentence, and the numbers."""

    name: str
    sentence: str
    expected: float
    got: float


def traced(
    subject: Subject, x: Tensor, scale: float | None, dim: int, *, whole: bool = True
) -> list[Seen]:
    """The faults that the operations on tokens x [1,T,M] show; nothing where every step is right.

    `whole` is False for one query at a time against keys, whose scores may be of any kind: weights
    are judged alone.

    Raises:
        CannotTry: no attention is found in the operations, or one of them is not understood.
    """
    both = subject.traced()
    if both is None:
        raise CannotTry("its operations cannot be recorded")
    module, same = both
    with torch.no_grad(), Tape(module, x) as tape:
        same.ask(x, Ask())
    found: list[Seen] = []
    cores = find_attention(tape)
    for core in cores:
        found += _normalised(core)
        if core.additive or not whole:
            continue
        found += [
            *_scaled(core, x.shape[1], scale, dim),
            *_biased(core),
            *_roles(core),
            *_grouped(core),
        ]
        found += _joined(core, tape, len(cores))
    if whole:
        found += _of_their_tokens(subject, x, cores)
    unique = {seen.name: seen for seen in reversed(found)}
    return list(unique.values())


def softcap(subject: Subject, x: Tensor) -> float | None:
    """c, where the scores go through c tanh(scores / c)."""
    with torch.no_grad(), Tape(nn.Identity(), x) as tape:
        subject.ask(x, Ask())
    for node in tape.nodes:
        if node.name == "mul" and len(node.mixed) == 1 and node.mixed[0].name == "tanh":
            return constant_of(node)
    return None


def _of_their_tokens(subject: Subject, x: Tensor, cores: list[Core]) -> list[Seen]:
    """The query, the key and the value at each place come from the token there."""
    j, T = x.shape[1] // 2, x.shape[1]
    other = x.clone()
    other[:, j] = -x[:, j] + 0.5
    both = subject.traced()
    if both is None or T < 3 or any(core.additive for core in cores):
        return []
    with torch.no_grad(), Tape(both[0], other) as tape:
        both[1].ask(other, Ask())
    for core, again in zip(cores, find_attention(tape), strict=True):
        pairs = {
            "query": (core.query, again.query),
            "key": (core.key, again.key),
            "value": (core.value, again.value),
        }
        for name, (a, b) in pairs.items():
            axis = -1 if name == "key" and core.products else -2
            n = a.value.shape[axis]
            if a.value.shape != b.value.shape or n % T:
                raise CannotTry(f"a {name} for each token is not found in its operations")
            rows = (a.value != b.value).transpose(axis, -1).flatten(0, -2).any(0)
            if n > T:  # heads and tokens along one axis, in either order
                by_token = rows.view(T, n // T).any(1)
                rows = by_token if int(by_token.sum()) == 1 else rows.view(n // T, T).any(0)
            moved = rows.nonzero().flatten().tolist()
            if len(moved) == 1 and moved != [j]:
                sentence = f"The {name} at place {moved[0]} is made of token {j}."
                return [Seen("definition-differs", sentence, float(j), float(moved[0]))]
            if moved != [j]:
                raise CannotTry(f"its {name} at one place depends on {len(moved)} tokens")
    return []


def rotary(subject: Subject, x: Tensor) -> list[Seen]:
    """The faults of rotary positions: with equal tokens x, cosines of queries and keys depend on
    distance alone.
    """
    both = subject.traced()
    if both is None:
        return []
    module, same = both
    with torch.no_grad(), Tape(module, x) as tape:
        same.ask(x, Ask())
    T = x.shape[1]
    for core in find_attention(tape):
        turned = None if core.additive else _by_head(core.query, T)
        if turned is not None:
            return [turned]
        if (
            core.additive
            or core.query.value.shape[-2] != T
            or core.key.value.shape[-1 if core.products else -2] != T
        ):
            continue
        q = core.query.value
        k = core.key.value.transpose(-1, -2) if core.products else core.key.value
        v = core.value.value
        if v.shape[-2] == T and _varies(v) and _steady(v):
            return [
                Seen(
                    "rotary-values",
                    "Equal tokens have values that turn with their positions.",
                    0.0,
                    _spread(v),
                )
            ]
        if not (_varies(q) or _varies(k)) or not (_steady(q) and _steady(k)) or q.shape != k.shape:
            continue
        if _varies(q) != _varies(k):
            which = "queries" if _varies(q) else "keys"
            return [
                Seen(
                    "rotary-one-sided",
                    f"Only {which} turn with their positions.",
                    0.0,
                    _spread(q if _varies(q) else k),
                )
            ]
        if len(core.products) > 1:  # a part of each head is rotated, and the other one is not
            continue
        scores = q @ k.transpose(-1, -2)
        off = (scores[..., 1:, 1:] - scores[..., :-1, :-1]).abs()
        if float(off.max()) > 1e-4 * float(scores.abs().max()):
            first, then = (
                float(scores.flatten(0, -3)[0, 0, 0]),
                float(scores.flatten(0, -3)[0, 1, 1]),
            )
            return [
                Seen(
                    "rotary-not-relative",
                    "Equal tokens at equal distances have different scores.",
                    first,
                    then,
                )
            ]
    return []


def _by_head(node: Node, T: int) -> Seen | None:
    """A table of angles that differs by head and not by token."""
    while node.mixed and node.name not in MAPS:
        for table in node.inputs if node.name == "mul" else ():
            value, shape = table.value, node.value.shape
            if (
                table.tokens
                or table.weights
                or value.ndim < 3
                or T not in shape
                or not value.is_complex() | bool((value.abs() <= 1).all())
            ):
                continue
            axis = list(shape).index(T) - len(shape)
            other = next(
                (a for a in (-2, -3) if a != axis and value.ndim >= -a and value.shape[a] > 1), None
            )
            if other is None or (value.ndim >= -axis and value.shape[axis] == T):
                continue
            off = (value - value.select(other, 0).unsqueeze(other)).abs()
            if float(off[..., 1:].max()) > CLOSE:
                return Seen(
                    "rotary-axis",
                    "Queries are turned by a table that differs by head and not by token.",
                    0.0,
                    float(off.max()),
                )
        node = node.mixed[0]
    return None


def _varies(x: Tensor) -> bool:
    return _spread(x) > 1e-6 * float(x.abs().max())


def _spread(x: Tensor) -> float:
    return float((x - x[..., :1, :]).abs().max())


def _steady(x: Tensor) -> bool:
    """Whether the norms of vectors do not depend on their positions."""
    n = x.norm(dim=-1)
    return float((n - n[..., :1]).abs().max()) <= 1e-4 * float(n.max())


def _normalised(core: Core) -> Iterator[Seen]:
    """Each row of weights over the keys sums to 1, or to less where a sink has a share."""
    if core.weights is None or core.softmax is None:
        return
    rows, columns = core.weights.sum(-1), core.weights.sum(-2)
    rows = torch.where(rows == 0, 1.0, rows)  # a row that sees nothing
    ones = bool(((rows - 1).abs() < CLOSE).all())
    whole = core.softmax.value
    if ones and whole.numel() > core.weights.numel() and core.softmax.name != "exp":
        yield Seen(
            "sink-renormalised",
            "Weights beside a sink sum to 1: its share is given back.",
            1 - 1e-3,
            1.0,
        )
    if ones:
        return
    at = int((rows - 1).abs().argmax())
    got = float(rows.flatten()[at])
    if whole.numel() > core.weights.numel() and bool((rows <= 1 + CLOSE).all()):
        return  # a sink
    masked = (
        whole.numel() == core.weights.numel()
        and bool((core.weights == 0).any())
        and not bool((whole == 0).any())
    )
    if masked and bool((rows <= 1 + CLOSE).all()):
        yield Seen(
            "mask-after-softmax",
            f"Weights are set to 0 behind the softmax: a row sums to {got:.4g}.",
            1.0,
            got,
        )
    elif bool(((columns - 1).abs() < CLOSE).all()):
        yield Seen(
            "softmax-axis",
            f"The weights of a query sum to {got:.4g}, and those of each key to 1.",
            1.0,
            got,
        )
    elif core.softmax.name in ("_softmax", "_safe_softmax"):
        yield Seen(
            "softmax-axis", f"The weights of a query over its keys sum to {got:.4g}.", 1.0, got
        )
    else:
        raise CannotTry(
            "its weights do not sum to 1, and no plain softmax makes them: it may work in blocks"
        )


def _scaled(core: Core, T: int, scale: float | None, dim: int) -> Iterator[Seen]:
    """Products are multiplied by 1/sqrt(D), D being all that they sum over."""
    if core.free is not None:
        return
    if core.products:
        gains = []
        sizes = 0
        for product, factor in core.products:
            a, b = operands(product)
            gains.append(abs(factor * gain_of(a)[0] * gain_of(b)[0]))
            sizes += a.value.shape[-1]
        if max(gains) - min(gains) > CLOSE * max(gains):
            raise CannotTry("parts of its scores are scaled apart")
        got = gains[0]
        if product.name == "mm" and core.weights is None:
            return
    else:
        got, sizes = abs(float(core.out.options["gain"])), core.query.value.shape[-1]
    right = [1 / math.sqrt(n) for n in _sizes(core, sizes)] if scale is None else [scale]
    if any(abs(got - r) <= 1e-6 * r for r in right):
        return
    sentence = f"Products over {sizes} features are multiplied by {got:.6g}, not by {right[0]:.6g}."
    yield Seen(_scale_name(got, right[0], dim, T), sentence, right[0], got)


def _scale_name(got: float, right: float, dim: int, T: int) -> str:
    named = {
        "scale-missing": (1.0,),
        "scale-twice": (right * right,),
        "scale-wrong-dim": (dim**-0.5, T**-0.5),
        "scale-inverted": (1 / right,),
    }
    for name, values in named.items():
        if any(abs(got - value) <= 1e-6 * value for value in values):
            return name
    return "scale-wrong"


def _sizes(core: Core, size: int) -> list[int]:
    """The sizes that 1/sqrt may be of: what is summed over; of absorbed latents, the head before
    its own map, too.
    """
    found = [size]
    for node in (core.query, core.key):
        while node.name in MOVES and node.mixed:
            node = node.mixed[0]
        parts = node.mixed if node.name in ("cat", "stack") else [node]
        for part in parts:
            while part.name in MOVES and part.mixed:
                part = part.mixed[0]
            if part.name == "bmm" and part.weights:
                a, _ = operands(part)
                found.append(size - part.value.shape[-1] + a.value.shape[-1])
    return found


def _biased(core: Core) -> Iterator[Seen]:
    """A bias of positions falls with the distance, or is learned and added."""
    for node, sign in core.biases:
        value = node.value
        if value.ndim < 2 or value.shape[-1] != value.shape[-2] or not value.is_floating_point():
            continue
        T = value.shape[-1]
        i, j = torch.arange(T)[:, None], torch.arange(T)
        b = sign * value.reshape(-1, T, T).double()
        near = (b.abs() < LARGE) & (j < i)
        if T < 3 or not bool(near.any()):
            continue
        by_distance = [b[:, (i - j == d) & near.all(0)] for d in range(1, T)]
        means = torch.stack([x.mean(-1) for x in by_distance if x.numel()], -1)
        steps = means.diff(dim=-1)
        moving = steps.abs().amax(-1) > CLOSE
        if not bool(moving.any()):
            continue
        steps = steps[moving]
        if not node.weights and bool((steps > 0).all()):
            sentence = (
                "A bias of positions grows with the distance, so that far keys are preferred."
            )
            yield Seen(
                "bias-sign", sentence, float(-means[moving][0, -1]), float(means[moving][0, -1])
            )
        elif node.weights and sign * _sign(node) < 0 and not bool((steps < 0).all()):
            yield Seen(
                "bias-sign",
                "A learned bias is subtracted from the scores.",
                float(-means[moving][0, 0]),
                float(means[moving][0, 0]),
            )


def _sign(node: Node) -> float:
    """With which sign a learned table stands in a bias."""
    sign = 1.0
    while node.name not in ("embedding", "parameter", *PRODUCTS):
        inner = [n for n in node.inputs if n.weights]
        if not inner:
            break
        if node.name == "neg":
            sign = -sign
        elif node.name in ("mul", "div"):
            others = [n for n in node.inputs if not n.weights]
            number = (
                float(others[0].value)
                if others and others[0].value.numel() == 1
                else node.scalars[0]
                if node.scalars
                else 1.0
            )
            sign = -sign if number < 0 else sign
        elif node.name in ("sub", "rsub") and node.inputs[0] is not inner[0]:
            sign = -sign
        node = inner[0]
    return sign


def _roles(core: Core) -> Iterator[Seen]:
    """Queries, keys and values come from the maps of these names."""
    made = {}
    for name, node in (("q", core.query), ("k", core.key), ("v", core.value)):
        try:
            roles = {role(part) for weight in gain_of(node)[1] for part in weight.split(".")}
        except CannotTry:
            return
        made[name] = roles & {"q", "k", "v"}
    swaps = {"keys-values-exchanged": ("k", "v"), "queries-values-exchanged": ("q", "v")}
    if _upright(core):
        swaps["queries-keys-exchanged"] = ("q", "k")
    for fault, (a, b) in swaps.items():
        if made[a] == {b} and made[b] == {a}:
            yield Seen(
                fault, f"The map named for {b} makes {a}, and the other way round.", 0.0, 1.0
            )


def _upright(core: Core) -> bool:
    """Whether the rows of the product are the rows of the weights: the first operand makes
    queries.
    """
    if core.weights is None:
        return True
    scores = core.products[0][0].value * core.products[0][1]
    if len(core.products) > 1 or scores.shape != core.weights.shape:
        return False
    hidden = core.weights == 0
    tries = [
        torch.softmax(s.masked_fill(hidden, -torch.inf), -1)
        for s in (scores, scores.transpose(-1, -2))
    ]
    off = [float(_finite(p - core.weights).abs().max()) for p in tries]
    return off[0] < CLOSE < off[1]


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)


def _grouped(core: Core) -> Iterator[Seen]:
    """Adjacent query heads share a key head."""
    k = core.key.value
    k = k.flatten(0, -3) if k.ndim > 3 else k
    H = k.shape[0]
    if H < 4:
        return
    same = (k[:, None] - k[None]).abs().flatten(2).amax(-1) == 0
    G = len({tuple(row.tolist()) for row in same})
    if not 1 < G < H or H % G:
        return
    h = torch.arange(H)
    if torch.equal(same, (h[:, None] % G) == (h % G)) and not torch.equal(
        same, (h[:, None] // (H // G)) == (h // (H // G))
    ):
        yield Seen(
            "gqa-head-order",
            f"Query heads 0 and {G} share a key head, and 0 and 1 do not.",
            0.0,
            float(G),
        )


def _joined(core: Core, tape: Tape, count: int) -> Iterator[Seen]:
    """Heads are joined token by token before the output map, or in the output."""
    z = core.out.value
    z = z.flatten(0, -3) if z.ndim > 3 else z
    if z.ndim != 3 or z.shape[0] < 2 or count > 1:
        return
    rows, right = z.reshape(z.shape[1], -1), z.transpose(0, 1).reshape(z.shape[1], -1)
    entries = [n.mixed[0] for n in tape.nodes if n.name in MAPS and n.weights and len(n.mixed) == 1]
    for node in [*entries, tape.nodes[-1]]:
        if node.value.numel() != z.numel():
            continue
        given = node.value.reshape(rows.shape[0], -1)
        if torch.equal(given, right):
            return
        if torch.equal(given, rows):
            at = int((rows - right).abs().argmax())
            yield Seen(
                "heads-joined",
                "What enters the output map mixes tokens.",
                float(right.flatten()[at]),
                float(rows.flatten()[at]),
            )
            return
        gate = given / right
        if bool(((gate >= 0) & (gate <= 1)).all()):
            return
    raise CannotTry(
        "something stands between its heads and its output map, such as a gate or a norm"
    )
