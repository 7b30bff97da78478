"""The recurrences with decayed sums under test: how to run each, its definition, and the same as
somebody would type it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.linear import (
    PowerFeatures,
    TaylorFeatures,
    cosine_features,
    gated_slots,
    linear_attention,
    log_linear,
    mlstm,
    rwkv4,
    rwkv6,
)
from tests.oracles import decayed

State = tuple[Tensor, ...]
Inputs = dict[str, Tensor]
PERIOD = 160
"""Longer than every text of the tests."""


class Recurrence(NamedTuple):
    """draw(B, H, G, T, scale) -> inputs;  run(inputs, **options) -> (out, state);
    exact(row, tokens) -> [T, E] for one head;  plain(inputs) -> outputs in the dtype of the
    inputs, by sums in several orders.
    """

    draw: Callable[..., Inputs]
    run: Callable[..., tuple[Tensor, State]]
    exact: Callable[[Inputs, Sequence[int]], Tensor]
    plain: Callable[[Inputs], list[Tensor]]


def heads(B: int, H: int, G: int, T: int, scale: float, D: int = 4, E: int = 3) -> Inputs:
    make: Any = {"dtype": torch.float64}
    return {
        "q": torch.randn(B, H, T, D, **make) * scale,
        "k": torch.randn(B, G, T, D, **make) * scale,
        "v": torch.randn(B, G, T, E, **make) * scale,
    }


def draw_rwkv6(B: int, H: int, G: int, T: int, scale: float) -> Inputs:
    made = heads(B, H, G, T, scale)
    bonus = torch.randn(G, 4, dtype=torch.float64)
    return {**made, "log_decay": -torch.randn_like(made["k"]).mul(2).exp(), "bonus": bonus}


def draw_rwkv4(B: int, H: int, G: int, T: int, scale: float) -> Inputs:
    made = heads(B, G, G, T, scale, D=3)
    decay = -torch.randn(G, 3, dtype=torch.float64).exp()
    bonus = torch.randn(G, 3, dtype=torch.float64)
    return {"k": made["k"], "v": made["v"], "log_decay": decay, "bonus": bonus}


def draw_mlstm(B: int, H: int, G: int, T: int, scale: float) -> Inputs:
    write, forget = (torch.randn(B, G, T, dtype=torch.float64) for _ in "if")
    return {**heads(B, H, G, T, scale), "log_input": 3 * write, "log_forget": -forget.exp()}


def draw_slots(B: int, H: int, G: int, T: int, scale: float) -> Inputs:
    g = -torch.randn(B, G, T, 5, dtype=torch.float64).mul(1.5).exp()
    return {**heads(B, H, G, T, scale), "log_decay": g}


def draw_log_linear(B: int, H: int, G: int, T: int, scale: float) -> Inputs:
    """As many query heads as key heads, and four levels."""
    g = -torch.randn(B, G, T, 1, dtype=torch.float64).exp()
    weights = torch.rand(B, G, T, 4, dtype=torch.float64)
    return {**heads(B, G, G, T, scale), "log_decay": g, "level_weights": weights}


def loop_rwkv6(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, *, apart: bool
) -> Tensor:
    """As somebody would type it; the heads are equal in number. With `apart`, as in the following
    loops, the same in another order.
    """
    S, rows = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[2]):
        written = k[:, :, t, :, None] * v[:, :, t, None]
        query = q[:, :, t, None]
        if apart:
            own = (query[:, :, 0] * bonus * k[:, :, t]).sum(-1)[..., None, None]
            rows.append(own * v[:, :, t, None] + query @ S)
        else:
            rows.append(query @ (S + bonus[..., None] * written))
        S = S * log_decay[:, :, t, :, None].exp() + written
    return torch.cat(rows, 2)


def loop_rwkv4(k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, *, apart: bool) -> Tensor:
    a, b, rows = torch.zeros_like(k[:, :, 0]), torch.zeros_like(k[:, :, 0]), []
    m = torch.full_like(a, -1e30)
    for t in range(k.shape[2]):
        key, value = k[:, :, t], v[:, :, t]
        top = torch.maximum(m, bonus + key)
        old, new = (m - top).exp(), (bonus + key - top).exp()
        below = old * b + new
        if apart:
            rows.append(old / below * a + new / below * value)
        else:
            rows.append((old * a + new * value) / below)
        top = torch.maximum(m + log_decay, key)
        old, new = (m + log_decay - top).exp(), (key - top).exp()
        a, b, m = old * a + new * value, old * b + new, top
    return torch.stack(rows, 2)


def loop_mlstm(
    q: Tensor, k: Tensor, v: Tensor, log_input: Tensor, log_forget: Tensor, *, apart: bool
) -> Tensor:
    B, H, T, D = q.shape
    C, n, m = q.new_zeros(B, H, D, v.shape[3]), q.new_zeros(B, H, D), q.new_zeros(B, H)
    rows, queries = [], q / math.sqrt(D)
    for t in range(T):
        top = torch.maximum(log_forget[:, :, t] + m, log_input[:, :, t])
        f, i = (log_forget[:, :, t] + m - top).exp(), (log_input[:, :, t] - top).exp()
        if apart:
            f = (log_forget[:, :, t] + (m - top)).exp()
        C = f[..., None, None] * C + i[..., None, None] * k[:, :, t, :, None] * v[:, :, t, None]
        n, m = f[..., None] * n + i[..., None] * k[:, :, t], top
        bound = torch.maximum((queries[:, :, t] * n).sum(-1).abs(), (-m).exp())
        rows.append((queries[:, :, t, None] @ C)[:, :, 0] / bound[..., None])
    return torch.stack(rows, 2)


def loop_slots(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, apart: bool) -> Tensor:
    B, H, T, D = q.shape
    slots = log_decay.shape[3]
    K, V, rows = q.new_zeros(B, H, D, slots), q.new_zeros(B, H, slots, v.shape[3]), []
    for t in range(T):
        a = log_decay[:, :, t].exp()
        write = -torch.expm1(log_decay[:, :, t]) if apart else 1 - a
        K = K * a[:, :, None] + k[:, :, t, :, None] * write[:, :, None]
        V = V * a[..., None] + write[..., None] * v[:, :, t, None]
        weights = (q[:, :, t, None] @ K / math.sqrt(D)).softmax(-1)
        rows.append(weights @ V)
    return torch.cat(rows, 2)


def loop_log_linear(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, level_weights: Tensor, *, apart: bool
) -> Tensor:
    levels, queries, rows = level_weights.shape[3], q / math.sqrt(q.shape[3]), []
    S = [q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]) for _ in range(levels)]
    for t in range(q.shape[2]):
        S = [x * log_decay[:, :, t, :, None].exp() for x in S]
        if t:
            to = min(len(bin(t)) - len(bin(t).rstrip("0")) + 1, levels - 1)
            S[: to + 1] = [torch.zeros_like(S[0])] * to + [sum(S[1 : to + 1], S[0])]
        S[0] = S[0] + k[:, :, t, :, None] * v[:, :, t, None]
        read, shares = queries[:, :, t, None], level_weights[:, :, t, :, None, None].unbind(2)
        if apart:
            rows.append(sum(w * (read @ x) for w, x in zip(shares, S, strict=True)))
        else:
            rows.append(read @ sum(w * x for w, x in zip(shares, S, strict=True)))
    return torch.cat(rows, 2)


def sum_over_features(q: Tensor, k: Tensor, v: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """The sums of token t, over its features last, of values and of ones."""
    keys, values = k[:, :, : t + 1], v[:, :, : t + 1]
    by_feature = q[:, :, t, :, None] * (keys.mT @ values)
    return by_feature.flip(2).sum(2), (q[:, :, t] * keys.sum(2)).flip(2).sum(2)[..., None]


def by_loop(
    draw: Callable[..., Inputs],
    run: Callable[..., Any],
    exact: Callable[..., Tensor],
    loop: Callable[..., Tensor],
) -> Recurrence:
    """A recurrence of which each function takes the inputs by name, or in their order."""
    return Recurrence(
        draw,
        lambda c, **o: run(**c, **o),
        lambda row, tokens: exact(*row.values(), tokens),
        lambda c: [loop(**c, apart=x) for x in (False, True)],
    )


def kernel_of(
    run: Callable[..., tuple[Tensor, State]],
    f: Callable[[float, int, int, int], float],
    features: Callable[[Tensor], Tensor],
) -> Recurrence:
    def plain(c: Inputs) -> list[Tensor]:
        q, k, v = features(c["q"]), features(c["k"]), c["v"]
        weights = (q @ k.mT).tril()
        total = weights.sum(-1, keepdim=True)
        states = (k[..., :, None] * v[..., None, :]).cumsum(2)
        sums = (q[..., None, :] @ states)[..., 0, :]
        below = (q * k.cumsum(2)).sum(-1, keepdim=True)
        rows, row_totals = zip(
            *(sum_over_features(q, k, v, t) for t in range(q.shape[2])), strict=True
        )
        stepped = torch.stack(rows, 2), torch.stack(row_totals, 2)
        pairs = ((weights @ v, total), (sums, below), stepped)
        return [(x / y.masked_fill(y == 0, 1)).masked_fill(y == 0, 0) for x, y in pairs]

    return Recurrence(
        heads,
        run,
        lambda row, tokens: decayed.kernel(
            row["q"],
            row["k"],
            row["v"],
            tokens,
            lambda s, i, j: f(s, tokens.index(i), tokens.index(j), row["q"].shape[1]),
        ),
        plain,
    )


def products(x: Tensor, power: int) -> Tensor:
    """All products of `power` channels, each order on its own."""
    out = x
    for _ in range(power - 1):
        out = (out[..., :, None] * x[..., None, :]).flatten(-2)
    return out


def taylor(x: Tensor) -> Tensor:
    y = x / x.shape[-1] ** 0.25
    return torch.cat([torch.ones_like(x[..., :1]), y, products(y, 2) / math.sqrt(2)], -1)


def run_cosine(c: Inputs, k_positions: Any = None, **options: Any) -> tuple[Tensor, State]:
    T, start = c["q"].shape[2], int(c.get("start", torch.tensor(0)))
    where = torch.arange(start, start + T)[None] if k_positions is None else k_positions
    q, k = (cosine_features(c[name], where, PERIOD) for name in "qk")
    return linear_attention(q, k, c["v"], feature_map="identity", k_positions=where, **options)


def cosine_of(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * math.pi / (2 * PERIOD)
    return torch.cat([x.relu() * angles.cos().to(x), x.relu() * angles.sin().to(x)], -1)


def exact_cosine(row: Inputs, tokens: Sequence[int]) -> Tensor:
    place = {t: n for n, t in enumerate(tokens)}
    return decayed.kernel(
        row["q"].relu(),
        row["k"].relu(),
        row["v"],
        tokens,
        lambda s, i, j: s * math.cos(math.pi * (place[i] - place[j]) / (2 * PERIOD)),
    )


def run_features(feature_map: Any) -> Callable[..., tuple[Tensor, State]]:
    return lambda c, **o: linear_attention(c["q"], c["k"], c["v"], feature_map=feature_map, **o)


RECURRENCES: dict[str, Recurrence] = {
    "rwkv6": by_loop(draw_rwkv6, rwkv6, decayed.rwkv6, loop_rwkv6),
    "rwkv4": by_loop(draw_rwkv4, rwkv4, decayed.rwkv4, loop_rwkv4),
    "mlstm": by_loop(draw_mlstm, mlstm, decayed.mlstm, loop_mlstm),
    "slots": by_loop(draw_slots, gated_slots, decayed.slots, loop_slots),
    "log linear": by_loop(draw_log_linear, log_linear, decayed.log_linear, loop_log_linear),
    "taylor": kernel_of(
        run_features(TaylorFeatures()),
        lambda s, i, j, D: 1 + s / math.sqrt(D) + s * s / (2 * D),
        taylor,
    ),
    "power 2": kernel_of(
        run_features(PowerFeatures(2)), lambda s, i, j, D: s**2, lambda x: products(x, 2)
    ),
    "power 4": kernel_of(
        run_features(PowerFeatures(4)), lambda s, i, j, D: s**4, lambda x: products(x, 4)
    ),
    "cosine": Recurrence(
        heads,
        run_cosine,
        exact_cosine,
        lambda c: kernel_of(run_cosine, lambda *_: 0.0, cosine_of).plain(c),
    ),
}


def is_weight(x: Tensor) -> bool:
    """Whether an input has no tokens."""
    return x.ndim < 3


def upto(c: Inputs, first: int, stop: int) -> Inputs:
    """The tokens first to stop - 1 of every input."""
    cut = {name: x if is_weight(x) else x[:, :, first:stop] for name, x in c.items()}
    return cut | {"start": torch.tensor(first)} if "start" in c else cut


def definition(name: str, c: Inputs) -> Tensor:
    """The outputs [B, H, T, E] by the definition, head by head."""
    B, G, T = c["k"].shape[:3]
    H = c["q"].shape[1] if "q" in c else G
    out = []
    for b in range(B):
        for h in range(H):
            row = {
                key: x[h // (H // G)] if is_weight(x) else x[b, h if key == "q" else h // (H // G)]
                for key, x in c.items()
            }
            out.append(RECURRENCES[name].exact(row, range(T)))
    return torch.stack(out).unflatten(0, (B, H))


def to(c: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: x.to(dtype) for name, x in c.items()}
