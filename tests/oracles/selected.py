"""Selected attention from the papers' equations: Python floats and loops over positions, and
nothing of regard.

Positions are lists per batch row; -1 is a slot that holds nothing. What is chosen is a set of
positions for each [row][query head][query slot].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.oracles.heads import dot

Chosen = list[list[list[set[int]]]]
Rows = Sequence[Sequence[int]]


def best(scores: dict[int, float], n: int) -> set[int]:
    """The n largest; of equal ones the smallest index."""
    return set(sorted(scores, key=lambda i: (-scores[i], i))[: max(n, 0)])


def attend_chosen(
    q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, k_positions: Rows, scale: float | None = None
) -> Tensor:
    """Softmax attention of each query over the positions chosen for it; float64 [B,H,T,E], 0 where
    there are none.
    """
    (B, H, T, D), (_, G, _, E) = q.shape, v.shape
    ql, kl, vl = (x.detach().double().tolist() for x in (q, k, v))
    scale = 1 / math.sqrt(D) if scale is None else scale
    out = torch.zeros(B, H, T, E, dtype=torch.float64)
    for b in range(B):
        slot = {p: j for j, p in enumerate(k_positions[b]) if p >= 0}
        for h in range(H):
            g = h // (H // G)
            for t in range(T):
                s = {
                    j: scale * dot(ql[b][h][t], kl[b][g][j])
                    for p in chosen[b][h][t]
                    if (j := slot[p]) >= 0
                }
                top = max(s.values(), default=0.0)
                total = math.fsum(math.exp(x - top) for x in s.values())
                for e in range(E):
                    parts = (math.exp(x - top) / total * vl[b][g][j][e] for j, x in s.items())
                    out[b, h, t, e] = math.fsum(parts)
    return out


def best_past_blocks(
    q: Tensor,
    k: Tensor,
    size: int,
    topk: int,
    q_positions: Rows,
    k_positions: Rows,
    score: Callable[[Sequence[float], Sequence[Sequence[float]]], float],
) -> Chosen:
    """The query's own block, and the topk - 1 past blocks with the largest score of the query and
    the keys of the block.
    """
    (B, H), G = q.shape[:2], k.shape[1]
    ql, kl = q.detach().double().tolist(), k.detach().double().tolist()
    chosen: Chosen = []
    for b in range(B):
        slot = {p: j for j, p in enumerate(k_positions[b]) if p >= 0}
        chosen.append([])
        for h in range(H):
            keys, rows = kl[b][h // (H // G)], []
            for t, at in enumerate(q_positions[b]):
                scores = {}
                for block in {p // size for p in slot if at >= 0 and p // size < at // size}:
                    inside = [keys[slot[p]] for p in slot if p // size == block]
                    scores[block] = score(ql[b][h][t], inside)
                blocks = best(scores, topk - 1) | {at // size}
                rows.append({p for p in slot if p <= at and p // size in blocks})
            chosen[b].append(rows)
    return chosen


def mean_product(query: Sequence[float], keys: Sequence[Sequence[float]]) -> float:
    """arXiv 2502.13189: <q, mean of the block>."""
    return dot(query, [math.fsum(x) / len(keys) for x in zip(*keys, strict=True)])


def page_bound(query: Sequence[float], keys: Sequence[Sequence[float]]) -> float:
    """arXiv 2406.10774, algorithm 1: the sum over channels of the larger of q times the smallest
    and q times the largest number of the page.
    """
    return math.fsum(
        max(x * min(channel), x * max(channel))
        for x, channel in zip(query, zip(*keys, strict=True), strict=True)
    )


moba = partial(best_past_blocks, score=mean_product)
quest = partial(best_past_blocks, score=page_bound)


def block_maximum(
    q: Tensor,
    k: Tensor,
    heads: int,
    sizes: tuple[int, int, int],
    q_positions: Rows,
    k_positions: Rows,
) -> Chosen:
    """MiniMax-M3, sizes (block, topk, local): the best key of a block is its score, the local
    blocks are always chosen, and index head j serves heads / J query heads.
    """
    size, topk, local = sizes
    B, J = q.shape[:2]
    ql, kl = q.detach().double().tolist(), k.detach().double().tolist()
    chosen: Chosen = []
    for b in range(B):
        slot = {p: j for j, p in enumerate(k_positions[b]) if p >= 0}
        chosen.append([])
        for h in range(heads):
            j, rows = h // (heads // J), []
            for t, at in enumerate(q_positions[b]):
                past = {p for p in slot if p <= at}
                scores = {
                    block: max(
                        dot(ql[b][j][t], kl[b][0][slot[p]]) for p in past if p // size == block
                    )
                    for block in {p // size for p in past}
                }
                near = {x for x in scores if x > at // size - local}
                rest = {x: s for x, s in scores.items() if x not in near}
                blocks = near | best(rest, topk - len(near))
                rows.append({p for p in past if p // size in blocks})
            chosen[b].append(rows)
    return chosen


def indexer(
    q: Tensor, k: Tensor, w: Tensor, topk: int, q_positions: Rows, k_positions: Rows, heads: int
) -> tuple[list[list[dict[int, float]]], Chosen]:
    """DeepSeek-V3.2: I_ts = sum_j w_tj relu(q_tj . k_s) over the past keys, by position, and the
    topk of them.
    """
    B, J = q.shape[:2]
    ql, kl, wl = (x.detach().double().tolist() for x in (q, k, w))
    scores: list[list[dict[int, float]]] = []
    for b in range(B):
        slot = {p: i for i, p in enumerate(k_positions[b]) if p >= 0}
        scores.append([])
        for t, at in enumerate(q_positions[b]):
            scores[b].append(
                {
                    p: math.fsum(
                        wl[b][t][j] * max(0.0, dot(ql[b][j][t], kl[b][0][i])) for j in range(J)
                    )
                    for p, i in slot.items()
                    if p <= at
                }
            )
    chosen = [[[best(s, topk) for s in rows] for _ in range(heads)] for rows in scores]
    return scores, chosen


def closed_blocks(
    q: Tensor,
    entries: list[dict[int, list[float]]],
    w: Tensor,
    sizes: tuple[int, int, int],
    q_positions: Rows,
    k_positions: Rows,
) -> Chosen:
    """QSA, sizes (block, topk, query heads): the topk closed blocks with the largest sum_j w_tj
    relu(q_tj . e_i), by their entries of each row, and the tokens behind the last closed one.
    """
    m, topk, heads = sizes
    ql, wl = q.detach().double().tolist(), w.detach().double().tolist()
    chosen: Chosen = []
    for b, row in enumerate(entries):
        held, rows = {p for p in k_positions[b] if p >= 0}, []
        for t, at in enumerate(q_positions[b]):
            scores = {
                i: math.fsum(wl[b][t][j] * max(0.0, dot(ql[b][j][t], e)) for j in range(q.shape[1]))
                for i, e in row.items()
                if (i + 1) * m <= at + 1
            }
            blocks, behind = best(scores, topk), (at + 1) // m * m
            rows.append({p for p in held if p <= at and (p // m in blocks or p >= behind)})
        chosen.append([rows] * heads)
    return chosen


def pooled(
    y: Tensor, z: Tensor | None, places: list[list[float]], m: int, positions: Rows
) -> list[dict[int, list[float]]]:
    """For each row, the sum of softmax_t(z_t + b_t) y_t over the tokens t of each block of m
    positions, channel by channel; without z their mean.
    """
    yl = y.detach().double().tolist()
    zl = None if z is None else z.detach().double().tolist()
    out: list[dict[int, list[float]]] = []
    for b, row in enumerate(positions):
        blocks: dict[int, list[float]] = {}
        for i in {p // m for p in row if p >= 0}:
            slots = [s for s, p in enumerate(row) if p >= 0 and p // m == i]
            blocks[i] = []
            for c in range(y.shape[-1]):
                logits = [
                    0.0 if zl is None else zl[b][0][s][c] + places[row[s] % m][c] for s in slots
                ]
                weights = [math.exp(x - max(logits)) for x in logits]
                total = math.fsum(w * yl[b][0][s][c] for w, s in zip(weights, slots, strict=True))
                blocks[i].append(total / math.fsum(weights))
        out.append(blocks)
    return out


def compressed(
    x: Tensor,
    length: int,
    stride: int,
    positions: Rows,
    phi: Callable[[list[list[float]]], list[float]],
) -> list[list[dict[int, list[float]]]]:
    """arXiv 2502.11089, equation 7: [row][head][i] = phi of tokens i d .. i d + l - 1, for each i
    with all of them.
    """
    xl = x.detach().double().tolist()
    found: list[list[dict[int, list[float]]]] = []
    for b, row in enumerate(positions):
        slot = {p: j for j, p in enumerate(row) if p >= 0}
        last = max(slot, default=-1)
        whole = [
            i
            for i in range(last // stride + 1)
            if all(p in slot for p in range(i * stride, i * stride + length))
        ]
        found.append(
            [
                {i: phi([head[slot[i * stride + o]] for o in range(length)]) for i in whole}
                for head in xl[b]
            ]
        )
    return found


def network(
    places: Any, up: Any, up_bias: Any, down: Any, down_bias: Any
) -> Callable[[list[list[float]]], list[float]]:
    """W2 silu(W1 [x_1 + e_1; ...] + b1) + b2, from nested lists."""

    def phi(block: list[list[float]]) -> list[float]:
        flat = [
            a + e for x, es in zip(block, places, strict=True) for a, e in zip(x, es, strict=True)
        ]
        hidden = [dot(row, flat) + b for row, b in zip(up, up_bias, strict=True)]
        hidden = [h / (1 + math.exp(-h)) for h in hidden]
        return [dot(row, hidden) + b for row, b in zip(down, down_bias, strict=True)]

    return phi


def nsa_compressed_attention(
    q: Tensor,
    keys: list[list[dict[int, list[float]]]],
    values: list[list[dict[int, list[float]]]],
    length: int,
    stride: int,
    q_positions: Rows,
) -> tuple[Tensor, list[list[list[dict[int, float]]]]]:
    """Attention to compressed tokens, out [B,H,T,E] and the weights [row][head][query][i] (equation
    8).
    """
    B, H, T, D = q.shape
    G, ql = len(keys[0]), q.detach().double().tolist()
    E = next((len(x) for row in values for head in row for x in head.values()), D)
    out, weights = torch.zeros(B, H, T, E, dtype=torch.float64), []
    for b in range(B):
        weights.append([])
        for h in range(H):
            g, rows = h // (H // G), []
            for t, at in enumerate(q_positions[b]):
                s = {
                    i: dot(ql[b][h][t], key) / math.sqrt(D)
                    for i, key in keys[b][g].items()
                    if i * stride + length - 1 <= at
                }
                top = max(s.values(), default=0.0)
                total = math.fsum(math.exp(x - top) for x in s.values())
                p = {i: math.exp(x - top) / total for i, x in s.items()}
                for e in range(E):
                    out[b, h, t, e] = math.fsum(x * values[b][g][i][e] for i, x in p.items())
                rows.append(p)
            weights[b].append(rows)
    return out, weights


def nsa_chosen(
    weights: list[list[list[dict[int, float]]]],
    groups: int,
    sizes: tuple[int, int, int, int, int, int],
    q_positions: Rows,
    k_positions: Rows,
) -> Chosen:
    """Equations 9 to 12, sizes (l, d, l', n, initial, local): Eq. 9 as printed, with j and the
    index counted from 1.
    """
    l, d, select, n, initial, local = sizes
    H = len(weights[0])
    chosen: Chosen = []
    for b, heads in enumerate(weights):
        held = {p for p in k_positions[b] if p >= 0}
        chosen.append([])
        for h in range(H):
            group = range(
                h // (H // groups) * (H // groups), (h // (H // groups) + 1) * (H // groups)
            )
            rows = []
            for t, at in enumerate(q_positions[b]):
                own = at // select
                past = {p // select for p in held if at >= 0 and p // select <= own}
                fixed = {j for j in past if j < initial or j > own - local}
                share = {}
                for j in past - fixed:
                    terms = [
                        heads[x][t].get(select // d * (j + 1) - m - k - 1, 0.0)
                        for x in group
                        for m in range(select // d)
                        for k in range(l // d)
                    ]
                    share[j] = math.fsum(terms)
                blocks = fixed | best(share, n - len(fixed))
                rows.append({p for p in held if p <= at and p // select in blocks})
            chosen[b].append(rows)
    return chosen


def past(q_positions: Rows, k_positions: Rows, heads: int, window: int | None = None) -> Chosen:
    """Every key up to the query, or the last `window` of them."""
    return [
        [
            [{p for p in ks if 0 <= p <= at and (window is None or p > at - window)} for at in qs]
            for _ in range(heads)
        ]
        for qs, ks in zip(q_positions, k_positions, strict=True)
    ]
